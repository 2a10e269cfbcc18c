"""A dense Transformer block beside an MoE block: only the feed-forward layer differs."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from guide_code.figures.style import NARROW_WIDTH, SMALL, WIDE_WIDTH, Palette, arrow, box, canvas, path, plus, words

ALT = (
    "Two Transformer blocks. Both run norm, attention and a residual sum, then norm, a feed-forward part and a "
    "second residual sum. In the dense block the feed-forward part is one network that every token passes. In the "
    "MoE block a router picks two of four smaller networks, the experts, for each token; their outputs are "
    "multiplied by the router's weights and added. The two experts that were not picked do no work."
)
LAYOUTS = ("wide", "narrow")
_PANEL_HEIGHT = 436
_CHOSEN = {1: "0.7", 3: "0.3"}  # expert: weight


def draw(palette: Palette, layout: str) -> Figure:
    """The two blocks beside each other, or one below the other."""
    if layout == "narrow":
        figure, axes = canvas(NARROW_WIDTH, 2 * _PANEL_HEIGHT + 28)
        _block(axes, palette, 20, 0, 300, moe=False)
        _block(axes, palette, 20, _PANEL_HEIGHT + 28, 300, moe=True)
    else:
        figure, axes = canvas(WIDE_WIDTH, _PANEL_HEIGHT)
        _block(axes, palette, 30, 0, 310, moe=False)
        _block(axes, palette, 380, 0, 310, moe=True)
    return figure


def _block(axes: Axes, palette: Palette, left: float, top: float, width: float, *, moe: bool) -> None:
    middle = left + width / 2
    words(axes, left, top + 13, "MoE block" if moe else "Dense block", palette.ink, size=15, align="left", bold=True)
    box(axes, left, top + 30, width, _PANEL_HEIGHT - 32, fill=palette.surface, edge=palette.surface, radius=10, over=0)

    _residual(axes, palette, middle, width, top + 58, top + 150)
    arrow(axes, (middle, top + 40), (middle, top + 72), palette.line)
    _step(axes, palette, middle, top + 72, "norm")
    _step(axes, palette, middle, top + 106, "attention")
    plus(axes, middle, top + 150, palette)

    _residual(axes, palette, middle, width, top + 174, top + 382)
    arrow(axes, (middle, top + 160), (middle, top + 190), palette.line)
    _step(axes, palette, middle, top + 190, "norm")
    if moe:
        _experts(axes, palette, middle, top + 216)
    else:
        _feed_forward(axes, palette, middle, top + 216)
    plus(axes, middle, top + 382, palette)
    arrow(axes, (middle, top + 392), (middle, top + 424), palette.line)


def _step(axes: Axes, palette: Palette, middle: float, top: float, name: str) -> None:
    box(axes, middle - 52, top, 104, 26, fill=palette.paper, edge=palette.line)
    words(axes, middle, top + 13, name, palette.ink, size=SMALL)
    arrow(axes, (middle, top + 26), (middle, top + 34), palette.line, head=False)


def _residual(axes: Axes, palette: Palette, middle: float, width: float, start: float, end: float) -> None:
    """The way around: what enters the half block is added to what leaves it."""
    side = middle + width / 2 - 14
    path(axes, [(middle, start), (side, start), (side, end)], palette.line)
    arrow(axes, (side, end), (middle + 11, end), palette.line)


def _feed_forward(axes: Axes, palette: Palette, middle: float, top: float) -> None:
    color = palette.experts[0]
    arrow(axes, (middle, top), (middle, top + 16), palette.line)
    box(axes, middle - 110, top + 16, 220, 116, fill=palette.tint(color), edge=color, line=1.6)
    words(axes, middle, top + 64, "feed-forward network", palette.ink, bold=True)
    words(axes, middle, top + 86, "every token uses all of it", palette.ink, size=SMALL)
    arrow(axes, (middle, top + 132), (middle, top + 156), palette.line)


def _experts(axes: Axes, palette: Palette, middle: float, top: float) -> None:
    arrow(axes, (middle, top), (middle, top + 12), palette.line)
    box(axes, middle - 52, top + 12, 104, 26, fill=palette.tint(palette.accent), edge=palette.accent, line=1.6)
    words(axes, middle, top + 25, "router", palette.ink, size=SMALL, bold=True)
    size, gap = 50.0, 10.0
    first = middle - 2 * size - 1.5 * gap
    for expert in range(4):
        center = first + expert * (size + gap) + size / 2
        color = palette.experts[expert]
        chosen = expert in _CHOSEN
        if chosen:
            path(axes, [(middle, top + 38), (center, top + 58)], color, line=1.8)
            path(axes, [(center, top + 98), (center, top + 128), (middle, top + 128)], color, line=1.8)
            weight = f"\u00d7 {_CHOSEN[expert]}"
            side, align = (-7, "right") if center < middle else (7, "left")
            words(axes, center + side, top + 114, weight, palette.ink, size=SMALL, align=align)
        fill = palette.tint(color, 0.25) if chosen else palette.surface
        box(
            axes, center - size / 2, top + 58, size, 40, fill=fill, edge=color if chosen else palette.line,
            dashed=not chosen, line=1.6 if chosen else 1,
        )  # fmt: skip
        words(axes, center, top + 78, f"$E_{expert}$", palette.ink if chosen else palette.muted, size=14)
    plus(axes, middle, top + 128, palette)
    arrow(axes, (middle, top + 138), (middle, top + 156), palette.line)
