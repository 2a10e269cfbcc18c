"""Upcycling: a trained dense model becomes a sparse one by copying, or by cutting and copying, its feed-forward layer.

Copies: Komatsuzaki et al. 2022 (arXiv:2212.05055). Fine-grained, with virtual groups of shards: He et al. 2024
(arXiv:2410.07524).
"""

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

EXPERTS, SHARDS, COPIES = 4, 4, 2
LAYOUTS = ("wide", "narrow")
ALT = (
    "Two ways to turn the feed-forward layer of a dense model into experts. Copies: the whole layer is copied into "
    "four experts and a new random router is added; with weights that sum to one, the output at the start is exactly "
    "the dense model's. Shards: the layer is cut into four shards along its hidden width and every shard is copied "
    "twice, which gives eight experts a quarter as wide; the router starts with one score for all shards of a copy, so "
    "that a token gets each shard once, and the weights are scaled so that the shards add up to the dense output. "
    "Attention and embeddings are taken over."
)


def draw(palette: Palette, layout: str) -> Figure:
    """A panel per way."""
    return panels(
        palette,
        layout,
        [
            Panel("Copies", 232, _copies, f"{EXPERTS} experts, as wide as before"),
            Panel("Shards, copied", 232, _shards, f"{SHARDS * COPIES} experts, a quarter as wide"),
        ],
    )


def _dense(pen: Pen) -> None:
    pen.area(0, 0, pen.width, 228)
    pen.words(170, 14, "trained dense feed-forward layer", size=10.5, muted=True)


def _copies(pen: Pen) -> None:
    _dense(pen)
    pen.box(122, 28, 96, 44, "FFN", color=pen.expert(0), strength=0.45, size=13, bold=True)
    for expert in range(EXPERTS):
        x = 8 + 82 * expert
        pen.flow((170, 72), (x + 39, 110), pen.expert(0))
        pen.box(x, 110, 78, 44, f"$E_{expert}$ = FFN", color=pen.expert(0), strength=0.45, size=11)
    _router(pen, "new router: random, weights sum to 1")
    pen.words(170, 215, "at the start, output = dense output", size=11, bold=True)


def _shards(pen: Pen) -> None:
    _dense(pen)
    for shard in range(SHARDS):
        x = 122 + 24 * shard
        pen.box(x, 28, 24, 44, f"$F_{shard}$", color=pen.expert(shard), strength=0.45, radius=2)
        for copy in range(COPIES):
            left = 8 + 41 * (shard + SHARDS * copy)
            pen.flow((x + 12, 72), (left + 18.5, 110), pen.expert(shard))
            pen.box(left, 110, 37, 44, f"$F_{shard}$", color=pen.expert(shard), strength=0.45)
    for copy in range(COPIES):
        pen.words(88.5 + 164 * copy, 163, f"copy {copy}", size=TINY, muted=True)
    _router(pen, "new router: the shards of one copy score alike")
    pen.words(170, 215, "weights scaled so that the shards add up", size=11, bold=True)


def _router(pen: Pen, text: str) -> None:
    pen.box(8, 175, pen.width - 16, 26, text, color=pen.palette.accent, size=10.5 if len(text) < 44 else TINY)
