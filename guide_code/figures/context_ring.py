"""Context parallelism: the sequence is split over ranks, keys and values go round, and causal masks need a zigzag.

Ring attention: Liu et al. 2023 (arXiv:2310.01889). Two parts per rank, one from each end, balance the causal work:
Llama 3 (arXiv:2407.21783), section 3.3.2.
"""

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

RANKS = 4
LAYOUTS = ("wide", "narrow")
ALT = (
    "Four ranks each hold a quarter of the sequence's queries. In four steps the keys and values move from rank to "
    "rank, so that each rank's queries meet all of them; those that lie in the future are masked and skipped. Below, "
    "the causal mask in eight parts, coloured by the rank that computes each block: with contiguous parts the ranks "
    "have 2, 6, 10 and 14 blocks of work; in zigzag, rank r holds parts r and 7 - r, and each has 8."
)


def owner(part: int, zigzag: bool) -> int:
    """The rank that holds a part of the sequence; there are two parts per rank."""
    return min(part, 2 * RANKS - 1 - part) if zigzag else part // 2


def work(zigzag: bool) -> list[float]:
    """Blocks of the causal mask per rank; a block on the diagonal is half."""
    blocks = [0.0] * RANKS
    for part in range(2 * RANKS):
        blocks[owner(part, zigzag)] += part + 0.5
    return blocks


def draw(palette: Palette, layout: str) -> Figure:
    """The ring above, the two ways to split below."""
    least, *_, most = work(zigzag=False)
    return panels(
        palette,
        layout,
        [
            Panel("Keys and values go round", 208, _ring, "queries stay", full=True),
            Panel(
                "Contiguous parts",
                262,
                lambda pen: _mask(pen, zigzag=False),
                f"rank {RANKS - 1} works {most / least:g} times as long",
            ),
            Panel("Zigzag parts", 262, lambda pen: _mask(pen, zigzag=True), "equal work"),
        ],
    )


def _ring(pen: Pen) -> None:
    left = 50
    pitch = (pen.width - left) / RANKS
    for rank in range(RANKS):
        x = left + rank * pitch
        pen.area(x + 2, 0, pitch - 4, 206)
        pen.box(x + 8, 6, pitch - 16, 38, f"rank {rank}\n$Q_{rank}$", color=pen.expert(rank), strength=0.4, size=11)
    for step in range(RANKS):
        y = 54 + 40 * step
        pen.words(4, y + 13, f"step {step}", size=TINY, align="left", muted=True)
        for rank in range(RANKS):
            part = (rank - step) % RANKS
            x = left + rank * pitch + pitch / 2
            masked = part > rank
            color = pen.expert(part)
            pen.box(x - 25, y, 50, 26, f"$K_{part}$, $V_{part}$", color=color, empty=masked, dashed=masked, size=10.5)
            if step + 1 < RANKS and rank + 1 < RANKS:
                pen.arrow((x + 18, y + 27), (x + pitch - 18, y + 39), color=color)


def _mask(pen: Pen, *, zigzag: bool) -> None:
    size = 26
    for query in range(2 * RANKS):
        color = pen.expert(owner(query, zigzag))
        pen.words(50, 13 + size * query, f"$Q_{query}$", size=TINY, muted=True)
        for key in range(2 * RANKS):
            x, y = 66 + size * key, size * query
            masked = key > query
            pen.box(
                x + 1, y + 1, size - 2, size - 2, color=None if masked else color, radius=2, empty=masked,
                dashed=masked, strength=0.25 if key == query else 0.6,
            )  # fmt: skip
    pen.words(310, 13, "work", size=TINY, muted=True)
    pen.words(310, 28, "per rank", size=TINY, muted=True)
    for rank, blocks in enumerate(work(zigzag)):
        y = 52 + 36 * rank
        pen.box(286, y, 48, 28, f"{blocks:g}", color=pen.expert(rank), strength=0.4, bold=True, size=13)
    pen.words(66 + 4 * size, 222, "keys, parts 0 to 7", size=TINY, muted=True)
    held = ", ".join("+".join(str(p) for p in range(2 * RANKS) if owner(p, zigzag) == rank) for rank in range(RANKS))
    pen.words(pen.width / 2, 246, f"ranks 0 to 3 hold parts {held}", size=10.5)
