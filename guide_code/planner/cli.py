"""``moe-guide plan``: what a layout needs per rank, and which layouts are fastest, before anything is started."""

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from guide_code.parallel.mesh import ParallelSizes, check_world_size
from guide_code.planner.plan import Hardware, Job, Plan, make_plan
from guide_code.planner.suggest import suggest
from guide_code.presets import preset

app = typer.Typer(add_completion=False)
UNITS = {"GiB": 2**30, "GB": 1e9}


@app.command()
def plan(
    name: Annotated[str, typer.Argument(metavar="PRESET", help="A model, see moe-guide models.")],
    gpus: Annotated[int, typer.Option(min=1, help="Ranks that you have.")],
    hbm: Annotated[str, typer.Option(help="Memory of one, in GB or GiB.")] = "80GB",
    dp: Annotated[int | None, typer.Option(help="Replicas of the dense layers; what is left when not given.")] = None,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    cp: Annotated[int, typer.Option(help="Parts of each sequence.")] = 1,
    tp: Annotated[int, typer.Option(help="Parts of each dense matrix.")] = 1,
    ep: Annotated[int, typer.Option(help="Groups of experts.")] = 1,
    etp: Annotated[int, typer.Option(help="Parts of each expert's matrices.")] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences of a step, over all ranks.")] = 512,
    micro_batch: Annotated[int, typer.Option(help="Sequences computed at once.")] = 1,
    zero: Annotated[int, typer.Option(help="ZeRO stage: 1, 2 or 3.")] = 3,
    recompute: Annotated[bool, typer.Option(help="Compute blocks again in the backward.")] = False,
    schedule: Annotated[str, typer.Option(help="Of the pipeline: GPipe, 1F1B or Interleaved1F1B.")] = "1F1B",
    peak_tflops: Annotated[float, typer.Option(help="Peak rate of one GPU in bfloat16.")] = 989.0,
    intra_gbs: Annotated[float, typer.Option(help="GB/s that one GPU sends inside a machine.")] = 450.0,
    inter_gbs: Annotated[float, typer.Option(help="GB/s that one GPU sends between machines.")] = 50.0,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a machine.")] = 8,
    efficiency: Annotated[float, typer.Option(help="Part of the peak rate that is reached: assumed.")] = 0.5,
    search: Annotated[bool, typer.Option("--suggest", help="Search layouts; sizes given are not used.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers for programs.")] = False,
) -> None:
    """Plan a training run: memory, operations, traffic and time per rank, and what does not fit."""
    try:
        config = preset(name, allow_unverified=True)
        job = Job(sequence, batch, micro_batch, zero, recompute, schedule)
        hardware = Hardware(
            parse_bytes(hbm), peak_tflops * 1e12, intra_gbs * 1e9, inter_gbs * 1e9, gpus_per_node, efficiency
        )
        if search:
            plans = suggest(config, gpus, job, hardware)
        else:
            rest = max(1, gpus // max(1, pp * cp * tp)) if dp is None else dp
            sizes = ParallelSizes(pp=pp, dp=rest, cp=cp, tp=tp, ep=ep, etp=etp)
            check_world_size(sizes, gpus)
            plans = [make_plan(config, sizes, job, hardware)]
    except ValueError as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        numbers: Any = [_numbers(one) for one in plans]
        sys.stdout.write(json.dumps(numbers if search else numbers[0], indent=2) + "\n")
    elif search:
        Console().print(_ranking(plans, name, gpus))
    else:
        _show(plans[0], name)


def parse_bytes(text: str) -> float:
    """Bytes of "80GB" or "80GiB".

    Raises:
        ValueError: it is neither.
    """
    for unit, size in UNITS.items():
        number = text.strip().removesuffix(unit)
        if number != text.strip() and number.strip().replace(".", "", 1).isdigit():
            return float(number) * size
    raise ValueError(f"hbm={text!r} is no amount of memory: give a number with GB or GiB, as in 80GB")


def _numbers(one: Plan) -> dict[str, Any]:
    return asdict(one) | {"fits": not one.misfits}


def _sizes(one: Plan) -> str:
    named = [f"{axis}{size}" for axis, size in vars(one.sizes).items() if size > 1]
    return " ".join([*named, f"zero{one.job.zero}", *(["recompute"] if one.job.recompute else [])])


def _ranking(plans: list[Plan], name: str, gpus: int) -> Table:
    table = Table("layout", "GB", "idle", "s/step", "tokens/s", box=box.SIMPLE, title=f"{name} on {gpus} GPUs")
    for one in plans:
        most = max(stage.bytes for stage in one.stages) / 1e9
        row = (f"{most:.1f}", f"{one.bubble:.0%}", f"{one.seconds:.3g}", f"{one.tokens_per_second:,.0f}")
        table.add_row(_sizes(one), *row)
    return table


def _show(one: Plan, name: str) -> None:
    console = Console()
    table = Table("per rank", box=box.SIMPLE, title=f"{name}: {_sizes(one)}, {one.micro_batches} micro-batches")
    shown = {0: "first stage", len(one.stages) - 1: "last stage"} if len(one.stages) > 1 else {0: "every rank"}
    worst = max(range(len(one.stages)), key=lambda n: one.stages[n].bytes)
    shown.setdefault(worst, f"stage {worst}")
    for title in shown.values():
        table.add_column(title, justify="right")
    stages = [one.stages[n] for n in shown]
    for part in stages[0].memory:
        table.add_row(f"{part}, GB", *(f"{s.memory[part] / 1e9:.2f}" for s in stages))
    table.add_row("memory, GB", *(f"{s.bytes / 1e9:.2f}" for s in stages), style="bold")
    table.add_row("TFLOPs per step", *(f"{s.flops / 1e12:,.0f}" for s in stages))
    for axis in dict.fromkeys(axis for s in stages for axis in s.traffic):
        for link in ("intra", "inter"):
            sent = [getattr(s.traffic[axis], link) / 1e9 if axis in s.traffic else 0.0 for s in stages]
            if any(sent):
                table.add_row(f"{axis} sends, {link}-node, GB", *(f"{n:.2f}" for n in sent))
    for title, field in (("compute", "compute_seconds"), ("wait", "blocking_seconds"), ("shard", "sharding_seconds")):
        table.add_row(f"{title}, s", *(f"{getattr(s, field):.3g}" for s in stages))
    console.print(table)
    end = f"idle {one.bubble:.1%}; {one.seconds:.3g} s per step, {one.tokens_per_second:,.0f} tokens/s"
    console.print(end, highlight=False)
    for misfit in one.misfits[:4]:
        console.print(f"[red]does not fit:[/] {escape(misfit)}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
