"""The training loop.

B batch, S sequence, T = B*S tokens.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from guide_code.balancer import Balancer
from guide_code.corpus import Corpus
from guide_code.moe import MoE
from guide_code.training.balance import step_balancers
from guide_code.training.config import TrainConfig
from guide_code.training.interrupt import interruptible
from guide_code.training.losses import next_token_loss, validation_loss
from guide_code.training.optimizer import learning_rate, make_optimizer
from guide_code.training.ranks import Ranks
from guide_code.transformer import Transformer


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
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
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
        ranks: the processes that train the model together; all of them call this, and get the same metrics.

    Returns:
        The metrics of every step: ``step`` (from 1), ``tokens`` seen, ``loss`` (nats per token, the language model's
        alone), each balancing loss by name (mean over layers, without coefficient), ``max_violation`` (worst
        layer), ``counts`` (per sparse layer, assignments per expert), ``grad_norm`` before clipping, ``lr``,
        ``tokens_per_second``, and every ``validate_every`` steps and at the end ``validation_loss``.

    Raises:
        TrainingStopped: the loss or a gradient is not finite; nothing of that step was applied.
        ValueError: the model has fewer ids or positions than the corpus and the sequence length need.
    """
    check_fit(model, corpus, config)
    ranks.check(config)
    device = next(model.parameters()).device
    optimizer = optimizer or make_optimizer(model, config)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    history, saved = [], first_step
    model.train()
    with interruptible() as interrupted:
        for step in range(first_step, config.steps):
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
            tokens_BS, _ = corpus.train.batch(config.batch_size, config.sequence_length, generator)
            loss = torch.zeros((), device=device)
            for index, part_BS in enumerate(tokens_BS.to(device).chunk(config.accumulate)):
                ranks.begin_micro_batch(model, last=index + 1 == config.accumulate)
                for layer in layers:
                    if isinstance(layer.balancer, Balancer):
                        layer.balancer.set_scale(1 / config.accumulate)
                part = next_token_loss(model, ranks.share(part_BS)) / config.accumulate
                part.backward()
                loss += part.detach()
            norm = ranks.clip(model, config.clip_norm)
            loss, stop = ranks.agree(loss, bool(interrupted))
            if not (loss + norm).isfinite():
                raise TrainingStopped(
                    f"loss {loss.item()} with gradient norm {norm.item()} at step {step + 1}; "
                    f"the last good state is after step {saved}"
                )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            metrics = {"step": step + 1, "tokens": (step + 1) * tokens_BS[:, 1:].numel(), "loss": loss.item()}
            metrics |= step_balancers(layers) | {"grad_norm": norm.item(), "lr": optimizer.param_groups[0]["lr"]}
            metrics["tokens_per_second"] = tokens_BS[:, 1:].numel() / (time.perf_counter() - started)
            last = step + 1 == config.steps or stop
            if last or (step + 1) % config.validate_every == 0:
                metrics["validation_loss"] = validation_loss(model, corpus, config)
            history.append(metrics)
            if on_step is not None:
                on_step(metrics)
            if on_save is not None and (last or (step + 1) % config.save_every == 0):
                on_save(step + 1)
                saved = step + 1
            if last:  # not ``interrupted``, which may have been filled since
                break
    return history


def check_fit(model: Transformer, corpus: Corpus, config: TrainConfig) -> None:
    """Raise a ValueError if the model has fewer ids or positions than the corpus and the sequence length need."""
    ids = model.get_parameter("embedding.weight").shape[0]
    if corpus.vocab_size > ids:
        raise ValueError(f"the corpus has {corpus.vocab_size} token ids but the model's vocab_size is {ids}")
    if config.sequence_length > model.max_length:
        raise ValueError(f"sequence_length={config.sequence_length} exceeds the model's max_length={model.max_length}")
