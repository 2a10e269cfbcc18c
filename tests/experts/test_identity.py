import pytest
import torch

from guide_code.experts.grouped import GroupedExperts
from guide_code.experts.identity import IdentityExperts, identity_experts
from guide_code.experts.loop import LoopExperts
from guide_code.testing.contract import relative_rms
from guide_code.testing.oracle import oracle_experts


@pytest.mark.parametrize("backend", [LoopExperts, GroupedExperts], ids=lambda b: b.__name__)
def test_real_experts_then_identity_experts(backend):
    experts = IdentityExperts(backend(4, 16, 8, bias=True), 3)
    x_TD, weights_TK = torch.randn(50, 16, requires_grad=True), torch.rand(50, 3, requires_grad=True)
    ids_TK = torch.rand(50, 8).argsort(dim=1)[:, :3]  # 0-3 real, 4-6 identity, 7 the sentinel
    cotangent_TD = torch.randn(50, 16)
    inputs = (x_TD, weights_TK, experts.experts.gate_up_proj)
    actual = torch.autograd.grad(experts(x_TD, ids_TK, weights_TK), inputs, cotangent_TD)

    real_TD = oracle_experts(
        x_TD, ids_TK, weights_TK, experts.experts.gate_up_proj, experts.experts.down_proj,
        gate_up_proj_bias=experts.experts.gate_up_proj_bias, down_proj_bias=experts.experts.down_proj_bias,
    )  # fmt: skip
    identity_TK = (ids_TK >= 4) & (ids_TK < 7)
    expected_TD = real_TD + (weights_TK.double() * identity_TK).sum(dim=1, keepdim=True) * x_TD.double()
    assert relative_rms(experts(x_TD, ids_TK, weights_TK), expected_TD) < 2e-6
    for got, wanted in zip(actual, torch.autograd.grad(expected_TD, inputs, cotangent_TD.double()), strict=True):
        assert relative_rms(got, wanted) < 2e-6


def test_a_token_without_identity_expert_adds_nothing_whatever_it_holds():
    x_TD = torch.tensor([[torch.nan], [3.0]], requires_grad=True)
    weights_TK = torch.tensor([[0.5], [0.5]], requires_grad=True)
    out_TD = identity_experts(x_TD, torch.tensor([[4], [2]]), weights_TK, 2, 2)
    out_TD.backward(torch.ones(2, 1))
    assert out_TD.tolist() == [[0.0], [1.5]]
    assert x_TD.grad.tolist() == [[0.0], [0.5]] and weights_TK.grad.tolist() == [[0.0], [3.0]]


def test_identity_experts_pass_gradcheck():
    x_TD = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weights_TK = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    ids_TK = torch.tensor([[0, 1], [2, 1], [3, 2], [4, 2], [1, 4]])
    assert torch.autograd.gradcheck(lambda x, w: identity_experts(x, ids_TK, w, 2, 2), (x_TD, weights_TK))


def test_output_keeps_the_dtype_of_x():
    experts = IdentityExperts(GroupedExperts(4, 16, 8), 2).bfloat16()
    out_TD = experts(torch.randn(5, 16).bfloat16(), torch.full((5, 1), 5), torch.rand(5, 1))
    assert out_TD.dtype == torch.bfloat16 and out_TD.count_nonzero() > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert experts(torch.randn(5, 16), torch.full((5, 1), 5), torch.rand(5, 1)).dtype == torch.float32


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="num_identity must be at least 0, got -1"):
        IdentityExperts(LoopExperts(4, 16, 8), -1)
