"""The default router: every token takes the experts that score best on it, and each counts by its score.

Shazeer et al. 2017 (arXiv:1701.06538), eq. 3-5; Switch, Fedus et al. 2021 (arXiv:2101.03961), eq. 1-2;
DeepSeek-V3 (arXiv:2412.19437), eq. 12-16.
Copy alone: needs torch only.

T tokens, D hidden size, E experts, K choices per token, G groups of experts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCORE_FNS = ("softmax", "sigmoid", "sqrtsoftplus")
GROUP_SCORES = ("top2_sum", "max")


class Routing(NamedTuple):
    """The decision of a router. Slots that lead nowhere hold the id ``E`` (one past the last expert).

    A slot leads nowhere when its token is padding, when it was dropped for lack of capacity, when a score of its
    token is not finite, or when fewer experts than slots want the token. Its weight is then exactly 0.
    """

    weights: Tensor
    """(T, K) combine weights, at least float32."""
    ids: Tensor
    """(T, K) int64 expert ids in [0, E], distinct within a row but for E; best choice first."""
    scores: Tensor
    """(T, E) scores over all experts, without the bias for choice. NaN throughout a row that was rejected."""
    logits: Tensor
    """(T, E) what the scores were computed from."""


def top_k_routing(
    logits_TE: Tensor,
    top_k: int,
    *,
    score_fn: str = "softmax",
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    num_groups: int = 1,
    top_k_groups: int = 1,
    group_score: str = "top2_sum",
    expert_bias_E: Tensor | None = None,
    ids_TK: Tensor | None = None,
    mask_T: Tensor | None = None,
) -> Routing:
    """Choose the ``top_k`` experts of every token.

    The arithmetic is done in float32 or wider, with autocast off. Of experts with equal scores the lowest id
    is chosen first, on every device (``torch.topk`` promises no order).

    Args:
        logits_TE: router outputs. A single -inf forbids one expert; a row whose scores are not all finite is
            rejected: sentinel ids, zero weights, no gradient.
        top_k: experts per token, 1 to E.
        score_fn: "softmax" over all experts, "sigmoid" (DeepSeek-V3) or "sqrtsoftplus" (DeepSeek-V4) of each.
        norm_topk_prob: divide the chosen weights by their sum. Softmax then top-k then this is the same as
            top-k then softmax (gpt-oss).
        routed_scaling_factor: multiplies the weights last (2.5 in DeepSeek-V3).
        num_groups: experts 0..E/G-1 form the first group, and so on; 1 means no groups.
        top_k_groups: groups from which a token may choose.
        group_score: a group's score: the sum of its two best ("top2_sum", DeepSeek-V3) or its best ("max", V2).
        expert_bias_E: added to the scores for the choice of groups and experts, never to the weights
            (Wang et al. 2024, arXiv:2408.15664).
        ids_TK: experts chosen elsewhere (a table, a recording, a solved assignment), any number of slots per
            token. They only get their weights here, so ``top_k``, groups and bias play no part. An id outside
            [0, E) is an empty slot.
        mask_T: 1 or True where the token is real; bool, integer or float.

    Raises:
        ValueError: an argument is out of range; the message names it and its value.
    """
    num_experts = _check(logits_TE, top_k, score_fn, num_groups, top_k_groups, group_score, mask_T, ids_TK)
    with autocast_off(logits_TE):
        wide = torch.promote_types(logits_TE.dtype, torch.float32)
        logits_TE = logits_TE.to(wide)
        finite_T = expert_scores(logits_TE.detach(), score_fn).isfinite().all(dim=-1)
        # Clean before the softmax: behind a NaN score, a zero gradient times NaN is NaN.
        scores_TE = expert_scores(torch.where(finite_T[:, None], logits_TE, 0.0), score_fn)

        if ids_TK is None:
            choice_TE = scores_TE.detach() if expert_bias_E is None else scores_TE.detach() + expert_bias_E
            if num_groups > 1:
                choice_TE = _keep_best_groups(choice_TE, num_groups, top_k_groups, group_score)
            ids_TK = lowest_id_top_k(choice_TE, top_k)

        valid_T = finite_T if mask_T is None else finite_T & mask_T.bool()
        used_TK = valid_T[:, None] & (ids_TK >= 0) & (ids_TK < num_experts)
        weights_TK = torch.where(used_TK, scores_TE.gather(-1, ids_TK.clamp(0, num_experts - 1)), 0.0)
        if norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(wide).tiny)
        weights_TK = weights_TK * routed_scaling_factor
        ids_TK = torch.where(used_TK, ids_TK, num_experts)
        scores_TE = torch.where(finite_T[:, None], scores_TE, torch.nan)
    return Routing(weights_TK, ids_TK, scores_TE, logits_TE)


class TopKRouter(nn.Module):
    """A linear layer from tokens to experts, then :func:`top_k_routing`.

    Args:
        hidden_size: width D of a token.
        num_experts: number E of experts.
        top_k: experts per token.
        bias: add a learned bias to the logits (gpt-oss).
        jitter: in training, multiply what the router sees by uniform noise in [1 - jitter, 1 + jitter]
            (Switch, section 2.2). The experts see the tokens as they are; evaluation has no noise.
        use_expert_bias: keep a float32 buffer ``expert_bias`` (E,) that moves the choice. A balancer updates
            it; no cast of the module narrows it.
        score_fn: and the options after it: see :func:`top_k_routing`.

    Raises:
        ValueError: an option is out of range.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        bias: bool = False,
        jitter: float = 0.0,
        use_expert_bias: bool = False,
        score_fn: str = "softmax",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        num_groups: int = 1,
        top_k_groups: int = 1,
        group_score: str = "top2_sum",
    ):
        super().__init__()
        if not 0.0 <= jitter < 1.0:
            raise ValueError(f"jitter must be in [0, 1), got {jitter}")
        self.num_experts, self.top_k, self.jitter = num_experts, top_k, jitter
        self.options = {
            "score_fn": score_fn,
            "norm_topk_prob": norm_topk_prob,
            "routed_scaling_factor": routed_scaling_factor,
            "num_groups": num_groups,
            "top_k_groups": top_k_groups,
            "group_score": group_score,
        }
        top_k_routing(torch.zeros(0, num_experts, device="cpu"), top_k, **self.options)  # refuses bad options now
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_experts)) if bias else None
        self.register_buffer("expert_bias", torch.zeros(num_experts) if use_expert_bias else None)
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, tokens_T: Tensor | None = None) -> Routing:
        """Route tokens ``x_TD``; ``tokens_T`` (their ids in the vocabulary) is for routers that hash them."""
        with autocast_off(x_TD):
            # Rows that must not count are zeroed before the product: 0 x NaN would reach the weight's gradient.
            finite_T = x_TD.isfinite().all(dim=-1)
            usable_T = finite_T if mask_T is None else finite_T & mask_T.bool()
            wide = torch.promote_types(x_TD.dtype, torch.float32)
            x_TD = torch.where(usable_T[:, None], x_TD, 0.0).to(wide)
            if self.training and self.jitter:
                x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self.jitter, 1 + self.jitter)
            logits_TE = F.linear(x_TD, self.weight.to(wide), None if self.bias is None else self.bias.to(wide))
            logits_TE = torch.where(finite_T[:, None], logits_TE, torch.nan)
        choice = {"expert_bias_E": self.expert_bias, "ids_TK": self.choose(logits_TE.detach(), mask_T, tokens_T)}
        return top_k_routing(logits_TE, self.top_k, mask_T=mask_T, **choice, **self.options)

    def choose(self, logits_TE: Tensor, mask_T: Tensor | None, tokens_T: Tensor | None) -> Tensor | None:
        """The experts of every token, (T, any K), where another rule than the best scores decides; None here.

        Routers that choose otherwise override this and nothing else.
        """

    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, kept in before.items():
            moved = self._buffers[name]
            if kept is not None and moved is not None and moved.dtype != kept.dtype:
                # A cast to bfloat16 would swallow updates of 0.001: move the buffer, keep its precision.
                self._buffers[name] = moved.to(kept.dtype) if kept.is_meta else kept.to(moved.device)
        return self

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.weight.shape[1]}, {self.num_experts}, {self.top_k}, {options}"


def autocast_off(x: Tensor) -> torch.autocast:
    """A context in which autocast narrows nothing on the device of ``x``."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)  # autocast knows no meta device


def expert_scores(logits_TE: Tensor, score_fn: str) -> Tensor:
    """Scores (T, E) of logits: "softmax" over the experts, "sigmoid" or "sqrtsoftplus" of each."""
    if score_fn == "softmax":
        return logits_TE.softmax(dim=-1)
    if score_fn == "sigmoid":
        return logits_TE.sigmoid()
    tiny = torch.finfo(logits_TE.dtype).tiny
    return F.softplus(logits_TE).clamp_min(tiny).sqrt()  # the square root has no slope at 0


def _keep_best_groups(choice_TE: Tensor, num_groups: int, top_k_groups: int, group_score: str) -> Tensor:
    """Set the experts outside the best groups to -inf (0 would beat scores that a bias made negative)."""
    choice_TGM = choice_TE.unflatten(-1, (num_groups, -1))  # M experts per group
    best = 2 if group_score == "top2_sum" else 1
    group_TG = choice_TGM.topk(min(best, choice_TGM.shape[-1]), dim=-1).values.sum(dim=-1)
    kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    kept_TG.scatter_(-1, lowest_id_top_k(group_TG, top_k_groups), True)
    return choice_TGM.masked_fill(~kept_TG[..., None], -torch.inf).flatten(-2)


def lowest_id_top_k(values_TE: Tensor, k: int) -> Tensor:
    """Ids (T, k) of the k largest of every row, largest first, equal ones by id: a stable sort keeps their order."""
    return torch.sort(values_TE, dim=-1, descending=True, stable=True).indices[:, :k]


def _check(logits_TE, top_k, score_fn, num_groups, top_k_groups, group_score, mask_T, ids_TK) -> int:
    if logits_TE.ndim != 2 or not logits_TE.is_floating_point():
        raise ValueError(
            f"logits must be floating point (tokens, experts), got {logits_TE.dtype} {tuple(logits_TE.shape)}"
        )
    num_experts = logits_TE.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be in [1, num_experts={num_experts}], got {top_k}")
    if score_fn not in SCORE_FNS:
        raise ValueError(f"score_fn must be one of {SCORE_FNS}, got {score_fn!r}")
    if group_score not in GROUP_SCORES:
        raise ValueError(f"group_score must be one of {GROUP_SCORES}, got {group_score!r}")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups must divide num_experts={num_experts}, got {num_groups}")
    if not 1 <= top_k_groups <= num_groups:
        raise ValueError(f"top_k_groups must be in [1, num_groups={num_groups}], got {top_k_groups}")
    reachable = top_k_groups * num_experts // num_groups
    if top_k > reachable:
        raise ValueError(
            f"top_k={top_k} experts cannot come from top_k_groups={top_k_groups} of num_groups={num_groups} "
            f"groups: they hold {reachable}"
        )
    if mask_T is not None and mask_T.shape != logits_TE.shape[:1]:
        raise ValueError(
            f"mask has shape {tuple(mask_T.shape)} but there are {logits_TE.shape[0]} tokens; "
            "give one entry per token of this call (drop the columns of cached tokens)"
        )
    if ids_TK is not None and (
        ids_TK.ndim != 2 or ids_TK.shape[0] != logits_TE.shape[0] or ids_TK.dtype != torch.int64
    ):
        raise ValueError(
            f"ids must be int64 (tokens, slots) for {logits_TE.shape[0]} tokens, "
            f"got {ids_TK.dtype} {tuple(ids_TK.shape)}"
        )
    return num_experts
