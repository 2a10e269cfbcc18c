import pytest
import torch

from guide_code.experts import auto
from guide_code.experts.auto import ROWS_PER_EXPERT, AutoExperts, choose
from guide_code.testing.contract import CASES, Case, check_experts


def only(monkeypatch, backend):
    monkeypatch.setattr(auto, "FEW_ASSIGNMENTS", 1e9 if backend == "gathered" else -1)
    monkeypatch.setattr(auto, "ROWS_PER_EXPERT", dict.fromkeys(ROWS_PER_EXPERT, 0 if backend == "blocked" else 1e9))


@pytest.mark.parametrize("backend", ["blocked", "grouped", "gathered"])
@pytest.mark.parametrize("case", CASES[:5], ids=lambda case: case.reason)
def test_whatever_is_chosen_equals_the_oracle(monkeypatch, backend, case):
    only(monkeypatch, backend)
    with torch.no_grad():
        assert AutoExperts(6, 16, 8).choice(9, 2).backend == backend
    check_experts(AutoExperts, case, torch.float32)


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512", "DEFAULT"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_choice_and_its_reason(monkeypatch, instructions, dtype):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    column = "AVX2" if instructions == "AVX2" else "other"
    kind = "float32" if dtype == torch.float32 else "narrow"
    for use in ("inference", "training"):
        size = {"device": "cpu", "dtype": dtype, "training": use == "training"}
        least = ROWS_PER_EXPERT[column, kind, use]
        many = choose(8 * max(3, least), 8, 64, **size)
        assert many.backend == "blocked" and f"are at least the {least} from which" in many.reason
        assert f"({kind}, {use}, {column} instructions)" in many.reason
        if least:
            few = choose(3, 8, 64, **size)
            assert few.backend == "grouped" and few.reason.startswith("0.375 rows per expert are fewer than")


def test_few_assignments_are_gathered_however_many_experts_there_are():
    size = {"device": "cpu", "dtype": torch.float32}
    for experts in (8, 64, 512):
        assert choose(2, 8, experts, **size) == ("gathered", "16 assignments are at most the 16 that need no sort")
        assert choose(2, 8, experts, training=True, **size).backend != "gathered", "a gradient needs copies"
    assert choose(1, 17, 64, **size).backend == "grouped"


def test_other_devices():
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
    for tokens in (1, 20, 4 * 12, 4 * 96):
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
