"""The memory bound, in a process of its own: the model and its largest tensor, whatever the size of the checkpoint."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")

CODE = """
import json, sys, pathlib, torch
from guide_code.conversion.measure import measure, write_synthetic
from guide_code.conversion.loading import empty_model, own_tensors
from guide_code.conversion.registry import read_config
from guide_code.convert import load_hf

folder = pathlib.Path(sys.argv[1])
warm = write_synthetic(folder / "warm", 1_000_000)
load_hf(folder / "warm")  # whatever is allocated once
total = write_synthetic(folder / "src", 200_000_000, shard_bytes=60_000_000)
config = read_config(json.loads((folder / "src/config.json").read_text()))
largest = max(t.numel() * 2 for t in own_tensors(empty_model(config)).values())
costs = {cost.name: cost.peak_bytes for cost in measure(folder / "src", folder / "work", load_hf)}
print(json.dumps([total, largest, costs]))
"""
SLACK = 25_000_000
"""Threads, file handles, and what the allocator keeps."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measure")
    command = [sys.executable, "-c", CODE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_loading_stays_within_the_model_and_its_largest_tensor(measured):
    total, largest, costs = measured
    assert total > 150_000_000 and largest < total / 8
    assert 0.7 * total < costs["load_hf"] < total + largest + SLACK


def test_converting_stays_within_the_largest_tensor(measured):
    _, largest, costs = measured
    assert costs["convert --to guide"] < largest + SLACK
    assert costs["convert --to hf"] < largest + SLACK
