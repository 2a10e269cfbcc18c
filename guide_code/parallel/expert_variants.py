"""Three other ways to bring tokens and experts together, each a module with the interface of ``ExpertParallel``.

Padded: GShard, Lepikhin et al. 2020 (arXiv:2006.16668), algorithm 1. Replicated: every rank has every token, as in the
tensor-parallel decoding of DeepSpeed-MoE, Rajbhandari et al. 2022 (arXiv:2201.05596). Deduplicating: a token travels
once to a rank, however many of its experts are there, as in DeepSeek-V3 (arXiv:2412.19437), section 3.2.2.
Copy with expert.py into one package: needs torch only.

T tokens of this rank, D hidden size, K choices per token, P ranks, L experts per rank, E = P*L experts, C capacity,
M rows sent, R rows received.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .expert import AllToAll, ExpertParallel, RowsToTokens, TokensToRows


class PaddedExpertParallel(ExpertParallel):
    """Every rank sends C rows to every expert, empty ones where it has fewer: no host waits, every shape is known.

    An assignment beyond C is dropped, the last tokens first, and counted in ``dropped``.

    Args:
        experts: as in ``ExpertParallel``.
        group: as in ``ExpertParallel``.
        capacity: rows C from each rank to each expert; None: as many as the call has tokens, which drops nothing
            and must then be the same on every rank.

    Attributes:
        dropped: assignments left out since the module was made or ``dropped.zero_()``; () int64.
    """

    dropped: Tensor

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup, capacity: int | None = None, **options):
        super().__init__(experts, group, **options)
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1 row per rank and expert, got {capacity}")
        self.capacity = capacity
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D) in the dtype of ``x_TD``; ids outside [0, E) contribute exactly 0."""
        if self.ranks == 1 and self.capacity is None:
            return self.call_experts(x_TD, ids_TK, weights_TK)
        capacity = len(x_TD) if self.capacity is None else self.capacity
        num_rows = self.num_experts * capacity
        valid_TK = (ids_TK >= 0) & (ids_TK < self.num_experts)
        expert_N, order_N = torch.where(valid_TK, ids_TK, self.num_experts).flatten().sort(stable=True)
        first_E = torch.searchsorted(expert_N, torch.arange(self.num_experts + 1, device=expert_N.device))
        rank_N = torch.arange(len(order_N), device=order_N.device) - first_E[expert_N]
        kept_N = (expert_N < self.num_experts) & (rank_N < capacity)
        with torch.no_grad():
            self.dropped += valid_TK.sum() - kept_N.sum()
        row_N = torch.where(kept_N, expert_N * capacity + rank_N, num_rows)
        slot_TK = torch.empty_like(order_N).scatter_(0, order_N, row_N).view_as(ids_TK)
        # Which assignment fills each row. An empty row takes the first: its weight is 0, its expert none.
        filling_M = order_N.new_zeros(num_rows + 1).scatter_(0, row_N, order_N)[:-1]
        filled_M = kept_N.new_zeros(num_rows + 1).scatter_(0, row_N, kept_N)[:-1]

        even = [self.local_experts * capacity] * self.ranks
        rows_MD = TokensToRows.apply(x_TD, filling_M, slot_TK)
        weights_M = F.pad(weights_TK.flatten(), (0, 1))[torch.where(filled_M, filling_M, ids_TK.numel())]
        local_M = torch.arange(num_rows, device=ids_TK.device) // max(capacity, 1) % self.local_experts
        ids_M = torch.where(filled_M, local_M, self.local_experts)
        rows_RD, weights_R, ids_R = (
            AllToAll.apply(part, even, even, self.group) for part in (rows_MD, weights_M, ids_M)
        )
        y_RD = self.call_experts(rows_RD, ids_R[:, None], weights_R[:, None])
        y_MD = AllToAll.apply(y_RD, even, even, self.group)
        return RowsToTokens.apply(y_MD, filling_M, slot_TK).to(x_TD.dtype)


class ReplicatedExpertParallel(ExpertParallel):
    """Every rank holds the same tokens: each computes its experts' share, and one all-reduce adds the shares up.

    For decoding, where tokens are few, and for tensor-parallel layers, which have replicated tokens already. Each
    rank must receive the same gradient of the output.
    """

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D) in the dtype of ``x_TD``, the same on every rank; ids outside [0, E) contribute exactly 0."""
        if self.ranks == 1:
            return self.call_experts(x_TD, ids_TK, weights_TK)
        local_TK = ids_TK - dist.get_rank(self.group) * self.local_experts  # others fall outside [0, L)
        local_TK = torch.where(ids_TK < self.num_experts, local_TK, -1)
        x_TD, weights_TK = _SumGradients.apply(x_TD, self.group), _SumGradients.apply(weights_TK, self.group)
        share_TD = self.call_experts(x_TD, local_TK, weights_TK)
        wide = torch.promote_types(share_TD.dtype, torch.float32)
        return _SumValues.apply(share_TD.to(wide), self.group).to(x_TD.dtype)


class DeduplicatedExpertParallel(ExpertParallel):
    """A token travels once to each rank that has any of its experts, and its outputs come back added up.

    With K choices among L experts per rank it sends fewer rows the more choices share a rank, and each row carries
    K ids and weights.
    """

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D) in the dtype of ``x_TD``; ids outside [0, E) contribute exactly 0 and are not sent."""
        if self.ranks == 1:
            return self.call_experts(x_TD, ids_TK, weights_TK)
        num_tokens, device = len(x_TD), ids_TK.device
        valid_TK = (ids_TK >= 0) & (ids_TK < self.num_experts)
        owner_TK = torch.where(valid_TK, ids_TK // self.local_experts, self.ranks)
        goes_TP = torch.zeros(num_tokens, self.ranks + 1, dtype=torch.bool, device=device)
        goes_PT = goes_TP.scatter_(1, owner_TK, True)[:, :-1].t()
        counts_P = goes_PT.sum(dim=1)
        coming_P = torch.empty_like(counts_P)
        dist.all_to_all_single(coming_P, counts_P, group=self.group)
        received, sent = torch.stack([coming_P, counts_P]).tolist()

        # Rows by receiving rank, then by token: like K = P choices, of which some lead nowhere.
        flat_PT = goes_PT.flatten()
        place_PT = torch.where(flat_PT, flat_PT.cumsum(0) - 1, sum(sent))
        source_M = torch.empty(sum(sent) + 1, dtype=torch.int64, device=device)
        source_M.scatter_(0, place_PT, torch.arange(len(place_PT), device=device))
        owner_M, token_M = source_M[:-1] // max(num_tokens, 1), source_M[:-1] % max(num_tokens, 1)
        slot_TP, order_M = place_PT.view(self.ranks, num_tokens).t(), token_M * self.ranks + owner_M

        rows_MD = TokensToRows.apply(x_TD, order_M, slot_TP)
        here_MK = owner_TK[token_M] == owner_M[:, None]
        ids_MK = torch.where(here_MK, ids_TK[token_M] % self.local_experts, self.local_experts)
        weights_MK = torch.where(here_MK, weights_TK[token_M], 0.0)
        rows_RD, ids_RK, weights_RK = (
            AllToAll.apply(part, received, sent, self.group) for part in (rows_MD, ids_MK.int(), weights_MK)
        )
        y_RD = self.call_experts(rows_RD, ids_RK.long(), weights_RK)
        y_MD = AllToAll.apply(y_RD, sent, received, self.group)
        return RowsToTokens.apply(y_MD, order_M, slot_TP).to(x_TD.dtype)


def deduplicated_bytes(
    sent: int, received: int, hidden_size: int, top_k: int, ranks: int, *, element_size: int, weight_size: int = 4
) -> int:
    """As :func:`~guide_code.parallel.expert.all_to_all_bytes`, for :class:`DeduplicatedExpertParallel`.

    Args:
        sent: rows M, a token counted once for each rank that it goes to.
        received: rows R.
        hidden_size: D.
        top_k: K ids (4 bytes each) and weights that go with every row.
        ranks: P, each of which tells each other one 8-byte count.
        element_size: bytes per element of a token.
        weight_size: bytes per combine weight.
    """
    return (sent + received) * hidden_size * element_size + sent * top_k * (4 + weight_size) + ranks * 8


class _SumGradients(torch.autograd.Function):
    """The same value; its gradient is added up over the ranks."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumValues(torch.autograd.Function):
    """The sum over the ranks; each rank's gradient is that of the sum, which is the same everywhere."""

    @staticmethod
    def forward(ctx, value, group):
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None
