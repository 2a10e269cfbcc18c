import pytest
import torch

from guide_code.balance import (
    expert_counts,
    load_balancing_loss,
    max_violation,
    model_load_balancing_loss,
    update_expert_bias_,
    z_loss,
)
from guide_code.routers import Routing, top_k_routing
from guide_code.testing.oracle import oracle_load_balancing_loss


def loss_of(logits_TE, top_k=2, **options):
    routing = top_k_routing(logits_TE, top_k, mask_T=options.get("mask_T"))
    return load_balancing_loss(routing.scores, routing.ids, **options)


@pytest.mark.parametrize("convention", ["megatron", "hf"])
@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
def test_load_balancing_loss_equals_oracle(convention, score_fn):
    logits_TE = torch.randn(50, 6, dtype=torch.float64)
    mask_T = torch.rand(50) < 0.7
    routing = top_k_routing(logits_TE, 2, score_fn=score_fn)
    loss = load_balancing_loss(routing.scores, routing.ids, convention=convention, mask_T=mask_T)
    scores, ids = routing.scores[mask_T].tolist(), routing.ids[mask_T].tolist()
    assert loss.item() == pytest.approx(oracle_load_balancing_loss(scores, ids, 6, convention=convention), rel=1e-12)


@pytest.mark.parametrize(("convention", "balanced", "collapsed"), [("megatron", 1, 4), ("hf", 2, 8)])
def test_values_when_balanced_and_when_collapsed(convention, balanced, collapsed):
    """E = 8, k = 2."""
    even_TE = torch.stack([torch.zeros(8).index_fill(0, torch.tensor([t % 8, (t + 1) % 8]), 0.1) for t in range(64)])
    assert loss_of(even_TE, convention=convention).item() == pytest.approx(balanced)
    assert loss_of(torch.tensor([[30.0, 30.0] + [0.0] * 6] * 64), convention=convention).item() == pytest.approx(
        collapsed
    )


def test_counts_are_taken_before_the_drop_and_of_all_choices():
    """known_failures A-07."""
    scores_TE = torch.tensor([[0.6, 0.3, 0.1]] * 3 + [[0.2, 0.5, 0.3]])
    ids_TK = torch.tensor([[0], [0], [0], [1]])
    assert load_balancing_loss(scores_TE, ids_TK).item() == pytest.approx(1.3875)
    assert expert_counts(torch.tensor([[0, 2], [2, 1]]), 3).tolist() == [1, 1, 2]


def test_tiny_sigmoid_scores_cannot_cheat():
    """known_failures A-06."""
    logits_TE = torch.stack([torch.tensor([1.0, 2.0, 3.0, 4.0]).log().roll(r) - 60 for r in range(4)]).requires_grad_()
    routing = top_k_routing(logits_TE, 1, score_fn="sigmoid")
    loss = load_balancing_loss(routing.scores, routing.ids)
    assert loss.item() == pytest.approx(1.0, rel=1e-6)
    loss.backward()
    assert logits_TE.grad.isfinite().all()
    for low in (-95.0, -110.0, -1000.0):
        logits_TE = torch.full((4, 4), low, requires_grad=True)
        routing = top_k_routing(logits_TE, 1, score_fn="sigmoid")
        loss = load_balancing_loss(routing.scores, routing.ids)
        loss.backward()
        assert loss.item() == pytest.approx(1.0) and logits_TE.grad.isfinite().all()


def test_pooling_over_layers_hides_layers_that_collapse_apart():
    """known_failures A-02: 1.5 and 1.5 per layer, 1.0 pooled. Both are there, by name."""
    layers = [
        Routing(None, torch.full((8, 1), expert), torch.tensor([[0.75, 0.25]] * 8).roll(expert, 1), None)
        for expert in (0, 1)
    ]
    assert model_load_balancing_loss(layers, convention="megatron").item() == pytest.approx(3.0)
    assert model_load_balancing_loss(layers, convention="hf").item() == pytest.approx(1.0)
    one = [layers[0], None]
    assert model_load_balancing_loss(one, convention="hf").item() == pytest.approx(1.5)
    assert model_load_balancing_loss(one, convention="megatron").item() == pytest.approx(1.5)
    assert model_load_balancing_loss([None, None]).item() == 0


def test_padding_and_bad_rows_do_not_count():
    logits_TE = torch.randn(20, 6)
    padded_TE = torch.cat([logits_TE, torch.full((5, 6), 9.0), torch.full((2, 6), torch.nan)]).requires_grad_()
    mask_T = torch.tensor([1.0] * 20 + [0] * 5 + [1] * 2)
    routing = top_k_routing(padded_TE, 2, mask_T=mask_T)
    for convention in ("megatron", "hf"):
        loss = load_balancing_loss(routing.scores, routing.ids, convention=convention, mask_T=mask_T)
        assert loss.item() == pytest.approx(loss_of(logits_TE, convention=convention).item(), rel=1e-6)
    zee = z_loss(routing.logits, mask_T)
    assert zee.item() == pytest.approx(z_loss(logits_TE).item(), rel=1e-6)
    (loss + zee).backward()
    assert padded_TE.grad.isfinite().all() and (padded_TE.grad[20:] == 0).all()


def test_nothing_valid_gives_zero_with_zero_gradient():
    logits_TE = torch.randn(3, 4, requires_grad=True)
    routing = top_k_routing(logits_TE, 2, mask_T=torch.zeros(3))
    loss = load_balancing_loss(routing.scores, routing.ids, mask_T=torch.zeros(3)) + z_loss(logits_TE, torch.zeros(3))
    loss.backward()
    assert loss.item() == 0 and (logits_TE.grad == 0).all()
    assert z_loss(torch.zeros(0, 4)).item() == 0


def test_losses_pass_gradcheck():
    logits_TE = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    mask_T = torch.tensor([1, 1, 0] * 3)
    for run in (
        lambda x: loss_of(x, mask_T=mask_T),
        lambda x: loss_of(x, convention="hf"),
        lambda x: z_loss(x, mask_T),
        lambda x: load_balancing_loss(x.sigmoid(), torch.tensor([[0, 1]] * 9)),
    ):
        assert torch.autograd.gradcheck(run, logits_TE)


def test_outer_counts_replace_the_batch_s_own():
    scores_TE, ids_TK = torch.rand(4, 3), torch.tensor([[0]] * 4)
    loss = load_balancing_loss(scores_TE, ids_TK, counts_E=torch.tensor([5, 5, 5]))
    assert loss.item() == pytest.approx(1.0)


def test_z_loss_of_zero_logits_is_the_square_of_log_e():
    assert z_loss(torch.zeros(4, 8)).item() == pytest.approx(4.3241, abs=1e-4)


def test_expert_counts_leave_out_sentinels_and_padding():
    ids_TK = torch.tensor([[0, 3], [-1, 1], [1, 2], [7, 0]])
    assert expert_counts(ids_TK, 3).tolist() == [2, 2, 1]
    assert expert_counts(ids_TK, 3, torch.tensor([1, 1, 0, 1])).tolist() == [2, 1, 0]
    assert expert_counts(torch.zeros(0, 2, dtype=torch.int64), 3).tolist() == [0, 0, 0]


def test_bias_moves_against_the_load():
    bias_E = torch.zeros(4)
    update_expert_bias_(bias_E, torch.tensor([6, 2, 4, 4]), 0.001)
    torch.testing.assert_close(bias_E, torch.tensor([-0.001, 0.001, 0.0, 0.0]))


def test_max_violation():
    assert max_violation(torch.tensor([4, 4, 4, 4])).item() == 0
    assert max_violation(torch.tensor([16, 0, 0, 0])).item() == pytest.approx(3.0)
    assert max_violation(torch.tensor([6, 2, 4, 4])).item() == pytest.approx(0.5)
    assert max_violation(torch.zeros(4, dtype=torch.int64)).item() == 0


def test_unknown_convention_is_named():
    with pytest.raises(ValueError, match=r"convention must be one of .*'switchy'"):
        load_balancing_loss(torch.rand(2, 2), torch.zeros(2, 1, dtype=torch.int64), convention="switchy")
