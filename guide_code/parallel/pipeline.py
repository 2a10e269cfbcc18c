"""Pipeline parallelism: layers cut into stages by cost, run by the schedules of ``torch.distributed.pipelining``.

GPipe, Huang et al. 2019 (arXiv:1811.06965); interleaved 1F1B, Narayanan et al. 2021 (arXiv:2104.04473), section 2.2;
zero bubble, Qi et al. 2023 (arXiv:2401.10241). A stage passes hidden states and nothing else: balancers inject the
gradients of their losses where they arise.
Copy alone: needs torch only.

B sequences of a micro-batch, S sequence, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble",)
SCHEDULES = ("GPipe", "1F1B", *LOOPED, *V_SHAPED)
"""The looped and the V-shaped ones give every rank two stages: r and r + P, or r and 2P - 1 - r."""


class PipelineStageModule(nn.Module):
    """Consecutive layers of a model under the names that they have there, with the embedding or the head at its ends.

    Args:
        model: embedding, blocks, norm, head and rotary, as in ``Transformer``.
        first: number of the first layer here.
        last: one past the last.

    Raises:
        ValueError: a layer sees a window only, or the output projection is the embedding: they are in two stages.
    """

    def __init__(self, model: Any, first: int, last: int):
        super().__init__()
        if model.head.weight is model.embedding.weight:
            raise ValueError("tie_embeddings=True joins the first and the last stage: give tie_embeddings=False")
        if any(block.reach != (None, False) for block in model.blocks):
            raise ValueError("a stage has no masks: sliding or chunked attention cannot be pipelined, give full layers")
        self.embedding = model.embedding if first == 0 else None
        self.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in range(first, last)})
        ends = last == len(model.blocks)
        self.norm, self.head = (model.norm, model.head) if ends else (None, None)
        self.rotary = model.rotary

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (B, S) in the first stage, else hidden states (B, S, D); logits (B, S, V) from the last."""
        positions_BS = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        rotary = self.rotary(positions_BS)
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x, _ = block(x, rotary)
        return x if self.head is None else self.head(self.norm(x))  # pyright: ignore[reportOptionalCall]


class Pipeline(NamedTuple):
    """The stages of this rank and their schedule."""

    schedule: Any
    """``step(tokens)`` on the rank of the first stage, ``step(target=..., losses=[])`` on that of the last."""
    modules: nn.ModuleList
    """The stages of this rank: give their parameters to the optimizer."""
    first: bool
    """Whether this rank feeds tokens in."""
    last: bool
    """Whether this rank has the losses."""


def make_pipeline(
    model: nn.Module,
    group: dist.ProcessGroup,
    batch_shape: tuple[int, int],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    *,
    micro_batches: int,
    schedule: str = "1F1B",
    costs: Sequence[float] | None = None,
) -> Pipeline:
    """Cut a model into the stages of this rank and of the others.

    Shapes are given to the engine. It would find them by running every stage on memory that nobody wrote, in training
    mode, which ends up in the counts of the balancers.

    Args:
        model: see :class:`PipelineStageModule`; the same on every rank.
        group: the ranks of the pipeline.
        batch_shape: sequences of a step, over all its micro-batches, and their length.
        loss_fn: logits and targets of a micro-batch to its loss. The gradients of the micro-batches are added up:
            divide by their number, and set the balancers' scale to the same.
        micro_batches: of a step.
        schedule: one of :data:`SCHEDULES`.
        costs: of every layer, in any unit; None: all the same.

    Raises:
        ValueError: the schedule is not known, micro-batches do not divide the batch, or there are too few layers.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}")
    sequences, length = batch_shape
    if sequences % micro_batches:
        raise ValueError(f"micro_batches={micro_batches} must divide the {sequences} sequences of a step")
    parts: Any = model
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    held = [rank]
    if schedule not in ("GPipe", "1F1B"):
        held.append(rank + ranks if schedule in LOOPED else 2 * ranks - 1 - rank)
    total = ranks * len(held)
    bounds = cut_layers(costs or [1.0] * len(parts.blocks), total)
    weight: Tensor = parts.embedding.weight
    shape, floats = (sequences // micro_batches, length), {"dtype": weight.dtype, "device": "meta"}
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    hidden = torch.empty(*shape, weight.shape[1], requires_grad=True, **floats)  # else no gradient comes back
    logits = torch.empty(*shape, parts.head.weight.shape[0], requires_grad=True, **floats)
    modules = nn.ModuleList(PipelineStageModule(model, *bounds[index]) for index in held)
    stages = [
        PipelineStage(
            module,
            index,
            total,
            weight.device,
            input_args=(tokens if index == 0 else hidden,),
            output_args=(logits if index == total - 1 else hidden,),
            group=group,
        )
        for index, module in zip(held, modules, strict=True)
    ]
    kind = get_schedule_class(schedule)
    given: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    run = kind(given, micro_batches, loss_fn=loss_fn, scale_grads=False)
    return Pipeline(run, modules, 0 in held, total - 1 in held)


def cut_layers(costs: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """First and one-past-last layer of every stage, such that the most expensive stage costs as little as possible.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"every stage needs a layer: {stages} stages for {layers} layers; give fewer stages")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[n]: the least possible maximum, and where the last cut is, for the first n layers in the stages so far.
    best: list[tuple[float, list[int]]] = [(before[n], [0]) for n in range(layers + 1)]
    for stage in range(1, stages):
        best = [
            min((max(best[cut][0], before[n] - before[cut]), [*best[cut][1], cut]) for cut in range(stage, n))
            if n > stage
            else (float("inf"), [])
            for n in range(layers + 1)
        ]
    return list(pairwise([*best[layers][1], layers]))
