"""The conventions of load balancing side by side, computed: ``python -m guide_code.conventions``.

E = 8 experts and K = 2 choices per token, on routings made by hand, under every name of ``balance.CONVENTIONS``.
The page "Load-balancing conventions" shows the same tables.

L layers, T tokens, E experts, K choices per token, S tokens per sequence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from torch import Tensor

from guide_code.balance import (
    CONVENTIONS,
    Z_CONVENTIONS,
    equivalent_coefficient,
    expert_counts,
    load_balancing_loss,
    model_load_balancing_loss,
    model_z_loss,
    required_arguments,
)
from guide_code.capacity import apply_capacity
from guide_code.presets import preset
from guide_code.routers import Routing, top_k_routing

NUM_EXPERTS, TOP_K, NUM_LAYERS = 8, 2, 4
SEQUENCES, LENGTH = 4, 256

ALL_CHOICES = tuple(
    name for name, rule in CONVENTIONS.items() if rule.counts == "all" and rule.over in ("batch", "group")
)
"""The conventions that count all choices over the batch: their gradients differ by a factor only."""

BEFORE_DROP = tuple(name for name, rule in CONVENTIONS.items() if rule.counts != "kept")

PUBLISHED = {
    "Mixtral-8x7B": (0.02, 2, 32),
    "OLMoE-1B-7B": (0.01, 8, 16),
    "Qwen3-30B-A3B": (0.001, 8, 48),
    "gpt-oss-20b": (0.9, 4, 24),
}
"""``router_aux_loss_coef``, choices per token and MoE layers of published ``config.json`` files; all mean "hf"."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def grouped(self) -> "Table":
        """The same table with one row where rows differ in their name only."""
        names: dict[tuple[str, ...], list[str]] = {}
        for name, *values in self.rows:
            names.setdefault(tuple(values), []).append(name)
        return Table(self.title, self.columns, tuple((", ".join(n), *values) for values, n in names.items()))

    def markdown(self) -> str:
        """A table for a page, without its title: conventions as code that does not break, numbers to the right."""
        numeric = [all(row[i][:1].isdigit() for row in self.rows) for i in range(len(self.columns))]
        lines = [self.columns, ["--:" if number else "---" for number in numeric]]
        for first, *rest in self.rows:
            if self.columns[0] == "convention":
                first = ", ".join(f'`{name}`{{ style="white-space: nowrap" }}' for name in first.split(", "))
            lines.append([first, *rest])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def balanced_logits(num_tokens: int = SEQUENCES * LENGTH) -> Tensor:
    """Token t prefers experts t and t + 1 (modulo E), (T, E): every expert is first and second equally often."""
    firsts_T = torch.arange(num_tokens) % NUM_EXPERTS
    return _pair_logits(firsts_T, (firsts_T + 1) % NUM_EXPERTS)


def collapsed_logits(pair: int = 0, num_tokens: int = SEQUENCES * LENGTH) -> Tensor:
    """All tokens prefer experts 2 * pair, with 0.622 of the score, and 2 * pair + 1, (T, E)."""
    firsts_T = torch.full((num_tokens,), 2 * pair)
    return _pair_logits(firsts_T, firsts_T + 1)


def sequence_logits() -> Tensor:
    """Each sequence has a pair of experts of its own, (T, E): the batch is balanced, no sequence is."""
    return torch.cat([collapsed_logits(pair, LENGTH) for pair in range(SEQUENCES)])


def skewed_logits(seed: int = 0) -> Tensor:
    """Normal noise, and in every layer a fixed preference for some experts, (L, T, E)."""
    generator = torch.Generator().manual_seed(seed)
    shape = NUM_LAYERS, SEQUENCES * LENGTH, NUM_EXPERTS
    noise_LTE = torch.randn(shape, generator=generator, dtype=torch.float64)
    return noise_LTE + torch.randn(NUM_LAYERS, 1, NUM_EXPERTS, generator=generator, dtype=torch.float64)


def padded_logits() -> tuple[Tensor, Tensor]:
    """384 balanced tokens, then 128 padding tokens that all prefer one pair, (T, E); and the mask (T,)."""
    mask_T = torch.arange(512) < 384
    return torch.cat([balanced_logits(384), collapsed_logits(0, 128)]), mask_T


def definitions() -> Table:
    """What each convention is made of."""
    rows = []
    for name, rule in CONVENTIONS.items():
        counts = {"all": "all", "first": "the first", "kept": "the first, if kept"}[rule.counts]
        over = {"global": "f: larger batch, P: batch", "sequence": "each sequence", "group": "each group"}
        value = "K" if rule.per == "token" else "1"
        rows.append((name, counts, over.get(rule.over, "the batch"), value, rule.layers))
    columns = ("convention", "choices counted", "over", "balanced", "layers")
    return Table("Conventions", columns, tuple(rows))


def sources() -> Table:
    """Where each convention is from."""
    return Table("Sources", ("convention", "source"), tuple((name, r.source) for name, r in CONVENTIONS.items()))


def layer_values() -> Table:
    """The loss of one layer, where a mean over layers divides by 1."""
    padded_TE, mask_T = padded_logits()
    cases: dict[str, tuple[Tensor, Tensor | None, int]] = {
        "balanced": (balanced_logits(), None, LENGTH),
        "all tokens on one pair": (collapsed_logits(), None, LENGTH),
        "each sequence on its own pair": (sequence_logits(), None, LENGTH),
        "random, skewed": (skewed_logits()[0], None, LENGTH),
        "padding, masked": (padded_TE, mask_T, 512),
        "padding, counted": (padded_TE, None, 512),
    }
    rows = [
        (name, *(f"{layer_value(name, logits_TE, mask_T, size):.3f}" for logits_TE, mask_T, size in cases.values()))
        for name in CONVENTIONS
    ]
    return Table(f"One layer, E = {NUM_EXPERTS}, K = {TOP_K}", ("convention", *cases), tuple(rows))


def layer_value(convention: str, logits_TE: Tensor, mask_T: Tensor | None = None, group_size: int = LENGTH) -> float:
    """The loss of one layer with softmax routing.

    A convention that counts over a larger batch finds it as this batch is. One that counts what capacity kept sees
    top-1 routing with 1.2 times the even share of slots.
    """
    routing = top_k_routing(logits_TE, TOP_K, mask_T=mask_T)
    if CONVENTIONS[convention].counts == "kept":
        routing = top_k_routing(logits_TE, 1, mask_T=mask_T)
        routing = apply_capacity(routing, math.ceil(1.2 * logits_TE.shape[0] / logits_TE.shape[1]))
    options = {"num_layers": 1, "group_size": group_size, "counts_E": expert_counts(routing.ids, NUM_EXPERTS)}
    options = {name: options[name] for name in required_arguments(convention)}
    loss = load_balancing_loss(routing.scores, routing.ids, convention=convention, mask_T=mask_T, **options)
    return loss.item()


def model_values() -> Table:
    """The loss of four layers, over layers as each convention does it."""
    apart = [collapsed_logits(pair) for pair in range(NUM_LAYERS)]
    cases: dict[str, Sequence[Tensor] | Tensor] = {
        "balanced": [balanced_logits()] * NUM_LAYERS,
        "all layers on one pair": [collapsed_logits()] * NUM_LAYERS,
        "each layer on its own pair": apart,
        "random, skewed": skewed_logits(),
    }
    routed = [[top_k_routing(logits_TE, TOP_K) for logits_TE in logits] for logits in cases.values()]
    rows = [(name, *(f"{_model_loss(layers, name, LENGTH).item():.3f}" for layers in routed)) for name in BEFORE_DROP]
    return Table(f"{NUM_LAYERS} layers, E = {NUM_EXPERTS}, K = {TOP_K}", ("convention", *cases), tuple(rows))


def gradient_angle(logits_LTE: Tensor, top_k: int, *, source: str, target: str, group_size: int | None = None) -> float:
    """Degrees between the gradients of two conventions on the logits of all layers.

    0 where one is a multiple of the other, so that a coefficient makes them equal; 90 where one leaves alone what the
    other pushes; NaN where a gradient is zero.

    Args:
        logits_LTE: logits of every layer.
        top_k: choices per token.
        source: one convention.
        target: the other one.
        group_size: tokens per sequence, for a convention that needs it.
    """
    first, second = _gradients(logits_LTE, top_k, (source, target), group_size)
    return _angle(first, second)


def angles() -> Table:
    """How far each convention pushes in another direction than "megatron", layers alike and layers apart."""
    skewed_LTE = skewed_logits()
    cells = []
    for logits_LTE in (skewed_LTE[:1].expand(NUM_LAYERS, -1, -1), skewed_LTE):
        megatron, *others = _gradients(logits_LTE, TOP_K, ("megatron", *BEFORE_DROP), LENGTH)
        cells.append([f"{_angle(megatron, other):.1f}" for other in others])
    columns = ("convention", "layers route alike", "each layer has its own preference")
    return Table(
        'Degrees between its gradient and that of "megatron"', columns, tuple(zip(BEFORE_DROP, *cells, strict=True))
    )


def coefficients(names: Sequence[str] | None = None) -> Table:
    """For each preset, and for published models, the coefficient that gives the same gradient under each convention.

    Args:
        names: presets to show; None: the guide's own, and the published models.
    """
    rows = []
    for name in ("tiny", "small") if names is None else names:
        config = preset(name)
        if config.moe is not None:
            source = config.moe.load_balancing_convention, config.moe.load_balancing_coef
            dense = config.num_layers - len(config.sparse_layers)
            rows.append(_equivalents(name, *source, config.moe.top_k, config.num_layers, dense))
    if names is None:
        rows += [_equivalents(name, "hf", coef, k, layers, 0) for name, (coef, k, layers) in PUBLISHED.items()]
    columns = ("model", "K", "MoE layers", *(", ".join(group) for group in _equal_conventions()))
    return Table("Coefficients of equal pressure", columns, tuple(rows))


def z_values() -> Table:
    """z-losses of four layers with logits of 0: not 0, but (ln E)^2 = 4.324 in each."""
    zeros_TE = torch.zeros(LENGTH, NUM_EXPERTS, dtype=torch.float64)
    routings = [top_k_routing(zeros_TE, TOP_K)] * NUM_LAYERS
    rows = [
        (name, layers, f"{model_z_loss(routings, convention=name).item():.3f}")
        for name, layers in Z_CONVENTIONS.items()
    ]
    return Table(f"z-loss of {NUM_LAYERS} layers, logits of 0, E = {NUM_EXPERTS}", ("convention", "layers", "value"),
                 tuple(rows))  # fmt: skip


def _pair_logits(firsts_T: Tensor, seconds_T: Tensor) -> Tensor:
    logits_TE = torch.zeros(len(firsts_T), NUM_EXPERTS, dtype=torch.float64)
    return logits_TE.scatter(1, firsts_T[:, None], 20.5).scatter(1, seconds_T[:, None], 20.0)


def _model_loss(routings: Sequence[Routing], convention: str, group_size: int | None) -> Tensor:
    """A convention that counts over a larger batch finds it as this batch is."""
    needs = required_arguments(convention)
    return model_load_balancing_loss(
        routings,
        convention=convention,
        group_size=group_size if "group_size" in needs else None,
        counts_LE=[expert_counts(r.ids, r.scores.shape[1]) for r in routings] if "counts_E" in needs else None,
    )


def _gradients(logits_LTE: Tensor, top_k: int, names: Sequence[str], group_size: int | None) -> list[Tensor]:
    leaf_LTE = logits_LTE.detach().double().requires_grad_()
    routings = [top_k_routing(logits_TE, top_k) for logits_TE in leaf_LTE]
    losses = [_model_loss(routings, name, group_size) for name in names]
    return [torch.autograd.grad(loss, leaf_LTE, retain_graph=True)[0].flatten() for loss in losses]


def _angle(first: Tensor, second: Tensor) -> float:
    first, second = first / first.norm(), second / second.norm()
    # Stable near 0 and 180 degrees, where the arc cosine is not.
    return math.degrees(2 * math.atan2((first - second).norm().item(), (first + second).norm().item()))


def _equal_conventions() -> list[list[str]]:
    """:data:`ALL_CHOICES`, those that take the same coefficient together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in ALL_CHOICES:
        rule = CONVENTIONS[name]
        groups.setdefault((rule.per, "mean" if rule.layers == "pooled" else rule.layers), []).append(name)
    return list(groups.values())


def _equivalents(
    model: str, source: str, coef: float, top_k: int, num_layers: int, dense_layers: int
) -> tuple[str, ...]:
    """The coefficient under every convention, by way of "megatron": means divide by different numbers of layers."""
    cells = []
    for target, *_ in _equal_conventions():
        value = coef
        for start, end in ((source, "megatron"), ("megatron", target)):
            all_layers = "mean of all" in (CONVENTIONS[start].layers, CONVENTIONS[end].layers)
            layers = num_layers if all_layers else num_layers - dense_layers
            value = equivalent_coefficient(value, source=start, target=end, top_k=top_k, num_layers=layers)
        cells.append(f"{value:.3g}")
    return (model, str(top_k), str(num_layers - dense_layers), *cells)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    name: Annotated[str | None, typer.Option("--preset", help="Coefficients of this preset only.")] = None,
) -> None:
    """Compare the load-balancing conventions: values, directions, and coefficients of equal pressure."""
    console = Console()
    try:
        tables = [coefficients([name])] if name is not None else [
            definitions(),
                sources(), layer_values(), model_values(), angles(), coefficients(), z_values()
        ]  # fmt: skip
    except ValueError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    for table in tables:
        shown = RichTable(title=table.title, box=box.SIMPLE)
        for column in table.columns:
            shown.add_column(column, overflow="fold")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)


if __name__ == "__main__":
    app()
