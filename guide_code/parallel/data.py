"""Data parallelism, sharded by FSDP2: what ZeRO's stages are there, and one gradient norm over dense and expert layers.

ZeRO, Rajbhandari et al. 2020 (arXiv:1910.02054), section 5; FSDP, Zhao et al. 2023 (arXiv:2304.11277).
Copy alone: needs torch only.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

ZERO_STAGES = (1, 2, 3)
"""1: the optimizer state is sharded. 2: and the gradients, after every micro-batch. 3: and the parameters, which are
gathered for one layer at a time, in the forward and again in the backward."""


def shard(
    modules: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    zero: int = 3,
    param_dtype: torch.dtype | None = None,
    cast_inputs: bool = True,
) -> None:
    """Shard parameters, gradients and optimizer state over the ranks of a mesh; gradients become their average.

    Each module is one unit of communication: give inner modules before outer ones, the whole model last.

    Args:
        modules: what to shard.
        mesh: one dimension: the ranks that hold the same parameters.
        zero: 1, 2 or 3, see :data:`ZERO_STAGES`. In FSDP2, 2 keeps the gathered parameters from forward to backward.
            1 is 2 with gradients that are reduced after the last micro-batch only: :func:`set_last_micro_batch`.
        param_dtype: compute in this dtype; parameters, gradients and optimizer state stay as they are.
        cast_inputs: cast what goes into a module to ``param_dtype`` as well. Not for experts: it would narrow their
            combine weights.

    Raises:
        ValueError: there is no such stage.
    """
    if zero not in ZERO_STAGES:
        raise ValueError(f"zero must be one of {ZERO_STAGES}, got {zero!r}")
    reduce_dtype = None if param_dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=cast_inputs)
    for module in modules:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=zero == 3,
            mp_policy=policy,
            shard_placement_fn=lambda parameter: _shard_dim(parameter, mesh.size()),
        )


def set_last_micro_batch(model: nn.Module, zero: int, last: bool) -> None:
    """Call before each micro-batch: under ``zero=1`` only the last one's backward communicates gradients."""
    if zero == 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(last, recurse=False)


def gradient_norm(parameters: Iterable[nn.Parameter], stages: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm of all gradients together, the same on every rank, as if one process held them.

    Each parameter counts once, however it is sharded: every rank adds its shards, and one that is replicated adds the
    share that makes the copies one. One value that is not finite on one rank makes the norm not finite on all, so
    all can stop together. A collective call.

    Args:
        parameters: dense ones, experts, on whatever mesh each is.
        stages: the ranks of the pipeline, whose parameters differ.
    """
    squares = {}
    for parameter in parameters:
        grad = parameter.grad
        mesh, placements = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else (None, ())
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if local is not None:
            squares.setdefault((mesh, placements), []).append(local)
    total = None
    for (mesh, placements), grads in squares.items():
        square = torch.nn.utils.get_total_norm(grads).double().square()
        for dim, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(square, group=mesh.get_group(dim))
        total = square if total is None else total + square
    total = torch.zeros((), dtype=torch.float64) if total is None else total
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def clip_gradients_(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Multiply all gradients by max_norm / norm where that is below 1, in place; the norm: :func:`gradient_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            local.mul_(scale.to(local.device, local.dtype))


def mean_over(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over ranks of a detached value, for reports: a rank's loss says nothing about that of the others."""
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value / dist.get_world_size(group)


def _shard_dim(parameter: nn.Parameter, ranks: int) -> Shard:
    """Experts are cut inside, along rows: their first dimension may be split over ranks already, and is short."""
    return Shard(1 if parameter.ndim == 3 and parameter.shape[1] % ranks == 0 else 0)
