"""The path of tokens through an MoE layer: route, permute, experts, combine, with the shape of every tensor."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from guide_code.figures.style import (
    NARROW_WIDTH,
    SMALL,
    WIDE_WIDTH,
    Palette,
    arrow,
    box,
    canvas,
    flow,
    words,
)  # fmt: skip

CHOICES = ((0, 2), (0, 1), (2, 3), (2, 0))  # the two experts of each token, best first
WEIGHTS = ((0.7, 0.3), (0.6, 0.4), (0.8, 0.2), (0.6, 0.4))
NUM_EXPERTS = 4
LAYOUTS = ("wide", "narrow")


def sorted_rows() -> list[tuple[int, int, int]]:
    """(expert, token, choice) of every assignment in the order of the permuted rows: by expert, then by token."""
    rows = [(expert, token, choice) for token, ids in enumerate(CHOICES) for choice, expert in enumerate(ids)]
    return sorted(rows, key=lambda row: row[0])


def counts() -> list[int]:
    """Rows of each expert."""
    return [sum(ids.count(expert) for ids in CHOICES) for expert in range(NUM_EXPERTS)]


ALT = (
    "The path of four tokens through an MoE layer with four experts and two choices per token. Route: the tokens x "
    "of shape (T, D) give logits (T, E), and from them expert ids and weights (T, K); token 0 goes to experts 0 and "
    "2, token 1 to 0 and 1, token 2 to 2 and 3, token 3 to 2 and 0. Permute: the tokens are copied into N = T times "
    f"K = 8 rows of shape (N, D), sorted by expert; the counts per expert are {', '.join(map(str, counts()))}. "
    "Experts: a grouped matmul multiplies each group of rows by the weights of its expert. Combine: every row is "
    "multiplied by its weight and added into its token, which gives the output (T, D)."
)


def draw(palette: Palette, layout: str) -> Figure:
    """The flow from left to right, or from top to bottom on a phone."""
    return _draw_narrow(palette) if layout == "narrow" else _draw_wide(palette)


def _draw_wide(palette: Palette) -> Figure:
    figure, axes = canvas(WIDE_WIDTH, 414)
    for x, title in ((138, "1  Route"), (366, "2  Permute"), (474, "3  Experts"), (668, "4  Combine")):
        words(axes, x, 16, title, palette.ink, bold=True)
    for x, label in (
        (40, "x\n(T, D)"), (112, "logits\n(T, E)"), (214, "ids, weights\n(T, K)"), (303, "sort by\nexpert"),
        (366, "rows\n(N, D)"), (474, "grouped\nmatmul"), (586, "\u00d7 weight,\nsum"), (668, "out\n(T, D)"),
    ):  # fmt: skip
        words(axes, x, 390, label, palette.muted, size=SMALL, mono=True)

    tokens = [102 + 66 * token for token in range(len(CHOICES))]  # the middle of each token's row
    box(axes, 82, 42, 60, 318, fill=palette.tint(palette.accent), edge=palette.accent, line=1.6)
    words(axes, 112, 201, "router", palette.ink, size=SMALL, bold=True)
    for token, y in enumerate(tokens):
        _cell(axes, palette, 12, y - 14, 56, f"$t_{token}$")
        arrow(axes, (68, y), (82, y), palette.line, head=False)
        arrow(axes, (142, y), (160, y), palette.line)
        for choice in range(2):
            _choice(axes, palette, 160 + 55 * choice, y - 14, (55, 28), token, choice, " ")
        _cell(axes, palette, 640, y - 14, 56, f"$t_{token}$")

    places, spans = _places(56)
    for (expert, token, _), y in zip(sorted_rows(), places, strict=True):
        color = palette.experts[expert]
        flow(axes, (270, tokens[token]), (338, y), color, upright=False)
        _cell(axes, palette, 338, y - 14, 56, f"$t_{token}$", color)
        arrow(axes, (394, y), (418, y), color)
        flow(axes, (530, y), (640, tokens[token]), color, upright=False)
    for expert, (first, last) in enumerate(spans):
        color = palette.experts[expert]
        box(axes, 418, first - 14, 112, last - first + 28, fill=palette.tint(color), edge=color, line=1.6)
        number = counts()[expert]
        text = f"$E_{expert}$   {number} row{'s' if number > 1 else ''}"
        words(axes, 474, (first + last) / 2, text, palette.ink)
    return figure


def _draw_narrow(palette: Palette) -> Figure:
    figure, axes = canvas(NARROW_WIDTH, 570)
    for y, title, shapes in (
        (0, "1  Route", "x (T, D) \u2192 ids, weights (T, K)"),
        (176, "2  Permute", "sort by expert \u2192 rows (N, D)"),
        (326, "3  Experts", "grouped matmul"),
        (496, "4  Combine", "\u00d7 weight, sum \u2192 out (T, D)"),
    ):
        box(axes, 0, y, NARROW_WIDTH, 24, fill=palette.surface, edge=palette.surface, radius=4)
        words(axes, 8, y + 12, title, palette.ink, align="left", bold=True)
        words(axes, NARROW_WIDTH - 8, y + 12, shapes, palette.muted, size=10.5, align="right", mono=True)

    tokens = [47 + 82 * token for token in range(len(CHOICES))]  # the middle of each token's column
    box(axes, 8, 78, 324, 28, fill=palette.tint(palette.accent), edge=palette.accent, line=1.6)
    words(axes, 170, 92, "router", palette.ink, size=SMALL, bold=True)
    words(axes, 324, 92, "logits (T, E)", palette.ink, size=10.5, align="right", mono=True)
    for token, x in enumerate(tokens):
        _cell(axes, palette, x - 30, 34, 60, f"$t_{token}$")
        arrow(axes, (x, 62), (x, 78), palette.line, head=False)
        arrow(axes, (x, 106), (x, 122), palette.line)
        for choice in range(2):
            _choice(axes, palette, x - 39 + 39 * choice, 122, (39, 42), token, choice, "\n")
        _cell(axes, palette, x - 30, 538, 60, f"$t_{token}$")
        arrow(axes, (x, 520), (x, 538), palette.line)

    places, spans = _places(32)
    for (expert, token, choice), x in zip(sorted_rows(), places, strict=True):
        color = palette.experts[expert]
        leaves = tokens[token] - 19.5 + 39 * choice
        arrow(axes, (leaves, 164), (leaves, 176), color, head=False)
        flow(axes, (leaves, 200), (x, 286), color, upright=True)
        _cell(axes, palette, x - 16.5, 286, 33, f"$t_{token}$", color)
        arrow(axes, (x, 314), (x, 326), color, head=False)
        arrow(axes, (x, 350), (x, 364), color)
        flow(axes, (x, 408), (tokens[token] - 8 + 16 * choice, 496), color, upright=True)
    for expert, (first, last) in enumerate(spans):
        color = palette.experts[expert]
        box(axes, first - 16.5, 364, last - first + 33, 44, fill=palette.tint(color), edge=color, line=1.6)
        words(axes, (first + last) / 2, 386, f"$E_{expert}$", palette.ink)
    return figure


def _places(start: float) -> tuple[list[float], list[tuple[float, float]]]:
    """The middle of each permuted row, groups standing apart, and each expert's first and last."""
    rows = sorted_rows()
    places = [start + 36 * number + 8 * expert for number, (expert, _, _) in enumerate(rows)]
    groups = [[y for y, row in zip(places, rows, strict=True) if row[0] == e] for e in range(NUM_EXPERTS)]
    return places, [(group[0], group[-1]) for group in groups]


def _cell(axes: Axes, palette: Palette, x: float, y: float, width: float, text: str, color: str | None = None) -> None:
    fill = palette.tint(color, 0.25) if color else palette.surface
    box(axes, x, y, width, 28, fill=fill, edge=color or palette.line, radius=4)
    words(axes, x + width / 2, y + 14, text, palette.ink)


def _choice(
    axes: Axes, palette: Palette, x: float, y: float, size: tuple[float, float], token: int, choice: int, gap: str
) -> None:
    """One choice of a token: the expert in its colour, and the weight."""
    expert, weight = CHOICES[token][choice], WEIGHTS[token][choice]
    color = palette.experts[expert]
    width, height = size
    box(axes, x + 1, y, width - 2, height, fill=palette.tint(color, 0.25), edge=color, radius=4)
    words(axes, x + width / 2, y + height / 2, f"$E_{expert}${gap}{weight}", palette.ink, size=SMALL)
