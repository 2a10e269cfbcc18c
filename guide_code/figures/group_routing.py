"""Group-limited routing: one token's scores, and the groups that the rules of DeepSeek-V2 and V3 pick from them.

DeepSeek-V2 (arXiv:2405.04434) ranks groups by their best expert, DeepSeek-V3 (arXiv:2412.19437) by the sum of their
two best. A checkpoint trained with one rule needs that rule.
"""

import torch
from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette
from guide_code.routers import top_k_routing

SCORES = (0.90, 0.10, 0.20, 0.10, 0.60, 0.55, 0.10, 0.20, 0.30, 0.25, 0.20, 0.10, 0.70, 0.05, 0.10, 0.15)
GROUPS, TOP_GROUPS, TOP_K = 4, 2, 4
RULES = {"max": ("By the best expert", "DeepSeek-V2"), "top2_sum": ("By the sum of the two best", "DeepSeek-V3")}
LAYOUTS = ("wide", "narrow")
ALT = (
    "The scores of one token over sixteen experts in four groups, drawn twice as bars; a token may use four experts "
    "from two groups. Ranked by their best expert, groups 0 (0.90) and 3 (0.70) win, and experts 0, 12, 2 and 15 are "
    "picked. Ranked by the sum of the two best, groups 1 (1.15) and 0 (1.10) win, and experts 0, 4, 5 and 2 are picked."
)


def chosen(rule: str) -> list[int]:
    """The experts that the router picks under a rule, best first."""
    logits_TE = torch.logit(torch.tensor([SCORES]))
    options = {"score_fn": "sigmoid", "num_groups": GROUPS, "top_k_groups": TOP_GROUPS, "group_score": rule}
    return top_k_routing(logits_TE, TOP_K, **options).ids[0].tolist()


def draw(palette: Palette, layout: str) -> Figure:
    """A panel per rule."""
    parts = [Panel(title, 152, lambda pen, rule=rule: _bars(pen, rule), note) for rule, (title, note) in RULES.items()]
    return panels(palette, layout, parts)


def _bars(pen: Pen, rule: str) -> None:
    size = len(SCORES) // GROUPS
    picked = chosen(rule)
    for group in range(GROUPS):
        scores = sorted(SCORES[group * size : (group + 1) * size], reverse=True)
        value = scores[0] if rule == "max" else scores[0] + scores[1]
        wins = any(expert // size == group for expert in picked)
        left = 85.5 * group
        pen.box(left + 0.6, 0, 81, 150, color=pen.palette.accent if wins else None, strength=0.1, radius=6)
        pen.words(left + 41, 14, f"group: {value:.2f}", size=TINY, bold=wins)
        for place in range(size):
            expert = group * size + place
            x, height = left + 5 + 18.5 * place, 92 * SCORES[expert]
            color = pen.palette.accent if expert in picked else pen.palette.line
            pen.bar(x, 128 - height, 15, height, color)
            pen.words(x + 7.5, 139, str(expert), size=TINY, bold=expert in picked)
