"""How to train: one frozen dataclass."""

from dataclasses import dataclass


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
