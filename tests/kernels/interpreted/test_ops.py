import pytest
import torch
from torch.library import opcheck
from triton.runtime.interpreter import InterpretedFunction

from guide_code.experts.fused import FusedExperts
from guide_code.experts.grouped import GroupedExperts
from guide_code.kernels.ops import decode_op, experts_backward_op, experts_op
from guide_code.testing.contract import TOLERANCES, relative_rms


def arguments(*, grad: bool) -> list:
    new = lambda *shape: torch.randn(shape, requires_grad=grad)
    ids_TK = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])  # no sentinel: its rows are unwritten, so not equal
    tensors = [
        new(5, 4),
        ids_TK,
        torch.rand(5, 2, requires_grad=grad),
        new(3, 12, 4),
        new(3, 4, 6),
        new(3, 12),
        new(3, 4),
    ]
    return [*tensors, "silu", True, torch.float32]


def test_operators_keep_the_rules_of_pytorch():
    """Schema, autograd registration, fake tensors, and tracing with dynamic shapes."""
    opcheck(experts_op, (*arguments(grad=True), True))
    plain = arguments(grad=False)
    opcheck(decode_op, tuple(plain))
    saved = experts_op(*plain, True)[1:]
    opcheck(experts_backward_op, (torch.randn(5, 4), *plain[:7], *saved, "silu", True, [True, False] * 3))


@pytest.mark.parametrize(("num_tokens", "grad"), [(33, True), (5, False)], ids=["training", "decoding"])
def test_the_layer_compiles_whole(num_tokens, grad):
    experts, reference = FusedExperts(4, 16, 8, bias=True), GroupedExperts(4, 16, 8, bias=True)
    reference.load_state_dict(experts.state_dict())
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    x_TD, ids_TK, weights_TK = (
        torch.randn(num_tokens, 16),
        torch.randint(0, 5, (num_tokens, 2)),
        torch.rand(num_tokens, 2),
    )
    with torch.set_grad_enabled(grad):
        outs = [f(x_TD, ids_TK, weights_TK) for f in (compiled, reference)]
    assert relative_rms(*outs) < TOLERANCES[torch.float32]
    if grad:
        cotangent_TD = torch.randn(num_tokens, 16)
        for out in outs:
            out.backward(cotangent_TD)
        for a, b in zip(experts.parameters(), reference.parameters(), strict=True):
            assert relative_rms(a.grad, b.grad) < TOLERANCES[torch.float32]


def test_tokens_may_vary_without_another_compilation():
    experts = FusedExperts(4, 16, 8)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(experts, fullgraph=True, backend=counter, dynamic=True)
    for num_tokens in (33, 40, 57):
        compiled(torch.randn(num_tokens, 16), torch.zeros(num_tokens, 2, dtype=torch.int64), torch.rand(num_tokens, 2))
    assert counter.frame_count == 1


def test_frozen_inputs_cost_no_gradient_kernel(monkeypatch):
    experts, seen = FusedExperts(4, 16, 8, bias=True), []
    experts.requires_grad_(False)
    x_TD = torch.randn(33, 16, requires_grad=True)
    out_TD = experts(x_TD, torch.randint(0, 4, (33, 2)), torch.rand(33, 2))
    real = InterpretedFunction.run
    watched = lambda kernel, *args, **options: seen.append(kernel.__name__) or real(kernel, *args, **options)
    monkeypatch.setattr(InterpretedFunction, "run", watched)
    out_TD.sum().backward()
    assert seen == ["hidden_gradient_kernel", "down_kernel", "combine_kernel"]
    assert experts.down_proj.grad is None and x_TD.grad.isfinite().all()


def test_fake_shapes_are_those_of_the_kernels():
    for save in (True, False):
        args = (*arguments(grad=False), save)
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
        for real, fake in zip(experts_op(*args), experts_op(*meta), strict=True):
            assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16], ids=str)
def test_autocast_computes_narrow_and_returns_the_dtype_of_x(weight_dtype):
    """known_failures D-03."""
    experts = FusedExperts(4, 16, 8, bias=True).to(weight_dtype)
    x_TD, ids_TK, weights_TK = torch.randn(20, 16), torch.randint(0, 4, (20, 2)), torch.rand(20, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        out_TD = experts(x_TD, ids_TK, weights_TK)
        out_TD.backward(torch.randn_like(out_TD))
    assert out_TD.dtype == torch.float32
    assert all(p.grad.dtype == weight_dtype and p.grad.isfinite().all() for p in experts.parameters())
    assert 1e-5 < relative_rms(out_TD, experts.float()(x_TD, ids_TK, weights_TK)) < TOLERANCES[torch.float16]
