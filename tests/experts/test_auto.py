import pytest
import torch

from guide_code.experts import auto
from guide_code.experts.auto import ROWS_PER_EXPERT, AutoExperts, choose
from guide_code.testing.contract import CASES, Case, check_experts


@pytest.mark.parametrize("backend", ["blocked", "grouped"])
@pytest.mark.parametrize("case", CASES[:5], ids=lambda case: case.reason)
def test_whatever_is_chosen_equals_the_oracle(monkeypatch, backend, case):
    monkeypatch.setattr(auto, "ROWS_PER_EXPERT", dict.fromkeys(ROWS_PER_EXPERT, 0 if backend == "blocked" else 1e9))
    assert AutoExperts(6, 16, 8).choice(9, 2).backend == backend
    check_experts(AutoExperts, case, torch.float32)


def test_the_choice_and_its_reason():
    size = {"device": "cpu", "dtype": torch.float32}
    least = ROWS_PER_EXPERT["float32", "inference"]
    few, many = choose(1, 8, 64, **size), choose(8 * least, 8, 64, **size)
    assert few.backend == "grouped" and few.reason.startswith("0.125 rows per expert are fewer than")
    assert many.backend == "blocked" and f"{least} rows per expert are at least" in many.reason
    assert choose(8 * least, 8, 64, training=True, **size).backend == "grouped", "gradients move the border"
    assert choose(1, 8, 64, device="cpu", dtype=torch.bfloat16).backend == "blocked"
    assert choose(1, 8, 64, device="meta", dtype=torch.float32) == ("grouped", "nothing else is made for meta")
    without_gpu = choose(1, 8, 64, device="cuda", dtype=torch.float64)
    assert without_gpu.backend == "grouped" and "cannot run" in without_gpu.reason


@pytest.mark.parametrize("training", [False, True])
def test_what_is_called_is_what_the_choice_says(monkeypatch, training):
    called = []
    for name, function in auto.FUNCTIONS.items():
        spy = lambda *args, name=name, function=function, **kw: called.append(name) or function(*args, **kw)
        monkeypatch.setitem(auto.FUNCTIONS, name, spy)
    experts = AutoExperts(4, 16, 8)
    for tokens in (1, 4 * 12, 4 * 96):
        with torch.set_grad_enabled(training):
            experts(torch.randn(tokens, 16), torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1))
            assert called.pop() == experts.choice(tokens, 1).backend


def test_autocast_decides_the_dtype(monkeypatch):
    seen = []
    monkeypatch.setattr(auto, "choose", lambda *a, dtype, **k: seen.append(dtype) or choose(*a, dtype=dtype, **k))
    arguments = torch.randn(3, 16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        AutoExperts(4, 16, 8)(*arguments)
    AutoExperts(4, 16, 8)(*arguments)
    assert seen == [torch.bfloat16, torch.float32]


def test_sizes_without_tokens():
    check_experts(AutoExperts, Case("none", num_tokens=0), torch.float32)
