"""The ways to compute experts, by name: same parameters, same numbers, other speed."""

import torch
from torch import nn

from guide_code.experts.auto import AutoExperts
from guide_code.experts.blocked import BlockedExperts
from guide_code.experts.fused import FusedExperts, fused_obstacle
from guide_code.experts.gathered import GatheredExperts
from guide_code.experts.grouped import GroupedExperts
from guide_code.experts.loop import LoopExperts
from guide_code.experts.offloaded import OffloadedExperts
from guide_code.experts.padded import PaddedExperts

CLASSES: dict[str, type[nn.Module]] = {
    "loop": LoopExperts,
    "blocked": BlockedExperts,
    "grouped": GroupedExperts,
    "padded": PaddedExperts,
    "gathered": GatheredExperts,
    "fused": FusedExperts,
    "offloaded": OffloadedExperts,
}
BACKENDS = tuple(CLASSES)


def experts_class(name: str) -> type[nn.Module]:
    """The class called ``name``, one of ``BACKENDS`` or "auto"."""
    return AutoExperts if name == "auto" else CLASSES[name]


def available_backends(device: torch.device | str) -> dict[str, str]:
    """Every backend of experts, with "" or why it cannot run on ``device``."""
    device = torch.device(device)
    return dict.fromkeys(BACKENDS, "") | {"fused": fused_obstacle(device)}
