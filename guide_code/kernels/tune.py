"""Measure tiles on the GPU at hand for an entry of ``configs.py``: ``python -m guide_code.kernels.tune [--write]``.

Optional: no call of the layer ever tunes. Each candidate tile of a kernel is compiled and timed in a real forward and
backward call, with a cold L2 cache (``triton.testing.do_bench``). The three row kernels share their number of rows, so
the best tiles are found for each number, and the set that is fastest in total wins.
"""

import argparse
import ast
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from . import configs
from .configs import Config, Tile, architecture_of
from .launch import Launch, Launcher, run
from .record import Problem, layer_arguments, train

ROW_KERNELS = ("up", "down", "hidden_gradient")
ROWS = (64, 128)
"""Rows of a tile that are tried: wgmma and tcgen05 start at 64."""


def candidates(rows: int) -> Iterator[Tile]:
    """Tiles with ``rows`` rows in which each thread has 32 to 128 values of the accumulator."""
    for columns, step, warps, stages in product((64, 128, 256), (32, 64), (4, 8), (2, 3, 4)):
        if 32 <= rows * columns // (32 * warps) <= 128:
            yield Tile(rows, columns, step, warps, stages)


def tune(
    problem: Problem, device: torch.device, measure: Callable[[Launch], float], start: Launcher = run
) -> tuple[Config, float]:
    """(the fastest configuration, milliseconds of its four kernels over one forward and backward call).

    Args:
        problem: what to measure.
        device: where the tensors are.
        measure: milliseconds of one launch; infinite where a tile does not fit.
        start: starts every launch that is not measured, since the measured ones read its results.

    Raises:
        ValueError: no tile fits.
    """
    args = layer_arguments(problem, device)

    def best_of(kernel: str, rows: int) -> tuple[float, Tile]:
        found = []
        for tile in candidates(rows):
            times: list[float] = []

            def launch(one: Launch, times: list[float] = times) -> None:
                if one.kernel.__name__ == f"{kernel}_kernel":
                    times.append(measure(one))
                else:
                    start(one)

            plain = Tile(rows, 64, 32, 4, 2)
            train(args, Config(plain, plain, plain, plain)._replace(**{kernel: tile}), launch)
            found.append((sum(times), tile))
        print(f"{kernel}, {rows} rows: {min(found)[0]:.3f} ms with {min(found)[1]}", file=sys.stderr)
        return min(found)

    weight_time, weight_tile = min(best_of("weight_gradient", rows) for rows in ROWS)
    sets = []
    for rows in ROWS:
        times, tiles = zip(*(best_of(kernel, rows) for kernel in ROW_KERNELS), strict=True)
        sets.append((sum(times) + weight_time, Config(*tiles, weight_gradient=weight_tile)))
    total, config = min(sets)
    if total == float("inf"):
        raise ValueError(f"no tile fits {device}: the table stays as it is")
    return config, total


def entry(config: Config, comment: str) -> str:
    """A configuration as the table of ``configs.py`` spells it."""
    tiles = [f"        {name}=Tile({', '.join(map(str, tile))}),\n" for name, tile in config._asdict().items()]
    return f"Config(\n        # {comment}\n{''.join(tiles)}    )"


def write_entry(path: Path, architecture: int, text: str) -> None:
    """Replace the entry of one architecture in a copy of ``configs.py``; the rest of the file keeps every byte.

    Args:
        path: the file; replaced when the new one is complete.
        architecture: a key of ``CONFIGS`` in it.
        text: from :func:`entry`.
    """
    source = path.read_text()
    named = (n for n in ast.parse(source).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "CONFIGS")
    table = next(named).value
    assert isinstance(table, ast.Dict)
    old = next(v for k, v in zip(table.keys, table.values, strict=True) if k and ast.literal_eval(k) == architecture)
    old_text = ast.get_source_segment(source, old)
    assert old_text and source.count(old_text) >= 1
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    begin = starts[old.lineno - 1] + old.col_offset
    assert source[begin : begin + len(old_text)] == old_text
    work = path.with_name(f".writing-{path.name}-{os.getpid()}")
    work.write_text(source[:begin] + text + source[begin + len(old_text) :])
    work.replace(path)


def _milliseconds(launch: Launch) -> float:
    from triton.testing import do_bench

    try:
        return float(do_bench(lambda: run(launch), return_mode="median"))  # type: ignore[arg-type]
    except OutOfResources:
        return float("inf")


def main(arguments: list[str] | None = None) -> None:
    """Print the entry, or write it into ``configs.py``. Exit code 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m guide_code.kernels.tune", description=__doc__)
    sizes = {field.name: field.default for field in fields(Problem) if field.type is int}
    for name, default in (sizes | {"num_tokens": 16384}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="replace the entry in configs.py instead of printing it")
    chosen = vars(parser.parse_args(arguments))
    write = chosen.pop("write")
    if not torch.cuda.is_available():
        print("tuning needs a CUDA device, and PyTorch sees none: the table stays as it is", file=sys.stderr)
        raise SystemExit(2)
    device = torch.device("cuda", torch.cuda.current_device())
    config, total = tune(Problem(**chosen), device, _milliseconds)
    where = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    text = entry(config, f"Tuned on {where}: {total:.3f} ms for {', '.join(f'{k}={v}' for k, v in chosen.items())}")
    if write:
        write_entry(Path(configs.__file__), architecture_of(device), text)
    else:
        print(f"    {architecture_of(device)}: {text},")


if __name__ == "__main__":
    main()
