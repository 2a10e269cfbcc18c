"""Expert choice: every expert takes the tokens that score best on it, so all experts do the same amount of work.

Zhou et al. 2022 (arXiv:2202.09368), section 3.2.
Copy with top_k.py into one package: needs torch only.

T tokens, E experts, K = E slots per token, D hidden size.
"""

import torch
from torch import Tensor

from .top_k import Routing, TopKRouter, autocast_off, expert_scores, top_k_routing


def expert_choice_routing(
    logits_TE: Tensor,
    capacity: int | Tensor,
    *,
    score_fn: str = "softmax",
    norm_topk_prob: bool = False,
    routed_scaling_factor: float = 1.0,
    mask_T: Tensor | None = None,
) -> Routing:
    """Let every expert choose its ``capacity`` best tokens. A token may end up with any number of experts, even none.

    Which experts a token gets depends on every other token of the call, later ones included. So a causal language
    model trained this way has seen hints of the future, and decoding one token at a time gives other experts than
    the full forward did.

    Args:
        logits_TE: router outputs; rows that are not finite are rejected as in ``top_k_routing``.
        capacity: tokens per expert; an integer, or a scalar tensor where the count must not wait for the device.
            More than there are valid tokens means all of them.
        score_fn: "softmax" over the experts (the paper), "sigmoid" or "sqrtsoftplus".
        norm_topk_prob: divide a token's weights by their sum. The paper does not.
        routed_scaling_factor: multiplies the weights last.
        mask_T: 1 or True where the token is real; padding is never chosen.

    Returns:
        A routing with K = E slots per token, its best expert first, unused slots last. Of tokens with equal scores
        an expert takes the earlier.

    Raises:
        ValueError: the capacity is negative.
    """
    if not isinstance(capacity, Tensor) and capacity < 0:
        raise ValueError(f"capacity must be at least 0, got {capacity}")
    return top_k_routing(
        logits_TE,
        logits_TE.shape[1],
        score_fn=score_fn,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
        ids_TK=_choices_of_experts(_valid_scores(logits_TE, score_fn, mask_T)[0], capacity),
        mask_T=mask_T,
    )


class ExpertChoiceRouter(TopKRouter):
    """A linear layer, then :func:`expert_choice_routing`: T * top_k / E tokens per expert, rounded up.

    Only valid tokens count for T.

    Args:
        hidden_size: width D of a token.
        num_experts: number E of experts.
        top_k: experts per token on average (the capacity factor c of Zhou et al.).
        norm_topk_prob: divide a token's weights by their sum.
        options: ``bias``, ``jitter``, ``score_fn`` and ``routed_scaling_factor`` of :class:`TopKRouter`.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, *, norm_topk_prob: bool = False, **options):
        super().__init__(hidden_size, num_experts, top_k, norm_topk_prob=norm_topk_prob, **options)

    def choose(self, logits_TE: Tensor, mask_T: Tensor | None, tokens_T: Tensor | None) -> Tensor:
        """The experts that chose each token, (T, E)."""
        scores_TE, valid_T = _valid_scores(logits_TE, self.options["score_fn"], mask_T)
        capacity = -(-valid_T.sum() * self.top_k // self.num_experts)
        return _choices_of_experts(scores_TE, capacity)


def _valid_scores(logits_TE: Tensor, score_fn: str, mask_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores without gradient, -inf on rows that must not be chosen, and which rows may be."""
    with autocast_off(logits_TE):
        wide = torch.promote_types(logits_TE.dtype, torch.float32)
        scores_TE = expert_scores(logits_TE.detach().to(wide), score_fn)
    valid_T = scores_TE.isfinite().all(dim=-1)
    if mask_T is not None:
        valid_T = valid_T & mask_T.bool()
    return torch.where(valid_T[:, None], scores_TE, -torch.inf), valid_T


def _choices_of_experts(scores_TE: Tensor, capacity: int | Tensor) -> Tensor:
    """For every token the experts that chose it, best first, then the sentinel.

    Tokens with -inf come last; those that are chosen all the same are rejected with their whole row later.
    """
    num_tokens, num_experts = scores_TE.shape
    order_TE = scores_TE.sort(dim=0, descending=True, stable=True).indices  # row r: the r-th choice of every expert
    taken_T = torch.arange(num_tokens, device=order_TE.device) < capacity
    chosen_TE = torch.zeros_like(order_TE, dtype=torch.bool)
    chosen_TE = chosen_TE.scatter(0, order_TE, taken_T[:, None].expand_as(order_TE))
    ids_TE = torch.arange(num_experts, device=order_TE.device).expand_as(order_TE)
    best_TE = torch.where(chosen_TE, scores_TE, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    return torch.where(chosen_TE, ids_TE, num_experts).gather(-1, best_TE)
