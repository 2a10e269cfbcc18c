"""Train a model in one process: ``python -m guide_code.train --preset tiny --steps 200``.

B batch, S sequence, T = B*S tokens, V vocabulary.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from guide_code.balance import max_violation
from guide_code.balancer import Balancer
from guide_code.build import build_model, parameter_counts
from guide_code.checkpoint import (
    checkpoints,
    claim_run,
    cut_metrics,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from guide_code.config import ModelConfig, override
from guide_code.corpus import Corpus, load_corpus
from guide_code.moe import MoE
from guide_code.presets import preset
from guide_code.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train.

    Raises:
        ValueError: a field is out of range.
    """

    steps: int = 200
    batch_size: int = 8
    """Sequences per optimizer step, over all micro-batches."""
    sequence_length: int = 128
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    learning_rate: float = 4e-3
    """Peak, reached after the warm-up; a cosine takes it down to a tenth."""
    warmup_steps: int = 20
    weight_decay: float = 0.1
    """On matrices only: neither norms nor biases."""
    clip_norm: float = 1.0
    validate_every: int = 50
    validation_batches: int = 8
    save_every: int = 100
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "sequence_length", "accumulate", "validate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} must divide batch_size={self.batch_size}")
        if self.learning_rate <= 0 or self.clip_norm <= 0:
            raise ValueError(f"learning_rate={self.learning_rate} and clip_norm={self.clip_norm} must be above 0")


class TrainingStopped(RuntimeError):
    """The loss is no longer a number. The message names the step and the last good checkpoint."""


def train(
    model: Transformer,
    corpus: Corpus,
    config: TrainConfig,
    *,
    first_step: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    on_save: Callable[[int], Any] | None = None,
) -> list[dict[str, Any]]:
    """Train in place; interrupt it (Ctrl-C) at any time and it saves what it has.

    The batch of a step depends on the seed and the step's number alone: two models see the same data, and a resumed
    run what it would have seen.

    Args:
        model: on its device already.
        corpus: text whose ids the model's vocabulary covers.
        config: see :class:`TrainConfig`.
        first_step: steps done before.
        optimizer: from :func:`make_optimizer`, as a checkpoint left it; a new one when None.
        on_step: called after every step with its metrics.
        on_save: called with the number of steps done, every ``save_every`` steps, at the end and when interrupted.

    Returns:
        The metrics of every step: ``step`` (from 1), ``tokens`` seen, ``loss`` (nats per token, the language model's
        alone), each balancing loss by name (mean over layers, without coefficient), ``max_violation`` (worst
        layer), ``counts`` (per sparse layer, assignments per expert), ``grad_norm`` before clipping, ``lr``,
        ``tokens_per_second``, and every ``validate_every`` steps and at the end ``validation_loss``.

    Raises:
        TrainingStopped: the loss or a gradient is not finite; nothing of that step was applied.
        ValueError: the model has fewer ids or positions than the corpus and the sequence length need.
    """
    _check(model, corpus, config)
    device = next(model.parameters()).device
    optimizer = optimizer or make_optimizer(model, config)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    history, saved = [], first_step
    model.train()
    with _interruptible() as interrupted:
        for step in range(first_step, config.steps):
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
            tokens_BS, _ = corpus.train.batch(config.batch_size, config.sequence_length, generator)
            loss = torch.zeros((), device=device)
            for part_BS in tokens_BS.to(device).chunk(config.accumulate):
                for layer in layers:
                    if isinstance(layer.balancer, Balancer):
                        layer.balancer.set_scale(1 / config.accumulate)
                part = next_token_loss(model, part_BS) / config.accumulate
                part.backward()
                loss += part.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            if not (loss + norm).isfinite():
                raise TrainingStopped(
                    f"loss {loss.item()} with gradient norm {norm.item()} at step {step + 1}; "
                    f"the last good state is after step {saved}"
                )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            metrics = {"step": step + 1, "tokens": (step + 1) * tokens_BS[:, 1:].numel(), "loss": loss.item()}
            metrics |= _balance(layers) | {"grad_norm": norm.item(), "lr": optimizer.param_groups[0]["lr"]}
            metrics["tokens_per_second"] = tokens_BS[:, 1:].numel() / (time.perf_counter() - started)
            last = step + 1 == config.steps or bool(interrupted)
            if last or (step + 1) % config.validate_every == 0:
                metrics["validation_loss"] = validation_loss(model, corpus, config)
            history.append(metrics)
            if on_step is not None:
                on_step(metrics)
            if on_save is not None and (last or (step + 1) % config.save_every == 0):
                on_save(step + 1)
                saved = step + 1
            if last:  # not ``interrupted``, which may have been filled after the save was decided
                break
    return history


def next_token_loss(model: Transformer, tokens_BS: Tensor) -> Tensor:
    """Mean cross-entropy in nats of predicting each token from those before it; ``tokens_BS`` holds S + 1."""
    logits_BSV = model(tokens_BS[:, :-1]).logits
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: Transformer, corpus: Corpus, config: TrainConfig) -> float:
    """Mean loss over the first ``validation_batches`` batches of the validation split, in evaluation mode."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    windows = corpus.validation.windows(config.batch_size, config.sequence_length, config.validation_batches)
    losses = [(next_token_loss(model, tokens_BS.to(device)).item(), len(tokens_BS)) for tokens_BS, _ in windows]
    model.train(was_training)
    return sum(loss * rows for loss, rows in losses) / sum(rows for _, rows in losses)


def make_optimizer(model: Transformer, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) with betas 0.9 and 0.95; decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up to the peak, then a cosine to a tenth of it at the last step (``step`` from 0)."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def _balance(layers: list[MoE]) -> dict[str, Any]:
    """Balancing losses, load and bias update of the step that ended."""
    balancers = [layer.balancer for layer in layers if isinstance(layer.balancer, Balancer)]
    if not balancers:
        return {}
    losses = [balancer.losses() for balancer in balancers]
    for layer in layers:
        if isinstance(layer.balancer, Balancer):
            layer.balancer.step(layer.router)
    metrics = {name: sum(values[name].item() for values in losses) / len(losses) for name in losses[0]}
    counts = [balancer.last_counts for balancer in balancers]
    metrics["max_violation"] = max(max_violation(counts_E).item() for counts_E in counts)
    return metrics | {"counts": [counts_E.tolist() for counts_E in counts]}


def _check(model: Transformer, corpus: Corpus, config: TrainConfig) -> None:
    ids = model.get_parameter("embedding.weight").shape[0]
    if corpus.vocab_size > ids:
        raise ValueError(f"the corpus has {corpus.vocab_size} token ids but the model's vocab_size is {ids}")
    if config.sequence_length > model.max_length:
        raise ValueError(f"sequence_length={config.sequence_length} exceeds the model's max_length={model.max_length}")


@contextmanager
def _interruptible() -> Iterator[list]:
    """A list that Ctrl-C fills, so that a step always ends; a second Ctrl-C stops at once."""
    received: list = []

    def handle(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        previous = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not in the main thread: nothing to catch
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)


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
        _run(override(preset(name), _pairs(changes)), run_config, corpus, out, _pick(device), resume)
    except (ValueError, OSError, TrainingStopped) as error:
        Console().print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _run(
    config: ModelConfig, run_config: TrainConfig, path: Path | None, out: Path, device: torch.device, resume: bool
) -> None:
    console = Console()
    with console.status("reading and tokenizing the text; the first time takes a while, then it is cached"):
        text = load_corpus(path, vocab_size=config.vocab_size)
    torch.manual_seed(run_config.seed)
    model = build_model(config).to(device)
    optimizer, first_step = make_optimizer(model, run_config), 0
    facts = {name: getattr(run_config, name) for name in ("batch_size", "sequence_length", "seed")}
    facts["text_digest"] = text.digest
    _check(model, text, run_config)
    if resume:
        first_step = load_checkpoint(latest_checkpoint(out), model, config, optimizer)
    claim_run(out, facts, resume=resume)
    cut_metrics(out / "metrics.jsonl", first_step)
    total, active = parameter_counts(model)
    skipped = ", ".join(f"{count} {reason}" for reason, count in text.skipped.items() if count)
    console.print(f"{text.files} files, {len(text.train.tokens):,} training tokens; skipped: {skipped or 'none'}")
    console.print(f"{total:,} parameters, {active:,} active per token, on {device}")
    text.tokenizer.save(str(out / "tokenizer.json"))
    columns = ("loss {task.fields[loss]}", "{task.fields[speed]} tokens/s", "max violation {task.fields[load]}")
    bar = Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), *map(TextColumn, columns), console=console)
    with bar, open(out / "metrics.jsonl", "a") as log:
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
            folder = save_checkpoint(out, step, model, config, optimizer)
            bar.console.print(f"saved {folder}")

        try:
            history = train(
                model, text, run_config, first_step=first_step, optimizer=optimizer, on_step=on_step, on_save=on_save
            )
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
