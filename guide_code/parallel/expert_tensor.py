"""Tensor parallelism inside experts: every rank holds a slice of each expert's inner width.

Megatron-LM, Shoeybi et al. 2019 (arXiv:1909.08053), section 3, for experts: gate and up by columns, down by rows, so
one sum over ranks ends the layer. Ranks may hold different tokens: they are gathered first, and the sums scattered.
Copy with expert.py into one package: needs torch only.

T tokens of this rank, D hidden size, I expert intermediate size, E experts here, K choices per token, P ranks,
M = P * (most tokens of any rank).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .expert import ScaleGradient


class ExpertTensorParallel(nn.Module):
    """Slices of experts, one per rank of a group, behind the interface of whole ``experts``.

    Every rank must call it as often as the others, with any number of tokens. Put it inside ``ExpertParallel`` to
    split over both axes. Gradients of a slice are sums over the tokens of all ranks of the group.

    Args:
        experts: this rank's slice, from :func:`slice_experts_`.
        group: the ranks that hold the slices, in their order.
    """

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup):
        super().__init__()
        self.experts, self.group, self.ranks = experts, group, dist.get_world_size(group)
        self.num_experts = int(experts.num_experts)  # pyright: ignore[reportArgumentType]

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D) in the dtype of ``x_TD``; ids outside [0, E) contribute exactly 0."""
        if self.ranks == 1:
            return self.experts(x_TD, ids_TK, weights_TK)
        num_tokens = torch.tensor(len(x_TD), device=x_TD.device)
        dist.all_reduce(num_tokens, dist.ReduceOp.MAX, group=self.group)
        missing = (0, 0, 0, int(num_tokens) - len(x_TD))  # shorter ranks fill up with tokens of no expert
        ids_MK = _Gather.apply(F.pad(ids_TK, missing, value=-1), self.group)
        x_MD, weights_MK = (_Gather.apply(F.pad(part, missing), self.group) for part in (x_TD, weights_TK))
        share_MD = torch.func.functional_call(self.experts, self._shared_bias(), (x_MD, ids_MK, weights_MK))
        wide = torch.promote_types(share_MD.dtype, torch.float32)
        return _SumScatter.apply(share_MD.to(wide), self.group)[: len(x_TD)].to(x_TD.dtype)

    def _shared_bias(self) -> dict[str, Tensor]:
        """Every rank adds its part of the bias on the output, and computes all of its gradient."""
        bias_ED = getattr(self.experts, "down_proj_bias", None)
        if bias_ED is None:
            return {}
        return {"down_proj_bias": ScaleGradient.apply(bias_ED, self.ranks) / self.ranks}


def slice_experts_(experts: nn.Module, rank: int, ranks: int) -> nn.Module:
    """Keep one slice of every expert's inner width, in place.

    Gate and up are cut apart: rows of (E, 2, I, D), not of the stacked (E, 2I, D), whose first half is all gate. Where
    their rows alternate ("swigluoai") neighbours stay together.

    Args:
        experts: whole, with the parameters of ``GroupedExperts``.
        rank: which slice.
        ranks: P.

    Raises:
        ValueError: the width I is no multiple of ``ranks``.
    """
    width = experts.get_parameter("down_proj").shape[2]
    if width % ranks:
        possible = [n for n in range(1, width + 1) if width % n == 0]
        raise ValueError(
            f"etp must divide moe_intermediate_size: etp={ranks} does not divide {width}. Possible: {possible}"
        )
    stacked = bool(experts.gated) and experts.activation != "swigluoai"  # pyright: ignore[reportAttributeAccessIssue]
    for name, parameter in list(experts.named_parameters()):
        value = parameter.detach()
        if name == "down_proj":
            part = value.chunk(ranks, dim=2)[rank]
        elif name == "down_proj_bias":
            continue
        elif stacked:
            part = value.unflatten(1, (2, width)).chunk(ranks, dim=2)[rank].flatten(1, 2)
        else:
            part = value.chunk(ranks, dim=1)[rank]
        setattr(experts, name, nn.Parameter(part.clone(), requires_grad=parameter.requires_grad))
    return experts


class _Gather(torch.autograd.Function):
    """The rows of all ranks, one after another; back, the sum of all ranks' gradients, each rank its rows."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        out = rows.new_empty(dist.get_world_size(group) * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _SumScatter.apply(grad, ctx.group), None


class _SumScatter(torch.autograd.Function):
    """The sum over ranks, each rank its rows. Backward is :class:`_Gather`."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        out = rows.new_empty(len(rows) // dist.get_world_size(group), *rows.shape[1:])
        dist.reduce_scatter_tensor(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _Gather.apply(grad, ctx.group), None
