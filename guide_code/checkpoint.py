"""Checkpoints in a folder: weights and optimizer state in safetensors, everything else in JSON; no pickle.

A checkpoint is written under a temporary name and renamed when it is complete, so a crash leaves the previous one.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from guide_code.config import ModelConfig, from_dict, to_dict
from guide_code.transformer import Transformer

_NAME = re.compile(r"step-(\d+)")


def save_checkpoint(
    run: Path, step: int, model: Transformer, config: ModelConfig, optimizer: torch.optim.Optimizer, keep: int = 2
) -> Path:
    """Write ``run/step-N`` and delete all but the newest ``keep`` checkpoints, the new one included.

    Args:
        run: the folder of the run.
        step: optimizer steps done.
        model: its parameters and buffers are saved.
        config: what the model was built from.
        optimizer: its state is saved by parameter name.
        keep: checkpoints to leave, at least 1.

    Returns:
        The folder of the checkpoint.
    """
    final, work = run / f"step-{step:08d}", run / f".writing-step-{step:08d}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    state = {
        f"{names[parameter]}.{key}": torch.as_tensor(value)
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }
    save_file(_own_memory(model.state_dict()), work / "model.safetensors")
    save_file(_own_memory(state | {"random_state": torch.get_rng_state()}), work / "training.safetensors")
    (work / "config.json").write_text(json.dumps(to_dict(config), indent=2))
    (work / "step.json").write_text(json.dumps({"step": step}))
    if final.exists():
        shutil.rmtree(final)
    work.rename(final)
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path for path in run.glob("step-*") if _NAME.fullmatch(path.name)) if run.is_dir() else []


def latest_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run; a checkpoint's own folder is taken as it is.

    Raises:
        ValueError: there is none.
    """
    if _NAME.fullmatch(run.name) and run.is_dir():
        return run
    found = checkpoints(run)
    if not found:
        raise ValueError(f"no checkpoint in {run}: expected a folder called step-N")
    return found[-1]


def load_config(folder: Path) -> ModelConfig:
    """The configuration that a checkpoint was made with."""
    return from_dict(json.loads((folder / "config.json").read_text()))


def load_checkpoint(
    folder: Path, model: Transformer, config: ModelConfig, optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Load weights, and with an optimizer its state and the random state as well, in place.

    Args:
        folder: of the checkpoint.
        model: built from ``config``.
        config: must equal the one that the checkpoint was made with.
        optimizer: over the parameters of ``model``; None when the model will only be used.

    Returns:
        The number of steps done.

    Raises:
        ValueError: the configurations differ; every field that does is listed with both values.
    """
    differences = _differences(to_dict(load_config(folder)), to_dict(config))
    if differences:
        raise ValueError(f"{folder} was made with another configuration: {'; '.join(differences)}")
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(weights, strict=False)  # tied weights are saved once; the check below is the strict one
    _check_names(set(weights), model)
    if optimizer is not None:
        state = load_file(folder / "training.safetensors")
        torch.set_rng_state(state.pop("random_state"))
        parameters = dict(model.named_parameters())
        for name, value in state.items():
            owner, key = name.rsplit(".", 1)
            like = parameters[owner]
            optimizer.state[like][key] = value if key == "step" else value.to(like.device)
    return json.loads((folder / "step.json").read_text())["step"]


def _own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies on the CPU; of tensors that share memory (tied weights) only the first."""
    seen, kept = set(), {}
    for name, tensor in tensors.items():
        if tensor.numel() and (tensor.data_ptr(), tensor.shape) in seen:
            continue
        seen.add((tensor.data_ptr(), tensor.shape))
        kept[name] = tensor.detach().cpu().contiguous()
    return kept


def _check_names(saved: set[str], model: Transformer) -> None:
    wanted = set(_own_memory(model.state_dict()))
    if saved != wanted:
        raise ValueError(f"checkpoint lacks {sorted(wanted - saved)} and has unknown {sorted(saved - wanted)}")


def _differences(saved: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name in sorted(saved.keys() | wanted.keys()):
        a, b = saved.get(name), wanted.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{name}.")
        elif a != b:
            shown = ["a mixture" if isinstance(value, dict) else repr(value) for value in (a, b)]
            found.append(f"{prefix}{name} is {shown[0]} in the checkpoint and {shown[1]} here")
    return found
