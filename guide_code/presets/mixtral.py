"""Mixtral of Mistral AI: Jiang et al. 2024 (arXiv:2401.04088)."""

from guide_code.balance import equivalent_coefficient
from guide_code.config import ModelConfig, MoEConfig


def mixtral_8x7b() -> ModelConfig:
    """46.7 billion parameters, 12.9 per token. MaxText, from Mixtral-8x7B-Instruct-v0.1."""
    return _mixtral(32000, 4096, 14336, 32, 32, 32768, 0.02)


def mixtral_8x22b() -> ModelConfig:
    """141 billion parameters, 39 per token. MaxText, from Mixtral-8x22B-Instruct-v0.1."""
    return _mixtral(32768, 6144, 16384, 56, 48, 65536, 0.001)


def _mixtral(
    vocab_size: int, hidden_size: int, width: int, num_layers: int, num_heads: int, max_length: int, coef: float
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_size=128,
        max_length=max_length,
        rope_theta=1e6,
        moe=MoEConfig(
            hidden_size=hidden_size,
            moe_intermediate_size=width,
            num_experts=8,
            top_k=2,
            load_balancing_coef=equivalent_coefficient(
                coef, source="hf", target="megatron", top_k=2, num_layers=num_layers
            ),
        ),
    )
