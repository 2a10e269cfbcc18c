import pytest
import torch
from torch import nn

from guide_code.build import build_moe
from guide_code.capacity import apply_capacity
from guide_code.config import MoEConfig
from guide_code.experts.grouped import GroupedExperts
from guide_code.experts.loop import LoopExperts
from guide_code.layers import FeedForward
from guide_code.moe import MoE
from guide_code.routers import TopKRouter
from guide_code.testing.contract import relative_rms
from guide_code.testing.oracle import oracle_experts

CONFIG = MoEConfig(hidden_size=16, moe_intermediate_size=8, num_experts=4, top_k=2)


def randomise_(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


def make_moe(**options):
    return randomise_(MoE(TopKRouter(16, 4, 2, bias=True), LoopExperts(4, 16, 8, bias=True), **options))


def test_moe_is_the_weighted_sum_of_experts_and_the_shared_one():
    moe = make_moe(shared=randomise_(FeedForward(16, 12)))
    x_BSD = torch.randn(2, 5, 16)
    out, routing, kept = moe(x_BSD)
    x_TD = x_BSD.flatten(0, 1)
    experts = moe.experts
    expected_TD = oracle_experts(
        x_TD,
        routing.ids,
        routing.weights,
        experts.gate_up_proj,
        experts.down_proj,
        gate_up_proj_bias=experts.gate_up_proj_bias,
        down_proj_bias=experts.down_proj_bias,
    )
    assert out.shape == x_BSD.shape and kept is routing
    assert relative_rms(out.flatten(0, 1), expected_TD + moe.shared(x_TD)) < 2e-6


def test_experts_see_the_tokens_without_jitter():
    """known_failures R-06: an identity expert receives exactly x in training mode."""

    class Record(nn.Module):
        def forward(self, x_TD, ids_TK, weights_TK):
            self.seen_TD = x_TD
            return x_TD

    moe = MoE(TopKRouter(16, 4, 2, jitter=0.2), Record())
    x_BSD = torch.randn(2, 3, 16)
    before = x_BSD.clone()
    moe(x_BSD)
    assert torch.equal(moe.experts.seen_TD, before.flatten(0, 1)) and torch.equal(x_BSD, before)


@pytest.mark.parametrize("backend", ["loop", "grouped"])
@pytest.mark.parametrize("num_shared_experts", [0, 1])
def test_padding_changes_nothing_and_gives_zero(backend, num_shared_experts):
    config = MoEConfig(
        hidden_size=16, moe_intermediate_size=8, num_experts=4, top_k=2, backend=backend,
        num_shared_experts=num_shared_experts, expert_biases=True, router_bias=True,
        load_balancing_coef=0.1, z_loss_coef=0.1,
    )  # fmt: skip
    moe = randomise_(build_moe(config))
    x_BSD, cotangent = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    mask_BS = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    rows = mask_BS.flatten().bool()

    alone = moe(x_BSD.flatten(0, 1)[rows][None])
    alone.out.backward(cotangent.flatten(0, 1)[rows][None])
    expected = [alone.out.detach(), *(p.grad.clone() for p in moe.parameters())]
    losses = moe.balancer.losses()
    moe.zero_grad(), moe.balancer.reset()

    padded = x_BSD.masked_fill(~mask_BS.bool()[..., None], torch.nan).requires_grad_()
    out = moe(padded, mask_BS)
    out.out.backward(cotangent)
    assert (out.out[mask_BS == 0] == 0).all() and (out.routing.ids[~rows] == 4).all()
    assert (padded.grad[mask_BS == 0] == 0).all() and padded.grad.isfinite().all()
    for actual, wanted in zip(
        [out.out.flatten(0, 1)[rows][None], *(p.grad for p in moe.parameters())], expected, strict=True
    ):
        assert relative_rms(actual, wanted) < 2e-6
    for name, value in moe.balancer.losses().items():
        assert value.item() == pytest.approx(losses[name].item(), rel=1e-5)


def test_a_token_that_is_not_finite_gives_zero_and_harms_no_other():
    moe = make_moe(shared=randomise_(FeedForward(16, 12, bias=True)))
    x_BSD = torch.randn(1, 4, 16)
    expected = moe(x_BSD).out.detach()
    bad = x_BSD.clone()
    bad[0, 2, 3] = torch.inf
    out = moe(bad.requires_grad_()).out
    out.backward(torch.randn(1, 4, 16))
    assert (out[0, 2] == 0).all()
    assert relative_rms(out[0, [0, 1, 3]], expected[0, [0, 1, 3]]) < 2e-5
    assert all(p.grad.isfinite().all() for p in moe.parameters())


def test_no_valid_token_leaves_zero_gradients_not_none():
    moe = make_moe()
    out = moe(torch.randn(1, 3, 16), torch.zeros(1, 3)).out
    out.backward(torch.randn(1, 3, 16))
    assert (out == 0).all() and all((p.grad == 0).all() for p in moe.parameters())


def test_capacity_drops_in_training_and_not_in_evaluation():
    moe = make_moe(capacity=lambda routing: apply_capacity(routing, 1))
    x_BSD = torch.randn(1, 8, 16)
    out = moe(x_BSD)
    assert (out.kept.ids == 4).sum() >= 12 and (out.routing.ids < 4).all()
    moe.eval()
    assert moe(x_BSD).kept is moe(x_BSD).kept or (moe(x_BSD).kept.ids < 4).all()


@pytest.mark.parametrize("shared", [0, 2])
def test_one_expert_means_a_dense_layer(shared):
    """The same numbers as one routed expert whose weight is 1, and no router at all."""
    dense = randomise_(
        build_moe(MoEConfig(hidden_size=16, moe_intermediate_size=8, num_experts=1, top_k=1, num_shared_experts=shared))
    )
    x_BSD, mask_BS = torch.randn(2, 3, 16), torch.tensor([[1, 1, 0], [1, 1, 1]])
    out, routing, kept = dense(x_BSD, mask_BS)
    assert routing is None and kept is None and (out[0, 2] == 0).all()
    weights = dense.feed_forward
    expected = oracle_experts(
        x_BSD.flatten(0, 1), torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1),
        weights.gate_up_proj.weight[None], weights.down_proj.weight[None],
    )  # fmt: skip
    assert relative_rms(dense(x_BSD).out.flatten(0, 1), expected) < 2e-6
    assert not any("router" in name for name, _ in dense.named_parameters())


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 4), torch.ones(2, 1, 3, 3), torch.ones(6)], ids=lambda m: str(tuple(m.shape))
)
@pytest.mark.parametrize("num_experts", [1, 4])
def test_mask_of_another_shape_is_refused(mask, num_experts):
    """known_failures M-02."""
    moe = build_moe(MoEConfig(hidden_size=16, moe_intermediate_size=8, num_experts=num_experts, top_k=1))
    with pytest.raises(ValueError, match="mask has shape"):
        moe(torch.randn(2, 3, 16), mask)


def test_masks_of_every_dtype_are_the_same():
    moe = make_moe()
    x_BSD, mask_BS = torch.randn(2, 3, 16), torch.tensor([[1, 1, 0], [1, 1, 1]])
    outs = [moe(x_BSD, mask_BS.to(dtype)).out for dtype in (torch.int64, torch.bool, torch.float32)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert torch.equal(moe(x_BSD).out, moe(x_BSD, torch.ones(2, 3)).out)


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_output_dtype_is_that_of_x_under_autocast(backend):
    config = MoEConfig(
        hidden_size=16, moe_intermediate_size=8, num_experts=4, top_k=2, backend=backend, num_shared_experts=1
    )
    moe = build_moe(config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moe(torch.randn(1, 3, 16)).out.dtype == torch.float32
        assert moe(torch.randn(1, 3, 16).bfloat16()).out.dtype == torch.bfloat16
    assert moe.bfloat16()(torch.randn(1, 3, 16).bfloat16()).out.dtype == torch.bfloat16


@pytest.mark.parametrize("backend", [LoopExperts, GroupedExperts], ids=lambda b: b.__name__)
def test_weight_on_input_multiplies_what_goes_into_the_experts(backend):
    """Llama-4. Each choice is one expert with weight 1 on a token times the weight; the oracle knows no more."""
    router = TopKRouter(16, 4, 2, score_fn="sigmoid", norm_topk_prob=False)
    moe = randomise_(MoE(router, backend(4, 16, 8, bias=True), weight_on_input=True))
    x_BSD, mask_BS = torch.randn(2, 5, 16, requires_grad=True), torch.ones(2, 5)
    mask_BS[0, 3:] = 0
    cotangent_BSD = torch.randn(2, 5, 16)
    out, routing, _ = moe(x_BSD, mask_BS)
    inputs = (x_BSD, *moe.parameters())
    actual = torch.autograd.grad(out, inputs, cotangent_BSD)

    x_TD, experts, expected_TD = x_BSD.flatten(0, 1).double(), moe.experts, 0
    weights_TK = moe.router(x_BSD.flatten(0, 1), mask_BS.flatten()).weights
    for slot in range(2):
        expected_TD = expected_TD + oracle_experts(
            x_TD * weights_TK[:, slot, None].double(), routing.ids[:, slot, None], torch.ones(10, 1),
            experts.gate_up_proj, experts.down_proj,
            gate_up_proj_bias=experts.gate_up_proj_bias, down_proj_bias=experts.down_proj_bias,
        )  # fmt: skip
    assert relative_rms(out.flatten(0, 1), expected_TD) < 2e-6
    assert (out[0, 3:] == 0).all()
    expected = torch.autograd.grad(expected_TD, inputs, cotangent_BSD.flatten(0, 1).double())
    for got, wanted in zip(actual, expected, strict=True):
        assert relative_rms(got, wanted) < 4e-6
    moe.weight_on_input = False
    assert relative_rms(moe(x_BSD, mask_BS).out, out) > 0.1


def test_weight_on_input_keeps_dtypes_and_drops():
    options = {"weight_on_input": True, "capacity": lambda routing: apply_capacity(routing, 1)}
    moe = MoE(TopKRouter(16, 4, 2), GroupedExperts(4, 16, 8), **options).bfloat16()
    out = moe(torch.randn(1, 9, 16).bfloat16())
    assert out.out.dtype == torch.bfloat16
    lost = (out.kept.ids == 4).all(dim=1)
    assert lost.any() and (out.out[0, lost] == 0).all() and (out.out[0, ~lost] != 0).any()
    assert moe(torch.randn(1, 0, 16).bfloat16()).out.shape == (1, 0, 16)


def test_combining_adds_up_in_float32_and_float16_does_not_overflow_inside():
    """known_failures D-04."""

    def linear_experts(outputs, dtype):
        """Experts without a gate that return constants: relu(x) is 1, one weight each."""
        experts = LoopExperts(len(outputs), 1, 1, activation="relu", gated=False).to(dtype)
        nn.init.ones_(experts.up_proj)
        experts.down_proj.data.copy_(torch.tensor(outputs).view(-1, 1, 1))
        return experts

    three = linear_experts([1000.0, 2000.0, 3000.0], torch.bfloat16)
    out = three(torch.ones(1, 1).bfloat16(), torch.tensor([[0, 1, 2]]), torch.tensor([[0.1, 0.2, 0.7]]))
    assert out.item() == torch.tensor(2600.0).bfloat16().item()
    big = linear_experts([300.0], torch.float16)
    big.up_proj.data.fill_(256.0)
    out = big(torch.ones(1, 1).half(), torch.tensor([[0]]), torch.tensor([[0.25]]))
    assert out.item() == 19_200.0


def test_autocast_with_narrow_or_wide_weights_gives_nearly_the_same():
    """known_failures D-03."""
    moe = make_moe()
    x_BSD = torch.randn(2, 6, 16)
    exact = moe(x_BSD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = moe(x_BSD)
        narrow = moe.bfloat16()(x_BSD)
    assert wide.out.dtype == narrow.out.dtype == torch.float32
    assert torch.equal(wide.routing.ids, exact.routing.ids)  # the router narrows nothing
    assert relative_rms(wide.out, exact.out) < 1.5e-2 and relative_rms(narrow.out, exact.out) < 5e-2
