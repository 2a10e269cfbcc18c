"""What torch.compile captures whole, forward and backward, and what it cannot."""

import functools
import inspect
from pathlib import Path

import pytest
import torch

from guide_code.backends import BACKENDS
from guide_code.experts.auto import AutoExperts
from guide_code.experts.blocked import BlockedExperts
from guide_code.experts.gathered import GatheredExperts
from guide_code.experts.grouped import GroupedExperts
from guide_code.experts.loop import LoopExperts
from guide_code.experts.offloaded import OffloadedExperts
from guide_code.experts.padded import PaddedExperts

# Dynamo itself makes instances of autograd functions.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

WHOLE = {
    "auto": AutoExperts,
    "grouped": GroupedExperts,
    "padded, capacity 5": functools.partial(PaddedExperts, capacity=5),
    "gathered": GatheredExperts,
}
BROKEN = {"loop": LoopExperts, "blocked": BlockedExperts}


def inputs(width, dtype):
    ids_TK = torch.stack([torch.randperm(7)[:2] for _ in range(13)])  # id 6 is one too many: a sentinel
    return torch.randn(13, width).to(dtype).requires_grad_(), ids_TK, torch.rand(13, 2).requires_grad_()


@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    [
        ("auto", 16, torch.float32),
        ("grouped", 16, torch.bfloat16),
        ("grouped", 7, torch.float32),  # an odd width, which F.grouped_mm refuses
        ("padded, capacity 5", 16, torch.float32),
        ("gathered", 16, torch.float32),
    ],
)
def test_compiles_whole_with_the_same_values_and_gradients(name, width, dtype):
    torch._dynamo.reset()
    experts = WHOLE[name](6, width, 5 if width == 7 else 8, bias=True).to(dtype)
    x_TD, ids_TK, weights_TK = inputs(width, dtype)
    cotangent_TD = torch.randn(13, width).to(dtype)
    sources = [x_TD, weights_TK, *experts.parameters()]
    eager_TD = experts(x_TD, ids_TK, weights_TK)
    eager = torch.autograd.grad(eager_TD, sources, cotangent_TD)
    compiled_TD = torch.compile(experts, fullgraph=True, backend="aot_eager")(x_TD, ids_TK, weights_TK)
    compiled = torch.autograd.grad(compiled_TD, sources, cotangent_TD)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for ours, theirs in zip([compiled_TD, *compiled], [eager_TD, *eager], strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("name", BROKEN)
def test_reading_sizes_on_the_host_breaks_the_graph(name):
    torch._dynamo.reset()
    experts, arguments = BROKEN[name](6, 16, 8), inputs(16, torch.float32)
    with pytest.raises(Exception, match="data-dependent"):
        torch.compile(experts, fullgraph=True, backend="aot_eager")(*arguments)


def test_offloaded_experts_are_fetched_by_the_host():
    torch._dynamo.reset()
    experts, arguments = OffloadedExperts(6, 16, 8), inputs(16, torch.float32)
    with torch.no_grad(), pytest.raises(Exception, match=r"(?i)data-dependent|unsupported|graph break"):
        torch.compile(experts, fullgraph=True, backend="aot_eager")(*arguments)


def test_the_table_of_the_guide_says_what_is_tested_here():
    page = (Path(__file__).parents[2] / "docs/reference/backends.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"]
    said = {row[0].strip("`"): row[-1] for row in rows}
    whole = {name.split(",")[0] for name in WHOLE} | {"fused"}  # that one: tests/kernels
    assert said == dict.fromkeys(whole, "yes") | dict.fromkeys([*BROKEN, "offloaded"], "no")
    assert set(said) == {*BACKENDS, "auto"}


def test_a_copy_of_the_file_has_operators_of_its_own(tmp_path, monkeypatch):
    """Both can be loaded in one process: the names of operators hold the name of the module."""
    source = inspect.getfile(GroupedExperts)
    (tmp_path / "my_experts.py").write_text(Path(source).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    import my_experts

    for module in (my_experts.GroupedExperts, GroupedExperts):
        torch._dynamo.reset()
        compiled = torch.compile(module(6, 16, 8), fullgraph=True, backend="aot_eager")
        compiled(*inputs(16, torch.float32)).backward(torch.randn(13, 16))
