"""The ways to compute experts, by name: same parameters, same numbers, other speed."""

import torch
from torch import nn

from guide_code.experts.grouped import GroupedExperts
from guide_code.experts.loop import LoopExperts

BACKENDS = ("loop", "grouped")


def experts_class(name: str) -> type[nn.Module]:
    """The class called ``name``, one of ``BACKENDS`` or "auto"."""
    return LoopExperts if name == "loop" else GroupedExperts


def available_backends(device: torch.device | str) -> dict[str, str]:
    """Every backend of experts, with "" or why it cannot run on ``device``."""
    torch.device(device)  # a wrong name is an error even while every backend runs everywhere
    return dict.fromkeys(BACKENDS, "")
