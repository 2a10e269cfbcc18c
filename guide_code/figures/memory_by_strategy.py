"""Memory per rank of one model under seven strategies: parameters, gradients and optimizer state, activations aside.

Bytes per parameter as in the figure `zero_stages` (mixed precision, Adam). What a strategy divides is held by 1/ranks;
otherwise pipeline stages divide everything, and expert parallelism divides the experts.
"""

from typing import NamedTuple

from matplotlib.figure import Figure

from guide_code.figures.shapes import Panel, Pen, panels
from guide_code.figures.style import Palette
from guide_code.figures.total_vs_active import Parameters, parameters
from guide_code.figures.zero_stages import BYTES, STAGES

PRESET, RANKS, DEVICE = "qwen3-30b-a3b", 64, 80.0  # GB of a common device
LAYOUTS = ("wide", "narrow")
ALT = (
    "Bars of the memory per rank for Qwen3-30B-A3B on 64 ranks, divided into parameters, gradients and optimizer "
    "state, with a line at 80 GB. DDP needs 489 GB, ZeRO-1 128, expert parallelism over 8 ranks 82.6, the two together "
    "26.4. Four pipeline stages with expert parallelism need 20.7, with ZeRO-1 as well 10.9. ZeRO-3 needs 7.63 and "
    "gathers every layer's parameters when it uses them. Activations come on top."
)
_ROW = 28.0


class Strategy(NamedTuple):
    """How one model is laid out on the ranks."""

    zero: str = "DDP"
    """A name of `zero_stages.STAGES`."""
    experts: int = 1
    """Expert-parallel ranks."""
    stages: int = 1
    """Pipeline stages, of equal size."""


STRATEGIES = {
    "DDP": Strategy(),
    "ZeRO-1": Strategy("ZeRO-1"),
    "EP 8": Strategy(experts=8),
    "EP 8, ZeRO-1": Strategy("ZeRO-1", experts=8),
    "PP 4, EP 8": Strategy(experts=8, stages=4),
    "PP 4, EP 8, ZeRO-1": Strategy("ZeRO-1", experts=8, stages=4),
    "ZeRO-3": Strategy("ZeRO-3"),
}


def gigabytes(strategy: Strategy, count: Parameters, ranks: int = RANKS) -> dict[str, float]:
    """What one rank holds of each part."""
    held = {}
    for part, size in BYTES.items():
        others, experts = strategy.stages, strategy.stages * strategy.experts
        if part in STAGES[strategy.zero]:
            others = experts = ranks
        held[part] = size * ((count.total - count.experts) / others + count.experts / experts) / 1e9
    return held


def draw(palette: Palette, layout: str) -> Figure:
    """One bar per strategy, and what the colours mean."""
    count = parameters(PRESET)
    height = _ROW * len(STRATEGIES) + 4
    title = f"{PRESET}: {count.experts / count.total:.0%} in experts"
    return panels(
        palette,
        layout,
        [
            Panel(title, height, lambda pen: _bars(pen, count), f"per rank of {RANKS}", full=True),
            Panel("", 20, _legend, full=True),
        ],
    )


def _bars(pen: Pen, count: Parameters) -> None:
    held = {name: gigabytes(strategy, count) for name, strategy in STRATEGIES.items()}
    most = max(sum(parts.values()) for parts in held.values())
    left = 128
    scale = (pen.width - left - 64) / most
    for row, (name, parts) in enumerate(held.items()):
        y = _ROW * row
        pen.words(0, y + _ROW / 2, name, size=11, align="left")
        x = left
        for number, part in enumerate(parts):
            pen.bar(x, y + 5, scale * parts[part], _ROW - 10, pen.expert(number))
            x += scale * parts[part]
        total = sum(parts.values())
        pen.words(pen.width - 1, y + _ROW / 2, f"{total:.3g} GB", size=11, align="right", bold=total <= DEVICE)
    x = left + scale * DEVICE
    pen.path([(x, 0), (x, _ROW * len(held) + 4)], color=pen.palette.ink, over=6)


def _legend(pen: Pen) -> None:
    entries = [(name, pen.expert(number), 1.0) for number, name in enumerate(BYTES)]
    pen.legend(1, 9, [*entries, (f"{DEVICE:g} GB", pen.palette.ink, 1.0)])
