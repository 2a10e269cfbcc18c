import pytest
import torch
from kernel_checks import SIZES, check_neighbours, check_same_bits, check_weighted_before_it_is_narrowed, pairwise_cases

from guide_code.experts.fused import FusedExperts
from guide_code.kernels.layer import saved_values
from guide_code.testing.contract import CASES, CLAMPED, Case, check_experts

NARROW = [c for c in CASES if c.bias and c.activation != "gelu"]


@pytest.mark.parametrize("case", (*CASES, CLAMPED), ids=lambda case: case.reason)
def test_fused_equals_oracle_in_float32(case):
    check_experts(FusedExperts, case, torch.float32)


@pytest.mark.parametrize("case", NARROW, ids=lambda case: case.reason)
def test_fused_equals_oracle_in_float16(case):
    check_experts(FusedExperts, case, torch.float16)


@pytest.mark.parametrize("case", pairwise_cases(SIZES, bias=True), ids=lambda case: case.reason)
def test_fused_equals_oracle_for_sizes_off_the_tile(case):
    """known_failures X-03, a pairwise sample."""
    check_experts(FusedExperts, case, torch.float32)


def test_neighbours_in_memory_are_not_read():
    """known_failures X-03: a mask that is missing shows as a NaN, or as another bit."""
    check_neighbours(Case("odd", 19, 17, 5, 3, 2, activation="swigluoai"), torch.float32, "cpu")


def test_weighted_before_it_is_narrowed():
    """known_failures D-04."""
    check_weighted_before_it_is_narrowed("cpu")


def test_same_bits_on_every_call():
    check_same_bits("cpu")


def test_unwritten_memory_shows():
    """These tests rest on it."""
    assert torch.empty(3).isnan().all() and torch.zeros(2).new_empty(3).isnan().all()


def test_a_token_may_name_an_expert_twice():
    experts = FusedExperts(3, 5, 4, bias=True)
    torch.nn.init.normal_(experts.down_proj_bias)
    x_TD, twice = torch.randn(2, 5), torch.tensor([[1, 0, 1], [2, 2, 2]])
    with torch.no_grad():
        decoded = experts(x_TD, twice, torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]))
        once = torch.tensor([[1, 0], [2, 3]])
        merged = experts(x_TD, once, torch.tensor([[0.4, 0.2], [1.5, 9.0]]))
    torch.testing.assert_close(decoded, merged)
    torch.testing.assert_close(experts(x_TD, twice, torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])), merged)


@pytest.mark.parametrize("gated", [True, False])
def test_saved_values_are_what_is_saved(gated):
    experts = FusedExperts(4, 16, 8, gated=gated)
    saved = {}

    def pack(tensor):
        if tensor.dtype == torch.float32:
            saved[tensor.data_ptr()] = tensor
        return tensor

    x_TD, weights_TK = torch.randn(32, 16), torch.rand(32, 2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(x_TD, torch.randint(0, 4, (32, 2)), weights_TK)
    for tensor in (weights_TK, *experts.parameters()):
        del saved[tensor.data_ptr()]
    assert sum(t.numel() for t in saved.values()) == 32 * saved_values(16, 8, 2, gated=gated)["ours"]


def test_saved_values_of_the_docstring():
    assert saved_values(2048, 1024, 8) == {"ours": 18_432, "everything": 67_584}
