"""Parameters that a model stores against those that one token is multiplied by, for the presets of the guide.

Both are counted on the model that `guide_code.build` makes of a preset, with tensors that have shapes and no memory.
"""

import functools
import math
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from guide_code.build import build_model, parameter_counts
from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette
from guide_code.moe import MoE
from guide_code.presets import PRESETS, preset

OURS = ("tiny", "small")
LAYOUTS = ("wide", "narrow")
ALT = (
    "One row per published model, largest first, on a logarithmic scale from 1 billion to 1 trillion parameters; a "
    "line joins the parameters that one token uses to all that are stored. In billions, active of total: kimi-k2 33 of "
    "1,026, deepseek-v3 38 of 671, mixtral-8x7b 13 of 46.7, qwen3-30b-a3b 3.4 of 30.5, olmoe-1b-7b 1.3 of 6.92. The "
    "larger the model, the smaller the active share tends to be: from over a quarter in Mixtral to 3 % in Kimi K2."
)
_ROW = 23.0


class Parameters(NamedTuple):
    """How many numbers a model holds, embeddings included."""

    total: int
    active: int
    experts: int
    """Those of the routed experts, part of the total."""


@functools.cache
def parameters(name: str) -> Parameters:
    """Of the preset called `name`."""
    with torch.device("meta"):
        model = build_model(preset(name))
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    experts = sum(parameter.numel() for layer in layers for parameter in layer.experts.parameters())
    return Parameters(*parameter_counts(model), experts)


def published() -> dict[str, Parameters]:
    """The presets of published models, largest first; the guide's own small ones are left out."""
    counted = {name: parameters(name) for name in PRESETS if name not in OURS}
    return dict(sorted(counted.items(), key=lambda item: -item[1].total))


def draw(palette: Palette, layout: str) -> Figure:
    """One row per model on a logarithmic scale."""
    models = published()
    height = _ROW * len(models) + 24
    return panels(
        palette,
        layout,
        [
            Panel("", height, lambda pen: _rows(pen, models), full=True),
            Panel("", 20, _legend, full=True),
        ],
    )


def _billions(count: int) -> str:
    return f"{count / 1e9:,.0f}" if count >= 1e11 else f"{count / 1e9:.3g}"


def _rows(pen: Pen, models: dict[str, Parameters]) -> None:
    low, high = math.log10(5e8), math.log10(1.4e12)
    left, right = 128, pen.width - 82

    def x(count: float) -> float:
        return left + (right - left) * (math.log10(count) - low) / (high - low)

    bottom = _ROW * len(models)
    for count, text in ((1e9, "1 B"), (1e10, "10 B"), (1e11, "100 B"), (1e12, "1 T")):
        pen.path([(x(count), 0), (x(count), bottom)], line=0.6)
        pen.words(x(count), bottom + 12, text, size=TINY, muted=True)
    for row, (name, count) in enumerate(models.items()):
        y = _ROW * (row + 0.5)
        pen.words(0, y, name, size=TINY, align="left")
        pen.path([(x(count.active), y), (x(count.total), y)], color=pen.expert(0), line=3)
        pen.box(x(count.total) - 5, y - 5, 10, 10, color=pen.expert(0), strength=1.0, radius=5)
        pen.box(x(count.active) - 5, y - 5, 10, 10, color=pen.palette.accent, strength=1.0, radius=5)
        text = f"{count.active / 1e9:.2g} / {_billions(count.total)}"
        pen.words(pen.width - 1, y, text, size=TINY, align="right", bold=True)


def _legend(pen: Pen) -> None:
    entries = [("active", pen.palette.accent, 1.0), ("total, in billions", pen.expert(0), 1.0)]
    pen.legend(1, 9, entries)
