"""One routing of eight tokens under a capacity of four slots per expert: each drop policy keeps other assignments.

The places come from `guide_code.capacity.apply_capacity`, GShard (arXiv:2006.16668), Switch (arXiv:2101.03961) and
V-MoE (arXiv:2106.05974).
"""

import torch
from matplotlib.figure import Figure

from guide_code.capacity import apply_capacity, expert_capacity
from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette
from guide_code.routers import Routing, top_k_routing

SCORES = (
    (0.50, 0.30, 0.10, 0.10),
    (0.45, 0.10, 0.35, 0.10),
    (0.40, 0.10, 0.15, 0.35),
    (0.30, 0.60, 0.05, 0.05),
    (0.55, 0.15, 0.20, 0.10),
    (0.10, 0.40, 0.48, 0.02),
    (0.70, 0.20, 0.06, 0.04),
    (0.65, 0.05, 0.25, 0.05),
)  # (T, E)
TOP_K = 2
NOTES = {
    "arrival": "first choices, then second",
    "tokens": "token by token, both choices",
    "probability": "largest weight first",
    "random": "a new draw on each call",
}
LAYOUTS = ("wide", "narrow")
ALT = (
    "Eight tokens choose two of four experts each; a capacity factor of 1 gives every expert four slots, and expert 0 "
    "is chosen seven times. Four panels show who gets the four slots of expert 0. By arrival, first choices come "
    "first: tokens 0, 1, 2 and 4 stay, 6, 7 and 3 are dropped. By tokens, both choices of a token together: tokens 0, "
    "1, 2 and 3 stay. By probability the largest weights stay: tokens 6, 4, 7 and 0. At random any four stay. The "
    "other experts have room for all of their tokens."
)


def routing() -> Routing:
    """The routing before any drop."""
    return top_k_routing(torch.tensor(SCORES).log(), TOP_K)


def capacity() -> int:
    """Slots per expert at a capacity factor of 1."""
    return expert_capacity(len(SCORES), len(SCORES[0]), TOP_K, 1.0)


def queues(priority: str) -> list[list[tuple[int, float]]]:
    """Per expert its (token, weight) in the order in which they are served.

    The place of an assignment is the number of slots with which it is dropped, and kept with one more.
    """
    route = routing()
    place_TK = torch.zeros_like(route.ids)
    for slots in range(len(SCORES)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)  # "random" draws the same order each time
            place_TK += apply_capacity(route, slots, priority=priority).ids == len(SCORES[0])
    lines: list[list[tuple[int, int, float]]] = [[] for _ in SCORES[0]]
    for token, (ids, places, weights) in enumerate(
        zip(route.ids.tolist(), place_TK.tolist(), route.weights.tolist(), strict=True)
    ):
        for expert, place, weight in zip(ids, places, weights, strict=True):
            lines[expert].append((place, token, weight))
    return [[(token, weight) for _, token, weight in sorted(line)] for line in lines]


def draw(palette: Palette, layout: str) -> Figure:
    """One panel per policy."""
    parts = [Panel(f'"{name}"', 184, lambda pen, name=name: _slots(pen, name), NOTES[name]) for name in NOTES]
    return panels(palette, layout, parts)


def _slots(pen: Pen, priority: str) -> None:
    slots, size = capacity(), 41
    pen.area(0, 0, 36 + size * slots + 4, 180)
    pen.words(38 + size * slots / 2, 12, f"{slots} slots each", size=TINY, muted=True)
    pen.words(44 + size * (slots + 1.5), 12, "dropped", size=TINY, muted=True)
    for expert, queue in enumerate(queues(priority)):
        y, color = 22 + 39 * expert, pen.expert(expert)
        pen.words(18, y + 17, f"$E_{expert}$", size=13)
        for place in range(max(slots, len(queue))):
            x = 36 + size * place + (8 if place >= slots else 0)
            if place >= len(queue):
                pen.box(x, y, size - 4, 34, empty=True, dashed=True)
                continue
            token, weight = queue[place]
            kept = place < slots
            pen.box(x, y, size - 4, 34, color=color if kept else None, strength=0.25, empty=not kept, dashed=not kept)
            pen.words(x + size / 2 - 2, y + 11, f"$t_{token}$", size=12, muted=not kept)
            pen.words(x + size / 2 - 2, y + 25, f"{weight:.2f}", size=TINY, muted=not kept)
