"""Data parallelism: every rank holds the whole model and works on its own part of the batch."""

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

RANKS = 4
LAYOUTS = ("wide", "narrow")
ALT = (
    "Four ranks in columns. Each takes its own quarter of the batch, runs forward and backward through its own whole "
    "copy of the model and has its own gradient. One all-reduce across all four ranks replaces each gradient by the "
    "mean. Then every rank makes the same optimizer step, so the copies stay equal."
)


def draw(palette: Palette, layout: str) -> Figure:
    """The ranks beside each other, time from top to bottom."""
    return panels(palette, layout, [Panel("", 300, _ranks, full=True)])


def _ranks(pen: Pen) -> None:
    pitch = pen.width / RANKS
    for rank in range(RANKS):
        x, width, color = rank * pitch + 3, pitch - 6, pen.expert(rank)
        middle = x + width / 2
        pen.area(x, 0, width, 300)
        pen.words(middle, 13, f"rank {rank}", bold=True)
        pen.box(x + 5, 28, width - 10, 38, f"batch\npart {rank}", color=color, strength=0.3, size=10.5)
        pen.arrow((middle, 66), (middle, 82))
        pen.box(x + 5, 82, width - 10, 54, "the whole\nmodel", size=10.5)
        pen.arrow((middle, 136), (middle, 152))
        pen.box(x + 5, 152, width - 10, 26, f"gradient {rank}", color=color, strength=0.3, size=TINY)
        pen.arrow((middle, 178), (middle, 196), color=color)
        pen.arrow((middle, 222), (middle, 240))
        pen.box(x + 5, 240, width - 10, 54, "the same\nmean, the\nsame step", size=TINY)
    pen.box(3, 196, pen.width - 6, 26, "all-reduce: mean of the gradients", color=pen.palette.accent, bold=True)
