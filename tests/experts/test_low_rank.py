import pytest
import torch
from torch import nn

from guide_code.experts.fused import FusedExperts
from guide_code.experts.grouped import GroupedExperts
from guide_code.experts.loop import LoopExperts
from guide_code.experts.low_rank import LoRAExperts, LowRank
from guide_code.testing.contract import CASES, TOLERANCES, Case, make_inputs, relative_rms
from guide_code.testing.oracle import oracle_experts

PLAIN = Case("plain", bias=True)


def make(case, dtype=torch.float32, backend=GroupedExperts, rank=3, shared=False):
    """Random experts with random updates, frozen."""
    base = backend(
        case.num_experts,
        case.hidden_size,
        case.intermediate_size,
        activation=case.activation,
        gated=case.gated,
        bias=case.bias,
    ).requires_grad_(False)
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    experts = LoRAExperts(base.to(dtype), rank, alpha=2.0 * rank, shared=shared)
    for _, update in experts.adapted():
        nn.init.normal_(update.b, std=0.3)
    return experts


def inputs(case, dtype=torch.float32):
    return make_inputs(case, dtype, torch.Generator().manual_seed(0))


def merged_oracle(experts, case, x, ids_TK, weights, updates):
    """Weights and updates added up, in float64."""
    tensors = {name: p.detach().double() for name, p in experts.base.named_parameters()}
    for name, (a, b) in updates.items():
        tensors[name] = tensors[name] + 2.0 * b @ a
    up = "gate_up_proj" if case.gated else "up_proj"
    return oracle_experts(
        x,
        ids_TK,
        weights,
        tensors[up],
        tensors["down_proj"],
        gate_up_proj_bias=tensors.get(f"{up}_bias"),
        down_proj_bias=tensors.get("down_proj_bias"),
        activation=case.activation,
        gated=case.gated,
    )


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float64, 3), (torch.float32, 4), (torch.float32, 3)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.reason)
def test_output_and_gradients_equal_those_of_merged_weights(case, dtype, rank, shared):
    experts = make(case, dtype, rank=rank, shared=shared)
    x_TD, ids_TK, weights_TK = inputs(case, dtype)
    cotangent_TD = torch.randn(x_TD.shape, dtype=dtype)
    x, weights = (t.clone().requires_grad_() for t in (x_TD, weights_TK))
    out_TD = experts(x, ids_TK, weights)
    out_TD.backward(cotangent_TD)

    x64, weights64 = (t.double().requires_grad_() for t in (x_TD, weights_TK))
    names = ("gate_up_proj" if case.gated else "up_proj", "down_proj")
    pairs = {
        name: tuple(p.detach().double().requires_grad_() for p in (update.a, update.b))
        for name, (_, update) in zip(names, experts.adapted(), strict=True)
    }
    expected_TD = merged_oracle(experts, case, x64, ids_TK, weights64, pairs)
    if expected_TD.requires_grad:
        expected_TD.backward(cotangent_TD.double())
    got = {"output": out_TD, "tokens": x.grad, "combine weights": weights.grad}
    wanted = {"output": expected_TD, "tokens": x64.grad, "combine weights": weights64.grad}
    for name, (_, update) in zip(names, experts.adapted(), strict=True):
        got |= {f"{name} a": update.a.grad, f"{name} b": update.b.grad}
        wanted |= {f"{name} {letter}": t.grad for letter, t in zip("ab", pairs[name], strict=True)}
    for what, tensor in got.items():
        expected = torch.zeros_like(tensor) if wanted[what] is None else wanted[what]
        assert tensor.isfinite().all() and relative_rms(tensor, expected) < 2 * TOLERANCES[dtype], what
    assert all(p.grad is None for p in experts.base.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_weights_have_wide_updates(dtype):
    experts = make(PLAIN, dtype)
    args = inputs(PLAIN, dtype)
    out_TD = experts(*args)
    out_TD.backward(torch.randn_like(out_TD))
    pairs = {n: (u.a.double(), u.b.double()) for n, (_, u) in zip(("gate_up_proj", "down_proj"), experts.adapted())}  # noqa: B905
    wide = [t.double() if t.is_floating_point() else t for t in args]
    assert relative_rms(out_TD, merged_oracle(experts, PLAIN, *wide, pairs)) < TOLERANCES[dtype]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in experts.parameters() if p.requires_grad)


@pytest.mark.parametrize("backend", [LoopExperts, GroupedExperts, FusedExperts], ids=lambda b: b.__name__)
def test_any_backend_with_stacked_weights_is_adapted(backend):
    torch.manual_seed(1)
    experts = make(PLAIN, backend=backend)
    torch.manual_seed(1)
    expected = make(PLAIN)
    assert torch.equal(experts(*inputs(PLAIN)), expected(*inputs(PLAIN)))


@pytest.mark.parametrize("backend", [LoopExperts, GroupedExperts], ids=lambda b: b.__name__)
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_weights_give_the_same_and_unmerging_restores_every_bit(backend, shared, dtype):
    experts = make(PLAIN, dtype, backend, shared=shared).eval()
    args = inputs(PLAIN, dtype)
    before, out_TD = {n: p.clone() for n, p in experts.base.named_parameters()}, experts(*args)
    for _ in range(2):
        for weight, update in experts.adapted():
            update.merge_(weight)
            update.merge_(weight)  # again: changes nothing
            exact = weight.data.double()
            expected = update._original.double() + (2.0 * update.b.double() @ update.a.double())
            assert relative_rms(exact, expected) < TOLERANCES[dtype]
        assert relative_rms(experts(*args), out_TD) < 2 * TOLERANCES[dtype]
        assert torch.equal(experts(*args), experts.base(*args)), "the backend computes"
        for weight, update in experts.adapted():
            update.unmerge_(weight)
            update.unmerge_(weight)
        assert all(torch.equal(before[n], p) for n, p in experts.base.named_parameters())
    assert torch.equal(experts(*args), out_TD)


def test_updates_begin_at_nothing_and_add_nothing():
    base = GroupedExperts(6, 16, 8, bias=True)
    experts = LoRAExperts(base, 4, 8.0)
    assert torch.equal(experts(*inputs(PLAIN)), base(*inputs(PLAIN)))
    out_TD = experts(*inputs(PLAIN))
    out_TD.backward(torch.randn_like(out_TD))
    assert experts.down_update.b.grad.norm() > 0, "or training could not begin"


def test_merged_updates_are_not_trained_silently():
    experts = make(PLAIN).train()
    for weight, update in experts.adapted():
        update.merge_(weight)
    with pytest.raises(ValueError, match=r"merged and would not be trained: call unmerge_lora_"):
        experts(*inputs(PLAIN))
    with torch.no_grad():
        experts(*inputs(PLAIN))
    experts.eval()(*inputs(PLAIN))


def test_autocast_computes_narrow():
    experts, args = make(PLAIN), inputs(PLAIN)
    expected = experts(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out_TD = experts(*args)
    assert out_TD.dtype == torch.float32 and 1e-5 < relative_rms(out_TD, expected) < TOLERANCES[torch.bfloat16]
    out_TD.backward(torch.randn_like(out_TD))
    assert all(u.a.grad.isfinite().all() for _, u in experts.adapted())


@pytest.mark.parametrize(("shape", "stack"), [((5, 7), ()), ((3, 5, 7), (3,))], ids=str)
def test_sizes_of_an_update(shape, stack):
    update = LowRank(torch.zeros(shape), 2, 6.0)
    assert update.a.shape == (*stack, 2, 7) and update.b.shape == (*stack, 5, 2) and update.scale == 3.0
    assert LowRank(torch.zeros(3, 5, 7), 2, 6.0, shared=True).a.shape == (1, 2, 7)
