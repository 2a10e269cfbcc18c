import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from guide_code.balance import expert_counts, load_balancing_loss, z_loss
from guide_code.balancer import Balancer
from guide_code.experts.loop import LoopExperts
from guide_code.moe import MoE
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


@pytest.mark.parametrize("convention", ["megatron", "hf"])
def test_injected_gradients_equal_those_of_a_returned_loss(convention):
    moe = make_moe(convention=convention)
    x_BSD, cotangent = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    mask_BS = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    moe(x_BSD, mask_BS).out.backward(cotangent)
    injected = gradients(moe)
    moe.balancer.coefs = dict.fromkeys(COEFS, 0.0)
    out, routing, _ = moe(x_BSD, mask_BS)
    balance = load_balancing_loss(routing.scores, routing.ids, convention=convention, mask_T=mask_BS.flatten())
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
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Balancer(4, **options)


def test_statistics_stay_out_of_the_state_dict():
    assert list(Balancer(4, coefs=COEFS).state_dict()) == []
