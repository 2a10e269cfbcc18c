import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guide_code.balance import expert_counts, load_balancing_loss
from guide_code.capacity import (
    CAPACITY_RULES,
    PRIORITIES,
    apply_capacity,
    capacity_counts,
    capacity_rule,
    expert_capacity,
)
from guide_code.routers import Routing, top_k_routing
from guide_code.testing.oracle import oracle_kept


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
        ((100, 2, 1, 1.1), {}, 55),  # 100 x 1.1 / 2 is 55.00000000000001 in floating point
        ((45, 3, 1, 1.4), {"rounding": "floor"}, 21),  # 45 x 1.4 / 3 is 20.999999999999996
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
        (lambda r: apply_capacity(r, 1, num_identity=3), r"num_identity must be in \[0, 2\], got 3"),
        (lambda r: capacity_rule("switch", 4, 2, 1, 1.0), "must be one of megatron, .*got 'switch'"),
        (lambda r: expert_capacity(4, 2, 1, float("nan")), "capacity_factor must be above 0, got nan"),
        (lambda r: expert_capacity(4, 2, 1, 0.0), "capacity_factor must be above 0"),
        (lambda r: expert_capacity(4, 2, 1, 1.0, rounding="up"), "rounding must be"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call(routing_of([[0]] * 6, [[1.0]] * 6, 2))


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("megatron", (64, 8, 2, 1.25), 20),
        ("megatron", (100, 2, 1, 1.1), 56),  # its floating point: 55.00000000000001 rounded up
        ("megatron", (10, 4, 1, 1.0), 3),
        ("megablocks", (10, 4, 1, 1.0), 2),
        ("megablocks", (64, 8, 2, 1.25), 20),
        ("deepspeed", (64, 8, 2, 1.25), 20),
        ("deepspeed", (8, 8, 1, 1.0), 4),  # its minimum
        ("deepspeed", (2, 8, 1, 1.0), 2),  # but never more than there are tokens
        ("tutel", (10, 4, 2, 1.0), 6),  # twice the rounded 3, not the rounded 5
        ("tutel", (10, 4, 2, 1.5), 8),
        ("st_moe", (64, 8, 2, 1.25), 10),  # k plays no part
        ("st_moe", (16, 8, 2, 1.25), 4),
        ("nllb", (10, 4, 2, 7.0), 6),
        ("switch_hf", (500, 8, 1, 1.0), 64),
        ("switch_hf", (50, 8, 1, 1.0), 50),
    ],
)
def test_rules_of_published_systems(name, sizes, expected):
    assert capacity_rule(name, *sizes) == expected


def test_every_rule_is_tried_above_and_rules_differ():
    """R-09: the rounding rule is documented and tested. One batch, seven answers."""
    slots = {name: capacity_rule(name, 1000, 16, 2, 1.01) for name in CAPACITY_RULES}
    assert slots == {
        "megatron": 127, "megablocks": 126, "deepspeed": 127, "tutel": 126, "st_moe": 63, "nllb": 126, "switch_hf": 64,
    }  # fmt: skip


@pytest.mark.parametrize("priority", PRIORITIES)
def test_more_slots_than_tokens(priority):
    """R-09 (b): 2 tokens, 4 experts, k = 2, factor 4."""
    routing = routing_of([[0, 1], [0, 2]], [[0.6, 0.4], [0.7, 0.3]], 4)
    assert expert_capacity(2, 4, 2, 4.0) == 2
    assert torch.equal(apply_capacity(routing, 2, priority=priority).ids, routing.ids)
    assert torch.equal(apply_capacity(routing, 99, priority=priority).ids, routing.ids)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.sampled_from(["arrival", "tokens", "probability"]),
    st.integers(0, 8),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 2**32),
)
def test_any_drop_equals_the_oracle(priority, num_tokens, top_k, capacity, seed):
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(num_tokens, 5, generator=generator).argsort(dim=1)[:, :top_k]  # 4 is the sentinel
    weights_TK = torch.rand(num_tokens, top_k, generator=generator)
    scores_TE = torch.rand(num_tokens, 4, generator=generator)
    kept = apply_capacity(Routing(weights_TK, ids_TK, scores_TE, scores_TE), capacity, priority=priority)
    expected = oracle_kept(ids_TK.tolist(), weights_TK.tolist(), 4, capacity, priority=priority)
    assert (kept.ids < 4).tolist() == expected
    assert torch.equal(kept.weights, weights_TK * torch.tensor(expected).view_as(weights_TK))


def test_routed_kept_and_dropped_are_counted_apart():
    """known_failures A-07: losses take the counts before the drop."""
    scores_TE = torch.tensor([[0.6, 0.3, 0.1]] * 3 + [[0.2, 0.5, 0.3]])
    routing = top_k_routing(scores_TE.log(), 1)
    kept = apply_capacity(routing, 2)
    routed_E, kept_E, dropped_E = capacity_counts(routing, kept)
    assert (routed_E.tolist(), kept_E.tolist(), dropped_E.tolist()) == ([3, 1, 0], [2, 1, 0], [1, 0, 0])
    assert load_balancing_loss(routing.scores, routing.ids).item() == pytest.approx(1.3875)
    # With f over all 4 tokens the counts after the drop would have given the lower 1.0125.
    assert 3 * (kept_E / 4 @ scores_TE.mean(dim=0)).item() == pytest.approx(1.0125)


def test_renormalising_after_the_drop():
    """DeepSpeed's top-2 gate; before the drop (GShard, Megatron-LM) the dropped weight is lost."""
    logits_TE = torch.tensor([[2.0, 1.0, 0.0]] * 3 + [[0.0, 1.0, 2.0]])
    before = apply_capacity(top_k_routing(logits_TE, 2), 2)
    assert before.ids.tolist() == [[0, 1], [0, 1], [3, 3], [2, 3]]
    first = torch.tensor([2.0, 1.0]).softmax(dim=0)
    torch.testing.assert_close(before.weights[3], torch.stack([first[0], torch.tensor(0.0)]))
    after = apply_capacity(top_k_routing(logits_TE, 2, norm_topk_prob=False), 2, renormalize=True)
    assert torch.equal(after.ids, before.ids)
    torch.testing.assert_close(after.weights[0], first)
    assert after.weights[2:].tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_renormalising_passes_gradcheck_with_a_token_that_lost_everything():
    ids_TK = torch.tensor([[0, 1], [0, 1], [0, 1]])
    scores_TE = torch.rand(3, 2)

    def run(weights_TK):
        return apply_capacity(Routing(weights_TK, ids_TK, scores_TE, scores_TE), 2, renormalize=True).weights

    assert torch.autograd.gradcheck(run, torch.rand(3, 2, dtype=torch.float64, requires_grad=True))


def test_identity_experts_have_no_limit():
    routing = routing_of([[0, 2], [0, 2], [0, 3], [4, 4]], [[0.5, 0.5]] * 3 + [[0.0, 0.0]], 4)
    kept = apply_capacity(routing, 1, num_identity=2)
    assert kept.ids.tolist() == [[0, 2], [4, 2], [4, 3], [4, 4]]
    assert apply_capacity(routing, 1).ids.tolist() == [[0, 2], [4, 4], [4, 3], [4, 4]]
