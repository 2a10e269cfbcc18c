"""Pipeline schedules as torch.distributed.pipelining orders them, and the time that each rank stands idle.

The orders come from PyTorch's own schedule objects. GPipe: Huang et al. 2018 (arXiv:1811.06965); 1F1B and
interleaved: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; zero bubble: Qi et al. 2023 (arXiv:2401.10241). A
forward of a rank's layers takes one unit of time, a backward two: one for the input's gradient, one for the weights'.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch.distributed.pipelining import schedules

from guide_code.figures.shapes import TINY, Panel, Pen, panels
from guide_code.figures.style import Palette

RANKS, MICRO_BATCHES = 4, 8
SCHEDULES = {
    "GPipe": ("ScheduleGPipe", 1),
    "1F1B": ("Schedule1F1B", 1),
    "Interleaved 1F1B": ("ScheduleInterleaved1F1B", 2),
    "Zero bubble": ("ScheduleInterleavedZeroBubble", 1),
}
"""PyTorch's class and the stages per rank."""
_UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
_COLORS = {"F": 0, "B": 2, "I": 2, "W": 1}
LAYOUTS = ("wide", "narrow")
ALT = (
    "Time lines of four ranks and eight micro-batches under four pipeline schedules. GPipe runs all forwards, then all "
    "backwards: 27 % of the time is idle, and each rank holds the activations of 8 micro-batches. 1F1B alternates: "
    "also 27 % idle, but at most 4 held. Interleaved 1F1B gives each rank two smaller stages: 16 % idle, 5.5 held. "
    "Zero bubble splits the backward and fills gaps with weight gradients: 11 % idle, 4 held."
)


class Slot(NamedTuple):
    """One action of a rank and when it runs."""

    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


def order(name: str) -> list[list[tuple[int, str, int]]]:
    """(stage, kind, micro-batch) of every rank, in PyTorch's order; kinds are F, B, I and W."""
    class_name, per_rank = SCHEDULES[name]
    stages = [_stage(RANKS * part, RANKS * per_rank) for part in range(per_rank)]
    schedule = getattr(schedules, class_name)(stages if "Interleaved" in class_name else stages[0], MICRO_BATCHES)
    found = []
    for rank in range(RANKS):
        forwards: dict[int, int] = {}
        actions = []
        for action in schedule.pipeline_order[rank]:
            if action is None or action.computation_type.value not in _UNITS:
                continue
            stage, kind, micro_batch = action.stage_index, action.computation_type.value, action.microbatch_index
            if kind == "F":  # forwards run in order; torch 2.13's 1F1B numbers those of the last rank from 1
                micro_batch = forwards.get(stage, 0)
                forwards[stage] = micro_batch + 1
            actions.append((stage, kind, micro_batch))
        found.append(actions)
    return found


def timed(name: str) -> list[list[Slot]]:
    """Every action as early as the order of its rank and the stages around it allow."""
    per_rank, ends, todo = SCHEDULES[name][1], {}, [list(actions) for actions in order(name)]
    rows: list[list[Slot]] = [[] for _ in todo]
    while any(todo):
        before = len(ends)
        for row, actions in zip(rows, todo, strict=True):
            while actions and (ready := _ready(*actions[0], RANKS * per_rank - 1, ends)) is not None:
                stage, kind, micro_batch = actions.pop(0)
                start = max(ready, row[-1].end if row else 0.0)
                end = start + _UNITS[kind] / per_rank
                row.append(Slot(stage, kind, micro_batch, start, end))
                ends[stage, kind, micro_batch] = end
        assert len(ends) > before, "the order waits for itself"
    return rows


def idle_share(name: str) -> float:
    """Idle time over all time of all ranks."""
    rows = timed(name)
    length = max(row[-1].end for row in rows)
    return 1 - sum(slot.end - slot.start for row in rows for slot in row) / (RANKS * length)


def held(name: str) -> float:
    """The most micro-batches whose activations one rank holds; a stage of two per rank counts half."""
    worst = 0
    for row in timed(name):
        now = 0
        for slot in row:
            now += {"F": 1, "B": -1, "W": -1}.get(slot.kind, 0)
            worst = max(worst, now)
    return worst / SCHEDULES[name][1]


def draw(palette: Palette, layout: str) -> Figure:
    """One time line below the other, on one scale."""
    rows = {name: timed(name) for name in SCHEDULES}
    length = max(row[-1].end for time_line in rows.values() for row in time_line)
    parts = [
        Panel(name, 94, lambda pen, name=name: _time_line(pen, rows[name], length),
              f"idle {idle_share(name):.0%}, holds {held(name):g} micro-batches", full=True)
        for name in SCHEDULES
    ]  # fmt: skip
    return panels(palette, layout, [*parts, Panel("", 38, _legend, full=True)])


def _stage(index: int, count: int) -> SimpleNamespace:
    """As much of a pipeline stage as a schedule asks for when it plans: no process group, no model."""
    return SimpleNamespace(
        stage_index=index, num_stages=count, group_size=RANKS, group_rank=0, is_first=index == 0,
        is_last=index == count - 1, submod=torch.nn.Identity(),
    )  # fmt: skip


def _ready(stage: int, kind: str, micro_batch: int, last: int, ends: dict) -> float | None:
    """When what an action needs is done; None while that is not known."""
    if kind == "F":
        needs = [(stage - 1, "F")] if stage else []
    elif kind == "W":
        needs = [(stage, "I")]
    else:
        needs = [(stage, "F")] + ([(stage + 1, kind)] if stage < last else [])
    times = [ends.get((at, what, micro_batch), ends.get((at, "B", micro_batch), math.inf)) for at, what in needs]
    latest = max(times, default=0.0)
    return None if latest == math.inf else latest


def _time_line(pen: Pen, rows: list[list[Slot]], length: float) -> None:
    scale = (pen.width - 24) / length
    pen.area(22, 0, pen.width - 22, 92, radius=3)
    for rank, row in enumerate(rows):
        y = 2 + 22.5 * rank
        pen.words(9, y + 10, f"r{rank}", size=TINY, muted=True)
        for slot in row:
            x, width = 23 + scale * slot.start, scale * (slot.end - slot.start)
            strength = 0.25 if slot.stage >= RANKS else 0.45
            pen.box(x, y, width, 20.5, color=pen.expert(_COLORS[slot.kind]), strength=strength, radius=1)
            if width > 8.5:  # narrower, two figures would touch
                pen.words(x + width / 2, y + 10.5, str(slot.micro_batch), size=TINY)


def _legend(pen: Pen) -> None:
    entries = [("forward", 0, 0.45), ("backward", 2, 0.45), ("backward, weights only", 1, 0.45)]
    entries.append(("pale: a rank's second stage", 0, 0.25))
    pen.legend(1, 9, [(name, pen.expert(color), strength) for name, color, strength in entries])
