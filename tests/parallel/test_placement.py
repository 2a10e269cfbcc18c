from itertools import permutations

import pytest
import torch

from guide_code.experts.grouped import GroupedExperts
from guide_code.parallel.placement import place_experts, spread_over_copies


def busiest(loads, slots, ranks):
    copies = [slots.count(expert) for expert in range(len(loads))]
    each = len(slots) // ranks
    totals = [sum(loads[e] / copies[e] for e in slots[r * each : r * each + each]) for r in range(ranks)]
    return max(totals) / (sum(totals) / ranks)


def test_by_hand():
    """Hot experts side by side: apart, each with a cold one, every rank has 10."""
    placement = place_experts(torch.tensor([9, 8, 2, 1]), 2)
    assert placement.expert_of_slot == (0, 3, 1, 2) and (placement.before, placement.after) == (1.7, 1.0)
    assert placement.slots(4) == [[0], [2], [3], [1]]


def test_a_copy_halves_the_hottest():
    placement = place_experts(torch.tensor([12, 2, 2, 2]), 2, copies=2)
    assert placement.slots(4)[0] == [0, 3] and placement.before == pytest.approx(14 / 9)
    assert placement.after == pytest.approx(1.0) and len(placement.expert_of_slot) == 6


@pytest.mark.parametrize("seed", range(5))
def test_close_to_the_best_and_never_worse_than_reported(seed):
    torch.manual_seed(seed)
    loads = torch.randint(1, 100, (6,))
    placement = place_experts(loads, 3)
    assert sorted(placement.expert_of_slot) == list(range(6))
    assert placement.after == pytest.approx(busiest(loads.tolist(), placement.expert_of_slot, 3))
    assert placement.before == pytest.approx(busiest(loads.tolist(), tuple(range(6)), 3))
    best = min(busiest(loads.tolist(), order, 3) for order in permutations(range(6)))
    assert best - 1e-9 <= placement.after <= 4 / 3 * best and placement.after <= placement.before + 1e-9


def test_copies_never_hurt_and_every_expert_has_a_slot():
    loads = (torch.arange(1, 17).float() ** -1.2 * 1000).long()
    after = []
    for copies in (0, 4, 8, 16):
        placement = place_experts(loads, 4, copies=copies)
        assert all(placement.slots(16)) and len(placement.expert_of_slot) == 16 + copies
        each = len(placement.expert_of_slot) // 4
        ranks = [placement.expert_of_slot[r * each : r * each + each] for r in range(4)]
        assert all(len(set(held)) == len(held) for held in ranks), "two copies on one rank share nothing"
        after.append(placement.after)
    assert after[0] < place_experts(loads, 4).before and after[-1] < 1.02 < after[0]


def test_the_same_layer_from_slots():
    """Weights in slots and ids of slots: the same outputs, and the copies share the tokens of their expert."""
    experts = GroupedExperts(4, 8, 8)
    ids = torch.tensor([[0, 1], [0, 2], [0, 4], [0, -1], [3, 0], [0, 1]])
    counts = torch.bincount(ids[(ids >= 0) & (ids < 4)], minlength=4)
    placement = place_experts(counts, 2, copies=2)
    slotted = GroupedExperts(6, 8, 8)
    slotted.load_state_dict({name: placement.order(p) for name, p in experts.state_dict().items()})
    slots = spread_over_copies(ids, placement, 4)
    x, weights = torch.randn(6, 8), torch.rand(6, 2)
    torch.testing.assert_close(slotted(x, slots, weights), experts(x, ids, weights), rtol=1e-5, atol=1e-6)
    used = torch.bincount(slots[slots < 6], minlength=6)
    hot = placement.slots(4)[0]
    assert len(hot) > 1 and used[hot].max() - used[hot].min() <= 1 and used[hot].sum() == counts[0]
    assert (slots[2, 1], slots[3, 1]) == (6, 6)


def test_no_load_and_what_is_refused():
    assert place_experts(torch.zeros(4), 2).after == 1.0
    with pytest.raises(ValueError, match=r"ranks=2 does not divide both num_experts=4 and .* copies=5"):
        place_experts(torch.ones(4), 2, copies=1)
    with pytest.raises(ValueError, match=r"copies=-2"):
        place_experts(torch.ones(4), 2, copies=-2)
