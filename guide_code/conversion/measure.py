"""What a conversion costs: seconds against a plain copy of the same files, and memory beyond what was there before.

Memory is RssAnon of Linux: pages that belong to the process alone. Mapped files are in the page cache, which the system
takes back when it needs to.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from guide_code.conversion.folders import hf_entries, prepare, run
from guide_code.conversion.loading import empty_model, own_tensors
from guide_code.conversion.reader import FolderSource, MemorySource
from guide_code.conversion.registry import read_config
from guide_code.conversion.writer import Entry, write_checkpoint, write_texts


class Cost(NamedTuple):
    """Of one step."""

    name: str
    seconds: float
    peak_bytes: int
    """Most anonymous memory at any time, above that at the start."""


def write_synthetic(folder: Path, num_bytes: int, *, shard_bytes: int = 500_000_000) -> int:
    """A checkpoint of Mixtral's family in bfloat16; returns its bytes, near ``num_bytes``.

    Every tensor is the beginning of the same random values: making new ones would take longer than converting them.
    """
    size = 1024 if num_bytes > 500_000_000 else 512
    hf_config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": size,
        "intermediate_size": 2 * size,
        "num_hidden_layers": max(1, round(num_bytes / (6 * size * size * 8 * 2 + 8 * size * size))),
        "num_attention_heads": size // 64,
        "max_position_embeddings": 4096,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
    }
    config = read_config(hf_config)
    ours = own_tensors(empty_model(config))
    values = torch.empty(2 * size * size, dtype=torch.bfloat16)
    values.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    entries = []
    for name, shape, _, _ in hf_entries(hf_config, ours, MemorySource(ours)):

        def make(shape=shape) -> torch.Tensor:
            return values[: torch.Size(shape).numel()].view(shape)

        entries.append(Entry(name, shape, torch.bfloat16, make))
    write_checkpoint(folder, entries, max_bytes=shard_bytes)
    write_texts(folder, {"config.json": json.dumps(hf_config)})
    return sum(entry.size for entry in entries)


def measure(folder: Path, work: Path, load: Callable[[Path], object]) -> list[Cost]:
    """Copy the files, convert them to our format and back, and load the model.

    Args:
        folder: a checkpoint of transformers.
        work: a folder for the results, which are deleted again.
        load: ``guide_code.convert.load_hf``.
    """
    work.mkdir(parents=True, exist_ok=True)
    steps: dict[str, Callable[[], object]] = {
        "copy of the files": lambda: _copy(folder, work / "copy"),
        "convert --to guide": lambda: run(prepare(folder, "guide"), work / "guide"),
        "convert --to hf": lambda: run(prepare(work / "guide", "hf"), work / "back"),
        "load_hf": lambda: load(folder),
    }
    costs = []
    for name, step in steps.items():
        with peak_memory() as peak:
            started = time.perf_counter()
            kept = step()
            seconds = time.perf_counter() - started
        del kept
        costs.append(Cost(name, seconds, peak[0]))
    for name in ("copy", "guide", "back"):
        shutil.rmtree(work / name)
    return costs


@contextlib.contextmanager
def peak_memory() -> Iterator[list[int]]:
    """A list whose only item becomes the most anonymous memory, in bytes above that at the start."""
    before, peak, stop = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], _anonymous() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        stop.set()
        watcher.join()
        peak[0] = max(peak[0], _anonymous() - before)


def _anonymous() -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    raise OSError("this system does not tell RssAnon")


def _copy(folder: Path, target: Path) -> None:
    target.mkdir()
    for path in FolderSource(folder).files:
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb") as file:
            os.fsync(file.fileno())  # as the converter does
