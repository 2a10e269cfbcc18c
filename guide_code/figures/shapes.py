"""What several figures draw: panels that stand side by side or below each other, and the pen that draws inside one.

A panel is `NARROW_WIDTH` wide unless it has the whole row, so that one drawing serves a desk and a phone. Its drawing
is a function of a `Pen`, whose lengths are pixels from the panel's top left corner.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from guide_code.figures import style
from guide_code.figures.style import NARROW_WIDTH, SMALL, WIDE_WIDTH, Palette

TINY = 10.0  # the least size of any text; a phone shows the narrow layout at its own size
_HEADING = 30.0
_GAP = 22.0


@dataclass(frozen=True)
class Pen:
    """Draws at an offset in one palette.

    Attributes:
        axes: The canvas.
        palette: Its colours.
        left: Where x = 0 is on the canvas.
        top: Where y = 0 is on the canvas.
        width: What the panel has to itself.
    """

    axes: Axes
    palette: Palette
    left: float
    top: float
    width: float

    def at(self, x: float, y: float, width: float | None = None) -> "Pen":
        """A pen for a part of this panel."""
        return Pen(self.axes, self.palette, self.left + x, self.top + y, self.width if width is None else width)

    def expert(self, number: int) -> str:
        """The colour of an expert, or of whatever else is numbered."""
        return self.palette.experts[number % len(self.palette.experts)]

    def words(
        self, x: float, y: float, text: str, *, size: float = SMALL, align: str = "center", bold: bool = False,
        mono: bool = False, muted: bool = False,
    ) -> None:  # fmt: skip
        """Lines of text, centred vertically on `y`."""
        color = self.palette.muted if muted else self.palette.ink
        style.words(
            self.axes, self.left + x, self.top + y, text, color, size=size, align=align, bold=bold, mono=mono
        )  # fmt: skip

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", *, color: str | None = None,
        strength: float = 0.18, dashed: bool = False, empty: bool = False, size: float = SMALL, bold: bool = False,
        mono: bool = False, radius: float = 4,
    ) -> None:  # fmt: skip
        """A rounded box with a tint of `color`; plain without one; a mere outline if `empty`."""
        palette = self.palette
        fill = palette.tint(color, strength) if color else palette.surface
        style.box(
            self.axes, self.left + x, self.top + y, width, height, fill=palette.paper if empty else fill,
            edge=color or palette.line, radius=min(radius, width / 2, height / 2), dashed=dashed,
        )  # fmt: skip
        if text:
            self.words(x + width / 2, y + height / 2, text, size=size, bold=bold, mono=mono, muted=empty)

    def area(self, x: float, y: float, width: float, height: float, *, radius: float = 8) -> None:
        """A quiet ground behind things that belong together."""
        fill = self.palette.surface
        style.box(
            self.axes, self.left + x, self.top + y, width, height, fill=fill, edge=fill, radius=radius, over=0
        )  # fmt: skip

    def bar(self, x: float, y: float, width: float, height: float, color: str, *, strength: float = 1.0) -> None:
        """A filled rectangle with sharp corners and no outline."""
        fill = self.palette.tint(color, strength)
        style.box(
            self.axes, self.left + x, self.top + y, width, height, fill=fill, edge=fill, radius=0, line=0
        )  # fmt: skip

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, color: str | None = None, head: bool = True,
        line: float = 1.4,
    ) -> None:  # fmt: skip
        """A straight arrow, or a line without a head."""
        style.arrow(self.axes, self._on(start), self._on(end), color or self.palette.line, head=head, line=line)

    def path(
        self, points: Sequence[tuple[float, float]], *, color: str | None = None, line: float = 1.4, over: int = 2
    ) -> None:
        """A line through the points; boxes and bars are at height 3."""
        style.path(self.axes, [self._on(point) for point in points], color or self.palette.line, line=line, over=over)

    def flow(
        self, start: tuple[float, float], end: tuple[float, float], color: str, *, upright: bool = True,
        line: float = 1.6,
    ) -> None:  # fmt: skip
        """A smooth curve, see `style.flow`."""
        style.flow(self.axes, self._on(start), self._on(end), color, upright=upright, line=line)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str, float]]) -> None:
        """Squares of a colour at a strength, each followed by its name; a new line where the panel ends."""
        place = x
        for name, color, strength in entries:
            width = 17 + 6.5 * len(name)
            if place + width > self.width:
                place, y = x, y + 18
            self.box(place, y - 5.5, 11, 11, color=color, strength=strength, radius=2)
            self.words(place + 17, y, name, size=10.5, align="left", muted=True)
            place += width + 16

    def _on(self, point: tuple[float, float]) -> tuple[float, float]:
        return self.left + point[0], self.top + point[1]


class Panel(NamedTuple):
    """One part of a figure.

    Attributes:
        title: Its heading; none if empty.
        height: What the drawing needs below the heading.
        draw: Draws it.
        note: Muted words beside the heading.
        full: It takes the whole row on a desk.
    """

    title: str
    height: float
    draw: Callable[[Pen], None]
    note: str = ""
    full: bool = False


def panels(palette: Palette, layout: str, parts: Sequence[Panel]) -> Figure:
    """The panels in rows of two, or below each other on a phone."""
    rows: list[list[Panel]] = []
    for part in parts:
        if rows and len(rows[-1]) == 1 and layout == "wide" and not part.full and not rows[-1][0].full:
            rows[-1].append(part)
        else:
            rows.append([part])
    heights = [max(part.height + (_HEADING if part.title else 0) for part in row) for row in rows]
    total = WIDE_WIDTH if layout == "wide" else NARROW_WIDTH
    figure, axes = style.canvas(total, sum(heights) + _GAP * (len(rows) - 1))
    top = 0.0
    for row, height in zip(rows, heights, strict=True):
        for column, part in enumerate(row):
            width = total if part.full else NARROW_WIDTH
            pen = Pen(axes, palette, column * (WIDE_WIDTH - NARROW_WIDTH), top, width)
            if part.title:
                pen.words(1, 11, part.title, size=style.BODY, align="left", bold=True)
                pen.words(width - 1, 11, part.note, size=10.5, align="right", muted=True)
            part.draw(pen.at(0, _HEADING if part.title else 0))
        top += height + _GAP
    return figure


def coordinates(rank: int, mesh: dict[str, int]) -> dict[str, int]:
    """The place of a rank in a mesh, whose first dimension has consecutive ranks as neighbours."""
    at = {}
    for name, size in mesh.items():
        rank, at[name] = divmod(rank, size)
    return at
