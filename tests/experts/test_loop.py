import torch
from torch import nn

from guide_code.experts.loop import LoopExperts, loop_experts


def test_loop_never_touches_an_expert_without_tokens():
    experts = LoopExperts(4, 8, 8)
    with torch.no_grad():
        experts.gate_up_proj[2:] = torch.nan
        experts.down_proj[2:] = torch.nan
    x_TD = torch.randn(5, 8)
    out_TD = experts(x_TD, torch.tensor([[0, 1]] * 5), torch.rand(5, 2))
    out_TD.backward(torch.randn(5, 8))
    assert out_TD.isfinite().all()
    assert experts.down_proj.grad[2:].count_nonzero() == 0 and experts.down_proj.grad[:2].count_nonzero() > 0


def test_loop_passes_gradcheck():
    shapes = [(5, 4), (5, 2), (3, 6, 4), (3, 4, 3), (3, 6), (3, 4)]
    x, weights, *parameters = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    ids_TK = torch.tensor([[0, 1], [2, 0], [1, 3], [3, 3], [2, 1]])  # 3 is the sentinel

    def run(x, weights, gate_up, down, gate_up_bias, down_bias):
        return loop_experts(x, ids_TK, weights, gate_up, down, gate_up_proj_bias=gate_up_bias, down_proj_bias=down_bias)

    assert torch.autograd.gradcheck(run, (x, weights, *parameters))


def test_parameter_names_tell_whether_there_is_a_gate():
    assert set(LoopExperts(2, 8, 4, bias=True).state_dict()) == {
        "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias",
    }  # fmt: skip
    assert set(LoopExperts(2, 8, 4, gated=False).state_dict()) == {"up_proj", "down_proj"}
    assert isinstance(LoopExperts(2, 8, 4).gate_up_proj, nn.Parameter)
