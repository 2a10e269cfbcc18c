import pytest
import torch

from guide_code.balance import expert_counts
from guide_code.capacity import PRIORITIES, apply_capacity, expert_capacity
from guide_code.routers import Routing, top_k_routing


def routing_of(ids, weights, num_experts):
    ids_TK, scores_TE = torch.tensor(ids), torch.rand(len(ids), num_experts)
    return Routing(torch.tensor(weights), ids_TK, scores_TE, scores_TE)


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ((64, 8, 2, 1.0), {}, 16),
        ((64, 8, 2, 1.25), {}, 20),
        ((10, 4, 1, 1.0), {}, 3),
        ((10, 4, 1, 1.0), {"rounding": "floor"}, 2),
        ((2, 8, 1, 1.0), {}, 1),
        ((16, 8, 1, 1.0), {"minimum": 4}, 4),
        ((2, 4, 2, 4.0), {}, 2),
        ((0, 4, 2, 1.0), {}, 0),
    ],
)
def test_expert_capacity(sizes, options, expected):
    assert expert_capacity(*sizes, **options) == expected


@pytest.mark.parametrize("priority", PRIORITIES)
def test_exactly_c_tokens_are_kept_under_every_priority(priority):
    """known_failures R-09 (a): 5 tokens all to expert 0 of 4, factor 1.0."""
    routing = routing_of([[0]] * 5, [[0.5]] * 5, 4)
    kept = apply_capacity(routing, expert_capacity(5, 4, 1, 1.0), priority=priority)
    assert expert_counts(kept.ids, 4).tolist() == [2, 0, 0, 0]
    assert ((kept.ids == 4) == (kept.weights == 0)).all()


def test_priorities_on_one_example():
    ids = [[0, 1], [1, 0], [0, 1]]
    weights = [[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]]
    routing = routing_of(ids, weights, 2)
    assert apply_capacity(routing, 2, priority="arrival").ids.tolist() == [[0, 1], [1, 2], [0, 2]]
    assert apply_capacity(routing, 2, priority="tokens").ids.tolist() == [[0, 1], [1, 0], [2, 2]]
    assert apply_capacity(routing, 1, priority="probability").ids.tolist() == [[2, 2], [1, 2], [0, 2]]


def test_kept_weights_are_unchanged_and_differentiable():
    weights_TK = torch.rand(6, 2, requires_grad=True)
    routing = routing_of([[0, 1]] * 6, [[0.0, 0.0]] * 6, 2)._replace(weights=weights_TK)
    kept = apply_capacity(routing, 4)
    assert torch.equal(kept.weights[:4], weights_TK[:4]) and (kept.weights[4:] == 0).all()
    kept.weights.backward(torch.ones(6, 2))
    assert weights_TK.grad.tolist() == [[1.0, 1.0]] * 4 + [[0.0, 0.0]] * 2


def test_groups_have_their_own_capacity():
    routing = routing_of([[0]] * 6, [[1.0]] * 6, 2)
    assert apply_capacity(routing, 2, group_size=3).ids.flatten().tolist() == [0, 0, 2, 0, 0, 2]
    assert apply_capacity(routing, 2).ids.flatten().tolist() == [0, 0, 2, 2, 2, 2]


def test_padding_takes_no_slot():
    mask_T = torch.tensor([0, 0, 0, 1, 1, 1])
    routing = top_k_routing(torch.tensor([[5.0, 0.0]] * 6), 1, mask_T=mask_T)
    assert apply_capacity(routing, 2).ids.flatten().tolist() == [2, 2, 2, 0, 0, 2]


def test_random_priority_changes_from_call_to_call():
    routing = routing_of([[0]] * 64, [[1.0]] * 64, 2)
    kept = {tuple(apply_capacity(routing, 8, priority="random").ids.flatten().tolist()) for _ in range(4)}
    assert len(kept) == 4


def test_no_token_and_no_capacity():
    """R-09 (d)."""
    empty = Routing(torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 4), torch.zeros(0, 4))
    assert apply_capacity(empty, 3).ids.shape == (0, 2)
    assert apply_capacity(routing_of([[0]], [[1.0]], 2), 0).ids.tolist() == [[2]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: apply_capacity(r, -1), "capacity must be at least 0, got -1"),
        (lambda r: apply_capacity(r, 1, priority="fifo"), "priority must be one of .*'fifo'"),
        (lambda r: apply_capacity(r, 1, group_size=4), "group_size=4 must divide the 6 tokens"),
        (lambda r: expert_capacity(4, 2, 1, 0.0), "capacity_factor must be above 0"),
        (lambda r: expert_capacity(4, 2, 1, 1.0, rounding="up"), "rounding must be"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call(routing_of([[0]] * 6, [[1.0]] * 6, 2))
