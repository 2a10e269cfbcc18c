"""Four ways to compute the same experts, loop, padded, grouped and fused, and the rows that each copies.

Rows of D numbers besides the tokens and the output: what is gathered before the experts and what they write before
the sum. The ids are those of the figure `moe_dataflow`. Padded: GShard (arXiv:2006.16668); fused: ScatterMoE
(arXiv:2403.08245).
"""

from typing import NamedTuple

from matplotlib.figure import Figure

from guide_code.figures.moe_dataflow import CHOICES, NUM_EXPERTS, counts, sorted_rows
from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

LAYOUTS = ("wide", "narrow")


class Cost(NamedTuple):
    """Rows of D numbers, and matrix products for the way up and the way down."""

    rows_in: int
    rows_out: int
    products: int


def costs() -> dict[str, Cost]:
    """The most that is held at once; padded to the busiest expert."""
    load = counts()
    rows, padded, busiest, active = sum(load), len(load) * max(load), max(load), sum(n > 0 for n in load)
    return {
        "loop": Cost(busiest, busiest, 2 * active),
        "padded": Cost(padded, padded, 2),
        "grouped": Cost(rows, rows, 2),
        "fused": Cost(0, rows, 2),
    }


ALT = (
    "Four ways to compute eight assignments of four tokens to four experts with 3, 1, 3 and 1 rows. Loop: the rows of "
    "one expert at a time are copied, at most 3, and every expert needs its own two matrix products, 8 in all. "
    "Padded: every expert gets as many rows as the busiest, 12 in all of which 4 are empty, and two batched products. "
    "Grouped: exactly the 8 rows, sorted by expert, and two grouped products. Fused: the kernel reads tokens by index "
    "and copies no row before its two products."
)
_NOTES = {
    "loop": "one expert after the other",
    "padded": "as many rows as the busiest",
    "grouped": "rows sorted by expert",
    "fused": "tokens are read by index",
}


def draw(palette: Palette, layout: str) -> Figure:
    """One panel per way."""
    parts = [Panel(name.title(), 178, lambda pen, name=name: _way(pen, name), _NOTES[name]) for name in _NOTES]
    return panels(palette, layout, parts)


def _way(pen: Pen, name: str) -> None:
    pen.area(0, 0, pen.width, 174)
    tokens = [104 + 62 * token for token in range(len(CHOICES))]
    pen.words(8, 20, "tokens\n(T, D)", size=TINY, align="left", mono=True, muted=True)
    for token, x in enumerate(tokens):
        pen.box(x - 17, 8, 34, 24, f"$t_{token}$")
    places = _places(name)
    for (expert, token, _), x in zip(sorted_rows(), places, strict=True):
        later = name == "loop" and expert > 0
        if not later:
            pen.flow((tokens[token], 32), (x, 104 if name == "fused" else 62), pen.expert(expert))
        if name != "fused":
            color = pen.expert(expert)
            pen.box(x - 9, 62, 18, 24, f"$t_{token}$", color=color, empty=later, dashed=later, size=TINY)
            pen.arrow((x, 86), (x, 104), color=color, head=False)
    if name == "padded":
        for expert, load in enumerate(counts()):
            for place in range(load, max(counts())):
                pen.box(_slot(expert, place) - 9, 62, 18, 24, empty=True, dashed=True)
    shape = {"loop": "(n, D)", "padded": "(E, C, D)", "grouped": "(N, D)", "fused": "no copy"}[name]
    pen.words(8, 74, shape, size=TINY, align="left", mono=True, muted=True)
    for expert in range(NUM_EXPERTS):
        xs = [x for (owner, _, _), x in zip(sorted_rows(), places, strict=True) if owner == expert]
        left, right = (_slot(expert, 0), _slot(expert, max(counts()) - 1)) if name == "padded" else (xs[0], xs[-1])
        pen.box(left - 11, 104, right - left + 22, 26, f"$E_{expert}$", color=pen.expert(expert), strength=0.3)
    if name != "loop":  # one product for all: a frame around the experts
        left, right = places[0] - 15, (places[-1] if name != "padded" else _slot(3, 2)) + 15
        pen.path([(left, 101), (right, 101), (right, 133), (left, 133), (left, 101)])
    pen.words(8, 117, "products", size=TINY, align="left", mono=True, muted=True)
    cost = costs()[name]
    most = "at most " if name == "loop" else ""
    text = f"{most}{cost.rows_in} rows in, {cost.rows_out} out;  {cost.products} matrix products"
    pen.words(pen.width / 2, 153, text, bold=True, size=11)


def _slot(expert: int, place: int) -> float:
    return 84 + 62 * expert + 20 * place


def _places(name: str) -> list[float]:
    """The middle of every assignment's row."""
    if name == "padded":
        seen = [0] * NUM_EXPERTS
        places = []
        for expert, _, _ in sorted_rows():
            places.append(_slot(expert, seen[expert]))
            seen[expert] += 1
        return places
    gap = 16 if name == "loop" else 6
    start = 100 if name == "loop" else 112
    return [start + 23 * number + gap * expert for number, (expert, _, _) in enumerate(sorted_rows())]
