import math

import pytest
import torch

from guide_code.balance import expert_counts
from guide_code.capacity import apply_capacity
from guide_code.load_metrics import (
    batch_max_violation,
    co_activation,
    dead_experts,
    drop_rate,
    global_max_violation,
    load_entropy,
    rejected_rows,
    router_confidence,
)
from guide_code.routers import top_k_routing


def test_each_batch_may_be_uneven_while_all_together_are_even():
    counts_NE = torch.tensor([[8, 0], [0, 8]])
    assert batch_max_violation(counts_NE).item() == pytest.approx(1.0)
    assert global_max_violation(counts_NE).item() == 0
    assert batch_max_violation(torch.tensor([[6, 2], [4, 4], [0, 0]])).item() == pytest.approx(0.5 / 3)
    assert batch_max_violation(torch.zeros(0, 4)).item() == global_max_violation(torch.zeros(0, 4)).item() == 0


def test_load_entropy():
    assert load_entropy(torch.tensor([5, 5, 5, 5])).item() == pytest.approx(1.0)
    assert load_entropy(torch.tensor([5, 5, 0, 0])).item() == pytest.approx(0.5)
    assert load_entropy(torch.tensor([0, 7, 0])).item() == 0
    half = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    assert load_entropy(torch.tensor([6, 2])).item() == pytest.approx(half)
    assert load_entropy(torch.zeros(3)).item() == 0
    assert load_entropy(torch.tensor([4])).item() == 1


def test_dead_experts():
    assert dead_experts(torch.tensor([3, 0, 1, 0])).item() == 2
    assert dead_experts(torch.zeros(3)).item() == 3


def test_drop_rate_counts_what_was_routed():
    """known_failures A-07: routed (3, 1, 0), capacity 2, kept (2, 1, 0)."""
    scores_TE = torch.tensor([[0.6, 0.3, 0.1]] * 3 + [[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    routing = top_k_routing(scores_TE.log(), 1, mask_T=torch.tensor([1, 1, 1, 1, 0]))
    kept = apply_capacity(routing, 2)
    assert expert_counts(routing.ids, 3).tolist() == [3, 1, 0] and expert_counts(kept.ids, 3).tolist() == [2, 1, 0]
    assert drop_rate(routing.ids, kept.ids, 3).item() == pytest.approx(0.25)
    assert drop_rate(routing.ids, routing.ids, 3).item() == 0
    assert drop_rate(torch.full((2, 1), 3), torch.full((2, 1), 3), 3).item() == 0


def test_router_confidence_is_a_share():
    scores_TE = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.2], [9.0, 0.0, 0.0], [torch.nan] * 3, [0.0] * 3])
    mask_T = torch.tensor([1, 1, 0, 1, 1])
    assert router_confidence(scores_TE, mask_T).item() == pytest.approx((0.5 + 1 / 3 + 1 / 3) / 3)
    assert router_confidence(scores_TE, torch.zeros(5)).item() == 0


def test_co_activation_counts_pairs():
    ids_TK = torch.tensor([[0, 1], [1, 0], [1, 2], [3, 2], [0, 2]])
    pairs = co_activation(ids_TK, 3, torch.tensor([1, 1, 1, 1, 0]))
    assert pairs.tolist() == [[2, 2, 0], [2, 3, 1], [0, 1, 2]]
    ids_TK = torch.rand(50, 9).topk(4, dim=1).indices
    pairs = co_activation(ids_TK, 9)
    assert torch.equal(pairs.diagonal(), expert_counts(ids_TK, 9)) and torch.equal(pairs, pairs.T)
    assert (pairs.sum(dim=1) == 4 * pairs.diagonal()).all()


def test_rejected_rows_are_counted():
    logits_TE = torch.randn(6, 4)
    logits_TE[1, 2], logits_TE[3], logits_TE[5, 0] = torch.nan, torch.inf, torch.nan
    scores_TE = top_k_routing(logits_TE, 2).scores
    assert rejected_rows(scores_TE).item() == 3
    assert rejected_rows(scores_TE, torch.tensor([1, 1, 1, 1, 1, 0])).item() == 2
    assert rejected_rows(scores_TE, torch.zeros(6)).item() == 0
