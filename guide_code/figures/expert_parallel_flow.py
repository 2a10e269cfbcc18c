"""Tokens of two ranks on their way through experts that live on both: permute, all-to-all, experts, and back."""

from matplotlib.figure import Figure

from guide_code.figures.shapes import TINY, Pen
from guide_code.figures.style import NARROW_WIDTH, WIDE_WIDTH, Palette, canvas

CHOICES = (((0, 2), (3, 1)), ((2, 0), (2, 3)))  # per rank, per token: its experts
NUM_EXPERTS, LOCAL = 4, 2
LAYOUTS = ("wide", "narrow")
Row = tuple[int, int]  # expert, token


def permuted(rank: int) -> list[Row]:
    """The rows of a rank's tokens, sorted by expert."""
    first = sum(len(tokens) for tokens in CHOICES[:rank])
    rows = [(expert, first + token) for token, ids in enumerate(CHOICES[rank]) for expert in ids]
    return sorted(rows, key=lambda row: row[0])


def received(rank: int) -> list[Row]:
    """What the first all-to-all brings to a rank: by sender, then by expert."""
    return [row for sender in range(len(CHOICES)) for row in permuted(sender) if row[0] // LOCAL == rank]


ALT = (
    "Expert parallelism on two ranks. Rank 0 holds tokens 0 and 1 and experts 0 and 1, rank 1 holds tokens 2 and 3 and "
    "experts 2 and 3; each token has two choices. Each rank permutes its tokens (T, D) into rows (N, D) sorted by "
    f"expert. An all-to-all sends each row to the rank of its expert: rank 0 receives R = {len(received(0))} rows, "
    f"rank 1 receives {len(received(1))}. Each rank sorts them by its own experts, runs the grouped matmul, and a "
    "second all-to-all takes the rows back. Weighted and summed they are the output (T, D)."
)
_STAGES = (
    ("x", "(T, D)"), ("permute", "(N, D)"), ("all-to-all", "(R, D)"), ("sort", "(R, D)"), ("experts", "grouped matmul"),
    ("all-to-all", "(N, D)"), ("combine", "(T, D)"),
)  # fmt: skip
_EXPERTS = 4  # the stage whose cells are whole experts
_WIDE = (34, 144, 268, 374, 474, 580, 686)
_NARROW = (52, 128, 216, 292, 366, 454, 530)
_BAND, _ALONG, _ACROSS = 166, 26, 28


def draw(palette: Palette, layout: str) -> Figure:
    """From left to right with a rank in each half, or from top to bottom."""
    wide = layout == "wide"
    size = (WIDE_WIDTH, 2 * _BAND + 66) if wide else (NARROW_WIDTH, _NARROW[-1] + 30)
    figure, axes = canvas(*size)
    pen = Pen(axes, palette, 0, 0, size[0])
    head = 24 if wide else 4
    for rank in range(2):
        start = rank * (_BAND + 8)
        if wide:
            pen.area(0, head + start, WIDE_WIDTH, _BAND)
            pen.words(8, head + start + 12, f"rank {rank}", size=TINY, align="left", bold=True)
        else:
            pen.area(start, 18, _BAND, size[1] - 18)
            pen.words(start + _BAND / 2, 8, f"rank {rank}", size=TINY, bold=True)
    _labels(pen, wide, size[1])
    for (stage, source), (_, target), color in _links():
        begin, end = _point(wide, stage, *source), _point(wide, stage + 1, *target)
        out, into = (34 if wide and at == _EXPERTS else _ALONG / 2 for at in (stage, stage + 1))
        if wide:
            start, stop = (begin[0] + out, begin[1]), (end[0] - into, end[1])
        else:
            start, stop = (begin[0], begin[1] + out), (end[0], end[1] - into)
        pen.flow(start, stop, pen.expert(color), upright=not wide)
    for stage, rank, index, count, (expert, token) in _cells():
        x, y = _point(wide, stage, rank, index, count)
        width, height = (_ALONG, _ACROSS) if wide else (_ACROSS, _ALONG)
        color = None if expert < 0 else pen.expert(expert)
        pen.box(x - width / 2, y - height / 2, width, height, f"$t_{token}$", color=color, strength=0.25)
    for rank in range(2):
        rows = sorted(received(rank))
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
            places = [i for i, row in enumerate(rows) if row[0] == expert]
            (x0, y0), (x1, y1) = (_point(wide, _EXPERTS, rank, i, len(rows)) for i in (places[0], places[-1]))
            grow = (34, 14) if wide else (14, 14)
            pen.box(
                x0 - grow[0], y0 - grow[1], x1 - x0 + 2 * grow[0], y1 - y0 + 2 * grow[1], f"$E_{expert}$",
                color=pen.expert(expert), size=13,
            )  # fmt: skip
    return figure


def _labels(pen: Pen, wide: bool, height: float) -> None:
    for (name, shape), along in zip(_STAGES, _WIDE if wide else _NARROW, strict=True):
        bold = name == "all-to-all"
        if wide:
            pen.words(along, 10, name, size=11, bold=bold)
            pen.words(along, height - 10, shape, size=TINY, mono=True, muted=True)
        else:
            pen.box(0.6, along - 34, NARROW_WIDTH - 1.2, 17, radius=3)
            pen.words(8, along - 25.5, name, size=TINY, align="left", bold=bold)
            pen.words(NARROW_WIDTH - 8, along - 25.5, shape, size=TINY, align="right", mono=True, muted=True)


def _point(wide: bool, stage: int, rank: int, index: int, count: int) -> tuple[float, float]:
    across = rank * (_BAND + 8) + _BAND / 2 + (index - (count - 1) / 2) * 31
    return (_WIDE[stage], 24 + across) if wide else (across, _NARROW[stage])


def _stage_rows(stage: int, rank: int) -> list[Row]:
    tokens = [(-1, sum(len(ids) for ids in CHOICES[:rank]) + token) for token in range(len(CHOICES[rank]))]
    arrived = received(rank)
    return [tokens, permuted(rank), arrived, sorted(arrived), sorted(arrived), permuted(rank), tokens][stage]


def _cells():
    for stage in (*range(_EXPERTS), *range(_EXPERTS + 1, len(_STAGES))):
        for rank in range(2):
            rows = _stage_rows(stage, rank)
            for index, row in enumerate(rows):
                yield stage, rank, index, len(rows), row


def _links():
    """Every row's way from one stage to the next: (stage, place), (stage + 1, place), expert."""
    for stage in range(len(_STAGES) - 1):
        places = {}
        for rank in range(2):
            rows = _stage_rows(stage + 1, rank)
            places |= {row: (rank, index, len(rows)) for index, row in enumerate(rows)}
        for rank in range(2):
            rows = _stage_rows(stage, rank)
            for index, (expert, token) in enumerate(rows):
                for row, place in places.items():
                    same = row[1] == token and (row[0] == expert or -1 in (row[0], expert))
                    if same:
                        color = max(row[0], expert)
                        yield (stage, (rank, index, len(rows))), (stage + 1, place), color
