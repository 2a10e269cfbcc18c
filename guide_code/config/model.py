"""What a model is made of: a frozen dataclass in the words of published ``config.json`` files."""

from dataclasses import dataclass

from guide_code.config.checks import at_least
from guide_code.config.moe import MoEConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only Transformer. ``moe=None`` makes every layer dense.

    Raises:
        ValueError: a field is out of range, or fields contradict each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense feed-forward layers."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_length: int
    """Most positions of a sequence."""
    moe: MoEConfig | None = None
    first_k_dense: int = 0
    """Layers at the bottom that stay dense (DeepSeek)."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """Whether the output projection is the embedding."""

    def __post_init__(self):
        at_least(self, 1, "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        at_least(self, 1, "num_kv_heads", "head_size", "max_length")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size={self.head_size} must be even: rotary positions turn pairs")
        if not 0 <= self.first_k_dense <= self.num_layers:
            raise ValueError(f"first_k_dense={self.first_k_dense} must be in [0, num_layers={self.num_layers}]")
        if self.moe is not None and self.moe.hidden_size != self.hidden_size:
            raise ValueError(
                f"hidden_size={self.hidden_size} differs from moe.hidden_size={self.moe.hidden_size}; "
                "set both, as override() does"
            )
        if self.moe is not None and self.moe.router == "hash" and self.moe.vocab_size != self.vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size} differs from moe.vocab_size={self.moe.vocab_size}; "
                "set both, as override() does"
            )
