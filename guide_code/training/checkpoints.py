"""Checkpoints of a run on one rank or many: many write together, and what they wrote loads on any number of ranks."""

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from guide_code.checkpoint import checkpoints, latest_checkpoint, load_checkpoint, load_config, save_checkpoint
from guide_code.config import ModelConfig, to_dict
from guide_code.parallel.checkpoint import load_distributed, save_distributed
from guide_code.training.ranks import Ranks
from guide_code.transformer import Transformer


def save_run(
    run: Path, step: int, model: Transformer, config: ModelConfig, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> Path:
    """Write ``run/step-N`` and keep the newest two; every rank calls it. Half a checkpoint never has that name."""
    if ranks.size == 1:
        return save_checkpoint(run, step, model, config, optimizer)
    final, work = run / f"step-{step:08d}", run / f".writing-step-{step:08d}"
    if ranks.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    dist.barrier()
    save_distributed(work, step, model, optimizer)
    if ranks.rank == 0:
        (work / "config.json").write_text(json.dumps(to_dict(config), indent=2))
        shutil.rmtree(final, ignore_errors=True)
        work.rename(final)
        for old in checkpoints(run)[:-2]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def load_run(run: Path, model: Transformer, config: ModelConfig, optimizer: torch.optim.Optimizer, ranks: Ranks) -> int:
    """Load the newest checkpoint of a run in place; returns the steps done.

    Raises:
        ValueError: there is none, it is of another configuration, or one process wrote it and several want it.
    """
    folder = latest_checkpoint(run)
    if not (folder / ".metadata").exists():
        if ranks.size > 1:
            raise ValueError(f"{folder} was written by one process: resume it on one rank, not on {ranks.size}")
        return load_checkpoint(folder, model, config, optimizer)
    if load_config(folder) != config:
        raise ValueError(f"{folder} was made with another configuration: compare {folder / 'config.json'}")
    return load_distributed(folder, model, optimizer)
