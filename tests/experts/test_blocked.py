import pytest
import torch

from guide_code.experts import blocked
from guide_code.experts.blocked import BlockedExperts, blocked_experts
from guide_code.testing.contract import Case, check_experts


@pytest.mark.parametrize("rows", [1, 7, 64], ids=lambda rows: f"blocks of {rows}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_any_size_give_the_oracle(monkeypatch, rows, dtype):
    monkeypatch.setattr(blocked, "BLOCK_ROWS", rows)
    check_experts(BlockedExperts, Case("several blocks", 40, num_experts=7, top_k=3, bias=True, routing="holes"), dtype)


def test_more_rows_than_a_block_holds():
    case = Case("300 rows of one expert, 5 of the other", 305, num_experts=2, top_k=1, bias=True)
    assert case.num_tokens > blocked.BLOCK_ROWS
    check_experts(BlockedExperts, case, torch.float32)


@pytest.mark.parametrize("tokens", [1, 3, 16, 20, 60], ids=lambda t: f"{t} rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_either_orientation_of_the_matmul(tokens, dtype):
    """Few rows are multiplied the other way round; the numbers of rows where that changes lie in between."""
    check_experts(BlockedExperts, Case("one expert", tokens, num_experts=1, top_k=1), dtype)


def test_frozen_weights_get_no_gradient_and_leave_that_of_tokens_alone():
    """As in fine-tuning with adapters: the outer products of frozen experts are not computed."""
    experts = BlockedExperts(4, 16, 8, bias=True)
    x_TD, ids_TK = torch.randn(9, 16, requires_grad=True), torch.randint(0, 4, (9, 1))
    weights_TK, cotangent_TD = torch.rand(9, 1, requires_grad=True), torch.randn(9, 16)
    wanted = torch.autograd.grad(experts(x_TD, ids_TK, weights_TK), [x_TD, weights_TK], cotangent_TD)
    experts.requires_grad_(False)
    experts.gate_up_proj_bias.requires_grad_()
    experts(x_TD, ids_TK, weights_TK).backward(cotangent_TD)
    assert torch.equal(x_TD.grad, wanted[0]) and torch.equal(weights_TK.grad, wanted[1])
    given = {name for name, parameter in experts.named_parameters() if parameter.grad is not None}
    assert given == {"gate_up_proj_bias"}


def test_saves_what_the_docstring_says():
    """N x J hidden numbers beyond the arguments: 12 x 2 x 16, in the dtype of the weights."""
    experts, saved = BlockedExperts(4, 24, 16).bfloat16(), []
    x_TD, ids_TK = torch.randn(12, 24, dtype=torch.bfloat16), torch.randint(0, 4, (12, 1))
    own = {x_TD.data_ptr(), *(p.data_ptr() for p in experts.parameters())}

    def pack(tensor):
        if tensor.is_floating_point() and tensor.data_ptr() not in own:
            saved.append((tensor.numel(), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(x_TD, ids_TK, torch.rand(12, 1).requires_grad_())
    assert [size for size, dtype in saved if dtype == torch.bfloat16] == [12 * 2 * 16]
    assert sum(size for size, dtype in saved if dtype != torch.bfloat16) == 12, "the combine weights"


def test_strided_weights_and_tokens():
    weights = torch.randn(3, 16, 10).mT, torch.randn(3, 5, 16).mT
    x_TD, ids_TK, weights_TK = torch.randn(16, 21).t()[1:], torch.randint(0, 3, (20, 1)), torch.rand(20, 1)
    same = blocked_experts(x_TD.contiguous(), ids_TK, weights_TK, *(w.contiguous() for w in weights))
    torch.testing.assert_close(blocked_experts(x_TD, ids_TK, weights_TK, *weights), same, rtol=1e-5, atol=1e-5)
