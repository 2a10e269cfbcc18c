"""Expert offloading: a few experts stay on the device, the others are fetched when a token needs them.

The least recently used expert makes room, as in Eliseev and Mazur 2023 (arXiv:2312.17238). The trace is the routing of
consecutive tokens in one layer of a small trained model, measured by `guide_code.figures.measure.load_over_training`.
"""

from collections import OrderedDict
from typing import Any

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

NUM_EXPERTS, SLOTS, SHOWN = 16, 8, 30
DATA = ("results/load_over_training.json",)
LAYOUTS = ("wide", "narrow")
ALT = (
    "A grid of sixteen experts by thirty consecutive tokens of a small trained model, each token using two experts, "
    "with a cache of eight. A cell says whether the token found the expert in the cache, had it fetched, or left it "
    "waiting there unused. Beside it, bars of the share of uses served from the cache over 64 tokens for 2 to 16 "
    "slots: the share grows with the slots, and even with room for all sixteen experts the first use of each is a "
    "fetch."
)


def simulate(trace: list[list[int]], slots: int) -> list[tuple[set[int], set[int]]]:
    """Per token the experts that were fetched and those that the cache holds after it.

    The experts of one token are needed together, so none of them makes room for another.

    Raises:
        ValueError: a token needs more experts than there are slots.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for ids in trace:
        if len(ids) > slots:
            raise ValueError(f"slots={slots} must hold the {len(ids)} experts of a token")
        fetched = {expert for expert in ids if expert not in cache}
        for expert in ids:
            cache[expert] = None
            cache.move_to_end(expert)
        while len(cache) > slots:
            cache.popitem(last=False)
        found.append((fetched, set(cache)))
    return found


def hit_rate(trace: list[list[int]], slots: int) -> float:
    """Share of uses that found their expert in the cache."""
    fetched = sum(len(new) for new, _ in simulate(trace, slots))
    return 1 - fetched / sum(len(ids) for ids in trace)


def draw(palette: Palette, layout: str, data: dict[str, Any]) -> Figure:
    """The grid, and the share of hits by size of the cache."""
    trace = data["trace"]
    return panels(
        palette,
        layout,
        [
            Panel(f"{SLOTS} slots", 256, lambda pen: _grid(pen, trace), f"{SHOWN} tokens, one column each"),
            Panel("Found in the cache", 256, lambda pen: _bars(pen, trace), f"{len(trace)} tokens"),
        ],
    )


def _grid(pen: Pen, trace: list[list[int]]) -> None:
    pitch, left = 10.4, 26
    pen.area(left - 2, 0, SHOWN * pitch + 4, 214)
    for expert in range(NUM_EXPERTS):
        pen.words(left - 8, 9 + 13 * expert, str(expert), size=TINY, align="right", muted=True)
    for column, (fetched, cached) in enumerate(simulate(trace, SLOTS)[:SHOWN]):
        for expert in cached:
            used = expert in trace[column]
            color = pen.palette.accent if expert in fetched else pen.expert(0)
            strength = 1.0 if used else 0.2
            pen.bar(left + pitch * column + 1, 4 + 13 * expert, pitch - 2, 10.5, color, strength=strength)
    names = (("fetched", pen.palette.accent, 1.0), ("found", pen.expert(0), 1.0), ("waiting", pen.expert(0), 0.2))
    pen.legend(left, 232, names)


def _bars(pen: Pen, trace: list[list[int]]) -> None:
    pen.area(0, 0, pen.width, 214)
    sizes = range(2, NUM_EXPERTS + 1, 2)
    for place, slots in enumerate(sizes):
        rate = hit_rate(trace, slots)
        x = 10 + 41 * place
        pen.bar(x, 196 - 170 * rate, 32, 170 * rate, pen.expert(0), strength=1.0 if slots == SLOTS else 0.5)
        pen.words(x + 16, 186 - 170 * rate, f"{rate:.0%}", size=10.5, bold=slots == SLOTS)
        pen.words(x + 16, 206, str(slots), size=TINY, muted=True)
    pen.words(pen.width / 2, 232, "slots of the cache", size=10.5, muted=True)
