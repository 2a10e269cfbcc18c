"""What the presets cost: ``moe-guide models`` prints parameters, work per token, cache and bytes of each.

Everything is counted on models built on the meta device, which have shapes and no memory.
"""

import csv
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from guide_code.build import build_model, parameter_counts
from guide_code.config import ModelConfig
from guide_code.moe import MoE
from guide_code.presets import PRESETS, UNVERIFIED, preset
from guide_code.routers import TopKRouter
from guide_code.transformer import Transformer

DTYPES = {"float32": 4, "bfloat16": 2, "float8": 1}
"""Bytes of a number."""


@dataclass(frozen=True)
class Cost:
    """What a model costs. Bytes are those of numbers alone: no scales of quantisation, no activations."""

    name: str
    total_parameters: int
    active_parameters: int
    """Of experts only as many as a token chooses."""
    flops_per_token: int
    """Forward pass for one more token with ``context`` tokens before it; a multiplication and an addition are two."""
    cache_bytes_per_token: float
    """Bytes of a bfloat16 cache for one sequence of ``context`` tokens, divided by them."""
    context: int
    bytes: dict[str, int]
    """Of the weights, in each of :data:`DTYPES`."""
    unverified: tuple[str, ...] = ()
    """Fields that no published configuration was found for."""


def cost(name: str, config: ModelConfig, context: int = 4096) -> Cost:
    """Count a model.

    Args:
        name: what to call it.
        config: its configuration.
        context: tokens before the one that is computed; at most the model's ``max_length``.

    Raises:
        ValueError: the context is below 1.
    """
    if context < 1:
        raise ValueError(f"context={context} must be at least 1")
    context = min(context, config.max_length)
    with torch.device("meta"):
        model = build_model(config)
        layers = model.make_cache(1, context).layers
    total, active = parameter_counts(model)
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in layers)
    return Cost(
        name=name,
        total_parameters=total,
        active_parameters=active,
        flops_per_token=2 * (_multiplied(model) + _attended(model, config, context)),
        cache_bytes_per_token=DTYPES["bfloat16"] * numbers / context,
        context=context,
        bytes={dtype: total * size for dtype, size in DTYPES.items()},
        unverified=UNVERIFIED.get(name, ()),
    )


def costs(names: Iterable[str] | None = None, context: int = 4096) -> list[Cost]:
    """The cost of presets; None: of all of them, those with unverified values included.

    Raises:
        ValueError: a name is not known.
    """
    chosen = [*PRESETS, *UNVERIFIED] if names is None else list(names)
    return [cost(name, preset(name, allow_unverified=True), context) for name in chosen]


def _multiplied(model: Transformer) -> int:
    """Weights that one token is multiplied by: matrices, not the table of embeddings, of experts its share."""
    count = 0
    for module in model.modules():
        if isinstance(module, MoE):
            assert isinstance(module.router, TopKRouter)
            matrices = sum(p.numel() for p in module.experts.parameters() if p.ndim == 3)
            count += module.router.weight.numel() + matrices * module.router.top_k // module.router.num_experts
        elif isinstance(module, nn.Linear):
            count += module.weight.numel()
    return count


def _attended(model: Transformer, config: ModelConfig, context: int) -> int:
    """Products of queries and keys, and of shares and values, for one token, as in training (latents expanded)."""
    widths = config.num_heads * (config.head_size + (config.v_head_dim or config.head_size))
    blocks: list[Any] = list(model.blocks)
    return sum(widths * min(context, block.reach[0] or context) for block in blocks)


class Format(StrEnum):
    """Of the table."""

    rich = "rich"
    csv = "csv"
    json = "json"


app = typer.Typer(add_completion=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[PRESET]...", help="Presets; all when none.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the one that is computed.")] = 4096,
    output: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.rich,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
) -> None:
    """List the presets: parameters, operations per token, cache per token, and bytes of the weights."""
    console = Console()
    try:
        rows = costs(names or None, context)
    except ValueError as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json or output is Format.json:
        sys.stdout.write(json.dumps([vars(row) for row in rows], indent=2) + "\n")
    elif output is Format.csv:
        _write_csv(rows)
    else:
        console.print(_table(rows, context))
        for row in rows:
            if row.unverified:
                console.print(f"* {row.name}: not verified: {', '.join(row.unverified)}", highlight=False)


def _write_csv(rows: list[Cost]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    fixed = ("name", "total_parameters", "active_parameters", "flops_per_token", "cache_bytes_per_token", "context")
    writer.writerow([*fixed, *(f"bytes_{dtype}" for dtype in DTYPES), "unverified"])
    for row in rows:
        writer.writerow([*(getattr(row, name) for name in fixed), *row.bytes.values(), " ".join(row.unverified)])


def _table(rows: list[Cost], context: int) -> Table:
    title = f"Presets: one token after {context:,}, or after the longest context if that is less"
    table = Table(box=box.SIMPLE, title=title, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    for column in ("params", "active", "FLOPs", "cache/B", *(f"{dtype}/B" for dtype in ("fp32", "bf16", "fp8"))):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        numbers = (_short(row.total_parameters), _short(row.active_parameters), _short(row.flops_per_token))
        sizes = (row.cache_bytes_per_token, *row.bytes.values())
        table.add_row(row.name + " *" * bool(row.unverified), *numbers, *map(_short, sizes))
    return table


def _short(number: float) -> str:
    """Three digits or four and a decimal prefix: 46.7G."""
    for prefix in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.3g}{prefix}"
        number /= 1000
    return f"{number:.4g}T"


if __name__ == "__main__":
    app()
