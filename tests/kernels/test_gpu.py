"""The kernels on a GPU: what the interpreter checks, in bfloat16 too, and what only a GPU has."""

import pytest
import torch
from kernel_checks import check_decode, check_neighbours, check_same_bits, check_weighted_before_it_is_narrowed

from guide_code.experts.fused import FusedExperts
from guide_code.experts.grouped import GroupedExperts
from guide_code.testing.contract import (
    CASES,
    CLAMPED,
    OFF_TILE_TOKENS,
    TOLERANCES,
    Case,
    check_experts,
    off_tile_cases,
    relative_rms,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
cases = pytest.mark.parametrize("case", (*CASES, CLAMPED), ids=lambda case: case.reason)


@dtypes
@cases
def test_fused_equals_oracle(case, dtype):
    check_experts(FusedExperts, case, dtype, device="cuda")


@dtypes
@cases
def test_decode_equals_oracle(case, dtype):
    check_decode(case, dtype, "cuda")


@pytest.mark.parametrize("num_tokens", OFF_TILE_TOKENS)
def test_sizes_off_the_tile(num_tokens):
    """known_failures X-03, the full grid."""
    for case in off_tile_cases(num_tokens):
        check_experts(FusedExperts, case, torch.bfloat16, device="cuda")


@dtypes
def test_neighbours_in_memory_are_not_read(dtype):
    check_neighbours(Case("odd", 19, 17, 5, 3, 2, activation="swigluoai"), dtype, "cuda")


def test_weighted_before_it_is_narrowed():
    """known_failures D-04."""
    check_weighted_before_it_is_narrowed("cuda")


def test_same_bits_on_every_call():
    check_same_bits("cuda")


def layer():
    experts = FusedExperts(8, 64, 32).to("cuda", torch.bfloat16)
    reference = GroupedExperts(8, 64, 32).to("cuda", torch.bfloat16)
    reference.load_state_dict(experts.state_dict())
    return experts, reference


def inputs(num_tokens):
    x_TD = torch.randn(num_tokens, 64, device="cuda", dtype=torch.bfloat16)
    return x_TD, torch.randint(0, 8, (num_tokens, 2), device="cuda"), torch.rand(num_tokens, 2, device="cuda")


@pytest.mark.parametrize("num_tokens", [1, 4, 200])
def test_a_cuda_graph_replays_with_other_tokens_and_another_routing(num_tokens):
    experts, reference = layer()
    held = inputs(num_tokens)
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            experts(*held)  # compiles before the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_TD = experts(*held)
        for _ in range(3):
            for old, new in zip(held, inputs(num_tokens), strict=True):
                old.copy_(new)
            graph.replay()
            assert relative_rms(out_TD.cpu(), reference(*held).cpu()) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_the_layer_compiles_whole(grad):
    torch._dynamo.reset()
    experts, reference = layer()
    arguments = inputs(200)
    with torch.set_grad_enabled(grad):
        outs = [f(*arguments) for f in (torch.compile(experts, fullgraph=True), reference)]
    assert relative_rms(*(out.cpu() for out in outs)) < TOLERANCES[torch.bfloat16]
    if grad:
        for out in outs:
            out.square().sum().backward()
        for a, b in zip(experts.parameters(), reference.parameters(), strict=True):
            assert relative_rms(a.grad.cpu(), b.grad.cpu()) < 4 * TOLERANCES[torch.bfloat16]


def test_nothing_waits_for_the_host():
    experts, _ = layer()
    arguments = inputs(200)
    experts(*arguments)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(*arguments).sum().backward()
        with torch.no_grad():
            experts(*(t[:2] for t in arguments))
    finally:
        torch.cuda.set_sync_debug_mode("default")
