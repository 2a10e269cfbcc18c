"""The folder of a run: checkpoints, with tensors in safetensors and the rest in JSON (no pickle), and run.json.

A checkpoint is written under a temporary name and renamed when it is complete, so a crash leaves the previous one.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
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
    save_file(_own_memory(state | _random_states()), work / "training.safetensors")
    (work / "config.json").write_text(json.dumps(to_dict(config), indent=2))
    (work / "step.json").write_text(json.dumps({"step": step}))
    for path in [*work.iterdir(), work]:
        _flush(path)  # or a power cut after the rename could leave a complete name with half the bytes
    replaced = run / f".replaced-step-{step:08d}"
    if final.exists():
        final.rename(replaced)
    work.rename(final)
    _flush(run)
    shutil.rmtree(replaced, ignore_errors=True)
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
    """The configuration that a checkpoint was made with.

    Raises:
        ValueError: the file is missing or damaged.
    """
    return from_dict(_read(folder / "config.json"))


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
        ValueError: the configurations differ (every field that does is listed with both values), or a file is
            missing or damaged (the checkpoint before this one is named). The model is as it was.
    """
    differences = _differences(to_dict(load_config(folder)), to_dict(config))
    if differences:
        raise ValueError(f"{folder} was made with another configuration: {'; '.join(differences)}")
    step, weights = _read(folder / "step.json")["step"], {}
    for path in sorted(folder.glob("model-*-of-*.safetensors")) or [folder / "model.safetensors"]:
        weights |= _read(path)  # a converted checkpoint may come in several files
    state = {} if optimizer is None else _read(folder / "training.safetensors")
    _check_names(set(weights), model)
    model.load_state_dict(weights, strict=False)  # tied weights are saved once; the check above is the strict one
    if optimizer is not None:
        _set_random_states(state)
        parameters = dict(model.named_parameters())
        for name, value in state.items():
            owner, key = name.rsplit(".", 1)
            like = parameters[owner]
            optimizer.state[like][key] = value if key == "step" else value.to(like.device)
    return step


def claim_run(run: Path, facts: dict[str, Any], *, resume: bool) -> None:
    """Note in ``run.json`` what decides the data of a run, or when resuming, check that it is still the same.

    Raises:
        ValueError: the folder holds a run already, or the one to resume was started with other facts.
    """
    path = run / "run.json"
    if resume:
        differences = _differences(_read(path), facts, where=f"in {path}") if path.exists() else []
        if differences:
            raise ValueError(f"cannot resume with other data: {'; '.join(differences)}")
    elif path.exists() or checkpoints(run):
        raise ValueError(f"{run} holds a run already: give --resume to go on with it, or another --out")
    else:
        run.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=2))


def cut_metrics(path: Path, step: int) -> None:
    """Drop what a crashed run wrote after ``step``, half a line included: resuming writes it again."""
    if path.exists():
        kept = [
            line for line in path.read_text().splitlines() if line.endswith("}") and json.loads(line)["step"] <= step
        ]
        path.write_text("".join(f"{line}\n" for line in kept))


def _read(path: Path) -> dict[str, Any]:
    try:
        return load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())
    except (OSError, ValueError, SafetensorError) as error:
        older = [folder for folder in checkpoints(path.parent.parent) if folder.name < path.parent.name]
        hint = f"; delete {path.parent} to go on from {older[-1]}" if older else ""
        raise ValueError(f"{path} is missing or damaged ({error}){hint}") from error


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _random_states() -> dict[str, Tensor]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"random_state": torch.get_rng_state()} | {f"random_state.{i}": state for i, state in enumerate(devices)}


def _set_random_states(state: dict[str, Tensor]) -> None:
    """Take the random states out of ``state`` and set them; those of absent GPUs have no use."""
    torch.set_rng_state(state.pop("random_state"))
    for name in [name for name in state if name.startswith("random_state.")]:
        index, value = int(name.rsplit(".", 1)[1]), state.pop(name)
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, index)


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


def _differences(
    saved: dict[str, Any], wanted: dict[str, Any], prefix: str = "", where: str = "in the checkpoint"
) -> list[str]:
    found = []
    for name in sorted(saved.keys() | wanted.keys()):
        a, b = saved.get(name), wanted.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{name}.", where)
        elif a != b:
            shown = ["a mixture" if isinstance(value, dict) else repr(value) for value in (a, b)]
            found.append(f"{prefix}{name} is {shown[0]} {where} and {shown[1]} here")
    return found
