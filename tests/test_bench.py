"""The benchmark as its users run it, at toy size: what it checks, what it writes, what it refuses."""

import json

import pytest
import torch
from typer.testing import CliRunner

from guide_code.benchmarks import candidates, report
from guide_code.benchmarks import switch as switch_benchmark
from guide_code.benchmarks.experts import Settings, disagreements, measure
from guide_code.benchmarks.record import read_result
from guide_code.benchmarks.shapes import SHAPES, choices, shape_of
from guide_code.cli import app
from guide_code.experts.loop import loop_experts

TINY = ["bench", "experts", "--shapes", "tiny", "--tokens", "5", "--dtypes", "float32", "--repeats", "2"]


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "deep/experts_all.json"
    done = run(*TINY, "--out", path)
    assert done.exit_code == 0, done.output
    return read_result(path, "experts")


def test_every_case_has_times_of_all_who_can_run_and_reasons_of_the_others(result):
    assert [(c["dtype"], c["mode"], c["tokens"]) for c in result["cases"]] == [
        ("float32", "forward", 5), ("float32", "step", 5)
    ]  # fmt: skip
    for case in result["cases"]:
        rows = case["rows"]
        assert {*candidates.OURS, *candidates.PEERS, "F.grouped_mm", "stream", "dense"} <= set(rows)
        for name, row in rows.items():
            assert ("median_ms" in row) != bool(row["skipped"]), name
            if "median_ms" in row:
                assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert rows[case["best_peer"]]["to_best_peer"] == 1 and rows[case["floor"]]["to_floor"] == 1
        peers = [rows[peer]["median_ms"] for peer in candidates.PEERS]
        assert rows["auto"]["to_best_peer"] == pytest.approx(rows["auto"]["median_ms"] / min(peers), rel=1e-3)
    assert {"cpu", "cores", "threads", "gpu"} <= set(result["machine"]) and {"torch", "transformers"} <= set(
        result["versions"]
    )


def test_what_computes_something_else_gets_no_time(monkeypatch):
    wrong = lambda name, weights, shape: lambda x, ids, w: loop_experts(x, ids, w, *weights) * (1 + (name == "padded"))
    monkeypatch.setattr(candidates, "_ours", wrong)
    settings = Settings(repeats=1, seconds=0.1, memory=False)
    (case,) = measure([SHAPES["tiny"]], [3], [torch.float32], ["step"], ["balanced"], settings)
    assert "median_ms" not in case["rows"]["padded"] and "median_ms" in case["rows"]["loop"]
    (line,) = disagreements(case)
    assert "padded differs from float64 by 1.0e+00" in line and "no speed is given" in line
    done = run(*TINY, "--modes", "forward", "--only", "padded")
    assert done.exit_code == 1 and "disagrees" in done.output


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--shapes", "tinny", "'tinny'"),
        ("--tokens", "0", "at least 1"),
        ("--tokens", "few", "few"),
        ("--dtypes", "float8", "none of float32"),
        ("--modes", "backward", "mode must be one of"),
        ("--routings", "even", "routing must be one of"),
        ("--device", "cuda", "PyTorch sees no GPU"),
    ],
)
def test_nonsense_is_refused_by_name(option, value, words):
    if option == "--device" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(*TINY, option, value)
    assert done.exit_code == 2 and words in done.output and "Traceback" not in done.output


def test_routings():
    generator, shape = torch.Generator().manual_seed(0), SHAPES["fine"]
    for routing in ("balanced", "zipf"):
        ids_TK = choices(512, shape, routing, generator)
        assert all(len(set(row)) == 8 for row in ids_TK.tolist()) and ids_TK.shape == (512, 8)
        counts = torch.bincount(ids_TK.flatten(), minlength=64)
        assert (counts.max() - counts.min() <= 1) if routing == "balanced" else counts.max() > 4 * counts.median()


def test_presets_shrink_until_they_fit():
    shape = shape_of("mixtral-8x7b", budget=100_000_000)
    assert shape.numbers * 4 <= 100_000_000 and shape.num_experts == 8 and shape.name == "mixtral-8x7b / 8"
    assert shape.intermediate_size / shape.hidden_size == 14336 / 4096


def test_switch_is_compared_and_written(tmp_path):
    path = tmp_path / "switch.json"
    sizes = ["--experts", "2,6", "--hidden-size", 16, "--intermediate-size", 8, "--repeats", 3, "--seconds", 1]
    done = run("bench", "switch", *sizes, "--out", path)
    assert done.exit_code == 0 and "growth of ours" in done.output
    result = read_result(path, "switch")
    assert [(r["experts"], r["way"]) for r in result["rows"][:2]] == [(2, "all experts"), (2, "transformers")]
    assert len(result["rows"]) == 8 and result["noise"] >= 0
    assert report.switch_table(result).count("\n") == 3
    assert run("bench", "switch", "--experts", "0").exit_code == 2
    refused = run("bench", "switch", "--experts", 10**6)
    assert refused.exit_code == 2 and "GB may be used" in refused.output


def test_a_switch_layer_that_differs_is_not_timed(monkeypatch):
    loop = switch_benchmark.all_experts_loop
    monkeypatch.setattr(switch_benchmark, "all_experts_loop", lambda *a: loop(*a) * 1.1)
    with pytest.raises(ArithmeticError, match="nothing is timed"):
        switch_benchmark.measure_switch((2,), hidden_size=16, intermediate_size=8, repeats=1)


def row(ms, floor, peer):
    return {"median_ms": ms, "to_floor": floor, "to_best_peer": peer}


@pytest.mark.parametrize(
    ("tokens", "floor", "peer", "met"),
    [
        (256, 3.0, 0.9, True),
        (256, 3.0, 0.91, False),
        (256, 1.15, 1.0, True),
        (2048, 1.21, 0.5, False),
        (1, 1.31, 0.5, False),
    ],
)
def test_the_goals(tokens, floor, peer, met):
    rows = {"auto": row(1.0, floor, peer), "grouped_mm": row(1 / peer, floor / peer, 1.0)}
    shape = SHAPES["tiny"]._asdict()
    case = {"shape": shape, "dtype": "float32", "mode": "forward", "tokens": tokens, "routing": "balanced",
            "floor": "dense", "best_peer": "grouped_mm", "auto": {"backend": "blocked"}, "rows": rows}  # fmt: skip
    (verdict,) = report.verdicts({"cases": [case]})
    assert verdict.met == met


def test_results_of_something_else_are_refused(tmp_path):
    (tmp_path / "switch.json").write_text(json.dumps({"benchmark": "experts", "schema": 1}))
    with pytest.raises(ValueError, match="wanted 'switch'"):
        report.load(tmp_path, "switch")
