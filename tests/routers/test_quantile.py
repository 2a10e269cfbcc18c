import pytest
import torch
from torch.utils.checkpoint import checkpoint

from guide_code.balance import expert_counts, max_violation
from guide_code.build import build_moe
from guide_code.config import MoEConfig
from guide_code.routers import QuantileRouter, quantile_bias, top_k_routing


def test_bias_lets_every_expert_beat_its_share_of_cutoffs():
    scores_TE, old_E = torch.rand(64, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64) / 10
    new_E = quantile_bias(scores_TE, 2, old_E)
    cutoff_T1 = (scores_TE + old_E).sort(dim=1, descending=True).values[:, 2:3]
    assert new_E.mean().abs() < 1e-12
    # Without the centring an expert's bias would sit on a margin, with 16 = 64 x 2 / 8 above it. Margins of tokens
    # whose cutoff is that very expert are all the same, so fewer may be above.
    shift = -(scores_TE - cutoff_T1).sort(dim=0, descending=True).values[16] - new_E
    torch.testing.assert_close(shift, shift[:1].expand(8))
    above_E, reached_E = (((scores_TE + new_E + shift) > cutoff_T1 + e).sum(dim=0) for e in (1e-12, -1e-12))
    assert (above_E <= 16).all() and (reached_E > 16).all() and (above_E == 16).sum() >= 4


def test_iterating_balances_a_fixed_batch():
    logits_TE = torch.randn(512, 8) + torch.linspace(-2, 2, 8)
    bias_E = torch.zeros(8)
    scores_TE = logits_TE.sigmoid()
    before = max_violation(expert_counts(top_k_routing(logits_TE, 2, score_fn="sigmoid").ids, 8))
    for _ in range(30):
        bias_E = quantile_bias(scores_TE, 2, bias_E)
    after = top_k_routing(logits_TE, 2, score_fn="sigmoid", expert_bias_E=bias_E)
    assert before > 0.9 and max_violation(expert_counts(after.ids, 8)) < 0.05


def test_padding_and_bad_rows_do_not_count():
    scores_TE, bias_E = torch.rand(10, 4), torch.randn(4)
    dirty_TE = scores_TE.clone()
    dirty_TE[3], dirty_TE[7] = torch.nan, 100.0
    mask_T = torch.ones(10)
    mask_T[7] = 0
    keep = [0, 1, 2, 4, 5, 6, 8, 9]
    assert torch.equal(quantile_bias(dirty_TE, 2, bias_E, mask_T), quantile_bias(scores_TE[keep], 2, bias_E))
    nobody_E = quantile_bias(dirty_TE, 2, bias_E, torch.zeros(10))
    torch.testing.assert_close(nobody_E, bias_E - bias_E.mean())
    torch.testing.assert_close(quantile_bias(scores_TE[:0], 2, bias_E), bias_E - bias_E.mean())


def test_router_balances_over_steps_and_uses_only_the_bias_of_earlier_ones():
    router = QuantileRouter(16, 8, 2, momentum=0.5, score_fn="sigmoid", bias=True)
    torch.nn.init.normal_(router.bias)
    violations = []
    for _ in range(15):
        for _ in range(2):
            x_TD = torch.randn(1024, 16)
            routing = router(x_TD)
            plain = top_k_routing(routing.logits, 2, score_fn="sigmoid", expert_bias_E=router.expert_bias)
            assert torch.equal(routing.ids, plain.ids)
        violations.append(max_violation(expert_counts(routing.ids, 8)).item())
        router.step()
    assert violations[0] > 0.8 and max(violations[-3:]) < 0.25
    assert router.expert_bias.mean().abs() < 1e-6


def test_step_is_the_mean_over_forwards_mixed_with_the_old_bias():
    router = QuantileRouter(16, 8, 2, momentum=0.9)
    router.expert_bias.copy_(torch.linspace(-0.1, 0.1, 8))
    old_E, batches = router.expert_bias.clone(), [torch.randn(64, 16) for _ in range(2)]
    targets = [quantile_bias(router(x_TD).scores, 2, old_E) for x_TD in batches]
    router.step()
    torch.testing.assert_close(router.expert_bias, 0.9 * old_E + 0.1 * (targets[0] + targets[1]) / 2)
    kept_E = router.expert_bias.clone()
    router.step()  # nothing was noted
    assert torch.equal(router.expert_bias, kept_E)


def test_the_balancer_of_a_layer_steps_it():
    moe = build_moe(MoEConfig(hidden_size=16, moe_intermediate_size=8, num_experts=8, top_k=2, router="quantile"))
    moe(torch.randn(2, 32, 16))
    moe.balancer.step(moe.router)
    assert moe.router.expert_bias.count_nonzero() == 8 and moe.router.target_count == 0


def test_evaluation_and_recompute_are_not_noted():
    router = QuantileRouter(16, 8, 2)
    x_TD = torch.randn(64, 16, requires_grad=True)
    router.eval()
    router(x_TD)
    assert router.target_count == 0
    router.train()
    checkpoint(lambda x: router(x).weights, x_TD, use_reentrant=False).backward(torch.randn(64, 2))
    assert router.target_count == 1


def test_what_is_noted_keeps_float32_under_casts():
    router = QuantileRouter(16, 8, 2).bfloat16()
    assert router.target_sum.dtype == router.expert_bias.dtype == torch.float32
    assert set(router.state_dict()) == {"weight", "expert_bias"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantile_bias(torch.rand(3, 4), 4, torch.zeros(4)), r"top_k must be in \[1, num_experts=4\)"),
        (lambda: QuantileRouter(16, 4, 4), "top_k=4 must be below num_experts=4"),
        (lambda: QuantileRouter(16, 4, 2, momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (lambda: QuantileRouter(16, 4, 2, num_groups=2), "num_groups=2: the quantile"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
