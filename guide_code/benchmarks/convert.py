"""Converting a synthetic checkpoint: seconds against a plain copy of its files, and peak memory against its bound."""

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guide_code.conversion.loading import empty_model, own_tensors
from guide_code.conversion.measure import measure, write_synthetic
from guide_code.conversion.registry import read_config
from guide_code.convert import load_hf

SLACK = 25_000_000
"""Bytes that a step may take beyond its bound: threads, file handles, what the allocator keeps."""
COPY = "copy of the files"


def measure_convert(
    folder: Path,
    num_bytes: int,
    *,
    repeats: int = 3,
    shard_bytes: int = 500_000_000,
    on_round: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """Write a checkpoint of Mixtral's family, then copy, convert both ways and load it, in turns.

    Args:
        folder: where the checkpoint and the results go; made, and deleted again with all that is in it.
        num_bytes: of the checkpoint, nearly.
        repeats: rounds; the median of their seconds and the highest of their peaks are kept.
        shard_bytes: most bytes of one of its files.
        on_round: called after each round with the number of rounds done.

    Returns:
        ``bytes`` and ``largest_bytes`` (of the largest tensor), and ``rows``: per step ``step``, ``median_s``,
        ``low_s``, ``high_s``, ``to_copy`` (ratio of medians; None for reading alone), ``peak_bytes`` (anonymous,
        above that before the step), ``bound_bytes`` and ``within`` (both None for the copy).

    Raises:
        ValueError: the folder exists, the disk has no room, or a number is below 1.
    """
    if num_bytes < 1 or repeats < 1 or shard_bytes < 1:
        raise ValueError(f"bytes={num_bytes}, repeats={repeats} and shard bytes={shard_bytes} must be at least 1")
    if folder.exists():
        raise ValueError(f"{folder} exists: name a folder that can be made, and deleted afterwards")
    folder.parent.mkdir(parents=True, exist_ok=True)
    needed, room = 4 * num_bytes, shutil.disk_usage(folder.parent).free
    if needed > room:
        raise ValueError(
            f"{folder.parent} has {room / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed: ask for fewer bytes"
        )
    try:
        write_synthetic(folder / "warm", 1_000_000)
        measure(folder / "warm", folder / "work", load_hf)  # what is imported and allocated once
        total = write_synthetic(folder / "source", num_bytes, shard_bytes=shard_bytes)
        tensors = own_tensors(empty_model(read_config(json.loads((folder / "source/config.json").read_text()))))
        largest = max(tensor.numel() * 2 for tensor in tensors.values())
        rounds = []
        for done in range(repeats):
            rounds.append(measure(folder / "source", folder / "work", load_hf))
            on_round(done + 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bounds = {"convert --to guide": largest, "convert --to hf": largest, "load_hf": total + largest}
    rows = []
    for costs in zip(*rounds, strict=True):
        seconds, peak = sorted(cost.seconds for cost in costs), max(cost.peak_bytes for cost in costs)
        bound = bounds.get(costs[0].name)
        row = {"step": costs[0].name, "median_s": statistics.median(seconds), "low_s": seconds[0]}
        within = None if bound is None else peak <= bound + SLACK
        rows.append(row | {"high_s": seconds[-1], "peak_bytes": peak, "bound_bytes": bound, "within": within})
    copy = rows[0]["median_s"]
    assert rows[0]["step"] == COPY
    for row in rows:
        row["to_copy"] = row["median_s"] / copy if row["step"] in (COPY, *list(bounds)[:2]) else None
    return {"bytes": total, "largest_bytes": largest, "rows": rows}
