"""AdamW with decay on matrices only, and the learning rate of each step."""

import math

import torch

from guide_code.training.config import TrainConfig
from guide_code.transformer import Transformer


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
