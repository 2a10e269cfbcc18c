"""SparseMixer: experts are sampled one after another in training, and the router's gradient is estimated for that.

Liu et al. 2023 (arXiv:2310.00811); for two experts, GRIN, Liu et al. 2024 (arXiv:2409.12136), section 3.1, whose router
is that of Phi-3.5-MoE; transformers ``models/phimoe/modeling_phimoe.py``, ``sparsemixer``.
Copy with top_k.py into one package: needs torch only.

T tokens, E experts, K choices per token, D hidden size.
"""

import torch
from torch import Tensor

from .top_k import Routing, TopKRouter, autocast_off, lowest_id_top_k


def sparse_mixer_ids(logits_TE: Tensor, top_k: int, *, margin: float, sample: bool = False) -> Tensor:
    """The experts of every token, (T, K), distinct: each time the best of those left, or a sample of those near it.

    Args:
        logits_TE: router outputs.
        top_k: experts per token.
        margin: see :func:`sparse_mixer_weights`.
        sample: draw from the softmax over the experts near the best, as in training; else take the best.
    """
    left_TE = torch.ones_like(logits_TE, dtype=torch.bool)
    ids = []
    for _ in range(top_k):
        value_TE = _near_best(logits_TE, left_TE, margin)
        if sample:  # Gumbel's trick: the largest of logit + noise is a sample of the softmax
            value_TE = value_TE - torch.empty_like(value_TE).exponential_().log()
        ids.append(lowest_id_top_k(value_TE, 1))
        left_TE = left_TE.scatter(-1, ids[-1], False)
    return torch.cat(ids, dim=-1)


def sparse_mixer_weights(logits_TE: Tensor, ids_TK: Tensor, *, margin: float, sample: bool = False) -> Tensor:
    """Combine weights (T, K) of chosen experts: the first by its share among the experts near the best one, the next
    by its share among those near the best of the rest, and so on. They do not sum to 1.

    Args:
        logits_TE: router outputs, finite.
        ids_TK: from :func:`sparse_mixer_ids`.
        margin: an expert whose logit is lower than the best by more than this part of the larger of the two sizes
            has no share; twice ``router_jitter_noise`` of Phi-3.5-MoE.
        sample: whether the ids were sampled. A weight then counts fully if the expert is the best one or by a chance
            of 1/4, else by a third; its gradient is that of the share all the same (Heun's third-order method).
    """
    left_TE = torch.ones_like(logits_TE, dtype=torch.bool)
    weights = []
    for ids_T1 in ids_TK.split(1, dim=-1):
        shares_TE = _near_best(logits_TE, left_TE, margin).softmax(dim=-1)
        weight_T1 = shares_TE.gather(-1, ids_T1)
        if sample:
            full_T1 = (ids_T1 == shares_TE.argmax(dim=-1, keepdim=True)) | (torch.rand_like(weight_T1) > 0.75)
            weight_T1 = weight_T1 + (torch.where(full_T1, 0.0, -2 / 3) * weight_T1).detach()
        weights.append(weight_T1)
        left_TE = left_TE.scatter(-1, ids_T1, False)
    return torch.cat(weights, dim=-1)


class SparseMixerRouter(TopKRouter):
    """A :class:`TopKRouter` that samples in training, and whose weights are shares among near rivals.

    Scores, for losses and statistics, are the softmax over all experts.

    Args:
        hidden_size: width D of a token.
        num_experts: number E of experts.
        top_k: experts per token.
        jitter: half the margin of :func:`sparse_mixer_weights`; nothing is multiplied by noise.
        options: ``bias``, ``norm_topk_prob`` and ``routed_scaling_factor`` of :class:`TopKRouter`.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, *, jitter: float = 0.01, **options):
        if options.get("score_fn", "softmax") != "softmax":
            raise ValueError(f"score_fn={options['score_fn']!r} must be 'softmax': shares are those of a softmax")
        if options.get("num_groups", 1) != 1 or options.get("use_expert_bias", False):
            raise ValueError("num_groups and use_expert_bias have no meaning for SparseMixer: it samples by logits")
        super().__init__(hidden_size, num_experts, top_k, **options)
        self.margin = 2 * jitter

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, tokens_T: Tensor | None = None) -> Routing:
        """Route tokens ``x_TD``; ``tokens_T`` is for routers that hash them."""
        routing = super().forward(x_TD, mask_T, tokens_T)
        used_TK = routing.ids < self.num_experts
        with autocast_off(x_TD):
            logits_TE = torch.where(used_TK.any(dim=-1, keepdim=True), routing.logits, 0.0)
            ids_TK = torch.where(used_TK, routing.ids, torch.arange(self.top_k, device=x_TD.device))
            weights_TK = sparse_mixer_weights(logits_TE, ids_TK, margin=self.margin, sample=self.training)
            weights_TK = torch.where(used_TK, weights_TK, 0.0)
            if self.options["norm_topk_prob"]:
                tiny = torch.finfo(weights_TK.dtype).tiny
                weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp_min(tiny)
        return routing._replace(weights=weights_TK * self.options["routed_scaling_factor"])

    def choose(self, logits_TE: Tensor, mask_T: Tensor | None, tokens_T: Tensor | None) -> Tensor:
        """One expert after another."""
        finite_T1 = logits_TE.isfinite().all(dim=-1, keepdim=True)
        logits_TE = torch.where(finite_T1, logits_TE, 0.0)
        return sparse_mixer_ids(logits_TE, self.top_k, margin=self.margin, sample=self.training)


def _near_best(logits_TE: Tensor, left_TE: Tensor, margin: float) -> Tensor:
    """The logits of experts that are left and near the best of those; -inf elsewhere."""
    with torch.no_grad():
        best_T1 = logits_TE.masked_fill(~left_TE, -torch.inf).max(dim=-1, keepdim=True).values
        far_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1) > margin
    return logits_TE.masked_fill(~left_TE | far_TE, -torch.inf)
