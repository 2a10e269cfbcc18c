import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from guide_code.checkpoint import checkpoints
from guide_code.train import app
from guide_code.training import loop

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_size": 16, "num_experts": 4}
FLAGS = [f"--set={name}={value}" for name, value in SMALL.items()]


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / f"text/{number}.py").write_text(f"x = {number}\n" * 300)
    (tmp_path / "text/picture.bin").write_bytes(b"\xff")
    return tmp_path / "text"


def test_command_trains_saves_resumes_and_refuses_to_overwrite(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "run"
    common = ["--corpus", text, "--out", out, "--batch-size", 2, "--sequence-length", 16, "--save-every", 2, *FLAGS]
    first = call("--steps", 4, *common)
    assert first.exit_code == 0, first.output
    assert "3 files" in first.output and "skipped: 1 binary" in first.output and "active per token" in first.output
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and "z_loss" in lines[0]
    assert [path.name for path in checkpoints(out)] == ["step-00000002", "step-00000004"]
    again = call("--steps", 4, *common)
    assert again.exit_code == 1 and "holds a run already: give --resume" in again.output
    more = call("--steps", 6, "--resume", *common)
    assert more.exit_code == 0 and checkpoints(out)[-1].name == "step-00000006"
    other = call("--steps", 8, "--resume", *common, "--batch-size", 4)
    assert other.exit_code == 1 and "other data: batch_size is 2 in" in " ".join(other.output.split())
    done = call("--steps", 6, "--resume", *common)
    assert done.exit_code == 0 and "nothing to do: 6 of 6 steps are done" in done.output
    (text / "0.py").write_text("y = 5\n" * 300)
    other = call("--steps", 8, "--resume", *common)
    assert other.exit_code == 1 and "other data: text_digest is" in " ".join(other.output.split())
    other = call("--steps", 8, "--resume", *common, "--set", "top_k=1")
    assert other.exit_code == 1 and "moe.top_k is 2 in the checkpoint and 1 here" in " ".join(other.output.split())


def test_resuming_after_a_crash_writes_each_step_once(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "run"
    common = ["--corpus", text, "--out", out, "--sequence-length", 16, "--save-every", 2, *FLAGS]
    call("--steps", 5, *common)
    shutil.rmtree(checkpoints(out)[-1])  # as if it had crashed just before saving step 5
    before = (out / "metrics.jsonl").read_text().splitlines()
    assert call("--steps", 5, "--resume", *common).exit_code == 0
    after = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in after] == [1, 2, 3, 4, 5]
    assert [json.loads(line)["loss"] for line in after] == [json.loads(line)["loss"] for line in before]


def test_command_names_the_last_good_checkpoint_when_the_loss_is_no_number(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real, calls = loop.next_token_loss, []

    def poisoned(model, tokens_BS):
        calls.append(model.training)
        return real(model, tokens_BS) * (torch.inf if sum(calls) == 6 else 1)

    monkeypatch.setattr(loop, "next_token_loss", poisoned)
    out = tmp_path / "run"
    result = call("--corpus", text, "--out", out, "--sequence-length", 16, "--save-every", 2, "--steps", 9, *FLAGS)
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert f"at step 6; the last good state is after step 4 ({out}/step-00000004)" in result.output


def test_a_mistake_does_not_claim_the_folder(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    common = ["--corpus", text, "--out", tmp_path / "run", "--steps", 1, *FLAGS]
    result = call("--sequence-length", 999, *common)
    assert result.exit_code == 1 and "sequence_length=999 exceeds the model's max_length=256" in result.output
    assert call("--sequence-length", 16, *common).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "gpu"], "device='gpu' cannot be used here"),
        (["--device", "cuda:99"], "device='cuda:99' cannot be used here"),
        (["--out", "file/run", "--sequence-length", "16", *FLAGS], "Not a directory"),
        (["--preset", "tinny"], "no preset is called 'tinny'; did you mean tiny?"),
        (["--set", "topk=3"], "no config field is called 'topk'; did you mean top_k"),
        (["--set", "top_k"], "must be FIELD=VALUE"),
        (["--set", "top_k=many"], "is not a valid int"),
        (["--corpus", "nowhere"], "does not exist"),
        (["--resume", "--out", "nowhere"], "no checkpoint in nowhere"),
        (["--accumulate", "3"], "accumulate=3 must divide batch_size=8"),
    ],
)
def test_command_says_what_is_wrong_without_a_traceback(arguments, words, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    defaults = [] if "--corpus" in arguments else ["--corpus", text]
    result = call(*arguments, *defaults)
    assert result.exit_code == 1 and words in " ".join(result.output.split())
    assert "Traceback" not in result.output and not isinstance(result.exception, ValueError)


def test_command_interrupted_from_the_terminal_leaves_a_checkpoint(text, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "guide_code.train", "--corpus", text, "--out", out, "--steps", "100000", *FLAGS]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_text().count("\n") < 3:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    steps = (out / "metrics.jsonl").read_text().count("\n")
    assert process.returncode == 0 and "interrupted after step" in output
    assert checkpoints(out)[-1].name == f"step-{steps:08d}"
