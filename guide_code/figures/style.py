"""What all figures share: two palettes, one hand for boxes, arrows and words, and SVG files that never vary.

A figure module has

- `ALT`: what the figure shows, for readers who do not see it;
- `LAYOUTS`: ("wide", "narrow") or ("wide",); the narrow one is for phones, at most `NARROW_WIDTH` wide;
- `draw(palette, layout)`: the drawing, on a `canvas`;
- perhaps `DATA`: JSON files below `docs/data`, whose contents `draw` gets as further arguments.

Lengths are CSS pixels, x to the right and y down. Shapes join the axes by `add_artist`: `add_patch` would also update
limits that a canvas has fixed, which takes a fifth of the drawing time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, PathPatch
from matplotlib.path import Path as Curve

NARROW_WIDTH = 340
WIDE_WIDTH = 720
BODY, SMALL = 13.0, 11.5  # text sizes
_PIXELS_PER_INCH = 72.0  # so that a font size in points is one in pixels


@dataclass(frozen=True)
class Palette:
    """Colours of one of the site's palettes.

    Attributes:
        name: "light" or "dark".
        paper: The page behind the figure, which itself is transparent.
        ink: Words and what matters.
        muted: Secondary words; at least 4.5:1 on paper.
        line: Outlines and arrows.
        surface: Fill of plain boxes.
        accent: The router.
        experts: One colour for each expert, told apart also by readers who see few colours.
    """

    name: str
    paper: str
    ink: str
    muted: str
    line: str
    surface: str
    accent: str
    experts: tuple[str, ...]

    def tint(self, color: str, strength: float = 0.18) -> str:
        """`color` thinned onto the paper."""
        pairs = zip(to_rgb(self.paper), to_rgb(color), strict=True)
        red, green, blue = (paper + strength * (full - paper) for paper, full in pairs)
        return to_hex((red, green, blue))


LIGHT = Palette(
    "light", "#ffffff", "#1b2433", "#566173", "#7c879a", "#f3f5f9", "#b3400f",
    ("#1f63d6", "#c05f00", "#0e7d5b", "#8a3fc4"),
)  # fmt: skip
DARK = Palette(
    "dark", "#12161e", "#e6eaf2", "#a3adbf", "#76839a", "#1d2430", "#ffab7a",
    ("#7fb0ff", "#ffb454", "#5fd6a5", "#d5a0ff"),
)  # fmt: skip


@contextmanager
def consistent() -> Iterator[None]:
    """Settings under which a drawing has the same bytes on every machine: no local fonts, no random ids."""
    settings: dict[Any, Any] = {
        "svg.hashsalt": "moe-guide",
        "svg.fonttype": "path",
        "font.family": ["DejaVu Sans"],  # comes with matplotlib
        "mathtext.fontset": "dejavusans",
        "path.simplify": False,
    }
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        yield


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty transparent drawing of that many pixels."""
    figure = Figure(figsize=(width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH))
    figure.patch.set_alpha(0)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    return figure, axes


def save(figure: Figure, path: Path) -> tuple[int, int]:
    """Writes the drawing as SVG; returns its width and height in pixels."""
    figure.savefig(path, format="svg", dpi=_PIXELS_PER_INCH, metadata={"Date": None, "Creator": None})
    width, height = figure.get_size_inches() * _PIXELS_PER_INCH
    return round(width), round(height)


def words(
    axes: Axes, x: float, y: float, text: str, color: str, *,
    size: float = BODY, align: str = "center", bold: bool = False, mono: bool = False,
    over: int = 5,
) -> None:  # fmt: skip
    """One or more lines of text, centred vertically on `y`."""
    family = "DejaVu Sans Mono" if mono else "DejaVu Sans"
    weight = "bold" if bold else "normal"
    axes.text(
        x, y, text, color=color, fontsize=size, ha=align, va="center_baseline", family=family, weight=weight,
        linespacing=1.35, zorder=over,
    )  # fmt: skip


def box(
    axes: Axes, x: float, y: float, width: float, height: float, *,
    fill: str, edge: str, radius: float = 5, dashed: bool = False, line: float = 1.2, over: int = 3,
) -> None:  # fmt: skip
    """A rounded box whose top left corner is at (x, y)."""
    axes.add_artist(
        FancyBboxPatch(
            (x, y), width, height, boxstyle=f"round,pad=0,rounding_size={radius}", facecolor=fill, edgecolor=edge,
            linewidth=line, linestyle=(0, (3, 2)) if dashed else "solid", zorder=over,
        )
    )  # fmt: skip


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, *,
    line: float = 1.4, head: bool = True, over: int = 2,
) -> None:  # fmt: skip
    """A straight arrow, or a line without a head."""
    style = "-|>,head_width=3,head_length=5" if head else "-"
    axes.add_artist(
        FancyArrowPatch(
            start, end, arrowstyle=style, color=color, linewidth=line, shrinkA=0, shrinkB=0, mutation_scale=1,
            capstyle="butt", joinstyle="miter", zorder=over,
        )
    )  # fmt: skip


def plus(axes: Axes, x: float, y: float, palette: Palette, *, edge: str | None = None) -> None:
    """The sign of a sum: a plus in a circle of radius 10."""
    axes.add_artist(
        Circle((x, y), 10, facecolor=palette.paper, edgecolor=edge or palette.line, linewidth=1.2, zorder=4)
    )
    for start, end in (((x - 5, y), (x + 5, y)), ((x, y - 5), (x, y + 5))):
        path(axes, [start, end], palette.ink, over=5)


def path(axes: Axes, points: list[tuple[float, float]], color: str, *, line: float = 1.4, over: int = 2) -> None:
    """A line through the points."""
    axes.add_artist(PathPatch(Curve(points), facecolor="none", edgecolor=color, linewidth=line, zorder=over))


def flow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, *,
    upright: bool, line: float = 1.6, over: int = 2,
) -> None:  # fmt: skip
    """A smooth curve that leaves and arrives along the direction of flow: down if `upright`, else to the right."""
    (x0, y0), (x1, y1) = start, end
    if upright:
        bends = [(x0, (y0 + y1) / 2), (x1, (y0 + y1) / 2)]
    else:
        bends = [((x0 + x1) / 2, y0), ((x0 + x1) / 2, y1)]
    codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
    curve = Curve([start, *bends, end], codes)
    axes.add_artist(PathPatch(curve, facecolor="none", edgecolor=color, linewidth=line, zorder=over))
