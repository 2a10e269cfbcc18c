"""ZeRO: what each data-parallel rank keeps of parameters, gradients and optimizer state, and the memory that takes.

Rajbhandari et al. 2019 (arXiv:1910.02054), section 5 and figure 1: mixed precision with Adam takes 2 bytes per
parameter for the parameters, 2 for the gradients and 12 for the optimizer (float32 copy, mean, variance).
"""

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

BYTES = {"parameters": 2, "gradients": 2, "optimizer": 12}
STAGES = {"DDP": (), "ZeRO-1": ("optimizer",), "ZeRO-2": ("optimizer", "gradients"), "ZeRO-3": tuple(BYTES)}
"""What each stage divides among the ranks. FSDP is ZeRO-3."""
PARAMETERS, RANKS = 7.5e9, 64  # the example of the paper
DRAWN_RANKS = 4
LAYOUTS = ("wide", "narrow")


def gigabytes(stage: str, parameters: float = PARAMETERS, ranks: int = RANKS) -> float:
    """Memory per rank, activations aside: a part that the stage divides counts 1/ranks."""
    parts = (size / ranks if name in STAGES[stage] else size for name, size in BYTES.items())
    return parameters * sum(parts) / 1e9


ALT = (
    "Four panels with four ranks each; every rank is a column of parameters (2 bytes each), gradients (2 bytes) and "
    "optimizer state (12 bytes). DDP: all ranks hold everything. ZeRO-1: each rank holds its quarter of the optimizer "
    "state. ZeRO-2: also its quarter of the gradients. ZeRO-3: its quarter of everything. For 7.5 billion parameters "
    f"on 64 ranks that is {', '.join(f'{gigabytes(stage):.1f}' for stage in STAGES)} GB per rank."
)


def draw(palette: Palette, layout: str) -> Figure:
    """One panel per stage, and what the colours mean."""
    parts = [
        Panel(stage, 150, lambda pen, stage=stage: _ranks(pen, stage), f"divided: {_names(stage)}") for stage in STAGES
    ]
    return panels(palette, layout, [*parts, Panel("", 20, _legend, full=True)])


def _names(stage: str) -> str:
    return {0: "nothing", 3: "everything"}.get(len(STAGES[stage]), " and ".join(STAGES[stage]))


def _ranks(pen: Pen, stage: str) -> None:
    pen.area(0, 0, pen.width, 148)
    for rank in range(DRAWN_RANKS):
        x, y = 12 + 54 * rank, 10.0
        for number, (name, size) in enumerate(BYTES.items()):
            height = 6.6 * size
            divided = name in STAGES[stage]
            slot = height / DRAWN_RANKS if divided else height
            if divided:
                pen.box(x, y, 44, height, empty=True, dashed=True, radius=2)
            pen.bar(x, y + (rank * slot if divided else 0), 44, slot, pen.expert(number))
            y += height + 3
        pen.words(x + 22, 134, f"rank {rank}", size=TINY, muted=True)
    pen.words(284, 44, f"{gigabytes(stage):.1f}", size=22, bold=True)
    pen.words(284, 70, "GB per rank", size=11)
    pen.words(284, 98, f"{PARAMETERS / 1e9:g} B parameters,\n{RANKS} ranks", size=TINY, muted=True)


def _legend(pen: Pen) -> None:
    pen.legend(1, 9, [(name, pen.expert(number), 1.0) for number, name in enumerate(BYTES)])
