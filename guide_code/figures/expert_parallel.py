"""Expert parallelism: each rank has its own tokens, a copy of attention and router, and some of the experts."""

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

RANKS, NUM_EXPERTS = 4, 8
LAYOUTS = ("wide", "narrow")
ALT = (
    "Four ranks in columns. Each has its own quarter of the batch and a whole copy of attention and router. An "
    "all-to-all sends every token to the ranks of its experts: rank 0 holds experts 0 and 1, rank 1 experts 2 and 3, "
    "rank 2 experts 4 and 5, rank 3 experts 6 and 7. A second all-to-all brings the results back, and each rank sums "
    "them for its own tokens. Gradients of attention are averaged over all ranks, those of an expert stay on its rank."
)


def local_experts(rank: int) -> list[int]:
    """The experts of a rank: consecutive ones."""
    size = NUM_EXPERTS // RANKS
    return list(range(rank * size, (rank + 1) * size))


def draw(palette: Palette, layout: str) -> Figure:
    """The ranks beside each other, time from top to bottom."""
    return panels(palette, layout, [Panel("", 392, _ranks, full=True)])


def _ranks(pen: Pen) -> None:
    pitch = pen.width / RANKS
    for rank in range(RANKS):
        x, width, color = rank * pitch + 3, pitch - 6, pen.expert(rank)
        middle = x + width / 2
        pen.area(x, 0, width, 392)
        pen.words(middle, 13, f"rank {rank}", bold=True)
        pen.box(x + 5, 28, width - 10, 38, f"batch\npart {rank}", size=10.5)
        pen.box(x + 5, 82, width - 10, 54, "attention,\nrouter:\na copy", size=TINY)
        pen.box(x + 5, 202, width - 10, 54, color=color, strength=0.4)
        first, last = local_experts(rank)
        pen.words(middle, 217, "experts", size=10.5)
        pen.words(middle, 238, f"$E_{first}$, $E_{last}$", size=14)
        pen.box(x + 5, 322, width - 10, 62, "weighted\nsum for its\nown tokens", size=TINY)
        for start, end in ((66, 82), (136, 153), (181, 202), (256, 273), (301, 322)):
            pen.arrow((middle, start), (middle, end))
    for y, text in ((153, "all-to-all: tokens to their experts"), (273, "all-to-all: results back")):
        pen.box(3, y, pen.width - 6, 28, text, color=pen.palette.accent, bold=True)
