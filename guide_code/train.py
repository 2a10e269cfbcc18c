"""Train a model: ``python -m guide_code.train --preset tiny --steps 200``.

On several processes: ``torchrun --nproc-per-node 4 -m guide_code.train --dp 4 --ep 2``.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from guide_code.build import build_model, parameter_counts
from guide_code.checkpoint import checkpoints, claim_run, cut_metrics
from guide_code.config import ModelConfig, override
from guide_code.corpus import load_corpus
from guide_code.parallel.mesh import ParallelSizes
from guide_code.presets import preset
from guide_code.training.checkpoints import load_run, save_run
from guide_code.training.config import TrainConfig
from guide_code.training.loop import TrainingStopped, check_fit, train
from guide_code.training.optimizer import make_optimizer
from guide_code.training.ranks import Ranks, spread, start_ranks

app = typer.Typer(add_completion=False)


@app.command()
def main(
    name: Annotated[str, typer.Option("--preset", help="Configuration to start from.")] = "tiny",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 200,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 128,
    accumulate: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 4e-3,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    device: Annotated[str, typer.Option(help='"cpu", "cuda", or "auto" for the best there is.')] = "auto",
    corpus: Annotated[Path | None, typer.Option(help="Folder or file of text; else Python's own source.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/latest"),
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    dp: Annotated[int, typer.Option(help="Processes, each with sequences of its own.")] = 1,
    ep: Annotated[int, typer.Option(help="Of these, how many share the experts out among them.")] = 1,
    zero: Annotated[int, typer.Option(help="Shard optimizer state (1), gradients (2), parameters (3).")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    changes: Annotated[list[str] | None, typer.Option("--set", help="FIELD=VALUE of the configuration.")] = None,
) -> None:
    """Train a model on text and keep metrics and checkpoints in a folder."""
    try:
        run_config = TrainConfig(
            steps=steps,
            batch_size=batch_size,
            sequence_length=sequence_length,
            accumulate=accumulate,
            learning_rate=learning_rate,
            warmup_steps=max(1, min(20, steps // 10)),
            save_every=save_every,
            seed=seed,
        )
        sizes = ParallelSizes(dp=dp, ep=ep)
        ranks, place = start_ranks(sizes, _pick(device), zero)
        _run(override(preset(name), _pairs(changes)), run_config, corpus, out, place, resume, sizes, ranks)
    except (ValueError, OSError, TrainingStopped) as error:
        Console().print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if ranks.size > 1:
        dist.destroy_process_group()


def _run(
    config: ModelConfig,
    run_config: TrainConfig,
    path: Path | None,
    out: Path,
    device: torch.device,
    resume: bool,
    sizes: ParallelSizes,
    ranks: Ranks,
) -> None:
    console, first = Console(quiet=ranks.rank > 0), ranks.rank == 0
    with console.status("reading and tokenizing the text; the first time takes a while, then it is cached"):
        if not first:
            dist.barrier()  # the first rank fills the cache for the others
        text = load_corpus(path, vocab_size=config.vocab_size)
        if first and ranks.size > 1:
            dist.barrier()
    torch.manual_seed(run_config.seed)
    model = build_model(config).to(device)
    total, active = parameter_counts(model)
    model = spread(model, ranks, sizes)
    optimizer, first_step = make_optimizer(model, run_config), 0
    facts = {name: getattr(run_config, name) for name in ("batch_size", "sequence_length", "seed")}
    facts["text_digest"] = text.digest
    check_fit(model, text, run_config)
    ranks.check(run_config)
    if resume:
        first_step = load_run(out, model, config, optimizer, ranks)
    if first:
        claim_run(out, facts, resume=resume)
        cut_metrics(out / "metrics.jsonl", first_step)
    skipped = ", ".join(f"{count} {reason}" for reason, count in text.skipped.items() if count)
    console.print(f"{text.files} files, {len(text.train.tokens):,} training tokens; skipped: {skipped or 'none'}")
    console.print(f"{total:,} parameters, {active:,} active per token, on {ranks.size} x {device.type}")
    if first:
        text.tokenizer.save(str(out / "tokenizer.json"))
    columns = ("loss {task.fields[loss]}", "{task.fields[speed]} tokens/s", "max violation {task.fields[load]}")
    bar = Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), *map(TextColumn, columns), console=console)
    with bar, open(out / "metrics.jsonl" if first else os.devnull, "a") as log:
        task = bar.add_task("", total=run_config.steps, completed=first_step, loss="-", speed="-", load="-")

        def on_step(metrics: dict[str, Any]) -> None:
            log.write(json.dumps(metrics) + "\n")
            log.flush()
            load = f"{metrics['max_violation']:.2f}" if "max_violation" in metrics else "- (dense)"
            speed = f"{metrics['tokens_per_second']:,.0f}"
            bar.update(task, completed=metrics["step"], loss=f"{metrics['loss']:.3f}", speed=speed, load=load)
            if "validation_loss" in metrics:
                bar.console.print(f"step {metrics['step']}: validation loss {metrics['validation_loss']:.4f}")

        def on_save(step: int) -> None:
            folder = save_run(out, step, model, config, optimizer, ranks)
            bar.console.print(f"saved {folder}")

        try:
            steps = {"first_step": first_step, "on_step": on_step, "on_save": on_save}
            history = train(model, text, run_config, optimizer=optimizer, ranks=ranks, **steps)
        except TrainingStopped as error:
            good = checkpoints(out)
            raise TrainingStopped(f"{error} ({good[-1] if good else 'no checkpoint yet'})") from None
    if not history:
        console.print(f"nothing to do: {first_step} of {run_config.steps} steps are done; give more --steps")
    elif history[-1]["step"] < run_config.steps:
        console.print(f"interrupted after step {history[-1]['step']}; go on with --resume")


def _pairs(changes: list[str] | None) -> dict[str, str]:
    pairs = {}
    for change in changes or []:
        field, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"--set {change!r} must be FIELD=VALUE")
        pairs[field] = value
    return pairs


def _pick(device: str) -> torch.device:
    try:
        chosen = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:  # the CPU build of torch asserts
        raise ValueError(f"device={device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return chosen


if __name__ == "__main__":
    app()
