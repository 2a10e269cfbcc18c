"""Expert parallelism: every rank holds some of the experts, and tokens travel to them and back.

GShard, Lepikhin et al. 2020 (arXiv:2006.16668), section 3.2, with uneven all-to-all as in MegaBlocks, Gale et al. 2022
(arXiv:2211.15841): nothing is padded and nothing dropped.
Copy alone: needs torch only.

T tokens of this rank, D hidden size, K choices per token, P ranks, L experts per rank, E = P*L experts,
N assignments sent, R rows received.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Dispatched(NamedTuple):
    """Rows on their way to the experts of this rank, and what their owners need to take them back."""

    rows: Tensor
    """(R, D) tokens, by sending rank and within it by expert. Not to be read before ``pending`` is waited for."""
    ids: Tensor
    """(R, 1) their experts, numbered within this rank."""
    weights: Tensor
    """(R, 1) their combine weights."""
    received: list[int]
    """Rows from each rank, sums to R."""
    sent: list[int]
    """Rows to each rank, sums to N."""
    slot: Tensor
    """(T, K) where each assignment stands among the rows sent; nowhere, if its id is no expert."""
    order: Tensor
    """(N,) the flat assignment of each row sent."""
    pending: list
    """Transfers still under way."""


class ExpertParallel(nn.Module):
    """Experts of all ranks of a group behind the interface of one ``experts`` module; ids are global.

    Rank p of the group holds experts p*L to p*L + L - 1. Every rank must call it the same number of times, with any
    number of tokens, none included: a rank that skips the call leaves the others waiting. A group of one calls the
    experts directly: no copy, no collective.

    Args:
        experts: the L experts of this rank: ``experts(x_TD, ids_TK, weights_TK)``, and ``num_experts``.
        group: the ranks that share the experts.
        gradient_scale: multiplies the gradients of the experts, which are sums over the tokens of all ranks of the
            group. 1/P makes them averages over the ranks, as those of dense parameters under data parallelism.
    """

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup, *, gradient_scale: float = 1.0):
        super().__init__()
        self.gradient_scale = gradient_scale
        self.experts, self.group, self.ranks = experts, group, dist.get_world_size(group)
        self.local_experts = int(experts.num_experts)  # pyright: ignore[reportArgumentType]
        self.num_experts = self.ranks * self.local_experts

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D) in the dtype of ``x_TD``; ids outside [0, E) contribute exactly 0 and are not sent."""
        if self.ranks == 1:
            return self.call_experts(x_TD, ids_TK, weights_TK)
        sent = self.dispatch(x_TD, ids_TK, weights_TK)
        return self.combine(self.compute(sent), sent)

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Send every assignment, its token and weight, to the rank of its expert; returns while they travel.

        The ranks first tell each other how much will come. Reading that is the one point where the host waits.
        """
        valid_TK = (ids_TK >= 0) & (ids_TK < self.num_experts)
        expert_N, order_N = torch.where(valid_TK, ids_TK, self.num_experts).flatten().sort(stable=True)
        places_N = torch.arange(len(order_N), device=order_N.device)
        slot_TK = torch.empty_like(order_N).scatter_(0, order_N, places_N).view_as(ids_TK)
        slot_TK = torch.where(valid_TK, slot_TK, len(order_N))

        counts_E = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=ids_TK.device)
        counts_PL = counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))[:-1].view(self.ranks, -1)
        coming_PL = torch.empty_like(counts_PL)
        dist.all_to_all_single(coming_PL, counts_PL.contiguous(), group=self.group)
        received, sent = torch.stack([coming_PL.sum(dim=1), counts_PL.sum(dim=1)]).tolist()

        order_N, pending = order_N[: sum(sent)], []
        rows_ND = TokensToRows.apply(x_TD, order_N, slot_TK)
        rows_RD = AllToAll.apply(rows_ND, received, sent, self.group, pending)
        weights_R = AllToAll.apply(weights_TK.flatten()[order_N], received, sent, self.group, pending)
        local_PL = torch.arange(self.local_experts, device=ids_TK.device).expand_as(coming_PL)
        ids_R = local_PL.flatten().repeat_interleave(coming_PL.flatten(), output_size=sum(received))
        return Dispatched(rows_RD, ids_R[:, None], weights_R[:, None], received, sent, slot_TK, order_N, pending)

    def compute(self, sent: Dispatched) -> Tensor:
        """(R, D) the weighted outputs of the experts of this rank."""
        for work in sent.pending:
            work.wait()
        return self.call_experts(sent.rows, sent.ids, sent.weights)

    def combine(self, y_RD: Tensor, sent: Dispatched) -> Tensor:
        """(T, D): every row back to its owner, the K of a token added up in a fixed order, in float32 or wider."""
        y_ND = AllToAll.apply(y_RD, sent.sent, sent.received, self.group)
        return RowsToTokens.apply(y_ND, sent.order, sent.slot).to(y_RD.dtype)

    def call_experts(self, x_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        """The experts of this rank, on the local parts of their parameters where those are DTensors."""
        parameters = dict(self.experts.named_parameters())
        local = {name: p.to_local() for name, p in parameters.items() if isinstance(p, DTensor)}
        if self.gradient_scale != 1.0:
            local = {n: ScaleGradient.apply(local.get(n, p), self.gradient_scale) for n, p in parameters.items()}
        if not local:
            return self.experts(x_RD, ids_RK, weights_RK)
        return torch.func.functional_call(self.experts, local, (x_RD, ids_RK, weights_RK))

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, ranks={self.ranks}"


def all_to_all_bytes(
    sent: int, received: int, hidden_size: int, num_experts: int, *, element_size: int, weight_size: int = 4
) -> int:
    """Bytes that one rank puts into the all-to-alls of one forward of :class:`ExpertParallel`, its own share included.

    The backward moves the same tokens and weights the other way, but no counts: E * 8 bytes less.

    Args:
        sent: assignments N that it sends.
        received: rows R that it computes and sends back.
        hidden_size: D.
        num_experts: E, whose counts are exchanged as 8-byte integers.
        element_size: bytes per element of a token.
        weight_size: bytes per combine weight.
    """
    return (sent + received) * hidden_size * element_size + sent * weight_size + num_experts * 8


class AllToAll(torch.autograd.Function):
    """Rows by receiver to rows by sender: ``given[p]`` rows go to rank p, ``taken[p]`` come from it."""

    @staticmethod
    def forward(ctx, rows, taken: list[int], given: list[int], group, pending: list | None = None):
        """With ``pending``, return at once and append what has to be waited for."""
        ctx.taken, ctx.given, ctx.group = taken, given, group
        out = rows.new_empty(sum(taken), *rows.shape[1:])
        work = dist.all_to_all_single(out, rows.contiguous(), taken, given, group, async_op=pending is not None)
        if pending is not None:
            pending.append(work)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.given, ctx.taken, ctx.group), None, None, None, None


class ScaleGradient(torch.autograd.Function):
    """The same value; its gradient is multiplied."""

    @staticmethod
    def forward(ctx, value, scale):
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


class TokensToRows(torch.autograd.Function):
    """Token rows to rows in the order of ``order_N``. Backward is :class:`RowsToTokens`: a sum in a fixed order."""

    @staticmethod
    def forward(ctx, x_TD, order_N, slot_TK):
        ctx.save_for_backward(order_N, slot_TK)
        if not len(x_TD):
            return x_TD.new_zeros(len(order_N), x_TD.shape[1])  # rows that no token fills
        return x_TD[order_N // slot_TK.shape[1]]

    @staticmethod
    def backward(ctx, grad_ND):
        return RowsToTokens.apply(grad_ND, *ctx.saved_tensors).to(grad_ND.dtype), None, None


class RowsToTokens(torch.autograd.Function):
    """Rows to token rows, the K of a token added up in float32 or wider. Backward is :class:`TokensToRows`."""

    @staticmethod
    def forward(ctx, y_ND, order_N, slot_TK):
        ctx.save_for_backward(order_N, slot_TK)
        ctx.dtype = y_ND.dtype
        wide = torch.promote_types(y_ND.dtype, torch.float32)
        padded = torch.cat([y_ND, y_ND.new_zeros(1, y_ND.shape[1])])  # a slot that leads nowhere reads zeros
        return padded[slot_TK.clamp_max(len(y_ND))].sum(dim=1, dtype=wide)

    @staticmethod
    def backward(ctx, grad_TD):
        return TokensToRows.apply(grad_TD.to(ctx.dtype), *ctx.saved_tensors), None, None
