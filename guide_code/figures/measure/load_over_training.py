"""Train the same small model with and without balancing; keep the load of its experts over the steps.

Run `python -m guide_code.figures.measure.load_over_training docs/data/results/load_over_training.json` (two minutes on
two CPU cores). The figures `load_over_training` and `offload_cache` read the file.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

from guide_code.build import build_model
from guide_code.checkpoint import latest_checkpoint, load_checkpoint
from guide_code.config import ModelConfig, override
from guide_code.corpus import load_corpus
from guide_code.presets import preset

PRESET, STEPS, BLOCK, LAYER, TRACE_TOKENS = "tiny", 300, 10, 1, 64
RUNS = {
    "none": {"load_balancing_coef": "0"},
    "loss": {"load_balancing_coef": "0.005"},
    "bias": {"load_balancing_coef": "0", "expert_bias_rate": "0.003"},
}
"""What each run changes in the preset."""


def measure(folder: Path) -> dict[str, Any]:
    """The shares of one layer's experts over training under each setting, and the routing of the last model."""
    runs = {name: _train(changes, folder / name) for name, changes in RUNS.items()}
    config = override(preset(PRESET), RUNS["loss"])
    return {
        "what": f"preset {PRESET}, sparse layer {LAYER}: share of each expert in {BLOCK} steps' assignments",
        "command": "python -m guide_code.figures.measure.load_over_training OUT",
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": date.today().isoformat(),
        "steps": list(range(BLOCK, STEPS + 1, BLOCK)),
        "settings": RUNS,
        "shares": {name: run["shares"] for name, run in runs.items()},
        "validation_loss": {name: run["validation_loss"] for name, run in runs.items()},
        "trace": _trace(config, folder / "loss"),
    }


def _train(changes: dict[str, str], out: Path) -> dict[str, Any]:
    """A process of its own, as a reader would start it."""
    pairs = [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "guide_code.train", "--preset", PRESET, "--steps", str(STEPS), "--out", str(out)]
    subprocess.run([*command, *pairs], check=True, timeout=1800, stdout=subprocess.DEVNULL)
    history = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    counts_NE = torch.tensor([step["counts"][LAYER] for step in history]).view(STEPS // BLOCK, BLOCK, -1).sum(dim=1)
    shares = [[round(share, 4) for share in row] for row in (counts_NE / counts_NE.sum(dim=1, keepdim=True)).tolist()]
    return {"shares": shares, "validation_loss": round(history[-1]["validation_loss"], 4)}


@torch.no_grad()
def _trace(config: ModelConfig, run: Path) -> list[list[int]]:
    """The experts that consecutive tokens of the validation text choose in the layer."""
    model = build_model(config)
    load_checkpoint(latest_checkpoint(run), model, config)
    corpus = load_corpus(None, vocab_size=config.vocab_size)
    tokens_1S = next(iter(corpus.validation.windows(1, TRACE_TOKENS, 1)))[0][:, :TRACE_TOKENS]
    routings = [routing for routing in model.eval()(tokens_1S).routings if routing is not None]
    return routings[LAYER].ids.tolist()


def main(out: Path) -> None:
    """Measure and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder))
    part = out.with_name(f".{out.name}.part")
    part.write_text(json.dumps(result) + "\n", encoding="utf-8")
    part.replace(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
