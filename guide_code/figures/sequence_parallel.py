"""Sequence parallelism: between the tensor-parallel parts, activations are split along the sequence.

Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2: an all-reduce is a reduce-scatter and an all-gather, so the
traffic is the same and the norms' activations shrink to 1/P.
"""

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

RANKS = 4
LAYOUTS = ("wide", "narrow")
ALT = (
    "The activations of a block on four ranks, as a square of sequence by hidden size for each step. With tensor "
    "parallelism alone, norms hold the whole square on all four ranks; attention and the feed-forward network split "
    "it by heads or hidden columns; an all-reduce follows each. With sequence parallelism, each rank's norm holds a "
    "quarter of the rows of the sequence; an all-gather comes before attention or the feed-forward network and a "
    "reduce-scatter after it."
)
_ALONE = (("norm", "copies"), ("attention", "heads"), ("norm", "copies"), ("FFN", "columns"))
_BOTH = (("norm", "sequence"), ("attention", "heads"), ("norm", "sequence"), ("FFN", "columns"))


def draw(palette: Palette, layout: str) -> Figure:
    """Without and with sequence parallelism."""
    alone = ("every rank has it", "all-reduce", "every rank has it", "all-reduce")
    both = ("all-gather", "reduce-scatter", "all-gather", "reduce-scatter")
    return panels(
        palette,
        layout,
        [
            Panel("Tensor parallel alone", 140, lambda pen: _steps(pen, _ALONE, alone), "norms: whole, on all ranks"),
            Panel("With sequence parallel", 140, lambda pen: _steps(pen, _BOTH, both), "norms: a part each"),
            Panel("", 20, _legend, full=True),
        ],
    )


def _steps(pen: Pen, steps: tuple[tuple[str, str], ...], between: tuple[str, ...]) -> None:
    pen.area(0, 0, pen.width, 138)
    size = 50.0
    for number, (name, split) in enumerate(steps):
        x, y = 5 + 80 * number, 36.0
        if split == "copies":
            pen.box(x, y, size, size, "\u00d7 4", radius=2, size=13)
        for rank in range(0 if split == "copies" else RANKS):
            part = (x, y + rank * size / RANKS, size, size / RANKS)
            if split != "sequence":
                part = (x + rank * size / RANKS, y, size / RANKS, size)
            pen.box(*part, color=pen.expert(rank), strength=0.45, radius=0)
        pen.words(x + size / 2, 102, name, size=11, bold=True)
        shape = {"copies": "(S, D)", "sequence": "(S/P, D)", "heads": "H/P heads", "columns": "(S, I/P)"}[split]
        pen.words(x + size / 2, 119, shape, size=TINY, muted=True)
        pen.arrow((x + size + 3, y + size / 2), (x + size + 27, y + size / 2))
        label = between[number]
        if "-" in label:
            first, second = label.split("-")
            pen.words(x + size + 14, 18, f"{first}-\n{second}", size=TINY)


def _legend(pen: Pen) -> None:
    entries = [(f"rank {rank}", pen.expert(rank), 0.45) for rank in range(RANKS)]
    pen.legend(1, 9, entries)
