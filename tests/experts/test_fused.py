import pytest
import torch

from guide_code.experts.fused import FusedExperts, fused_experts, fused_obstacle
from guide_code.experts.grouped import GroupedExperts

CALL = (torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def test_obstacle_says_why(monkeypatch):
    assert "TRITON_INTERPRET=1" in fused_obstacle("cpu")
    assert "not meta" in fused_obstacle("meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in fused_obstacle("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, works in (((7, 5), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        assert (fused_obstacle("cuda") == "") is works
    monkeypatch.setattr("guide_code.experts.fused.find_spec", lambda name: None)
    assert "pip install triton" in fused_obstacle("cuda")


def test_a_device_without_triton_is_refused_by_name():
    with pytest.raises(ValueError, match=r"x_TD\.device='cpu': .*interpreter.*grouped_experts"):
        FusedExperts(4, 8, 8)(*CALL)


def test_float64_is_refused_by_name():
    with pytest.raises(ValueError, match=r"gate_up_proj\.dtype=torch\.float64"):
        FusedExperts(4, 8, 8).double()(CALL[0].double(), *CALL[1:])


def test_same_parameters_as_grouped():
    for options in ({}, {"bias": True}, {"gated": False, "activation": "relu"}):
        experts = FusedExperts(4, 16, 8, **options)
        GroupedExperts(4, 16, 8, **options).load_state_dict(experts.state_dict())


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_shapes_are_inferred_without_a_device(grad):
    """Meta tensors, as in the shape inference of a pipeline, and fake CUDA tensors, as in torch.compile."""
    with torch.device("meta"), torch.set_grad_enabled(grad):
        experts = FusedExperts(4, 8, 16, bias=True).to(torch.bfloat16)
        x_TD = torch.empty(40, 8, dtype=torch.bfloat16, requires_grad=grad)
        out_TD = experts(x_TD, torch.empty(40, 2, dtype=torch.int64), torch.empty(40, 2))
        assert out_TD.shape == (40, 8) and out_TD.dtype == torch.bfloat16
        if grad:
            out_TD.sum().backward()
            assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in (x_TD, *experts.parameters()))


def test_the_function_takes_what_grouped_takes():
    assert fused_experts.__annotations__ == GroupedExperts.forward.__globals__["grouped_experts"].__annotations__
