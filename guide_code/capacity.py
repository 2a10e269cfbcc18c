"""Capacity: the most assignments that an expert takes from one call, and which ones are dropped beyond it.

GShard, Lepikhin et al. 2020 (arXiv:2006.16668), section 2.2; Switch, Fedus et al. 2021 (arXiv:2101.03961), eq. 3;
priority by probability: V-MoE, Riquelme et al. 2021 (arXiv:2106.05974), section 4.1.
Copy alone: needs torch only.

T tokens, E experts, K choices per token, N = T*K assignments.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

PRIORITIES = ("arrival", "tokens", "probability", "random")

CAPACITY_RULES = {
    "megatron": lambda tokens, experts, top_k, factor: math.ceil(tokens * top_k / experts * factor),
    "megablocks": lambda tokens, experts, top_k, factor: int(factor * (top_k * tokens / experts)),
    "deepspeed": lambda tokens, experts, top_k, factor: max(4, math.ceil(tokens / experts * (factor * top_k))),
    "tutel": lambda tokens, experts, top_k, factor: top_k * int(factor * math.ceil(tokens / experts)),
    "st_moe": lambda tokens, experts, top_k, factor: max(4, int(tokens * factor / experts)),
    "nllb": lambda tokens, experts, top_k, factor: 2 * math.ceil(tokens / experts),
    "switch_hf": lambda tokens, experts, top_k, factor: 64,
}
"""Slots per expert in each system's own arithmetic, see :func:`capacity_rule`."""


class CapacityCounts(NamedTuple):
    """Assignments per expert, each (E,) int64; routed = kept + dropped."""

    routed: Tensor
    """What the router chose. Losses and load belong here: after the drop an overfull expert looks less so."""
    kept: Tensor
    """What is computed."""
    dropped: Tensor
    """What found no slot."""


def expert_capacity(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    capacity_factor: float,
    *,
    rounding: str = "ceil",
    minimum: int = 1,
) -> int:
    """Slots per expert: ``num_tokens * top_k / num_experts * capacity_factor``, rounded, within bounds.

    1.0 leaves exactly enough slots for a perfectly even load. An expert never needs more slots than there are
    tokens, so the result is at most ``num_tokens``; below that bound it is at least ``minimum``. The factor is taken
    as the decimal it was written as: 100 tokens on 2 experts with 1.1 give 55, where floating point would round
    55.00000000000001 up to 56.

    Args:
        num_tokens: tokens that share the capacity.
        num_experts: number of experts.
        top_k: choices per token.
        capacity_factor: slack over an even load, above 0.
        rounding: "ceil" (Megatron-LM) or "floor" (Switch).
        minimum: least number of slots (DeepSpeed: 4).

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0 < capacity_factor < math.inf:
        raise ValueError(f"capacity_factor must be above 0, got {capacity_factor}")
    if rounding not in ("ceil", "floor"):
        raise ValueError(f'rounding must be "ceil" or "floor", got {rounding!r}')
    exact = Fraction(num_tokens * top_k, num_experts) * Fraction(str(capacity_factor))
    slots = math.ceil(exact) if rounding == "ceil" else math.floor(exact)
    return min(max(slots, minimum), num_tokens)


def capacity_rule(name: str, num_tokens: int, num_experts: int, top_k: int, capacity_factor: float) -> int:
    """Slots per expert as a published system computes them, floating point included, but at most ``num_tokens``.

    | name       | slots                             | tokens that share them            | file                     |
    | ---------- | --------------------------------- | --------------------------------- | ------------------------ |
    | megatron   | ceil(T k / E x factor)            | a rank's micro-batch              | ``moe/moe_utils.py``     |
    | megablocks | int(factor x k T / E)             | those of all expert-parallel ranks | ``layers/moe.py``       |
    | deepspeed  | ceil(T / E x factor k), 4 or more | a rank's micro-batch              | ``moe/sharded_moe.py``   |
    | tutel      | k int(factor x ceil(T / E))       | a rank's micro-batch              | ``impls/fast_dispatch.py`` |
    | st_moe     | int(T x factor / E), 4 or more    | a sequence; k plays no part       | ``st_moe_pytorch.py``    |
    | nllb       | 2 ceil(T / E)                     | a batch; neither k nor the factor | transformers             |
    | switch_hf  | 64                                | a sequence; a setting, no formula | transformers             |

    Switch itself (eq. 3) is ``expert_capacity(..., top_k=1, rounding="floor")`` without its bounds.

    Raises:
        ValueError: the name is not one of ``CAPACITY_RULES``.
    """
    if name not in CAPACITY_RULES:
        raise ValueError(f"the capacity rule must be one of {', '.join(CAPACITY_RULES)}, got {name!r}")
    return min(CAPACITY_RULES[name](num_tokens, num_experts, top_k, capacity_factor), num_tokens)


def apply_capacity(
    routing,
    capacity: int,
    *,
    priority: str = "arrival",
    group_size: int | None = None,
    renormalize: bool = False,
    num_identity: int = 0,
):
    """Drop the assignments that no longer fit: their id becomes E and their weight 0; the others stay as they are.

    Padding and rejected tokens (ids outside [0, E)) take no slot.

    Args:
        routing: a ``Routing``; scores and logits pass through.
        capacity: slots per expert, and per group of tokens.
        priority: who comes first. "arrival": first choices in token order, then second choices (GShard).
            "tokens": token order, all choices of a token together. "probability": largest weight first.
            "random": a new order on each call.
        group_size: consecutive tokens that share the capacity (a sequence); all of them when None.
        renormalize: divide the kept weights of a token by their sum, so that a dropped choice is made up for by the
            others (DeepSpeed's top-2 gate, ``moe/sharded_moe.py``, whose router does not normalise before). False:
            what was dropped is lost (GShard, Megatron-LM).
        num_identity: so many of the last experts compute nothing and have no limit.

    Raises:
        ValueError: the capacity is negative, the priority unknown, the groups do not divide the tokens, or there are
            more identity experts than experts.
    """
    num_tokens, top_k = routing.ids.shape
    num_experts = routing.scores.shape[1]
    if capacity < 0:
        raise ValueError(f"capacity must be at least 0, got {capacity}")
    if group_size is not None and (group_size < 1 or num_tokens % group_size):
        raise ValueError(f"group_size={group_size} must divide the {num_tokens} tokens")
    if not 0 <= num_identity <= num_experts:
        raise ValueError(f"num_identity must be in [0, {num_experts}], got {num_identity}")
    order_N = _priority_order(routing.weights.detach(), priority)
    ids_TK = torch.where((routing.ids >= 0) & (routing.ids < num_experts), routing.ids, num_experts)
    queue_TK = ids_TK
    if group_size is not None:
        groups_T = torch.arange(num_tokens, device=ids_TK.device) // group_size
        queue_TK = queue_TK + groups_T[:, None] * (num_experts + 1)

    # Line up in order of priority before each expert: the place in the queue is the distance to its first.
    queue_N, line_N = queue_TK.flatten()[order_N].sort(stable=True)
    place_N = torch.arange(len(queue_N), device=queue_N.device) - torch.searchsorted(queue_N, queue_N)
    kept_N = torch.empty_like(place_N, dtype=torch.bool)
    kept_N[order_N[line_N]] = place_N < capacity
    kept_TK = (kept_N.view(num_tokens, top_k) | (ids_TK >= num_experts - num_identity)) & (ids_TK < num_experts)
    weights_TK = torch.where(kept_TK, routing.weights, 0.0)
    if renormalize:
        tiny = torch.finfo(weights_TK.dtype).tiny
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp_min(tiny)
    return routing._replace(weights=weights_TK, ids=torch.where(kept_TK, ids_TK, num_experts))


def capacity_counts(routing, kept) -> CapacityCounts:
    """Assignments per expert before the drop, after it, and the difference.

    Args:
        routing: the ``Routing`` of the router.
        kept: what :func:`apply_capacity` made of it.
    """
    num_experts = routing.scores.shape[1]
    routed_E, kept_E = _counts(routing.ids, num_experts), _counts(kept.ids, num_experts)
    return CapacityCounts(routed_E, kept_E, routed_E - kept_E)


def _counts(ids_TK: Tensor, num_experts: int) -> Tensor:
    slots_N = torch.where((ids_TK >= 0) & (ids_TK < num_experts), ids_TK, num_experts).flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_TK.device)
    return counts.scatter_add_(0, slots_N, torch.ones_like(slots_N))[:num_experts]


def _priority_order(weights_TK: Tensor, priority: str) -> Tensor:
    """Positions in the flattened (T, K), first served first."""
    num_tokens, top_k = weights_TK.shape
    positions_TK = torch.arange(weights_TK.numel(), device=weights_TK.device).view(num_tokens, top_k)
    if priority == "arrival":
        return positions_TK.T.flatten()
    if priority == "tokens":
        return positions_TK.flatten()
    if priority == "probability":
        return weights_TK.flatten().sort(descending=True, stable=True).indices
    if priority == "random":
        return torch.randperm(weights_TK.numel(), device=weights_TK.device)
    raise ValueError(f"priority must be one of {PRIORITIES}, got {priority!r}")
