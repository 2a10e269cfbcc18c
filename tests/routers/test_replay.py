import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from guide_code.build import build_model
from guide_code.config import override
from guide_code.presets import tiny
from guide_code.routers import (
    ExpertChoiceRouter,
    HashRouter,
    QuantileRouter,
    ReplayRouter,
    SinkhornRouter,
    TopKRouter,
    hash_table,
    replay_routing,
)

ROUTERS = {
    "top_k": lambda: TopKRouter(
        16, 8, 2, score_fn="sigmoid", routed_scaling_factor=2.5, use_expert_bias=True, num_groups=4, top_k_groups=2
    ),
    "unnormalised": lambda: TopKRouter(16, 8, 2, norm_topk_prob=False),
    "expert choice": lambda: ExpertChoiceRouter(16, 8, 2),
    "hash": lambda: HashRouter(16, 8, hash_table(30, 8, 2), score_fn="sqrtsoftplus"),
    "sinkhorn": lambda: SinkhornRouter(16, 8, 2),
    "quantile": lambda: QuantileRouter(16, 8, 2),
}


@pytest.mark.parametrize("make", ROUTERS.values(), ids=ROUTERS)
def test_replaying_a_recording_of_oneself_changes_nothing(make):
    router = make()
    x_TD, tokens_T, mask_T = torch.randn(30, 16), torch.randint(0, 30, (30,)), torch.arange(30) < 25
    recorded = router(x_TD, mask_T, tokens_T)
    replayed = ReplayRouter(router, recorded.ids)(x_TD, mask_T, tokens_T)
    for name in ("weights", "ids", "scores", "logits"):
        assert torch.equal(getattr(replayed, name), getattr(recorded, name)), name


@pytest.mark.parametrize("make", ROUTERS.values(), ids=ROUTERS)
def test_choices_are_the_recorded_ones_and_weights_those_of_the_present_router(make):
    router, x_TD, tokens_T = make(), torch.randn(30, 16), torch.randint(0, 30, (30,))
    ids_TK = torch.rand(30, 8).argsort(dim=1)[:, :2]
    replayed = ReplayRouter(router, ids_TK)(x_TD, None, tokens_T)
    assert torch.equal(replayed.ids, ids_TK)
    expected_TK = replayed.scores.gather(1, ids_TK)
    if router.options["norm_topk_prob"]:
        expected_TK = expected_TK / expected_TK.sum(dim=1, keepdim=True)
    torch.testing.assert_close(replayed.weights, expected_TK * router.options["routed_scaling_factor"])
    cotangent_TK = torch.randn(30, 2)
    (gradient,) = torch.autograd.grad(replayed.weights, router.weight, cotangent_TK)
    assert gradient.count_nonzero() > 0


def test_empty_slots_stay_empty_and_the_others_share_the_weight():
    router = TopKRouter(16, 8, 3)
    ids_TK = torch.tensor([[1, 8, 4], [8, 8, 8], [-1, 0, 2]])
    replayed = ReplayRouter(router, ids_TK)(torch.randn(3, 16).requires_grad_())
    assert replayed.ids.tolist() == [[1, 8, 4], [8, 8, 8], [8, 0, 2]]
    torch.testing.assert_close(replayed.weights.sum(dim=1), torch.tensor([1.0, 0.0, 1.0]))
    replayed.weights.backward(1e6 * torch.randn(3, 3))
    assert router.weight.grad.isfinite().all()


def test_padding_of_this_run_reaches_no_expert_whatever_was_recorded():
    ids_TK = torch.tensor([[1, 2], [3, 4]])
    replayed = ReplayRouter(TopKRouter(16, 8, 2), ids_TK)(torch.randn(2, 16), torch.tensor([1, 0]))
    assert replayed.ids.tolist() == [[1, 2], [8, 8]] and (replayed.weights[1] == 0).all()


def test_a_model_replays_another_run_and_routes_by_itself_afterwards():
    config = dataclasses.replace(override(tiny(), {"num_layers": 3, "router_jitter": 0.3}), first_k_dense=1)
    model = build_model(config)
    tokens_BS = torch.randint(0, 1024, (2, 16))
    recorded = model(tokens_BS)
    own = model(tokens_BS)
    assert any(not torch.equal(a.ids, b.ids) for a, b in zip(own.routings[1:], recorded.routings[1:], strict=True))
    names = set(model.state_dict())
    with replay_routing(model, recorded.routings):
        replayed = model(tokens_BS)
        replayed.logits.backward(torch.randn_like(replayed.logits))
    for forced, free in zip(replayed.routings[1:], recorded.routings[1:], strict=True):
        assert torch.equal(forced.ids, free.ids)
        assert not torch.equal(forced.weights, free.weights)  # this forward had its own jitter
    assert set(model.state_dict()) == names
    with pytest.raises(RuntimeError, match="inside"), replay_routing(model, recorded.routings):
        raise RuntimeError("inside")
    assert set(model.state_dict()) == names


def test_recompute_in_the_backward_pass_replays_as_well():
    """known_failures P-05: a recompute that chose anew would meet tensors of other shapes."""
    router = TopKRouter(16, 8, 2)
    x_TD = torch.randn(30, 16, requires_grad=True)
    replay = ReplayRouter(router, torch.rand(30, 8).argsort(dim=1)[:, :2])
    plain = replay(x_TD).weights.square().sum()
    (expected_TD,) = torch.autograd.grad(plain, x_TD)
    (actual_TD,) = torch.autograd.grad(
        checkpoint(lambda x: replay(x).weights, x_TD, use_reentrant=False).square().sum(), x_TD
    )
    assert torch.equal(actual_TD, expected_TD)


def test_bad_arguments_are_named():
    router = TopKRouter(16, 8, 2)
    with pytest.raises(ValueError, match=r"ids must be int64 \(tokens, slots\) for 3 tokens, got torch.int64 \(4, 2\)"):
        ReplayRouter(router, torch.zeros(4, 2, dtype=torch.int64))(torch.randn(3, 16))
    with pytest.raises(ValueError, match="1 recordings for 2 MoE layers"):
        with replay_routing(build_model(tiny()), [router(torch.randn(3, 16)), None]):
            pass
