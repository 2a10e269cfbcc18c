"""A softmax top-k router from the token to the combine weights, with the numbers that the guide's router computes."""

import torch
from matplotlib.figure import Figure

from guide_code.figures.shapes import Panel, Pen, panels
from guide_code.figures.style import Palette
from guide_code.routers import Routing, top_k_routing

LOGITS = (0.4, 1.9, -0.7, 0.2, -1.1, 2.4, 0.9, -0.3)
TOP_K = 2
LAYOUTS = ("wide", "narrow")
ALT = (
    "What a router does with one token, in four steps, as bars for eight experts. One: the token times the router's "
    "matrix gives one logit per expert, from -1.1 to 2.4. Two: a softmax turns the logits into scores that sum to 1; "
    "the largest are 0.45 for expert 5 and 0.27 for expert 1. Three: the two highest scores are kept, experts 5 and "
    "1. Four: the two are divided by their sum, which gives the combine weights 0.62 and 0.38."
)


def routing(normalise: bool = True) -> Routing:
    """What the router makes of the token's logits."""
    return top_k_routing(torch.tensor([LOGITS]), TOP_K, norm_topk_prob=normalise)


def draw(palette: Palette, layout: str) -> Figure:
    """Four panels, one for each step."""
    route, plain = routing(), routing(normalise=False)
    ids, scores = route.ids[0].tolist(), route.scores[0].tolist()
    chosen = dict(zip(ids, plain.weights[0].tolist(), strict=True))
    weights = dict(zip(ids, route.weights[0].tolist(), strict=True))
    steps = (
        ("1  Logits", "W x: one number per expert", dict(enumerate(LOGITS)), 23.0, 74.0),
        ("2  Scores", "softmax: they sum to 1", dict(enumerate(scores)), 170.0, 92.0),
        ("3  Choice", f"the {TOP_K} highest: ids (T, K)", chosen, 170.0, 92.0),
        ("4  Weights", "divided by their sum: (T, K)", weights, 118.0, 92.0),
    )
    return panels(
        palette,
        layout,
        [
            Panel(title, 130, lambda pen, values=values, scale=scale, zero=zero: _bars(pen, values, ids, scale, zero),
                  note)
            for title, note, values, scale, zero in steps
        ],
    )  # fmt: skip


def _bars(pen: Pen, values: dict[int, float], ids: list[int], scale: float, zero: float) -> None:
    """One bar per expert, its value above; experts without a value keep their place."""
    pen.area(0, 0, pen.width, 124)
    pen.path([(8, zero), (pen.width - 8, zero)])
    for expert in range(len(LOGITS)):
        middle = 28 + 40.6 * expert
        if expert in values:
            value = values[expert]
            color = pen.palette.accent if expert in ids else pen.palette.line
            height = abs(value) * scale
            pen.bar(middle - 12, zero - height if value > 0 else zero, 24, height, color)
            label = zero - height - 9 if value > 0 else zero - 9
            pen.words(middle, label, f"{value:.2g}" if zero < 90 else f"{value:.2f}", size=10.5, bold=expert in ids)
        pen.words(middle, 114, f"$E_{expert}$", muted=expert not in ids)
