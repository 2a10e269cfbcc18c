"""Capacity: the most assignments that an expert takes from one call, and which ones are dropped beyond it.

GShard, Lepikhin et al. 2020 (arXiv:2006.16668), section 2.2; Switch, Fedus et al. 2021 (arXiv:2101.03961), eq. 3;
priority by probability: V-MoE, Riquelme et al. 2021 (arXiv:2106.05974), section 4.1.
Copy alone: needs torch only.

T tokens, E experts, K choices per token, N = T*K assignments.
"""

import math

import torch
from torch import Tensor

PRIORITIES = ("arrival", "tokens", "probability", "random")


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
    tokens, so the result is at most ``num_tokens``; below that bound it is at least ``minimum``.

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
    if capacity_factor <= 0:
        raise ValueError(f"capacity_factor must be above 0, got {capacity_factor}")
    if rounding not in ("ceil", "floor"):
        raise ValueError(f'rounding must be "ceil" or "floor", got {rounding!r}')
    exact = num_tokens * top_k * capacity_factor / num_experts
    slots = math.ceil(exact) if rounding == "ceil" else math.floor(exact)
    return min(max(slots, minimum), num_tokens)


def apply_capacity(routing, capacity: int, *, priority: str = "arrival", group_size: int | None = None):
    """Drop the assignments that no longer fit: their id becomes E and their weight 0; the others stay as they are.

    Padding and rejected tokens (ids outside [0, E)) take no slot.

    Args:
        routing: a ``Routing``; scores and logits pass through.
        capacity: slots per expert, and per group of tokens.
        priority: who comes first. "arrival": first choices in token order, then second choices (GShard).
            "tokens": token order, all choices of a token together. "probability": largest weight first.
            "random": a new order on each call.
        group_size: consecutive tokens that share the capacity (a sequence); all of them when None.

    Raises:
        ValueError: the capacity is negative, the priority unknown, or the groups do not divide the tokens.
    """
    num_tokens, top_k = routing.ids.shape
    num_experts = routing.scores.shape[1]
    if capacity < 0:
        raise ValueError(f"capacity must be at least 0, got {capacity}")
    if group_size is not None and (group_size < 1 or num_tokens % group_size):
        raise ValueError(f"group_size={group_size} must divide the {num_tokens} tokens")
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
    kept_TK = kept_N.view(num_tokens, top_k) & (ids_TK < num_experts)
    weights_TK = torch.where(kept_TK, routing.weights, 0.0)
    return routing._replace(weights=weights_TK, ids=torch.where(kept_TK, ids_TK, num_experts))


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
