"""Fine-grained and shared experts: the same parameters and the same work, cut into more and smaller pieces.

DeepSeekMoE, Dai et al. 2024 (arXiv:2401.06066), section 3: each expert is cut into m, and m times as many are picked;
then some are always on. The count of possible choices is the paper's argument.
"""

from math import comb
from typing import NamedTuple

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

LAYOUTS = ("wide", "narrow")


class Design(NamedTuple):
    """How one feed-forward layer is cut."""

    title: str
    experts: int
    top_k: int
    shared: int
    picked: tuple[int, ...]
    """Routed experts drawn as picked."""


DESIGNS = (
    Design("Coarse", 8, 2, 0, (2, 5)),
    Design("Fine-grained", 32, 8, 0, (1, 5, 9, 14, 18, 19, 25, 30)),
    Design("Fine-grained and shared", 31, 7, 1, (4, 8, 13, 17, 18, 24, 29)),
)


def choices(design: Design) -> int:
    """Sets of routed experts that a token can get."""
    return comb(design.experts, design.top_k)


ALT = (
    "One feed-forward layer cut in three ways, its area always the same and a quarter of it active. Coarse: 8 wide "
    f"experts, 2 per token, {choices(DESIGNS[0])} possible choices. Fine-grained: 32 experts a quarter as wide, 8 per "
    f"token, {choices(DESIGNS[1]):,} choices. Fine-grained and shared: one of the 32 sees every token, and 7 of the "
    f"other 31 are picked, {choices(DESIGNS[2]):,} choices."
)


def draw(palette: Palette, layout: str) -> Figure:
    """One full-width panel per design."""
    parts = [
        Panel(d.title, 88, lambda pen, d=d: _experts(pen, d), f"{choices(d):,} choices", full=True) for d in DESIGNS
    ]
    return panels(palette, layout, parts)


def _experts(pen: Pen, design: Design) -> None:
    pen.area(0, 0, pen.width, 86)
    count = design.experts + design.shared
    pitch = (pen.width - 12) / count
    gap = 4 if count < 16 else 2.4
    for place in range(count):
        x, expert = 6 + pitch * place + gap / 2, place - design.shared
        if expert < 0:
            color: str | None = pen.palette.accent
        else:
            color = pen.expert(0) if expert in design.picked else None
        pen.box(x, 8, pitch - gap, 44, color=color, strength=0.6, radius=2)
    each = "each as wide as before" if count < 16 else "each a quarter as wide"
    text = f"{design.experts} experts, {design.top_k} per token" + (" + 1 shared" if design.shared else "")
    pen.words(8, 68, text, size=11, align="left", bold=True)
    pen.words(pen.width - 8, 68, each if not design.shared else "orange: shared", size=TINY, align="right", muted=True)
