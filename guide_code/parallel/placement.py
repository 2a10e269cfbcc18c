"""Which rank should hold which expert, from measured loads: greedy, with copies of the hottest experts.

As DeepSeek-V3's redundant experts (arXiv:2412.19437, section 3.4.1) and its EPLB (github.com/deepseek-ai/EPLB): copies
go to the experts with the most tokens per copy, then every copy to the least loaded rank that has room. Graham 1969:
largest first is within 4/3 of the best possible when ranks may hold any number.
Copy alone: needs torch only.

E experts, P ranks, S slots in all (a slot holds one copy), T tokens, K choices per token.
"""

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Where the experts are. Slots of rank p: p * S / P and following."""

    expert_of_slot: tuple[int, ...]
    """(S,) the expert in every slot."""
    ranks: int
    """P."""
    before: float
    """Load of the busiest rank over the mean, with experts in order of their ids and no copies."""
    after: float
    """The same under this placement, when the copies of an expert share its tokens evenly."""

    def slots(self, num_experts: int) -> list[list[int]]:
        """The slots of each expert."""
        found: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(self.expert_of_slot):
            found[expert].append(slot)
        return found

    def order(self, stacked: Tensor) -> Tensor:
        """Stacked weights (E, ...) as they stand in the slots, (S, ...)."""
        return stacked[torch.tensor(self.expert_of_slot, device=stacked.device)]


def place_experts(counts_E: Tensor, ranks: int, *, copies: int = 0) -> Placement:
    """Place experts so that every rank has as many slots and about as many tokens.

    Args:
        counts_E: tokens of each expert, measured over many batches.
        ranks: P.
        copies: further slots, for copies of the experts with the most tokens per copy, on other ranks as long as
            those have room. For inference: the gradients of copies would have to be added up.

    Raises:
        ValueError: the slots, E + copies, cannot be split evenly over the ranks, or E cannot; or copies are too many.
    """
    loads = [float(count) for count in counts_E.tolist()]
    num_experts, num_slots = len(loads), len(loads) + copies
    if ranks < 1 or num_experts % ranks or num_slots % ranks:
        raise ValueError(
            f"ranks must divide the experts and their copies: ranks={ranks} does not divide both "
            f"num_experts={num_experts} and num_experts + copies={num_slots}; give copies in multiples of ranks"
        )
    if not 0 <= copies <= num_experts * (ranks - 1):
        raise ValueError(
            f"copies={copies} must be in [0, {num_experts * (ranks - 1)}]: a rank needs an expert at most once"
        )
    times = [1] * num_experts
    queue = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(queue)
    for _ in range(copies):
        _, expert = heapq.heappop(queue)
        times[expert] += 1
        if times[expert] < ranks:  # a second copy on one rank would share nothing
            heapq.heappush(queue, (-loads[expert] / times[expert], expert))

    room, held = num_slots // ranks, [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    parts = [(loads[expert] / n, expert) for expert, n in enumerate(times) for _ in range(n)]
    for load, expert in sorted(parts, key=lambda part: (-part[0], part[1])):
        free = [rank for rank in range(ranks) if len(held[rank]) < room]
        best = min(free, key=lambda rank: (expert in held[rank], totals[rank], rank))
        held[best].append(expert)
        totals[best] += load
    each = num_experts // ranks
    before = [sum(loads[rank * each : rank * each + each]) for rank in range(ranks)]
    slots = tuple(expert for rank in held for expert in sorted(rank))
    return Placement(slots, ranks, _imbalance(before), _imbalance(totals))


def spread_over_copies(ids_TK: Tensor, placement: Placement, num_experts: int) -> Tensor:
    """Expert ids to slots, (T, K): the tokens of an expert take its copies in turns; no expert stays no slot (S).

    Args:
        ids_TK: expert ids; anything outside [0, E) is no expert.
        placement: of these experts.
        num_experts: E.
    """
    slots = placement.slots(num_experts)
    most = max(len(s) for s in slots)
    table = torch.tensor([[s[i % len(s)] for i in range(most)] for s in slots], device=ids_TK.device)
    copies_E = torch.tensor([len(s) for s in slots], device=ids_TK.device)
    valid_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    safe_TK = torch.where(valid_TK, ids_TK, 0)
    turn_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None]
    return torch.where(valid_TK, table[safe_TK, turn_T1 % copies_E[safe_TK]], len(placement.expert_of_slot))


def _imbalance(totals: list[float]) -> float:
    mean = sum(totals) / len(totals)
    return max(totals) / mean if mean else 1.0
