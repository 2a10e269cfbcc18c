import pytest
import torch

from guide_code.balance import expert_counts
from guide_code.routers import ExpertChoiceRouter, expert_choice_routing
from guide_code.testing.oracle import oracle_expert_choice


@pytest.mark.parametrize("capacity", [0, 1, 3, 7, 30])
def test_equals_oracle_on_logits_with_ties(capacity):
    logits_TE = torch.randint(-3, 4, (7, 5)).double()
    routing = expert_choice_routing(logits_TE, capacity)
    weights, ids = oracle_expert_choice(logits_TE, capacity)
    assert routing.ids.tolist() == ids
    torch.testing.assert_close(routing.weights, torch.tensor(weights, dtype=torch.float64))
    assert expert_counts(routing.ids, 5).tolist() == [min(capacity, 7)] * 5


def test_passes_gradcheck():
    logits_TE = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: expert_choice_routing(x, 2).weights, logits_TE)
    assert torch.autograd.gradcheck(
        lambda x: expert_choice_routing(x, 2, score_fn="sigmoid", norm_topk_prob=True).weights, logits_TE
    )


def test_weights_may_be_normalised_and_scaled():
    logits_TE = torch.randn(9, 4)
    plain = expert_choice_routing(logits_TE, 4)
    routing = expert_choice_routing(logits_TE, 4, norm_topk_prob=True, routed_scaling_factor=2.5)
    total_T1 = plain.weights.sum(dim=1, keepdim=True)
    expected_TE = torch.where(total_T1 > 0, 2.5 * plain.weights / total_T1.clamp_min(1e-9), 0.0)
    torch.testing.assert_close(routing.weights, expected_TE)
    assert torch.equal(routing.ids, plain.ids) and (total_T1 > 0).any()


def test_padding_and_bad_rows_are_never_chosen_and_the_capacity_is_clamped_to_the_others():
    logits_TE = torch.randn(6, 3)
    logits_TE[1] = 50.0  # padding that would win everywhere
    logits_TE[4, 2] = torch.nan
    mask_T = torch.tensor([1, 0, 1, 1, 1, 0])
    logits_TE.requires_grad_()
    routing = expert_choice_routing(logits_TE, 5, mask_T=mask_T)
    assert (routing.ids[[1, 4, 5]] == 3).all() and (routing.weights[[1, 4, 5]] == 0).all()
    assert expert_counts(routing.ids, 3).tolist() == [3, 3, 3]
    routing.weights.backward(torch.randn(6, 3))
    assert logits_TE.grad.isfinite().all() and (logits_TE.grad[[1, 4, 5]] == 0).all()
    alone = expert_choice_routing(logits_TE[[0, 2, 3]].detach(), 2)
    assert torch.equal(expert_choice_routing(logits_TE, 2, mask_T=mask_T).ids[[0, 2, 3]], alone.ids)


def test_router_fills_every_expert_equally_with_valid_tokens():
    router = ExpertChoiceRouter(16, 8, 2, bias=True)
    torch.nn.init.normal_(router.bias, std=5.0)
    mask_T = torch.arange(40) < 20
    routing = router(torch.randn(40, 16), mask_T)
    assert expert_counts(routing.ids, 8).tolist() == [5] * 8  # 20 x 2 / 8
    assert router.top_k == 2 and routing.ids.shape == (40, 8)
    assert not router.options["norm_topk_prob"]
    one = router(torch.randn(1, 16))  # rounded up: decoding gives a token to every expert
    assert sorted(one.ids[0].tolist()) == list(range(8))
    assert router(torch.randn(0, 16)).ids.shape == (0, 8)


def test_a_later_token_changes_the_experts_of_an_earlier_one():
    """Why this is no router for causal decoding."""
    router = ExpertChoiceRouter(16, 4, 1)
    x_TD = torch.randn(8, 16)
    full, prefix = router(x_TD), router(x_TD[:4])
    assert not torch.equal(full.ids[:4], prefix.ids)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="capacity must be at least 0, got -1"):
        expert_choice_routing(torch.zeros(2, 2), -1)
    with pytest.raises(ValueError, match="top_k must be in"):
        ExpertChoiceRouter(16, 4, 5)
