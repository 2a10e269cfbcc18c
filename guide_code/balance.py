"""Load balancing: the losses that spread tokens over experts, and the numbers that say how even they are.

Switch, Fedus et al. 2021 (arXiv:2101.03961), eq. 4-6; z-loss: ST-MoE, Zoph et al. 2022 (arXiv:2202.08906),
eq. 5; bias update: Wang et al. 2024 (arXiv:2408.15664), algorithm 1. Pure functions; coefficients are the caller's.
Copy alone: needs torch only.

T tokens, E experts, K choices per token. With c the assignments per expert, f = c / sum(c) and P the mean score
of each expert over the T valid tokens, the losses are multiples of the dot product f . P.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CONVENTIONS = ("megatron", "hf")


def expert_counts(ids_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """Assignments per expert, (E,) int64. Ids outside [0, E) and masked tokens are not counted."""
    inside_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    if mask_T is not None:
        inside_TK &= mask_T.bool()[:, None]
    slots_N = torch.where(inside_TK, ids_TK, num_experts).flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_TK.device)
    return counts.scatter_add_(0, slots_N, torch.ones_like(slots_N))[:num_experts]  # bincount would synchronise


def load_balancing_loss(
    scores_TE: Tensor,
    ids_TK: Tensor,
    *,
    convention: str = "megatron",
    mask_T: Tensor | None = None,
    counts_E: Tensor | None = None,
) -> Tensor:
    """Load-balancing loss of one layer, without coefficient: a scalar in the dtype of the scores.

    Only P carries a gradient: it pushes down the scores of experts in proportion to how many tokens they hold.

    Args:
        scores_TE: scores over all experts. Rows are normalised to sum to one first (sigmoid scores do not).
        ids_TK: the choices *before* any drop: counts taken after it hide the imbalance.
        convention: "megatron": E f.P, 1 when balanced and E/K when all tokens take the same K experts.
            "hf" (transformers): K times that, K when balanced and E when collapsed.
        mask_T: 1 or True where the token counts. Rows with a non-finite score never count.
        counts_E: assignments to use for f in place of those of ``ids_TK`` (a larger group of tokens).

    Returns:
        The loss; 0, with zero gradient, when no token counts.

    Raises:
        ValueError: the convention is not known.
    """
    check_convention(convention)
    num_experts, top_k = scores_TE.shape[1], ids_TK.shape[1]
    scores_TE, valid_T = _valid_scores(scores_TE, mask_T)
    if counts_E is None:
        counts_E = expert_counts(ids_TK, num_experts, valid_T)
    fraction_E = counts_E.to(scores_TE.dtype) / counts_E.sum().clamp_min(1)
    mean_score_E = scores_TE.sum(dim=0) / valid_T.sum().clamp_min(1)
    loss = num_experts * fraction_E @ mean_score_E
    return top_k * loss if convention == "hf" else loss


def model_load_balancing_loss(
    routings: Sequence, *, convention: str = "megatron", mask_T: Tensor | None = None
) -> Tensor:
    """Load-balancing loss of a model, over its layers as the convention does it, without coefficient.

    Args:
        routings: one ``Routing`` per layer; None for a dense layer, which counts nowhere.
        convention: "megatron": the sum of the layers' losses. "hf": f and P are pooled over layers *before* the
            product, so layers that collapse onto different experts look balanced.
        mask_T: as in :func:`load_balancing_loss`, the same for every layer.

    Returns:
        The loss; exactly 0 when no layer is sparse.
    """
    check_convention(convention)
    sparse = [routing for routing in routings if routing is not None]
    if not sparse:
        return torch.zeros(())
    if convention == "hf":
        scores_TE = torch.cat([routing.scores for routing in sparse])
        ids_TK = torch.cat([routing.ids for routing in sparse])
        mask_T = None if mask_T is None else mask_T.repeat(len(sparse))
        return load_balancing_loss(scores_TE, ids_TK, convention=convention, mask_T=mask_T)
    losses = [load_balancing_loss(r.scores, r.ids, convention=convention, mask_T=mask_T) for r in sparse]
    return torch.stack(losses).sum()


def z_loss(logits_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Mean over valid tokens of logsumexp(logits) squared: keeps logits small (ST-MoE, eq. 5).

    Logits of 0 give (ln E)^2, not 0: 4.32 for E = 8. Rows whose logsumexp is not finite never count.
    """
    finite_T = logits_TE.detach().logsumexp(dim=-1).isfinite()
    valid_T = finite_T if mask_T is None else finite_T & mask_T.bool()
    squares_T = torch.where(valid_T[:, None], logits_TE, 0.0).logsumexp(dim=-1).square()
    return torch.where(valid_T, squares_T, 0.0).sum() / valid_T.sum().clamp_min(1)


def update_expert_bias_(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """Raise the bias of experts below the mean load by ``rate`` and lower it above, in place."""
    counts_E = counts_E.to(bias_E.dtype)
    bias_E.add_(torch.sign(counts_E.mean() - counts_E), alpha=rate)


def max_violation(counts_E: Tensor) -> Tensor:
    """How far the busiest expert is above its fair share: max(c) / mean(c) - 1, from 0 to E - 1.

    0 when there is no assignment. Wang et al. 2024 (arXiv:2408.15664), section 3, "MaxVio".
    """
    counts_E = counts_E.to(torch.float32)
    return torch.where(counts_E.sum() > 0, counts_E.max() / counts_E.mean().clamp_min(1e-9) - 1, 0.0)


def _valid_scores(scores_TE: Tensor, mask_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows that sum to one, or are all zero where they must not count; and which do count."""
    valid_T = scores_TE.detach().isfinite().all(dim=-1)
    if mask_T is not None:
        valid_T = valid_T & mask_T.bool()
    scores_TE = torch.where(valid_T[:, None], scores_TE, 0.0)
    total_T1 = scores_TE.sum(dim=-1, keepdim=True)
    # Adding an epsilon instead would let a router shrink all its scores and so its loss.
    tiny = torch.finfo(scores_TE.dtype).tiny
    usable_T1 = total_T1 >= tiny
    shares_TE = torch.where(usable_T1, scores_TE / torch.where(usable_T1, total_T1, 1.0), 1 / scores_TE.shape[1])
    return torch.where(valid_T[:, None], shares_TE, 0.0), valid_T


def check_convention(convention: str) -> None:
    """Raise a ValueError unless the convention is one of :data:`CONVENTIONS`."""
    if convention not in CONVENTIONS:
        raise ValueError(f"convention must be one of {CONVENTIONS}, got {convention!r}")
