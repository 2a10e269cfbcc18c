import pytest
import torch

from guide_code.balance import expert_counts, max_violation
from guide_code.routers import SinkhornRouter, sinkhorn_plan, top_k_routing


def test_plan_gives_tokens_and_experts_equal_shares():
    plan_TE = sinkhorn_plan(3 * torch.randn(50, 8, dtype=torch.float64), num_iterations=200)
    torch.testing.assert_close(plan_TE.sum(dim=0), torch.full((8,), 1 / 8, dtype=torch.float64))
    torch.testing.assert_close(plan_TE.sum(dim=1), torch.full((50,), 1 / 50, dtype=torch.float64))


def test_plan_is_exp_of_logits_with_rows_and_columns_rescaled():
    """What makes it the plan: log(plan) - logits is a number per token plus a number per expert."""
    logits_TE = torch.randn(30, 6, dtype=torch.float64)
    rest_TE = sinkhorn_plan(logits_TE).log() - logits_TE
    rest_TE = rest_TE - rest_TE[:, :1]
    torch.testing.assert_close(rest_TE, rest_TE[:1].expand_as(rest_TE))


def test_plan_equals_the_usual_iteration():
    """Megatron-LM scales exp(logits) itself: same numbers where that does not overflow."""
    logits_TE = torch.randn(30, 6, dtype=torch.float64)
    mass_TE, column_E = logits_TE.exp(), torch.ones(6, dtype=torch.float64)
    for _ in range(20):
        row_T = 1 / (30 * (mass_TE @ column_E))
        column_E = 1 / (6 * (row_T @ mass_TE))
    torch.testing.assert_close(sinkhorn_plan(logits_TE), row_T[:, None] * mass_TE * column_E)
    assert sinkhorn_plan(logits_TE * 1000).isfinite().all()


def test_padding_and_bad_rows_have_no_mass_and_change_nothing():
    logits_TE = torch.randn(9, 4)
    keep_T = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1, 1]).bool()
    dirty_TE = logits_TE.clone()
    dirty_TE[1] = 70.0
    dirty_TE[5] = torch.nan
    mask_T = torch.ones(9)
    mask_T[1] = 0
    plan_TE = sinkhorn_plan(dirty_TE, mask_T)
    assert (plan_TE[~keep_T] == 0).all()
    torch.testing.assert_close(plan_TE[keep_T], sinkhorn_plan(logits_TE[keep_T]))
    assert (sinkhorn_plan(dirty_TE, torch.zeros(9)) == 0).all()
    assert sinkhorn_plan(torch.zeros(0, 4)).shape == (0, 4)


def test_a_forbidden_expert_stays_forbidden():
    logits_TE = torch.randn(6, 3)
    logits_TE[2, 0] = -torch.inf
    logits_TE[:, 1] = -torch.inf
    plan_TE = sinkhorn_plan(logits_TE)
    assert plan_TE.isfinite().all() and plan_TE[2, 0] == 0 and (plan_TE[:, 1] == 0).all() and plan_TE[2, 2] > 0


@pytest.mark.parametrize(("top_k", "score_fn"), [(1, "sigmoid"), (2, "softmax")])
def test_router_balances_in_training_only(top_k, score_fn):
    router = SinkhornRouter(16, 8, top_k, score_fn=score_fn, bias=True)
    torch.nn.init.normal_(router.bias, std=2.0)
    x_TD = torch.randn(400, 16)
    training = router(x_TD)
    router.eval()
    plain = router(x_TD)
    assert torch.equal(plain.ids, top_k_routing(plain.logits, top_k, score_fn=score_fn).ids)
    assert max_violation(expert_counts(plain.ids, 8)) > 1.0
    assert max_violation(expert_counts(training.ids, 8)) < 0.5
    assert torch.equal(training.weights, training.scores.gather(1, training.ids))  # no renormalising
    training.weights.backward(torch.randn(400, top_k))
    assert router.weight.grad.count_nonzero() > 0


def test_masked_tokens_change_no_choice():
    router = SinkhornRouter(16, 4, 2)
    x_TD, mask_T = torch.randn(10, 16), torch.arange(10) < 6
    assert torch.equal(router(x_TD, mask_T).ids[:6], router(x_TD[:6]).ids)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="num_iterations must be at least 1, got 0"):
        SinkhornRouter(16, 4, 2, num_iterations=0)
