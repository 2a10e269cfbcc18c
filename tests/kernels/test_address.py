"""known_failures X-01: 32-bit offsets overflow."""

import ast
from pathlib import Path

import pytest
import torch
import triton.language as tl

import guide_code.kernels
from guide_code.kernels import address
from guide_code.kernels.configs import Tile
from guide_code.kernels.launch import Launch, run

FOLDER = Path(guide_code.kernels.__file__).parent
HELPERS = ("at", "matrix", "advance")


class Int32:
    """An index as a kernel has it: products wrap unless it is widened first."""

    def __init__(self, value):
        self.value = value

    def to(self, kind):
        return self.value if kind == tl.int64 else self

    def __mul__(self, other):
        return (self.value * other + 2**31) % 2**32 - 2**31


PLACES = [
    (131_072 * 8, 2048, 2047, 1),  # tokens x top_k x hidden = 2^31
    (511 * 2048 + 2047, 4096, 4095, 1),  # expert x rows x columns = 2^32
    (3, 1, 4095, 2**20),  # a transposed weight: the columns are far apart
]


@pytest.mark.parametrize(("row", "row_stride", "column", "column_stride"), PLACES)
def test_addresses_equal_those_of_whole_numbers(row, row_stride, column, column_stride):
    exact = row * row_stride + column * column_stride
    assert exact >= 2**31 - 1
    assert address.at.fn(0, Int32(row), row_stride, Int32(column), column_stride) == exact
    assert Int32(row) * row_stride + Int32(column) * column_stride != exact, "32 bits would do: the case shows nothing"


def test_experts_begin_where_whole_numbers_say():
    assert address.matrix.fn(0, Int32(511), 2048 * 4096) == 511 * 2048 * 4096 > 2**31


def test_steps_are_taken_in_64_bits():
    step = _function(FOLDER / "address.py", "advance").body[-1].value
    assert ast.unparse(step) == "pointers + tl.cast(stride, tl.int64) * steps"


def test_no_kernel_multiplies_in_an_address():
    """Every address is one of the helpers', or a pointer plus an index; strides go to the helpers and nowhere else."""
    seen = 0
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem in ("address", "inspect", "tune", "traffic"):
            continue
        for kernel in _kernels(path):
            pointers = {n.targets[0].id: n.value for n in ast.walk(kernel) if isinstance(n, ast.Assign) and _plain(n)}
            for call in (n for n in ast.walk(kernel) if isinstance(n, ast.Call)):
                name = ast.unparse(call.func)
                if name in ("tl.load", "tl.store"):
                    seen += 1
                    value = call.args[0]
                    while isinstance(value, ast.Name) and value.id in pointers:
                        value = pointers[value.id]
                    products = [n for n in ast.walk(value) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
                    assert not products, f"{path.stem}.{kernel.name}: {ast.unparse(call)}"
            for product in (n for n in ast.walk(kernel) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)):
                assert "stride" not in ast.unparse(product), f"{path.stem}.{kernel.name}: {ast.unparse(product)}"
    assert seen > 60


def test_the_rule_finds_an_address_of_32_bits():
    source = ast.parse("tl.load(x + row * width)").body[0].value
    assert [n for n in ast.walk(source.args[0]) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]


def test_a_grid_that_is_too_large_is_refused():
    launch = Launch(address.at, (2**31,), {}, Tile(1, 1, 1, 4, 1))
    with pytest.raises(ValueError, match="exceeds 2\\^31 - 1"):
        run(launch)


def test_an_empty_grid_starts_nothing():
    run(Launch(None, (0,), {"x": torch.empty(0)}, Tile(1, 1, 1, 4, 1)))


def _plain(node: ast.Assign) -> bool:
    return len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and "pointers" in node.targets[0].id


def _kernels(path: Path) -> list[ast.FunctionDef]:
    functions = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
    return [f for f in functions if "triton.jit" in map(ast.unparse, f.decorator_list)]


def _function(path: Path, name: str) -> ast.FunctionDef:
    return next(f for f in _kernels(path) if f.name == name)
