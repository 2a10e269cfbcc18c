"""LoRA adapters in files: the trained matrices in safetensors, with what was adapted in the metadata."""

import dataclasses
import json
import os
import secrets
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from guide_code.experts.low_rank import LowRank
from guide_code.lora import LoRAConfig, apply_lora_, lora_config, remove_lora_

_KEY = "moe_guide_lora"


def save_adapter(model: nn.Module, path: Path) -> None:
    """Write the adapters of a model, and nothing else of it; an older file is replaced when the new one is complete.

    Raises:
        ValueError: the model has no adapters.
    """
    config = lora_config(model)
    if config is None:
        raise ValueError("the model has no adapters to save: apply_lora_(model, ...) first")
    tensors = {name: t.detach().cpu().contiguous() for name, t in _adapters(model).items()}
    work = path.with_name(f".writing-{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        save_file(tensors, work, metadata={_KEY: json.dumps(dataclasses.asdict(config))})
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)


@torch.no_grad()
def load_adapter_(model: nn.Module, path: Path) -> None:
    """Give a model the adapters of a file, in place; one that has none is frozen and adapted as the file says.

    Raises:
        ValueError: the file is missing, damaged or no adapter, belongs to another model, or the model has adapters of
            another kind, or merged ones. The model is as it was.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged ({error})") from error
    if facts is None:
        raise ValueError(f"{path} is a safetensors file, but not one that save_adapter wrote")
    config = LoRAConfig(**{**facts, "linears": tuple(facts["linears"])})
    present = lora_config(model)
    if present is None:
        apply_lora_(model, config)
    elif present != config:
        raise ValueError(f"{path} has {config}, but the model's adapters are {present}")
    own = _adapters(model)
    problems = ["the model's adapters are merged: unmerge_lora_(model) first"] * _any_merged(model)
    problems += [f"missing {name}" for name in sorted(own.keys() - tensors.keys())[:2]]
    problems += [f"unknown {name}" for name in sorted(tensors.keys() - own.keys())[:2]]
    for name in sorted(own.keys() & tensors.keys()):
        if own[name].shape != tensors[name].shape:
            problems.append(f"{name} is {tuple(tensors[name].shape)} there and {tuple(own[name].shape)} here")
    if problems:
        if present is None:
            remove_lora_(model)
        raise ValueError(f"{path} does not fit the model: {'; '.join(problems[:4])}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def _any_merged(model: nn.Module) -> bool:
    return any(module.merged for module in model.modules() if isinstance(module, LowRank))


def _adapters(model: nn.Module) -> dict[str, Tensor]:
    found = {path: module for path, module in model.named_modules() if isinstance(module, LowRank)}
    return {f"{path}.{name}": p for path, module in found.items() for name, p in module.named_parameters()}
