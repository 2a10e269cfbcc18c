"""Checkpoints that load under any layout: tensors by their global name, shape and place, written by all ranks at once.

torch.distributed.checkpoint does the work. It needs names that do not depend on the layout, so those that the wrapper
of experts adds are taken out.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from guide_code.parallel.expert import ExpertParallel


def plain_names(model: nn.Module) -> dict[str, str]:
    """Prefix of every wrapped module's state by what it was before the wrapper."""
    wrapped = [name for name, module in model.named_modules() if isinstance(module, ExpertParallel)]
    return {f"{name}.experts.": f"{name}." for name in wrapped}


def save_distributed(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write weights and optimizer state; every rank calls it, and writes what it alone holds."""
    save(_state(model, optimizer) | {"step": step}, checkpoint_id=folder)


def load_distributed(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load in place what :func:`save_distributed` wrote, under whatever layout; returns the steps done.

    Raises:
        CheckpointException: files are missing, or hold tensors of other names or shapes.
    """
    state = _state(model, optimizer)
    loaded: dict[str, Any] = state | {"step": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is a layout as well
        load(loaded, checkpoint_id=folder, no_dist=not dist.is_initialized())
    back = {plain: wrapped for wrapped, plain in plain_names(model).items()}
    set_state_dict(
        model,
        optimizer,
        model_state_dict=_rename(loaded["model"], back),
        optim_state_dict=_rename(loaded["optimizer"], back),
        options=StateDictOptions(flatten_optimizer_state_dict=True),
    )
    return loaded["step"]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    parts = get_state_dict(model, optimizer, options=options)
    names = plain_names(model)
    return {key: _rename(part, names) for key, part in zip(("model", "optimizer"), parts, strict=True)}


def _rename(state: dict[str, Any], prefixes: dict[str, str]) -> dict[str, Any]:
    """Keys with each prefix replaced, wherever it stands in them; optimizer state has "state." in front."""
    renamed = {}
    for key, value in state.items():
        for old, new in prefixes.items():
            head, found, tail = key.partition(old)
            if found and head in ("", "state.", "param_groups."):
                key = head + new + tail
                break
        renamed[key] = value
    return renamed
