"""What the compiler makes of every kernel for GPUs that are not here: ``python -m guide_code.kernels.inspect``.

Each launch of a stated problem is compiled ahead of time for sm_80, sm_90 and sm_100. Registers and spills are
ptxas's words (``ptxas -v``, from Triton's wheel), shared memory is Triton's, tensor-core instructions are read from
the PTX: mma.sync (Ampere), wgmma (Hopper), tcgen05 (Blackwell). No number here is a speed.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from .launch import Launch
from .record import Problem, record
from .traffic import traffic

ARCHITECTURES = (80, 90, 100)
MAIN = ("up", "down", "hidden_gradient", "weight_gradient", "decode_up", "decode_down")
"""The kernels whose work is matrix products."""

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
_TENSOR_CORES = {"tcgen05": r"\btcgen05\.mma\b", "wgmma": r"\bwgmma\.mma_async\b", "mma": r"\bmma\.sync\b"}


class Report(NamedTuple):
    """One kernel for one architecture."""

    kernel: str
    result: str
    """shape of what it writes: the same kernel may run for two"""
    architecture: int
    tile: str
    registers: int
    """per thread; 255 at most"""
    spill_bytes: int
    """stored to and loaded from memory for want of registers"""
    shared_bytes: int
    tensor_cores: str
    """"mma", "wgmma", "tcgen05" or none"""
    counted_bytes: int | None
    least_bytes: int | None


def inspect(problem: Problem, architectures: tuple[int, ...] = ARCHITECTURES) -> Iterator[Report]:
    """A report for every different kernel of a layer call, forward, backward and decode.

    Args:
        problem: what the layer computes.
        architectures: of :data:`ARCHITECTURES`.
    """
    for architecture in architectures:
        seen = set()
        for launch in record(architecture, problem):
            report = _report(launch, _source(launch), architecture)
            if report not in seen:
                seen.add(report)
                yield report


def _source(launch: Launch) -> ASTSource:
    """The kernel as a call would specialise it: ones and options are constants, multiples of 16 are known as such."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.args[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or value == 1:
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _report(launch: Launch, source: ASTSource, architecture: int) -> Report:
    tile, bytes_moved = launch.tile, traffic(launch)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    ptx = compiled.asm["ptx"]
    log = _ptxas_log(ptx, architecture)
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers and spills, log
    result = launch.args.get("out", launch.args.get("hidden"))
    found = [name for name, pattern in _TENSOR_CORES.items() if re.search(pattern, ptx)]
    return Report(
        kernel=launch.kernel.__name__.removesuffix("_kernel"),
        result="" if result is None else "x".join(map(str, result.shape)),
        architecture=architecture,
        tile="x".join(map(str, tile[:3])) + f" w{tile.warps} s{tile.stages}",
        registers=int(registers[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=compiled.metadata.shared,
        tensor_cores=found[0] if found else "",
        counted_bytes=bytes_moved and bytes_moved.counted,
        least_bytes=bytes_moved and bytes_moved.least,
    )


def _ptxas_log(ptx: str, architecture: int) -> str:
    """What ``ptxas -v`` says, from Triton's cache of compiled kernels if it was asked before."""
    cache = get_cache_manager(hashlib.sha256(f"{triton.__version__} {architecture} {ptx}".encode()).hexdigest())
    stored = cache.get_file("ptxas.log")
    if stored is not None:
        return Path(stored).read_text()
    blackwell = architecture >= 100
    tool = knobs.nvidia.ptxas_blackwell if blackwell else knobs.nvidia.ptxas
    target = f"sm_{architecture}{'a' if architecture >= 90 else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool.path, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        command += ["--regAllocOptLevel=2"] if blackwell else []  # as Triton calls it
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    cache.put(done.stderr, "ptxas.log", binary=False)
    return done.stderr


def _print_tables(problem: Problem, reports: list[Report]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    sizes = f"{problem.num_tokens:,} tokens, {problem.num_experts} experts, {problem.top_k} each"
    widths = f"D={problem.hidden_size:,}, I={problem.intermediate_size:,}, {str(problem.dtype).removeprefix('torch.')}"
    mega = lambda count: "" if count is None else f"{count / 1e6:,.1f}"
    for architecture in sorted({report.architecture for report in reports}):
        title = f"sm_{architecture}: {sizes}, {widths}"
        table = Table(title=title, caption="Compiled, not run: no number here is a speed.")
        for name in ("kernel", "result", "tile", "tensor cores"):
            table.add_column(name)
        for name in ("registers", "spilled", "shared KiB", "MB counted", "MB least"):
            table.add_column(name, justify="right")
        for r in (report for report in reports if report.architecture == architecture):
            numbers = (str(r.registers), str(r.spill_bytes), f"{r.shared_bytes / 1024:.1f}")
            table.add_row(
                r.kernel, r.result, r.tile, r.tensor_cores, *numbers, mega(r.counted_bytes), mega(r.least_bytes)
            )
        console.print(table)


def main(arguments: list[str] | None = None) -> None:
    """Print the reports as a table or, with ``--json``, as a list of objects."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m guide_code.kernels.inspect", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--activation", choices=("silu", "gelu", "relu", "swigluoai"), default="silu")
    parser.add_argument("--bias", action="store_true", help="experts with biases")
    parser.add_argument("--tokens", type=int, default=4096, help="few tokens choose smaller tiles")
    parser.add_argument("--architecture", type=int, choices=ARCHITECTURES, action="append", help="repeatable; all")
    chosen = parser.parse_args(arguments)
    problem = Problem(
        num_tokens=chosen.tokens,
        activation=chosen.activation,
        bias=chosen.bias,
        dtype=getattr(torch, chosen.dtype),
    )
    reports = list(inspect(problem, tuple(chosen.architecture or ARCHITECTURES)))
    if chosen.json:
        stated = {**problem.__dict__, "dtype": chosen.dtype}
        rows = [report._asdict() for report in reports]
        print(json.dumps({"triton": triton.__version__, "problem": stated, "kernels": rows}, indent=1))
    else:
        _print_tables(problem, reports)


if __name__ == "__main__":
    main()
