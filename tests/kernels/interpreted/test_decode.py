import pytest
import torch
from kernel_checks import check_decode
from triton.runtime.interpreter import InterpreterBuilder

from guide_code.experts.fused import FusedExperts
from guide_code.kernels.configs import DECODE_TOKENS
from guide_code.testing.contract import Case

CASES = (
    Case("one token", 1, 17, 5, 5, 3),
    Case("as many tokens as fit, biases, sentinels", DECODE_TOKENS, 17, 5, 5, 3, bias=True, routing="holes"),
    Case("all on the same experts", 9, 16, 8, routing="one", bias=True),
    Case("every expert chosen", 3, 33, 17, 5, 5),
    Case("gpt-oss", 5, 7, 19, 4, 2, activation="swigluoai", bias=True),
    Case("no gate", 4, 5, 3, 3, 1, activation="gelu", gated=False, bias=True),
    Case("no token", 0),
    Case("nothing but sentinels", 4, routing="none", bias=True),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.reason)
def test_decode_equals_oracle_in_float32(case):
    check_decode(case, torch.float32, "cpu")


@pytest.mark.parametrize("case", [c for c in CASES if c.bias], ids=lambda case: case.reason)
def test_decode_equals_oracle_in_float16(case):
    check_decode(case, torch.float16, "cpu")


def test_each_weight_is_read_once(monkeypatch):
    """One program per chosen expert and column tile gets as far as the weights, however many tokens chose it."""
    experts, seen = FusedExperts(6, 16, 16, gated=False, activation="relu"), []
    real = InterpreterBuilder.create_dot
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda *args: seen.append(1) or real(*args))
    ids_TK = torch.tensor([[0, 3], [3, 0], [5, 3], [6, 3]])  # 6 is the sentinel: experts 0, 3 and 5
    with torch.no_grad():
        experts(torch.randn(4, 16), ids_TK, torch.rand(4, 2))
    assert len(seen) == 3 + 3  # one tile of 16 x 16 up, one down
