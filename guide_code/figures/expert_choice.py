"""Token choice against expert choice: the same scores, picked along the rows or along the columns.

Expert choice: Zhou et al. 2022 (arXiv:2202.09368), section 3.2. The picks are those of `guide_code.routers`.
"""

import torch
from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette
from guide_code.routers import Routing, expert_choice_routing, top_k_routing

SCORES = (
    (0.50, 0.30, 0.15, 0.05),
    (0.60, 0.25, 0.05, 0.10),
    (0.45, 0.35, 0.12, 0.08),
    (0.55, 0.05, 0.30, 0.10),
    (0.30, 0.28, 0.20, 0.22),
    (0.40, 0.10, 0.15, 0.35),
)  # (T, E)
TOP_K = 2
CAPACITY = len(SCORES) * TOP_K // len(SCORES[0])
LAYOUTS = ("wide", "narrow")
ALT = (
    "A table of six tokens by four experts with the score in each cell, twice. Token choice marks the two best "
    "experts of each row: every token gets two, and the experts get 6, 4, 1 and 1. Expert choice marks the three best "
    "tokens of each column: every expert gets three, and the tokens get between 1 and 3."
)


def routing(name: str) -> Routing:
    """What a router makes of the scores."""
    logits_TE = torch.tensor(SCORES).log()
    return top_k_routing(logits_TE, TOP_K) if name == "token" else expert_choice_routing(logits_TE, CAPACITY)


def picks(name: str) -> list[list[bool]]:
    """Which cells of the table are picked."""
    return [[expert in ids for expert in range(len(SCORES[0]))] for ids in routing(name).ids.tolist()]


def draw(palette: Palette, layout: str) -> Figure:
    """A panel per router."""
    parts = [
        Panel("Token choice", 222, lambda pen: _table(pen, picks("token")), f"{TOP_K} best of each row"),
        Panel("Expert choice", 222, lambda pen: _table(pen, picks("expert")), f"{CAPACITY} best of each column"),
    ]
    return panels(palette, layout, parts)


def _table(pen: Pen, picked: list[list[bool]]) -> None:
    pen.area(0, 0, pen.width, 220)
    for expert in range(len(SCORES[0])):
        x = 40 + 58 * expert
        pen.words(x + 26, 12, f"$E_{expert}$")
        pen.words(x + 26, 207, str(sum(row[expert] for row in picked)), bold=True)
        for token, scores in enumerate(SCORES):
            pen.box(
                x, 24 + 28 * token, 52, 24, f"{scores[expert]:.2f}", radius=3, size=11,
                color=pen.expert(expert) if picked[token][expert] else None, strength=0.45,
                bold=picked[token][expert],
            )  # fmt: skip
    for token, row in enumerate(picked):
        pen.words(18, 36 + 28 * token, f"$t_{token}$")
        pen.words(304, 36 + 28 * token, str(sum(row)), bold=True)
    pen.words(304, 12, "experts", size=TINY, muted=True)
    pen.words(19, 207, "tokens", size=TINY, muted=True)
