"""Tensor parallelism of a feed-forward network: the first matrix split by columns, the second by rows.

Megatron-LM, Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
"""

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

RANKS = 2
LAYOUTS = ("wide", "narrow")
ALT = (
    "A feed-forward network on two ranks. Column-parallel: both ranks hold all tokens X (T, D); the first matrix "
    "(D, I) is split by columns, so each rank computes its half of the hidden numbers (T, I/2), activation included, "
    "without talking to the other. Row-parallel: the second matrix (I, D) is split by rows; each rank multiplies its "
    "half of the hidden numbers by its half of the rows and gets a full-size partial sum (T, D). One all-reduce adds "
    "the partial sums."
)


def draw(palette: Palette, layout: str) -> Figure:
    """A panel per matrix."""
    return panels(
        palette,
        layout,
        [
            Panel("Split by columns", 168, _columns, "no communication"),
            Panel("Split by rows", 168, _rows, "one all-reduce"),
        ],
    )


def _columns(pen: Pen) -> None:
    pen.area(0, 0, pen.width, 164)
    _matrix(pen, 12, 40, 54, 70, "X", "(T, D)", "")
    _sign(pen, 81, "\u00d7")
    _matrix(pen, 96, 48, 88, 54, "A", "(D, I)", "columns")
    _sign(pen, 199, "=")
    _matrix(pen, 214, 40, 88, 70, "H", "(T, I)", "columns")
    pen.legend(12, 150, [(f"rank {rank}", pen.expert(rank), 0.45) for rank in range(RANKS)])
    pen.words(pen.width - 10, 150, "gray: on both", size=TINY, align="right", muted=True)


def _rows(pen: Pen) -> None:
    pen.area(0, 0, pen.width, 164)
    _matrix(pen, 8, 40, 76, 70, "H", "(T, I)", "columns")
    _sign(pen, 94, "\u00d7")
    _matrix(pen, 105, 34, 54, 82, "B", "(I, D)", "rows")
    _sign(pen, 171, "=")
    for rank in range(RANKS):
        x = 183 + 78 * rank
        pen.box(x, 40, 54, 70, f"$Z_{rank}$", color=pen.expert(rank), strength=0.45, radius=2, size=13)
        pen.words(x + 27, 124, "(T, D)", size=TINY, mono=True, muted=True)
    _sign(pen, 249, "+")
    pen.box(183, 10, 132, 22, "all-reduce: Z", color=pen.palette.accent, size=10.5, bold=True)
    pen.words(pen.width / 2, 150, "each rank's product is a partial sum of full size", size=10.5, muted=True)


def _matrix(pen: Pen, x: float, y: float, width: float, height: float, name: str, shape: str, split: str) -> None:
    if not split:
        pen.box(x, y, width, height, radius=2)
    for rank in range(RANKS if split else 0):
        part = (x + rank * width / RANKS, y, width / RANKS, height)
        if split == "rows":
            part = (x, y + rank * height / RANKS, width, height / RANKS)
        pen.box(*part, color=pen.expert(rank), strength=0.45, radius=2)
        pen.words(part[0] + part[2] / 2, part[1] + part[3] / 2, f"${name}_{rank}$", size=13)
    if not split:
        pen.words(x + width / 2, y + height / 2, f"${name}$", size=13)
    pen.words(x + width / 2, 124, shape, size=TINY, mono=True, muted=True)


def _sign(pen: Pen, x: float, text: str) -> None:
    pen.words(x, 75, text, size=15)
