import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from guide_code.balance import expert_counts
from guide_code.routers import TopKRouter, top_k_routing
from guide_code.testing.oracle import oracle_routing

OPTIONS = [
    {"score_fn": score_fn, "norm_topk_prob": norm, "routed_scaling_factor": scale, **groups}
    for score_fn, norm, scale, groups in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus"),
        (True, False),
        (1.0, 2.5),
        (
            {},
            {"num_groups": 4, "top_k_groups": 2, "group_score": "top2_sum"},
            {"num_groups": 4, "top_k_groups": 2, "group_score": "max"},
        ),
    )
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_top_k_routing_equals_oracle(options):
    logits_TE, bias_E = torch.randn(40, 12, dtype=torch.float64), torch.randn(12)
    routing = top_k_routing(logits_TE, 3, expert_bias_E=bias_E, **options)
    weights, ids, scores = oracle_routing(logits_TE, 3, expert_bias_E=bias_E, **options)
    assert routing.ids.tolist() == ids
    torch.testing.assert_close(routing.weights, torch.tensor(weights, dtype=torch.float64))
    torch.testing.assert_close(routing.scores, torch.tensor(scores, dtype=torch.float64))
    assert routing.logits is logits_TE


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_top_k_routing_passes_gradcheck(options):
    logits_TE = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    bias_E = torch.randn(12)

    def run(logits_TE):
        routing = top_k_routing(logits_TE, 3, expert_bias_E=bias_E, **options)
        return routing.weights, routing.scores

    assert torch.autograd.gradcheck(run, logits_TE)


def test_softmax_before_or_after_top_k_is_the_same():
    logits_TE = torch.randn(50, 16, dtype=torch.float64)
    after_TK = logits_TE.topk(4).values.softmax(dim=-1)
    torch.testing.assert_close(top_k_routing(logits_TE, 4).weights, after_TK)


def test_forbidden_groups_stay_forbidden_when_the_bias_is_negative():
    """Masking them with 0 would make them the best once every biased score is below 0."""
    logits_TE = torch.randn(64, 8)
    options = {"score_fn": "sigmoid", "num_groups": 4, "top_k_groups": 1, "expert_bias_E": torch.full((8,), -5.0)}
    ids_TK = top_k_routing(logits_TE, 2, **options).ids
    assert (ids_TK[:, 0] // 2 == ids_TK[:, 1] // 2).all()


def test_max_and_top2_sum_choose_different_groups():
    logits_TE = torch.tensor([[2.0, -9.0, 1.5, 1.5]])
    chosen = {
        score: top_k_routing(
            logits_TE, 1, score_fn="sigmoid", num_groups=2, top_k_groups=1, group_score=score
        ).ids.item()
        for score in ("max", "top2_sum")
    }
    assert chosen == {"max": 0, "top2_sum": 2}


def test_bias_moves_the_choice_and_never_the_weights():
    logits_TE = torch.zeros(1, 4)
    routing = top_k_routing(
        logits_TE, 2, score_fn="sigmoid", norm_topk_prob=False, expert_bias_E=torch.tensor([0.0, 0.0, 1.0, 2.0])
    )
    assert routing.ids.tolist() == [[3, 2]] and routing.weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_bad_rows_are_rejected_and_poison_no_other(score_fn):
    """known_failures R-07, and stricter: a row without finite scores reaches no expert."""
    good = torch.randn(3, 8)
    nan, inf = torch.nan, torch.inf
    bad = torch.tensor([[nan] * 8, [0, nan, *[1.0] * 6], [0, inf, *[1.0] * 6], [-inf] * 8])
    rejected = [True, True, score_fn != "sigmoid", score_fn == "softmax"]  # sigmoid(inf) is 1, sigmoid(-inf) is 0
    logits_TE = torch.cat([good, bad]).requires_grad_()
    routing = top_k_routing(logits_TE, 4, score_fn=score_fn)
    for row, no in enumerate(rejected, start=3):
        assert (routing.ids[row] == 8).all() == no
        assert len(set(routing.ids[row].tolist())) == (1 if no else 4)
        assert routing.weights[row].count_nonzero() == 0 or not no
        assert routing.weights[row].isfinite().all()
    alone = top_k_routing(good, 4, score_fn=score_fn)
    assert torch.equal(routing.ids[:3], alone.ids) and torch.equal(routing.weights[:3], alone.weights)
    routing.weights.backward(torch.randn(7, 4))
    rows = torch.tensor([True] * 3 + [not no for no in rejected])
    assert (logits_TE.grad[~rows] == 0).all() and logits_TE.grad[:3].isfinite().all()


def test_ties_go_to_the_lowest_id():
    assert top_k_routing(torch.zeros(2, 8), 4).ids.tolist() == [[0, 1, 2, 3]] * 2
    logits_TE = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])
    assert top_k_routing(logits_TE, 4).ids.tolist() == [[1, 2, 4, 0]]
    groups = top_k_routing(torch.zeros(1, 8), 2, num_groups=4, top_k_groups=1)
    assert groups.ids.tolist() == [[0, 1]]


def test_an_expert_at_minus_infinity_is_never_preferred():
    routing = top_k_routing(torch.tensor([[-torch.inf, 0.0, 1.0]]), 2)
    assert routing.ids.tolist() == [[2, 1]] and routing.scores[0, 0] == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_mask_gives_the_sentinel_whatever_its_dtype(dtype):
    mask_T = torch.tensor([1, 0, 1]).to(dtype)
    routing = top_k_routing(torch.randn(3, 4), 2, mask_T=mask_T)
    assert routing.ids[1].tolist() == [4, 4] and routing.weights[1].tolist() == [0, 0]
    assert (routing.ids[[0, 2]] < 4).all() and routing.scores.isfinite().all()


def test_tiny_sigmoid_scores_still_give_weights_that_sum_to_one():
    routing = top_k_routing(torch.full((1, 4), -60.0), 2, score_fn="sigmoid")
    assert routing.weights.tolist() == [[0.5, 0.5]]


def test_top_k_routing_is_float32_under_autocast_and_from_bfloat16():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = top_k_routing(torch.randn(5, 8).bfloat16(), 2)
    assert {routing.weights.dtype, routing.scores.dtype, routing.logits.dtype} == {torch.float32}
    assert top_k_routing(torch.randn(0, 8), 2).ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"top_k": 9}, r"top_k must be in \[1, num_experts=8\], got 9"),
        ({"score_fn": "relu"}, "score_fn must be one of .*'relu'"),
        ({"num_groups": 3}, "num_groups must divide num_experts=8, got 3"),
        ({"num_groups": 4, "top_k_groups": 5}, r"top_k_groups must be in \[1, num_groups=4\], got 5"),
        ({"num_groups": 4, "top_k_groups": 1, "top_k": 3}, "top_k=3 experts cannot come from top_k_groups=1"),
        ({"group_score": "mean"}, "group_score must be one of .*'mean'"),
        ({"mask_T": torch.ones(4)}, r"mask has shape \(4,\) but there are 3 tokens"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        top_k_routing(torch.randn(3, 8), **{"top_k": 2, **arguments})


def test_router_refuses_bad_options_when_made():
    with pytest.raises(ValueError, match="top_k must be in"):
        TopKRouter(16, 4, 5)
    with pytest.raises(ValueError, match="jitter must be in"):
        TopKRouter(16, 4, 2, jitter=1.0)


def test_router_computes_in_float32_from_the_product_on():
    router = TopKRouter(512, 16, 2, bias=True).to(torch.bfloat16)
    nn.init.normal_(router.bias)
    x_TD = torch.randn(30, 512).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_TE = router(x_TD).logits
    expected_TE = x_TD.float() @ router.weight.float().T + router.bias.float()
    assert logits_TE.dtype == torch.float32
    torch.testing.assert_close(logits_TE, expected_TE)


def test_padding_and_bad_tokens_reach_no_gradient():
    router = TopKRouter(8, 4, 2, bias=True)
    x_TD = torch.randn(5, 8)
    x_TD[1], x_TD[3] = torch.nan, torch.nan
    x_TD.requires_grad_()
    mask_T = torch.tensor([1, 0, 1, 1, 1])
    routing = router(x_TD, mask_T)
    assert routing.ids[[1, 3]].tolist() == [[4, 4]] * 2
    assert not routing.scores[[1, 3]].isfinite().any() and routing.scores[[0, 2, 4]].isfinite().all()
    routing.weights.backward(torch.randn(5, 2))
    assert router.weight.grad.isfinite().all() and router.weight.grad.count_nonzero() > 0
    assert (x_TD.grad[[1, 3]] == 0).all() and x_TD.grad.isfinite().all()


def test_jitter_is_for_training_and_stays_in_the_router():
    """known_failures R-06."""
    router = TopKRouter(16, 8, 2, jitter=0.3)
    x_TD = torch.randn(20, 16)
    before = x_TD.clone()
    assert not torch.equal(router(x_TD).logits, router(x_TD).logits)
    assert torch.equal(x_TD, before)
    router.eval()
    plain = TopKRouter(16, 8, 2)
    plain.load_state_dict(router.state_dict())
    assert torch.equal(router(x_TD).logits, router(x_TD).logits)
    assert torch.equal(router(x_TD).logits, plain(x_TD).logits)


def test_expert_bias_keeps_float32_under_every_cast():
    router = TopKRouter(8, 4, 2, use_expert_bias=True)
    exact = torch.tensor([0.001, 1.001, -2.003, 0.0])
    router.expert_bias.copy_(exact)
    for cast in (nn.Module.bfloat16, nn.Module.half, lambda m: m.to(torch.float64), lambda m: m.to("cpu")):
        router = cast(router)
        assert router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, exact)
    assert "expert_bias" in router.state_dict() and "expert_bias" not in TopKRouter(8, 4, 2).state_dict()
    with torch.device("meta"):
        meta = TopKRouter(8, 4, 2, use_expert_bias=True)
    assert meta.bfloat16().expert_bias.dtype == torch.float32
    assert meta.to_empty(device="cpu").expert_bias.dtype == torch.float32


@st.composite
def problems(draw):
    """Logits on a coarse grid, so that ties are common, with options that fit them."""
    num_groups, per_group = draw(st.sampled_from([(1, 1), (1, 5), (2, 3), (3, 2), (4, 4)]))
    num_experts, num_tokens = num_groups * per_group, draw(st.integers(0, 9))
    top_k_groups = draw(st.integers(1, num_groups))
    top_k = draw(st.integers(1, top_k_groups * per_group))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits_TE = torch.randint(-6, 7, (num_tokens, num_experts), generator=generator).double() / 2
    bias_E = torch.randint(-3, 4, (num_experts,), generator=generator).double() / 8
    options = {
        "score_fn": draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"])),
        "norm_topk_prob": draw(st.booleans()),
        "num_groups": num_groups,
        "top_k_groups": top_k_groups,
        "group_score": draw(st.sampled_from(["top2_sum", "max"])),
    }
    return logits_TE, top_k, bias_E, options, generator


few = settings(max_examples=60, deadline=None, derandomize=True)


@few
@given(problems())
def test_permuting_tokens_permutes_rows(problem):
    logits_TE, top_k, bias_E, options, generator = problem
    order_T = torch.randperm(len(logits_TE), generator=generator)
    routing = top_k_routing(logits_TE, top_k, expert_bias_E=bias_E, **options)
    permuted = top_k_routing(logits_TE[order_T], top_k, expert_bias_E=bias_E, **options)
    for actual, expected in zip(permuted, routing, strict=True):
        assert torch.equal(actual, expected[order_T])


@few
@given(problems())
def test_permuting_experts_permutes_ids_and_weights(problem):
    """Without ties, which follow the id by design; groups move as wholes, and experts within them."""
    logits_TE, top_k, bias_E, options, generator = problem
    logits_TE = logits_TE + torch.rand(logits_TE.shape, generator=generator, dtype=torch.float64)
    num_groups = options["num_groups"]
    order_GM = torch.arange(logits_TE.shape[1]).view(num_groups, -1)[torch.randperm(num_groups, generator=generator)]
    order_E = torch.stack([row[torch.randperm(len(row), generator=generator)] for row in order_GM]).flatten()
    routing = top_k_routing(logits_TE, top_k, expert_bias_E=bias_E, **options)
    permuted = top_k_routing(logits_TE[:, order_E], top_k, expert_bias_E=bias_E[order_E], **options)
    assert torch.equal(order_E[permuted.ids], routing.ids)
    torch.testing.assert_close(permuted.weights, routing.weights)
    torch.testing.assert_close(permuted.scores, routing.scores[:, order_E])


@few
@given(problems(), st.floats(-50, 50))
def test_adding_a_constant_to_a_softmax_row_changes_nothing(problem, constant):
    logits_TE, top_k, bias_E, options, _ = problem
    options["score_fn"] = "softmax"
    routing = top_k_routing(logits_TE, top_k, expert_bias_E=bias_E, **options)
    shifted = top_k_routing(logits_TE + round(constant), top_k, expert_bias_E=bias_E, **options)
    assert torch.equal(shifted.ids, routing.ids)
    torch.testing.assert_close(shifted.weights, routing.weights)


@few
@given(problems())
def test_counts_sum_to_valid_tokens_times_top_k(problem):
    logits_TE, top_k, bias_E, options, generator = problem
    mask_T = torch.randint(0, 2, (len(logits_TE),), generator=generator)
    routing = top_k_routing(logits_TE, top_k, expert_bias_E=bias_E, mask_T=mask_T, **options)
    assert expert_counts(routing.ids, logits_TE.shape[1]).sum() == mask_T.sum() * top_k
    assert all(len(set(row)) == top_k for row in routing.ids[mask_T.bool()].tolist())


@few
@given(problems())
def test_any_problem_equals_the_oracle(problem):
    logits_TE, top_k, bias_E, options, _ = problem
    routing = top_k_routing(logits_TE, top_k, expert_bias_E=bias_E, **options)
    weights, ids, _ = oracle_routing(logits_TE, top_k, expert_bias_E=bias_E, **options)
    if options["score_fn"] != "softmax":  # sums of exponentials round differently there and break ties
        assert routing.ids.tolist() == ids
    torch.testing.assert_close(
        routing.weights.sort(dim=1).values, torch.tensor(weights, dtype=torch.float64).view(-1, top_k).sort(1).values
    ) if routing.ids.tolist() == ids else None


def test_top_k_then_sigmoid_is_sigmoid_then_top_k():
    """Llama-4 takes the sigmoid of the best logits: no other order of experts, and no sum to divide by."""
    logits_TE = torch.randn(50, 16, dtype=torch.float64)
    best = logits_TE.topk(4)
    routing = top_k_routing(logits_TE, 4, score_fn="sigmoid", norm_topk_prob=False)
    assert torch.equal(routing.ids, best.indices)
    torch.testing.assert_close(routing.weights, best.values.sigmoid())


def test_given_ids_get_the_weights_they_would_have_had_by_choice():
    logits_TE = torch.randn(20, 8)
    chosen = top_k_routing(logits_TE, 3, score_fn="sigmoid", routed_scaling_factor=2.5)
    given_ids = top_k_routing(logits_TE, 1, score_fn="sigmoid", routed_scaling_factor=2.5, ids_TK=chosen.ids)
    assert torch.equal(given_ids.weights, chosen.weights) and torch.equal(given_ids.ids, chosen.ids)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_given_ids_pass_gradcheck_with_empty_slots_and_an_empty_row(norm_topk_prob):
    logits_TE = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    ids_TK = torch.tensor([[0, 5, 3], [5, 5, 5], [4, 1, 2], [-1, 2, 9]])

    def run(logits_TE):
        return top_k_routing(logits_TE, 1, norm_topk_prob=norm_topk_prob, ids_TK=ids_TK).weights

    assert torch.autograd.gradcheck(run, logits_TE)
    assert top_k_routing(logits_TE, 1, ids_TK=ids_TK).ids.tolist() == [[0, 5, 3], [5, 5, 5], [4, 1, 2], [5, 2, 5]]
