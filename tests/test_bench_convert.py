"""``moe-guide bench convert`` at a small size: what it reports, and that it reports a bound that does not hold."""

import json
import sys

import pytest
from typer.testing import CliRunner

from guide_code.bench import app
from guide_code.benchmarks import convert
from guide_code.benchmarks.record import read_result
from guide_code.conversion.measure import Cost

linux = pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")


def run(*arguments):
    return CliRunner().invoke(app, ["convert", *arguments], env={"COLUMNS": "200"})


@linux
def test_every_step_is_timed_against_a_copy_and_held_to_its_bound(tmp_path):
    out = tmp_path / "convert.json"
    done = run("--gigabytes", "0.015", "--repeats", "2", "--folder", str(tmp_path / "work"), "--out", str(out))
    assert done.exit_code == 0, done.output
    found = read_result(out, "convert")
    rows = {row["step"]: row for row in found["rows"]}
    assert list(rows) == ["copy of the files", "convert --to guide", "convert --to hf", "load_hf"]
    assert rows["convert --to guide"]["bound_bytes"] == found["largest_bytes"]
    assert rows["load_hf"]["bound_bytes"] == pytest.approx(found["bytes"] + found["largest_bytes"], rel=1e-3)
    assert rows["copy of the files"]["to_copy"] == 1 and rows["load_hf"]["to_copy"] is None
    assert all(row["low_s"] <= row["median_s"] <= row["high_s"] for row in rows.values())
    assert not (tmp_path / "work").exists()


def test_the_median_and_the_highest_peak_of_the_rounds_count_and_a_broken_bound_is_an_error(tmp_path, monkeypatch):
    steps = ("copy of the files", "convert --to guide", "convert --to hf", "load_hf")
    rounds = iter([(0, 0), (2.0, 1), (9.0, 10**9), (4.0, 2)])  # the first is the warm-up

    def costs(*_):
        seconds, peak = next(rounds)
        return [Cost(name, seconds if name == steps[0] else 2 * seconds, peak) for name in steps]

    monkeypatch.setattr(convert, "measure", costs)
    out = tmp_path / "convert.json"
    done = run("--gigabytes", "0.02", "--folder", str(tmp_path / "work"), "--out", str(out))
    assert done.exit_code == 2 and "more memory than the bound: convert --to guide" in done.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["median_s"] for row in rows] == [4, 8, 8, 8] and rows[1]["to_copy"] == 2
    assert {row["peak_bytes"] for row in rows} == {10**9}
    assert [row["within"] for row in rows] == [None, False, False, False]


def test_a_folder_that_exists_is_left_alone_and_a_full_disk_is_named(tmp_path):
    (tmp_path / "mine").write_text("")
    done = run("--folder", str(tmp_path / "mine"))
    assert done.exit_code == 2 and "exists" in done.output and (tmp_path / "mine").exists()
    done = run("--gigabytes", "1e9", "--folder", str(tmp_path / "work"))
    assert done.exit_code == 2 and "GB free" in done.output and not (tmp_path / "work").exists()
    done = run("--gigabytes", "0", "--folder", str(tmp_path / "work"))
    assert done.exit_code == 2 and "bytes=0" in done.output
