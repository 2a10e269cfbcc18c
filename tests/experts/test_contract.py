"""Every backend x every case x every dtype against the float64 oracle; and what all backends share."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import guide_code.experts
from guide_code.experts.blocked import BlockedExperts
from guide_code.experts.gathered import GatheredExperts
from guide_code.experts.grouped import GroupedExperts
from guide_code.experts.loop import LoopExperts
from guide_code.experts.padded import PaddedExperts
from guide_code.testing.contract import (
    CASES,
    CLAMPED,
    OFF_TILE_TOKENS,
    TOLERANCES,
    Case,
    check_experts,
    make_inputs,
    off_tile_cases,
    relative_rms,
)

BACKENDS = (LoopExperts, GroupedExperts, BlockedExperts, PaddedExperts, GatheredExperts)
"""Auto is one of them for each call, and tested in its own file; so are the fused and the offloaded experts."""
PLAIN = Case("plain", bias=True)

backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__)


@backends
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.reason)
def test_backend_equals_oracle(backend, case, dtype):
    check_experts(backend, case, dtype)


@backends
def test_combine_weights_in_bfloat16_get_gradients_in_bfloat16(backend):
    experts, generator = backend(PLAIN.num_experts, PLAIN.hidden_size, PLAIN.intermediate_size), torch.Generator()
    x_TD, ids_TK, weights_TK = make_inputs(PLAIN, torch.float32, generator)
    narrow_TK = weights_TK.bfloat16().requires_grad_()
    wide_TK = narrow_TK.detach().float().requires_grad_()
    out_TD = experts(x_TD, ids_TK, narrow_TK)
    out_TD.square().sum().backward()
    experts(x_TD, ids_TK, wide_TK).square().sum().backward()
    assert out_TD.dtype == torch.float32 and narrow_TK.grad.dtype == torch.bfloat16
    assert relative_rms(narrow_TK.grad, wide_TK.grad) < 0.02


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_clamped_swiglu_equals_oracle(backend, dtype):
    check_experts(backend, CLAMPED, dtype)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", [GroupedExperts, BlockedExperts])
@pytest.mark.parametrize("num_tokens", OFF_TILE_TOKENS)
def test_the_full_grid_of_sizes_off_the_tile(backend, num_tokens):
    """known_failures X-03."""
    for case in off_tile_cases(num_tokens):
        check_experts(backend, case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_grouped_equals_oracle_for_sizes_off_the_tile(dtype):
    sizes = [
        (t, d, i, e, k) for t in (2, 3, 65) for d, i in ((3, 31), (33, 5), (129, 96)) for e in (3, 5) for k in (1, 2)
    ]
    for size in sizes:
        check_experts(GroupedExperts, Case(str(size), *size), dtype)


@backends
def test_contract_catches_a_wrong_backend(backend):
    class Swapped(backend):
        def forward(self, x_TD, ids_TK, weights_TK):
            return super().forward(x_TD, ids_TK, weights_TK.flip(1))

    class Detached(backend):
        def forward(self, x_TD, ids_TK, weights_TK):
            return super().forward(x_TD, ids_TK, weights_TK.detach()) + 0 * weights_TK.sum()

    for wrong, word in ((Swapped, "output"), (Detached, "combine weights")):
        with pytest.raises(AssertionError, match=word):
            check_experts(wrong, PLAIN, torch.float32)


@backends
def test_state_dict_moves_between_backends(backend):
    source = LoopExperts(4, 16, 8, bias=True)
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    target = backend(4, 16, 8, bias=True)
    target.load_state_dict(source.state_dict())
    x_TD, ids_TK, weights_TK = torch.randn(9, 16), torch.randint(0, 4, (9, 1)), torch.rand(9, 1)
    assert relative_rms(target(x_TD, ids_TK, weights_TK), source(x_TD, ids_TK, weights_TK)) < 2e-6


@backends
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_autocast_computes_narrow_and_returns_the_dtype_of_x(backend, weight_dtype, grad):
    """known_failures D-03."""
    experts = backend(6, 16, 8, bias=True).to(weight_dtype)
    x_TD, ids_TK, weights_TK = make_inputs(PLAIN, torch.float32, torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
        out_TD = experts(x_TD, ids_TK, weights_TK)
        hidden = experts(x_TD.to(torch.bfloat16), ids_TK, weights_TK)
    assert out_TD.dtype == torch.float32 and hidden.dtype == torch.bfloat16
    if grad:
        out_TD.backward(torch.randn_like(out_TD))
        assert all(p.grad is not None and p.grad.isfinite().all() for p in experts.parameters())
    expected_TD = experts.float()(x_TD, ids_TK, weights_TK)
    assert 1e-5 < relative_rms(out_TD, expected_TD) < TOLERANCES[torch.bfloat16], "computed in bfloat16"


@backends
def test_float16_result_beyond_its_range_is_weighted_before_it_is_narrowed(backend):
    """known_failures D-04: 256 x 300 = 76,800 exceeds float16's 65,504; times 0.25 it does not."""
    experts = backend(1, 8, 8, activation="relu", gated=False).to(torch.float16)
    with torch.no_grad():
        experts.up_proj.copy_(torch.eye(8))
        experts.down_proj.copy_(torch.eye(8) * 300)
    out_TD = experts(
        torch.full((1, 8), 256.0, dtype=torch.float16), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[0.25]])
    )
    assert out_TD.tolist() == [[19200.0] * 8]


@backends
def test_combine_adds_up_in_float32(backend):
    """known_failures D-04: 512 + 1 + ... + 1 loses every 1 when added in bfloat16."""
    experts = backend(9, 8, 8, activation="relu", gated=False).to(torch.bfloat16)
    with torch.no_grad():
        experts.up_proj.copy_(torch.eye(8))
        experts.down_proj.copy_(torch.eye(8))
        experts.down_proj[0] *= 512
    x_TD = torch.ones(1, 8, dtype=torch.bfloat16)
    out_TD = experts(x_TD, torch.arange(9)[None], torch.ones(1, 9))
    assert out_TD.tolist() == [[520.0] * 8]


@backends
def test_same_bits_on_every_call(backend):
    experts = backend(6, 16, 8)
    x_TD, ids_TK, weights_TK = make_inputs(PLAIN, torch.float32, torch.Generator().manual_seed(0))
    cotangent_TD, seen = torch.randn(33, 16), set()
    for _ in range(3):
        experts.zero_grad()
        x = x_TD.clone().requires_grad_()
        out_TD = experts(x, ids_TK, weights_TK)
        out_TD.backward(cotangent_TD)
        grads = [out_TD.detach(), x.grad, *(p.grad for p in experts.parameters())]
        seen.add(b"".join(t.numpy().tobytes() for t in grads))
    assert len(seen) == 1


@backends
def test_unknown_activation_is_named(backend):
    with pytest.raises(ValueError, match=r"activation must be one of .*'swish'"):
        backend(2, 8, 8, activation="swish")
    with pytest.raises(ValueError, match=r"activation='swigluoai' .* gated=False"):
        backend(2, 8, 8, activation="swigluoai", gated=False)


def test_copied_parts_stay_equal():
    """Each file copies out alone, so the module around each function is written in each: the same but for names."""
    sources = {}
    for path in sorted(Path(guide_code.experts.__file__).parent.glob("*.py")):
        if path.stem in ("identity", "low_rank", "offloaded", "fused", "auto"):  # wrappers, a store, two that inherit
            continue
        for node in ast.parse(path.read_text()).body:
            name = getattr(node, "name", "")
            if name == "_activate" or (isinstance(node, ast.ClassDef) and name.endswith("Experts")):
                text = ast.unparse(node).replace(name, "X").replace(f"{path.stem}_experts", "x")
                text = re.sub(
                    r"^.* = capacity\n|, capacity(: int \| None)?=(None|self.capacity)|^ +capacity: .*\n",
                    "",
                    text,
                    flags=re.M,
                )
                sources.setdefault("_activate" if name == "_activate" else "module", {})[path.stem] = text
    assert {kind: len(set(copies.values())) for kind, copies in sources.items()} == {"_activate": 1, "module": 1}
    assert set(sources["module"]) == {inspect.getmodule(b).__name__.split(".")[-1] for b in BACKENDS}
