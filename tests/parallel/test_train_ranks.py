"""The training command under torchrun: the curve of one process, and a run that goes on under another layout."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from guide_code.checkpoint import checkpoints
from guide_code.train import app

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_size": 16, "num_experts": 4}
RUN = [
    "--steps",
    "6",
    "--save-every",
    "3",
    "--batch-size",
    "4",
    "--sequence-length",
    "16",
    "--set=expert_bias_rate=0.01",
]
FLAGS = [*RUN, *(f"--set={name}={value}" for name, value in SMALL.items())]


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def torchrun(ranks, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name need not resolve
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command += ["-m", "guide_code.train", *arguments]
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=120)
    return process.returncode, process.stdout + process.stderr


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_ranks_train_like_one_process_and_their_run_goes_on_alone(tmp_path, monkeypatch):
    """What a rank sees of a batch is what one process sees of it in a micro-batch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    for number in range(3):
        (text / f"{number}.py").write_text("\n".join(f"x{i} = {i * number}" for i in range(300)))
    alone, out = tmp_path / "alone", tmp_path / "ranks"
    done = call("--corpus", text, "--out", alone, "--accumulate", 2, *FLAGS)
    assert done.exit_code == 0, done.output
    status, output = torchrun(2, "--corpus", text, "--out", out, "--dp", 2, "--ep", 2, *FLAGS)
    assert status == 0, output
    assert output.count("saved ") == 2 and "on 2 x cpu" in output, "every rank speaks"
    assert [path.name for path in checkpoints(out)] == ["step-00000003", "step-00000006"]
    wanted = metrics(alone)
    for found, expected in zip(metrics(out), wanted, strict=True):
        for name in ("loss", "grad_norm", "load_balancing", "z_loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name
        assert found["counts"] == expected["counts"] and found["tokens"] == expected["tokens"]
    assert metrics(out)[-1]["validation_loss"] == pytest.approx(wanted[-1]["validation_loss"], rel=1e-4)

    shutil.rmtree(checkpoints(out)[-1])  # as if it had been killed before the last save
    done = call("--corpus", text, "--out", out, "--accumulate", 2, "--resume", *FLAGS)
    assert done.exit_code == 0, done.output
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert metrics(out)[-1]["loss"] == pytest.approx(wanted[-1]["loss"], rel=1e-4)


def test_sizes_that_do_not_fit_the_processes_are_refused(tmp_path):
    done = call("--dp", 2, "--out", tmp_path / "run")
    words = " ".join(done.output.split())
    assert done.exit_code == 1 and "pp=1 x dp=2 x cp=1 x tp=1 = 2, but 1 were started. Nearest possible: dp=1" in words
    done = call("--dp", 2, "--ep", 4, "--out", tmp_path / "run")
    assert done.exit_code == 1 and "Nearest possible: ep=2, dp=4" in " ".join(done.output.split())
    assert not (tmp_path / "run").exists()
