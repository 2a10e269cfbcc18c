"""The load of sixteen experts while the same small model trains without balancing, with a loss, and with a bias.

Measured by `guide_code.figures.measure.load_over_training`; the machine, the versions and the settings are in the file.
Bias update: Wang et al. 2024 (arXiv:2408.15664).
"""

from typing import Any

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

DATA = ("results/load_over_training.json",)
LAYOUTS = ("wide", "narrow")
ALT = (
    "Four charts over 300 training steps of a small model with sixteen experts and two choices per token. Without "
    "balancing one expert ends with 38 % of the assignments and eight with almost none. With a balancing loss all "
    "sixteen end between 2 % and 10 %, with a bias on the choice between 5 % and 8 %; the fair share is 6.25 %. The "
    "fourth chart shows the share of the busiest expert in units of the fair share: it stays above 5 without balancing "
    "and ends below 2 with either way."
)
_TITLES = {"none": "No balancing", "loss": "Balancing loss", "bias": "Bias on the choice"}
_TOP, _MOST = 0.53, 9.8  # the ends of the axes; with two choices per token no share exceeds a half


def busiest(shares: list[list[float]]) -> list[float]:
    """The largest share at each step, in units of the fair share."""
    return [max(row) * len(row) for row in shares]


def draw(palette: Palette, layout: str, data: dict[str, Any]) -> Figure:
    """A chart per setting, and one that compares them."""
    parts = [
        Panel(title, 172, lambda pen, name=name: _shares(pen, data["shares"][name], data["steps"]),
              _ends(data["shares"][name]))
        for name, title in _TITLES.items()
    ]  # fmt: skip
    return panels(
        palette, layout, [*parts, Panel("Busiest expert", 172, lambda pen: _compare(pen, data), "in fair shares")]
    )


def _ends(shares: list[list[float]]) -> str:
    return f"at the end {min(shares[-1]):.0%} to {max(shares[-1]):.0%}"


def _frame(pen: Pen, steps: list[int], marks: list[tuple[float, str]], height: float) -> None:
    pen.area(0, 0, pen.width, 170)
    for value, text in marks:
        y = 144 - 134 * value / height
        pen.path([(40, y), (pen.width - 8, y)], line=0.6)
        pen.words(35, y, text, size=TINY, align="right", muted=True)
    for step in (steps[0], 100, 200, steps[-1]):
        pen.words(_x(pen, step, steps), 158, f"step {step}" if step == steps[0] else str(step), size=TINY, muted=True)


def _x(pen: Pen, step: int, steps: list[int]) -> float:
    return 48 + (pen.width - 64) * (step - steps[0]) / (steps[-1] - steps[0])


def _shares(pen: Pen, shares: list[list[float]], steps: list[int]) -> None:
    fair = 1 / len(shares[0])
    _frame(pen, steps, [(0, "0"), (0.25, "25%"), (0.5, "50%")], _TOP)
    order = sorted(range(len(shares[0])), key=lambda expert: shares[-1][expert])
    for place, expert in enumerate(order):
        points = [
            (_x(pen, step, steps), 144 - 134 * row[expert] / _TOP) for step, row in zip(steps, shares, strict=True)
        ]
        last = place == len(order) - 1
        pen.path(points, color=pen.palette.accent if last else pen.expert(0), line=1.6 if last else 0.9)
    y = 144 - 134 * fair / _TOP
    pen.path([(40, y), (pen.width - 8, y)], color=pen.palette.ink, line=1.2)


def _compare(pen: Pen, data: dict[str, Any]) -> None:
    steps = data["steps"]
    _frame(pen, steps, [(1, "1"), (4, "4"), (8, "8")], _MOST)
    for number, name in enumerate(_TITLES):
        color = (pen.palette.accent, pen.expert(0), pen.expert(2))[number]
        values = busiest(data["shares"][name])
        points = [(_x(pen, step, steps), 144 - 134 * value / _MOST) for step, value in zip(steps, values, strict=True)]
        pen.path(points, color=color, line=1.8)
    names = ((pen.palette.accent, "none"), (pen.expert(0), "loss"), (pen.expert(2), "bias"))
    pen.at(40, 0).legend(6, 15, [(name, color, 1.0) for color, name in names])
