import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from guide_code.balance import (
    CONVENTIONS,
    expert_counts,
    load_balancing_loss,
    model_load_balancing_loss,
    required_arguments,
    sequence_load_balancing_loss,
    z_loss,
)
from guide_code.balancer import LOSSES, Balancer
from guide_code.build import build_model
from guide_code.config import override
from guide_code.experts.loop import LoopExperts
from guide_code.importance import importance_loss, load_loss
from guide_code.moe import MoE
from guide_code.presets import tiny
from guide_code.routers import TopKRouter

COEFS = {"load_balancing": 0.3, "z_loss": 0.05}


def make_moe(coefs=COEFS, **options):
    balancer = Balancer(4, coefs=coefs, **options)
    moe = MoE(TopKRouter(8, 4, 2, use_expert_bias=True), LoopExperts(4, 8, 8), balancer=balancer)
    nn.init.normal_(moe.router.weight)
    return moe


def gradients(moe):
    found = {name: p.grad.clone() for name, p in moe.named_parameters()}
    moe.zero_grad()
    return found


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("convention", sorted(set(CONVENTIONS) - {"fastmoe_switch"}))
def test_injected_gradients_equal_those_of_a_returned_loss(convention):
    needs = required_arguments(convention)
    options = {"num_layers": 3} if "num_layers" in needs else {}
    moe = make_moe(convention=convention, **options)
    if "group_size" in needs:
        options["group_size"] = 6  # the layer tells the balancer
    x_BSD, cotangent = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    mask_BS = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    moe(x_BSD, mask_BS).out.backward(cotangent)
    injected = gradients(moe)
    moe.balancer.coefs = dict.fromkeys(COEFS, 0.0)
    out, routing, _ = moe(x_BSD, mask_BS)
    if "counts_E" in needs:
        options["counts_E"] = expert_counts(routing.ids, 4)
    balance = load_balancing_loss(
        routing.scores, routing.ids, convention=convention, mask_T=mask_BS.flatten(), **options
    )
    loss = (out * cotangent).sum() + 0.3 * balance + 0.05 * z_loss(routing.logits, mask_BS.flatten())
    loss.backward()
    assert_same(injected, gradients(moe))


def test_values_pass_through_and_losses_are_without_coefficient():
    moe, plain = make_moe(), make_moe()
    plain.load_state_dict(moe.state_dict())
    plain.balancer = None
    x_BSD = torch.randn(1, 6, 8)
    out = moe(x_BSD)
    assert torch.equal(out.out, plain(x_BSD).out)
    losses = moe.balancer.losses()
    assert losses.keys() == COEFS.keys() and not any(v.requires_grad for v in losses.values())
    assert losses["load_balancing"].item() == pytest.approx(
        load_balancing_loss(out.routing.scores, out.routing.ids).item()
    )


def test_accumulation_is_the_mean_over_micro_batches():
    """known_failures A-05: the same 8 sequences as 1 x 8, 2 x 4 and 8 x 1, the reference built loss by loss."""
    moe, x_BSD, cotangent = make_moe(), torch.randn(8, 3, 8), torch.randn(8, 3, 8)
    for parts in (1, 2, 8):
        moe.balancer.set_scale(1 / parts)
        for x, c in zip(x_BSD.chunk(parts), cotangent.chunk(parts), strict=True):
            moe(x).out.backward(c / parts)
        actual, logged = gradients(moe), moe.balancer.losses()
        moe.balancer.step(moe.router)

        wanted = []
        for x, c in zip(x_BSD.chunk(parts), cotangent.chunk(parts), strict=True):
            moe.eval()
            out, routing, _ = moe(x)
            moe.train()
            balance = load_balancing_loss(routing.scores, routing.ids)
            ((out * c).sum() / parts + (0.3 * balance + 0.05 * z_loss(routing.logits)) / parts).backward()
            wanted.append(balance.item())
        assert_same(actual, gradients(moe))
        assert logged["load_balancing"].item() == pytest.approx(sum(wanted) / parts, rel=1e-6)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_is_counted_once_and_its_gradients_are_right(use_reentrant):
    """known_failures P-05."""
    moe, x_BSD, cotangent = make_moe(), torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 5, 8)
    moe(x_BSD).out.backward(cotangent)
    expected, losses, counts = gradients(moe), moe.balancer.losses(), moe.balancer.counts.clone()
    moe.balancer.reset()
    checkpoint(lambda x: moe(x).out, x_BSD, use_reentrant=use_reentrant).backward(cotangent)
    assert_same(gradients(moe), expected)
    assert torch.equal(moe.balancer.counts, counts) and counts.sum() == 20
    torch.testing.assert_close(moe.balancer.losses(), losses)


def test_evaluation_counts_nothing_and_clears_nothing():
    moe, x_BSD = make_moe(), torch.randn(1, 4, 8)
    moe(x_BSD)
    before = moe.balancer.counts.clone(), moe.balancer.losses()
    moe.eval()
    out = moe(torch.randn(1, 9, 8, requires_grad=True))
    out.out.backward(torch.randn(1, 9, 8))
    torch.testing.assert_close((moe.balancer.counts, moe.balancer.losses()), before)


def test_step_moves_the_bias_once_and_clears():
    moe = make_moe(coefs={}, expert_bias_rate=0.01)
    ids = [moe(torch.randn(1, 5, 8)).routing.ids for _ in range(3)]
    counts = expert_counts(torch.cat(ids), 4)
    moe.balancer.step(moe.router)
    expected = 0.01 * torch.sign(counts.float().mean() - counts)
    torch.testing.assert_close(moe.router.expert_bias, expected)
    assert torch.equal(moe.balancer.last_counts, counts)
    assert moe.balancer.counts.sum() == 0 and moe.balancer.losses() == {}


def test_every_loss_by_name_injects_its_own_gradient():
    moe = make_moe(coefs=dict.fromkeys(LOSSES, 0.0), noise_std=0.5, z_loss_convention="swiss_nanotron", num_layers=2)
    x_BSD, mask_BS = torch.randn(2, 5, 8), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    mask_T = mask_BS.flatten()
    routing = moe(x_BSD, mask_BS).routing
    logged = moe.balancer.losses()
    expected = {
        "load_balancing": load_balancing_loss(routing.scores, routing.ids, mask_T=mask_T),
        "sequence_load_balancing": sequence_load_balancing_loss(
            routing.scores.view(2, 5, 4), routing.ids.view(2, 5, 2), mask_BS=mask_BS
        ),
        "z_loss": z_loss(routing.logits, mask_T, convention="swiss_nanotron", num_layers=2),
        "importance": importance_loss(routing.weights, routing.ids, 4, mask_T),
        "load": load_loss(routing.logits, routing.logits, 0.5, 2, mask_T),
    }
    assert list(expected) == list(LOSSES)
    for name, loss in expected.items():
        torch.testing.assert_close(logged[name], loss.detach())
        (wanted,) = torch.autograd.grad(loss, moe.router.weight, retain_graph=True)
        moe.balancer.coefs = {name: 0.7}
        moe(x_BSD, mask_BS).out.backward(torch.zeros(2, 5, 8))
        assert wanted.abs().max() > 0
        torch.testing.assert_close(gradients(moe)["router.weight"], 0.7 * wanted, msg=name)


def test_the_mask_holds_for_every_loss_even_if_the_router_ignored_it():
    router, x_TD = TopKRouter(8, 4, 2), torch.randn(9, 8)
    options = {"coefs": dict.fromkeys(LOSSES, 0.0), "noise_std": 0.5, "group_size": 3}
    masked, alone = Balancer(4, **options), Balancer(4, **options)
    masked(x_TD, router(x_TD), torch.tensor([1] * 6 + [0] * 3))
    alone(x_TD[:6], router(x_TD[:6]))
    torch.testing.assert_close(masked.losses(), alone.losses())
    assert torch.equal(masked.counts, alone.counts) and masked.counts.sum() == 12


def test_global_counts_are_those_of_the_micro_batches_so_far():
    moe = make_moe(coefs={"load_balancing": 1.0}, convention="megatron_global")
    for _ in range(2):  # and start anew with every step
        ids, total = [], 0.0
        for _ in range(3):
            routing = moe(torch.randn(1, 4, 8)).routing
            ids.append(routing.ids)
            counts_E = expert_counts(torch.cat(ids), 4)
            total += load_balancing_loss(routing.scores, routing.ids, counts_E=counts_E).item() / 3
        assert moe.balancer.losses()["load_balancing"].item() == pytest.approx(total, rel=1e-6)
        moe.balancer.step(moe.router)


def test_rejected_tokens_are_reported():
    moe = make_moe()
    x_BSD = torch.randn(1, 6, 8)
    x_BSD[0, 1, 3], x_BSD[0, 5] = torch.nan, torch.nan
    for _ in range(2):
        moe(x_BSD, torch.tensor([[1, 1, 1, 1, 1, 0]]))
    assert moe.balancer.rejected == 2 and moe.balancer.counts.sum() == 16
    assert all(value.isfinite() for value in moe.balancer.losses().values())
    moe.balancer.step(moe.router)
    assert moe.balancer.rejected == 0 and moe.balancer.last_rejected == 2


def test_the_centred_step_keeps_the_sum_of_the_bias():
    moe = make_moe(coefs={}, expert_bias_rate=0.01, centred_bias=True)
    moe.balancer.counts.copy_(torch.tensor([9, 1, 1, 1]))
    moe.balancer.step(moe.router)
    torch.testing.assert_close(moe.router.expert_bias, torch.tensor([-0.015, 0.005, 0.005, 0.005]))


def test_a_copy_counts_for_itself():
    moe = make_moe(coefs={"load_balancing": 1.0}, convention="megatron_global")
    moe(torch.randn(1, 4, 8))
    twin = copy.deepcopy(moe)
    twin(torch.randn(1, 6, 8))
    assert moe.balancer.counts.sum() == 8 and twin.balancer.counts.sum() == 20


TOKENS_BS = torch.arange(24).view(2, 12) * 37 % 1024


def forward_tiny(convention, **changes):
    """A tiny model's output, its routers, and a loss that leaves their gradients to the load-balancing loss."""
    config = override(tiny(), {"load_balancing_convention": convention, "num_layers": 3, "first_k_dense": 1, **changes})
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, z_loss_coef=0.0))
    torch.manual_seed(0)
    model = build_model(config)
    output = model(TOKENS_BS)
    return output, [block.ffn.router for block in model.blocks if isinstance(block.ffn, MoE)], 0 * output.logits.sum()


@pytest.mark.parametrize("convention", sorted(set(CONVENTIONS) - {"fastmoe_switch", "hf", "hf_switch"}))
def test_models_train_with_every_convention_that_a_layer_can_compute(convention):
    """Two MoE layers and a dense one: the injected gradients are those of the model's loss, over layers as it is."""
    _, injected, nothing = forward_tiny(convention)
    nothing.backward()
    output, routers, nothing = forward_tiny(convention, load_balancing_coef=0.0)
    counts_LE = [expert_counts(routing.ids, 16) for routing in output.routings if routing is not None]
    loss = model_load_balancing_loss(
        output.routings,
        convention=convention,
        group_size=12 if "group_size" in required_arguments(convention) else None,
        counts_LE=counts_LE if convention == "megatron_global" else None,
    )
    (0.005 * loss + nothing).backward()
    assert len(routers) == 2
    for actual, expected in zip(injected, routers, strict=True):
        assert actual.weight.grad.abs().max() > 0
        torch.testing.assert_close(actual.weight.grad, expected.weight.grad)


@pytest.mark.parametrize("convention", ["hf", "hf_switch"])
def test_models_refuse_to_pool_layers_unless_there_is_one(convention):
    with pytest.raises(ValueError, match=f"convention='{convention}' pools num_layers=2 layers before the product"):
        forward_tiny(convention)
    _, (router,), nothing = forward_tiny(convention, first_k_dense=2)
    nothing.backward()
    assert router.weight.grad.abs().max() > 0


def test_coefficient_zero_measures_without_a_gradient():
    moe = make_moe(coefs={"load_balancing": 0.0})
    x_BSD, cotangent = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    moe(x_BSD).out.backward(cotangent)
    actual = gradients(moe)
    assert moe.balancer.losses()["load_balancing"] > 0
    moe.balancer = None
    moe(x_BSD).out.backward(cotangent)
    assert_same(actual, gradients(moe))


def test_losses_of_your_own_join_by_name():
    def peak(routing, mask_T):
        return routing.scores.amax(dim=-1).mean()

    moe = make_moe(coefs={"peak": 2.0}, extra_losses={"peak": peak})
    x_BSD = torch.randn(1, 4, 8)
    moe(x_BSD).out.backward(torch.zeros(1, 4, 8))
    actual = moe.router.weight.grad.clone()
    moe.zero_grad()
    (2.0 * peak(moe.router(x_BSD[0]), None)).backward()
    torch.testing.assert_close(actual, moe.router.weight.grad)
    assert set(moe.balancer.losses()) == {"peak"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"coefs": {"balance": 1.0}}, "coefs names 'balance', but the losses are"),
        ({"coefs": {"z_loss": -1.0}}, r"coefs\['z_loss'\] must be at least 0, got -1.0"),
        ({"coefs": {}, "expert_bias_rate": -0.1}, "expert_bias_rate must be at least 0"),
        ({"coefs": {}, "convention": "mean"}, "convention must be one of"),
        ({"coefs": COEFS, "convention": "switch"}, "convention='switch' needs num_layers"),
        ({"coefs": COEFS, "convention": "hf", "num_layers": 2}, "pools num_layers=2 layers"),
        ({"coefs": COEFS, "convention": "fastmoe_switch"}, "counts what capacity kept, but a balancer sees"),
        ({"coefs": COEFS, "z_loss_convention": "hf_switch"}, "z_loss_convention='hf_switch' needs num_layers"),
        ({"coefs": COEFS, "z_loss_convention": "hf"}, "z_loss_convention must be one of"),
        ({"coefs": {"load": 1.0}}, 'coefs names "load", which needs noise_std above 0, got None'),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Balancer(4, **options)


def test_a_flat_output_needs_the_length_of_a_sequence():
    out_TD, routing = torch.zeros(6, 8), TopKRouter(8, 4, 2)(torch.randn(6, 8))
    with pytest.raises(ValueError, match="convention='sequence' needs group_size"):
        Balancer(4, coefs={"sequence_load_balancing": 1.0})(out_TD, routing)
    flat = Balancer(4, coefs={"sequence_load_balancing": 1.0}, group_size=3)
    deep = Balancer(4, coefs={"sequence_load_balancing": 1.0})
    flat(out_TD, routing)
    deep(out_TD.view(2, 3, 8), routing)
    torch.testing.assert_close(flat.losses(), deep.losses())


def test_statistics_stay_out_of_the_state_dict():
    assert list(Balancer(4, coefs=COEFS).state_dict()) == []
