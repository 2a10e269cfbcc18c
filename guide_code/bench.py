"""``moe-guide bench``: time the experts of this package, of transformers and the floors, in one process, in turns."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from guide_code.benchmarks.experts import MODES, Settings, disagreements, measure
from guide_code.benchmarks.record import describe, header, write_result
from guide_code.benchmarks.shapes import ROUTINGS, SHAPES, shape_of
from guide_code.benchmarks.timing import keep_freed_memory

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure speed, after a check that all compute the same."
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_Out = Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")]
_Repeats = Annotated[int, typer.Option(help="Turns of each candidate.", min=1)]
_Seconds = Annotated[float, typer.Option(help="Seconds that a candidate may use in one case; then it takes no turn.")]


@app.command()
def experts(
    shapes: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}, or presets; by commas.")] = "fine,coarse",
    tokens: Annotated[str, typer.Option(help="Tokens of a call, by commas.")] = "1,4,32,256,2048",
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "float32,bfloat16",
    modes: Annotated[str, typer.Option(help=f"Of {', '.join(MODES)}.")] = ",".join(MODES),
    routings: Annotated[str, typer.Option(help=f"Of {', '.join(ROUTINGS)}.")] = "balanced",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    only: Annotated[str, typer.Option(help="Candidates, by commas; all by default.")] = "",
    repeats: _Repeats = 40,
    seconds: _Seconds = 10.0,
    out: _Out = None,
) -> None:
    """Experts alone: all backends against transformers and the floors."""
    if device == "cuda" and not torch.cuda.is_available():
        _fail("--device cuda: PyTorch sees no GPU; use --device cpu")
    try:
        chosen = [shape_of(name) for name in _list(shapes)]
        kinds = [DTYPES[name] for name in _list(dtypes)]
        counts = [int(count) for count in _list(tokens)]
    except KeyError as error:
        _fail(f"--dtypes: {error} is none of {', '.join(DTYPES)}")
    except ValueError as error:
        _fail(str(error))
    settings = Settings(repeats, seconds, device, only=tuple(_list(only)))
    keep_freed_memory()
    result = header("experts", _command()) | {"cases": []}
    console = Console()
    try:
        for case in measure(chosen, counts, kinds, _list(modes), _list(routings), settings):
            result["cases"].append(case)
            console.print(_case_table(case))
            for line in disagreements(case):
                console.print(line, style="red")
    except ValueError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        console.print("stopped: what is complete is kept")
    _finish(console, result, out)
    if any(disagreements(case) for case in result["cases"]):
        raise typer.Exit(1)


@app.command()
def switch(
    experts: Annotated[str, typer.Option(help="Numbers of experts, by commas.")] = "8,16,32,64,128,256,512",
    hidden_size: Annotated[int, typer.Option(help="D.", min=1)] = 768,
    intermediate_size: Annotated[int, typer.Option(help="Of an expert.", min=1)] = 2048,
    repeats: _Repeats = 40,
    seconds: _Seconds = 10.0,
    out: _Out = None,
) -> None:
    """A Switch layer on one token: latency against the number of experts."""
    from guide_code.benchmarks.switch import growth, measure_switch

    try:
        rows = measure_switch(
            tuple(int(count) for count in _list(experts)),
            hidden_size=hidden_size, intermediate_size=intermediate_size, repeats=repeats, seconds=seconds,
        )  # fmt: skip
    except (ValueError, ArithmeticError) as error:
        _fail(str(error))
    found = growth(rows)
    console = Console()
    table = Table("experts", "way", "ms", "10 % to 90 %")
    for row in rows:
        low_to_high = f"{row['low_ms']:.2f} to {row['high_ms']:.2f}"
        table.add_row(str(row["experts"]), row["way"], f"{row['median_ms']:.2f}", low_to_high)
    console.print(table)
    console.print(f"growth of ours: {found['growth']:+.1%}; noise between two runs: {found['noise']:.1%}")
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    _finish(console, header("switch", _command()) | sizes | found | {"rows": rows}, out)


@app.command()
def convert(
    gigabytes: Annotated[float, typer.Option(help="Of the checkpoint, which is made for this.")] = 2.0,
    folder: Annotated[Path, typer.Option(help="To work in: made, and deleted afterwards.")] = Path("bench-convert"),
    repeats: Annotated[int, typer.Option(help="Rounds of copying, converting and loading.", min=1)] = 3,
    out: _Out = None,
) -> None:
    """Conversion of a checkpoint: seconds against a plain copy, peak memory against the bound."""
    from guide_code.benchmarks.convert import measure_convert

    try:
        found = measure_convert(folder, int(gigabytes * 1e9), repeats=repeats)
    except (ValueError, OSError) as error:
        _fail(str(error))
    console = Console()
    table = Table("step", "s", "lowest to highest", "to copy", "peak MB", "bound MB", title=f"{found['bytes']:,} bytes")
    for row in found["rows"]:
        ratio, bound = row["to_copy"], row["bound_bytes"]
        table.add_row(
            row["step"], f"{row['median_s']:.2f}", f"{row['low_s']:.2f} to {row['high_s']:.2f}",
            "" if ratio is None else f"{ratio:.2f}", f"{row['peak_bytes'] / 1e6:.0f}",
            "" if bound is None else f"{bound / 1e6:.0f}",
        )  # fmt: skip
    console.print(table)
    _finish(console, header("convert", _command()) | found, out)
    if beyond := [row["step"] for row in found["rows"] if row["within"] is False]:
        _fail(f"more memory than the bound: {', '.join(beyond)}")


def _case_table(case: dict[str, Any]) -> Table:
    title = f"{case['shape']['name']}, {case['dtype']}, {case['tokens']} tokens, {case['routing']}, {case['mode']}"
    table = Table("candidate", "ms", "10 % to 90 %", "to floor", "to best peer", "peak MB", title=title)
    for name, row in case["rows"].items():
        if "median_ms" not in row:
            table.add_row(name, row["skipped"] or "disagrees", "", "", "", "", style="dim")
            continue
        ratios = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("to_floor", "to_best_peer")]
        peak = row.get("peak_bytes")
        memory = "" if peak is None else f"{peak / 1e6:.0f}"
        table.add_row(name, f"{row['median_ms']:.2f}", f"{row['low_ms']:.2f} to {row['high_ms']:.2f}", *ratios, memory)
    return table


def _finish(console: Console, result: dict[str, Any], out: Path | None) -> None:
    console.print(describe(result))
    if out is not None:
        write_result(out, result)
        console.print(f"written: {out}")


def _command() -> str:
    return " ".join(["moe-guide bench", *sys.argv[sys.argv.index("bench") + 1 :]]) if "bench" in sys.argv else ""


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _fail(message: str) -> Any:
    typer.echo(message, err=True)
    raise typer.Exit(2)
