"""Sinkhorn routing: in training, choose from scores that were rescaled so that every expert gets the same share.

S-BASE, Clark et al. 2022 (arXiv:2202.01169); Megatron-LM
``core/transformer/moe/moe_utils.py``, ``sinkhorn``. The rescaling is that of Sinkhorn and Knopp (1967).
Copy with top_k.py into one package: needs torch only.

T tokens, E experts, K choices per token, D hidden size.
"""

import math

import torch
from torch import Tensor

from .top_k import TopKRouter, lowest_id_top_k


def sinkhorn_plan(logits_TE: Tensor, mask_T: Tensor | None = None, *, num_iterations: int = 20) -> Tensor:
    """Scale the rows and columns of exp(logits) until every token has mass 1/T and every expert mass 1/E.

    Done on logarithms, so no logit is too large. Megatron-LM iterates until the columns move by less than 1e-4, which
    asks the device for a number every time; a fixed count does not.

    Args:
        logits_TE: router outputs.
        mask_T: 1 or True where the token is real. Padding and rows that are not finite get mass 0.
        num_iterations: passes over rows and columns. Columns are scaled last, so expert masses are exact and
            token masses nearly so.

    Returns:
        The plan (T, E), float32 or wider, without gradient.
    """
    logits_TE = logits_TE.detach().to(torch.promote_types(logits_TE.dtype, torch.float32))
    valid_T = logits_TE.logsumexp(dim=-1).isfinite()
    if mask_T is not None:
        valid_T = valid_T & mask_T.bool()
    log_TE = torch.where(valid_T[:, None], logits_TE, -torch.inf)
    lowest = torch.finfo(log_TE.dtype).min
    for _ in range(num_iterations):
        rows_T1 = log_TE.logsumexp(dim=1, keepdim=True)  # the 1/T comes with the columns
        log_TE = log_TE - rows_T1.clamp_min(lowest)  # minus infinity from minus infinity would be NaN
        columns_1E = log_TE.logsumexp(dim=0, keepdim=True) + math.log(log_TE.shape[1])
        log_TE = log_TE - columns_1E.clamp_min(lowest)
    return log_TE.exp()


class SinkhornRouter(TopKRouter):
    """A linear layer whose best experts are taken from :func:`sinkhorn_plan` in training, from the scores otherwise.

    The weights are the plain scores of the chosen experts. Balance holds among the tokens of one call, nearly: the
    plan is exact, taking its ``top_k`` largest entries is not. In evaluation, where a token must not depend on its
    neighbours, nothing balances.

    Args:
        hidden_size: width D of a token.
        num_experts: number E of experts.
        top_k: experts per token.
        score_fn: Megatron-LM takes "sigmoid" when ``top_k`` is 1 and "softmax" otherwise.
        norm_topk_prob: divide the chosen weights by their sum. Megatron-LM does not.
        num_iterations: of the plan.
        options: ``bias``, ``jitter`` and ``routed_scaling_factor`` of :class:`TopKRouter`.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score_fn: str = "softmax",
        norm_topk_prob: bool = False,
        num_iterations: int = 20,
        **options,
    ):
        if num_iterations < 1:
            raise ValueError(f"num_iterations must be at least 1, got {num_iterations}")
        super().__init__(hidden_size, num_experts, top_k, score_fn=score_fn, norm_topk_prob=norm_topk_prob, **options)
        self.num_iterations = num_iterations

    def choose(self, logits_TE: Tensor, mask_T: Tensor | None, tokens_T: Tensor | None) -> Tensor | None:
        """The largest entries of each row of the plan, (T, K); None in evaluation."""
        if not self.training:
            return None
        plan_TE = sinkhorn_plan(logits_TE, mask_T, num_iterations=self.num_iterations)
        return lowest_id_top_k(plan_TE, self.top_k)
