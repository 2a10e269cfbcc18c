"""Quantile balancing: solve for the bias that would have given every expert its share, and use it in the next step.

Where Wang et al. 2024 (arXiv:2408.15664) nudge the bias for choice by a fixed rate, this computes it: balanced
assignment is a linear programme, and one sweep over its dual variables sets each expert's bias to a quantile. Jianlin
Su 2026, kexue.fm/archives/11619; Megatron-LM ``core/transformer/moe``, load-balancing type ``quantile_balancing``.
Copy with top_k.py into one package: needs torch only.

T tokens, E experts, K choices per token, D hidden size.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .top_k import TopKRouter, expert_scores


def quantile_bias(scores_TE: Tensor, top_k: int, bias_E: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """The bias under which every expert would beat T * top_k / E tokens' cutoffs, or fewer where they tie; mean 0.

    A token's cutoff is its (top_k + 1)-th largest biased score: what an expert must exceed to be chosen. The bias of
    an expert is minus the quantile of its margins (score - cutoff) that leaves that many tokens above. Cutoffs are
    those of the present bias, so one call is one step of an iteration; it stands still when the load is even.

    Args:
        scores_TE: scores without bias. Rows that are not finite do not count.
        top_k: choices per token, below E.
        bias_E: the bias that the tokens were routed with.
        mask_T: 1 or True where the token counts.

    Returns:
        The new bias (E,); ``bias_E`` itself, with mean 0, when no token counts.

    Raises:
        ValueError: ``top_k`` is not in [1, E).
    """
    num_experts = scores_TE.shape[1]
    if not 1 <= top_k < num_experts:
        raise ValueError(f"top_k must be in [1, num_experts={num_experts}) to leave a cutoff, got {top_k}")
    scores_TE = scores_TE.detach()
    valid_T = scores_TE.isfinite().all(dim=-1)
    if mask_T is not None:
        valid_T = valid_T & mask_T.bool()
    scores_TE = torch.where(valid_T[:, None], scores_TE, 0.0)
    cutoff_T1 = (scores_TE + bias_E).topk(top_k + 1, dim=-1).values[:, -1:]
    margin_TE = torch.where(valid_T[:, None], scores_TE - cutoff_T1, -torch.inf)
    share = valid_T.sum() * top_k // num_experts  # below the number of valid tokens, so an index
    # One row more: with no token at all there is still something to index, and it is thrown away below.
    margin_TE = torch.cat([margin_TE.sort(dim=0, descending=True).values, margin_TE.new_zeros(1, num_experts)])
    new_E = -margin_TE.index_select(0, share[None])[0]
    new_E = torch.where(valid_T.any(), new_E, bias_E)
    return new_E - new_E.mean()


class QuantileRouter(TopKRouter):
    """A :class:`TopKRouter` whose ``expert_bias`` (E,) is moved by :meth:`step` to where the load would be even.

    Call ``step`` once after each optimizer step. Training-mode forwards between two steps are averaged; recomputed
    ones (activation checkpointing) are not counted again. Routing itself uses the bias of earlier steps, so no token
    learns anything about later ones.

    Args:
        hidden_size: width D of a token.
        num_experts: number E of experts.
        top_k: experts per token, below E.
        momentum: how much of the old bias stays, in [0, 1). 0.9 damps the noise of small batches.
        options: those of :class:`TopKRouter` but for groups and ``use_expert_bias``, which is on.

    Raises:
        ValueError: an option is out of range.
    """

    expert_bias: Tensor
    target_sum: Tensor
    target_count: Tensor

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, *, momentum: float = 0.9, **options):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if top_k >= num_experts:
            raise ValueError(f"top_k={top_k} must be below num_experts={num_experts}: else nothing can be balanced")
        if options.get("num_groups", 1) != 1:
            raise ValueError(f"num_groups={options['num_groups']}: the quantile of all tokens knows no groups")
        super().__init__(hidden_size, num_experts, top_k, use_expert_bias=True, **options)
        self.momentum = momentum
        self.register_buffer("target_sum", torch.zeros(num_experts), persistent=False)
        self.register_buffer("target_count", torch.zeros((), dtype=torch.int64), persistent=False)

    def choose(self, logits_TE: Tensor, mask_T: Tensor | None, tokens_T: Tensor | None) -> None:
        """Nothing: the best biased scores decide. What the bias should have been is noted here."""
        recompute = torch._C._current_graph_task_id() != -1  # a forward inside a backward pass
        if self.training and not recompute:
            scores_TE = expert_scores(logits_TE, self.options["score_fn"])
            self.target_sum += quantile_bias(scores_TE, self.top_k, self.expert_bias, mask_T)
            self.target_count += 1

    def step(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the bias towards the mean of what was noted since the last step, and forget that.

        Args:
            group: ranks over which to average as well.
        """
        if group is not None:
            dist.all_reduce(self.target_sum, group=group)
            dist.all_reduce(self.target_count, group=group)
        target_E = (self.target_sum / self.target_count.clamp_min(1)).to(self.expert_bias.dtype)
        moved_E = torch.lerp(target_E, self.expert_bias, self.momentum)
        self.expert_bias.copy_(torch.where(self.target_count > 0, moved_E - moved_E.mean(), self.expert_bias))
        self.target_sum.zero_()
        self.target_count.zero_()
