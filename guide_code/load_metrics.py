"""Load metrics: numbers that say how even the load is, what was dropped, and how sure the router is.

With uniform scores a balancing loss is at its minimum whatever the load: its value is no proof. Report these as well.
MaxVio: Wang et al. 2024 (arXiv:2408.15664), section 3; the loss of one step says little about the whole: Qiu et al.
2025 (arXiv:2501.11873).
Copy with balance.py into one package: needs torch only.

T tokens, E experts, K choices per token, N batches.
"""

import math

import torch
from torch import Tensor

from .balance import expert_counts, max_violation


def batch_max_violation(counts_NE: Tensor) -> Tensor:
    """Mean over batches of max(c) / mean(c) - 1: what one step waits for. 0 to E - 1; batches without load are 0."""
    if not len(counts_NE):
        return torch.zeros((), device=counts_NE.device)
    return torch.stack([max_violation(counts_E) for counts_E in counts_NE]).mean()


def global_max_violation(counts_NE: Tensor) -> Tensor:
    """max(c) / mean(c) - 1 with the counts of all batches added up: whether experts specialise, whatever one step does.

    At most :func:`batch_max_violation` when the batches are of one size.
    """
    return max_violation(counts_NE.sum(dim=0))


def load_entropy(counts_E: Tensor) -> Tensor:
    """Entropy of the load as a share of its maximum: -sum f ln f / ln E. 1 when even, 0 when one expert has all.

    exp(load_entropy * ln E) is the number of experts in effect. 0 when there is no assignment; 1 for E = 1.
    """
    num_experts = counts_E.shape[0]
    if num_experts == 1:
        return (counts_E.sum() > 0).float()
    fraction_E = counts_E.to(torch.float32) / counts_E.sum().clamp_min(1)
    return torch.special.entr(fraction_E).sum() / math.log(num_experts)


def dead_experts(counts_E: Tensor) -> Tensor:
    """How many experts got no assignment at all, int64. One batch may be too small to tell: add up counts first."""
    return (counts_E == 0).sum()


def drop_rate(ids_TK: Tensor, kept_TK: Tensor, num_experts: int) -> Tensor:
    """Share of the assignments in ``ids_TK`` that lead nowhere in ``kept_TK``, from 0 to 1; 0 when there are none.

    Padding and rejected tokens (ids outside [0, E)) are neither assigned nor dropped.
    """
    routed, kept = expert_counts(ids_TK, num_experts).sum(), expert_counts(kept_TK, num_experts).sum()
    return (routed - kept) / routed.clamp_min(1)


def router_confidence(scores_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Mean over valid tokens of the largest score's share, max(s) / sum(s): from 1/E (undecided) to 1.

    Rows with a non-finite score are left out; 0 when no token counts.
    """
    valid_T = _valid(scores_TE, mask_T)
    clean_TE = torch.where(valid_T[:, None], scores_TE.detach(), 1.0)
    tiny = torch.finfo(clean_TE.dtype).tiny
    total_T = clean_TE.sum(dim=-1)
    share_T = torch.where(total_T >= tiny, clean_TE.amax(dim=-1) / total_T.clamp_min(tiny), 1 / scores_TE.shape[1])
    return torch.where(valid_T, share_T, 0.0).sum() / valid_T.sum().clamp_min(1)


def co_activation(ids_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """How many tokens chose both experts of a pair, (E, E) int64, symmetric; the diagonal holds the counts.

    Row i divided by its diagonal is the share of expert i's tokens that each other expert sees too. Pairs that often
    work together are worth placing on one device.
    """
    inside_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    if mask_T is not None:
        inside_TK &= mask_T.bool()[:, None]
    width = num_experts + 1
    slots_TK = torch.where(inside_TK, ids_TK, num_experts)
    pairs_TKK = slots_TK[:, :, None] * width + slots_TK[:, None, :]
    counts = torch.zeros(width * width, dtype=torch.int64, device=ids_TK.device)
    counts.scatter_add_(0, pairs_TKK.flatten(), torch.ones_like(pairs_TKK.flatten()))
    return counts.view(width, width)[:num_experts, :num_experts]


def rejected_rows(scores_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """How many tokens that should count have a score that is not finite, int64: each is a fault to look into."""
    rejected_T = ~_valid(scores_TE, None)
    return (rejected_T if mask_T is None else rejected_T & mask_T.bool()).sum()


def _valid(scores_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    finite_T = scores_TE.detach().isfinite().all(dim=-1)
    return finite_T if mask_T is None else finite_T & mask_T.bool()
