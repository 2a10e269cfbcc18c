import json

import pytest
import torch

from guide_code.kernels import inspect
from guide_code.kernels.inspect import ARCHITECTURES, MAIN
from guide_code.kernels.record import Problem, record
from guide_code.kernels.traffic import traffic

EXPECTED = {80: "mma", 90: "wgmma", 100: "tcgen05"}
DIALECT = "a decode tile has 16 rows, and wgmma and tcgen05 start at 64"


@pytest.fixture(scope="module")
def reports():
    return list(inspect.inspect(Problem()))


def test_no_kernel_spills(reports):
    assert not [(r.kernel, r.architecture, r.spill_bytes) for r in reports if r.spill_bytes]
    assert {r.architecture for r in reports} == set(ARCHITECTURES)
    assert all(0 < r.registers <= 255 for r in reports)


def test_main_kernels_use_the_tensor_cores_of_their_architecture(reports):
    main = [r for r in reports if r.kernel in MAIN]
    assert {(r.kernel, r.architecture) for r in main} == {(k, a) for k in MAIN for a in ARCHITECTURES}
    for r in main:
        expected = "mma" if r.kernel.startswith("decode") else EXPECTED[r.architecture]
        assert r.tensor_cores == expected, (r.kernel, r.architecture, DIALECT)
    assert not any(r.tensor_cores for r in reports if r.kernel not in MAIN)


def test_shared_memory_fits(reports):
    """163 KiB on 8.0, but the same entry serves 8.6, 8.9 and 12.0 with 99 KiB; 227 KiB on 9.0 and 10.0."""
    most = {80: 99, 90: 227, 100: 227}
    assert not [r for r in reports if r.shared_bytes > most[r.architecture] * 1024]


def test_bytes_are_counted(reports):
    counted = [r for r in reports if r.counted_bytes is not None]
    assert {r.kernel for r in counted} >= {*MAIN, "combine"}
    assert all(r.counted_bytes >= r.least_bytes > 0 for r in counted)
    for r in counted:
        if r.kernel.startswith("decode"):
            assert r.counted_bytes < 1.1 * r.least_bytes, "each chosen weight is read once"


def test_the_json_is_what_was_compiled(capsys):
    inspect.main(["--json", "--architecture", "90"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["problem"]["hidden_size"] == 2048 and printed["problem"]["dtype"] == "bfloat16"
    assert {k["architecture"] for k in printed["kernels"]} == {90}
    assert set(printed["kernels"][0]) == set(inspect.Report._fields)
    inspect.main(["--architecture", "90"])
    assert "wgmma" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(activation="swigluoai", bias=True),
        Problem(activation="gelu", bias=True, dtype=torch.float16),
        Problem(activation="relu", gated=False),
        Problem(num_tokens=64, bias=True),
        Problem(num_tokens=64, dtype=torch.float32, bias=True),
        Problem(hidden_size=2049, intermediate_size=1023),
    ],
    ids=lambda p: f"{p.activation} {p.num_tokens} {p.dtype} {p.hidden_size}",
)
def test_no_variant_spills(problem, architecture):
    reports = list(inspect.inspect(problem, (architecture,)))
    assert not [(r.kernel, r.spill_bytes) for r in reports if r.spill_bytes]
    if problem.dtype != torch.float32:
        assert all(r.tensor_cores for r in reports if r.kernel in MAIN)


def test_traffic_of_a_problem_counted_by_hand():
    """Two experts with 128 rows each, D = 64, I = 256."""
    problem = Problem(128, 2, 2, 64, 256)
    launch = next(x for x in record(90, problem) if x.kernel.__name__ == "up_kernel")
    rows, columns = launch.tile.rows, launch.tile.columns
    x, weight, written = 128 * 64, 2 * 512 * 64, 256 * (256 + 512)
    row_tiles, column_tiles = 2 * -(-128 // rows), -(-256 // columns)
    counted = 256 * 64 * column_tiles + row_tiles * 512 * 64 + written
    assert traffic(launch) == (2 * counted, 2 * (x + weight + written))
