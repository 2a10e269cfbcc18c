"""Two layers that collapse onto different experts: each layer's loss sees it, the loss pooled over layers does not.

The values come from `guide_code.balance`: the "megatron" convention takes one loss per layer, the "hf" convention
(transformers) joins the layers before it multiplies.
"""

import torch
from matplotlib.figure import Figure

from guide_code.balance import expert_counts, load_balancing_loss, model_load_balancing_loss
from guide_code.figures.shapes import Panel, Pen, panels
from guide_code.figures.style import Palette
from guide_code.routers import Routing, top_k_routing

TOKENS, SURE = 8, 0.75
LAYOUTS = ("wide", "narrow")
ALT = (
    "Bars for two layers with two experts. In layer 1 all tokens go to expert 0, f = 1 and 0, with mean scores P = "
    "0.75 and 0.25; its loss is 1.5. In layer 2 all go to expert 1, and its loss is 1.5 too. Pooled over both layers, "
    "f is 0.5 and 0.5, P is 0.5 and 0.5, and the loss is 1.0, the value of perfect balance: the collapse cannot be "
    "seen."
)


def layers() -> list[Routing]:
    """The routing of the two layers."""
    first = torch.tensor([[SURE, 1 - SURE]]).expand(TOKENS, 2)
    return [top_k_routing(scores_TE.log(), 1) for scores_TE in (first, first.flip(1))]


def values() -> list[tuple[list[float], list[float], float]]:
    """f, P and the loss of layer 1, of layer 2, and of both pooled."""
    routings = layers()
    found = []
    for routing in routings:
        f, p = _f_and_p([routing])
        found.append((f, p, load_balancing_loss(routing.scores, routing.ids).item()))
    f, p = _f_and_p(routings)
    return [*found, (f, p, model_load_balancing_loss(routings, convention="hf").item())]


def draw(palette: Palette, layout: str) -> Figure:
    """A panel for each layer and one for both pooled."""
    first, second, pooled = values()
    mean = (first[2] + second[2]) / 2
    return panels(
        palette,
        layout,
        [
            Panel("Layer 1", 150, lambda pen: _bars(pen, first), "all tokens to expert 0"),
            Panel("Layer 2", 150, lambda pen: _bars(pen, second), "all tokens to expert 1"),
            Panel("Both layers pooled", 150, lambda pen: _bars(pen, pooled), "as in transformers"),
            Panel("The verdicts", 150, lambda pen: _verdicts(pen, mean, pooled[2])),
        ],
    )


def _f_and_p(routings: list[Routing]) -> tuple[list[float], list[float]]:
    counts_E = torch.stack([expert_counts(routing.ids, 2) for routing in routings]).sum(dim=0)
    mean_E = torch.cat([routing.scores for routing in routings]).mean(dim=0)
    return (counts_E / counts_E.sum()).tolist(), mean_E.tolist()


def _bars(pen: Pen, value: tuple[list[float], list[float], float]) -> None:
    shares, scores, loss = value
    pen.area(0, 0, pen.width, 146)
    for group, (name, numbers) in enumerate((("f, share of tokens", shares), ("P, mean score", scores))):
        left = 14 + 122 * group
        pen.path([(left, 104), (left + 108, 104)])
        pen.words(left + 54, 132, name, size=10.5, muted=True)
        for expert, number in enumerate(numbers):
            x = left + 10 + 50 * expert
            pen.bar(x, 104 - 78 * number, 38, 78 * number, pen.expert(expert))
            pen.words(x + 19, 94 - 78 * number, f"{number:.2g}", size=10.5)
            pen.words(x + 19, 115, f"$E_{expert}$", size=10.5, muted=True)
    pen.words(294, 48, "E \u03a3 f P =", size=11)
    pen.words(294, 74, f"{loss:.1f}", size=22, bold=True)


def _verdicts(pen: Pen, mean: float, pooled: float) -> None:
    for row, (name, loss, says) in enumerate(
        (
            ("loss per layer, mean", mean, "collapse: 1 would be balanced"),
            ("loss of the pool", pooled, "looks balanced"),
        )
    ):
        y = 4 + 72 * row
        color = pen.palette.accent if loss > 1.001 else pen.expert(2)
        pen.box(0.6, y, pen.width - 1.2, 62, color=color)
        pen.words(50, y + 31, f"{loss:.1f}", size=24, bold=True)
        pen.words(96, y + 21, name, size=12, align="left", bold=True)
        pen.words(96, y + 42, says, size=11.5, align="left")
