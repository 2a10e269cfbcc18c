"""Qwen of Alibaba: Qwen2, Yang et al. 2024 (arXiv:2407.10671); Qwen3, Yang et al. 2025 (arXiv:2505.09388)."""

from typing import Any

from guide_code.balance import equivalent_coefficient
from guide_code.config import ModelConfig, MoEConfig


def qwen1_5_moe() -> ModelConfig:
    """14.3 billion parameters, 2.7 per token. transformers ``Qwen2MoeConfig``, which is this model, and MaxText."""
    return _qwen2(
        hidden_size=2048, intermediate_size=5632, num_layers=24, num_heads=16, num_kv_heads=16,
        experts=(60, 4, 1408, 5632)
    )  # fmt: skip


def qwen2_57b() -> ModelConfig:
    """57 billion parameters, 14 per token. TensorRT-LLM's test configuration.

    The vocabulary is taken from the other Qwen models: not verified, nor are the longest context and its wavelengths.
    """
    return _qwen2(
        hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4,
        experts=(64, 8, 2560, 20480)
    )  # fmt: skip


def qwen3_30b() -> ModelConfig:
    """30.5 billion parameters, 3.3 per token. MaxText, from Qwen3-30B-A3B-Thinking-2507; also litgpt and pith-train.

    The first release has ``rope_theta`` 1e6 and 40,960 positions.
    """
    return _qwen3(2048, 6144, 48, 32, 4, experts=(128, 8, 768), rope_theta=1e7)


def qwen3_235b() -> ModelConfig:
    """235 billion parameters, 22 per token. MaxText, from Qwen3-235B-A22B-Thinking-2507; also litgpt."""
    return _qwen3(4096, 12288, 94, 64, 4, experts=(128, 8, 1536), rope_theta=5e6)


def qwen3_coder_480b() -> ModelConfig:
    """480 billion parameters, 35 per token. MaxText, from Qwen3-Coder-480B-A35B; published with a coefficient of 0."""
    return _qwen3(6144, 8192, 62, 96, 8, experts=(160, 8, 2560), rope_theta=1e7, coef=0.0)


def _qwen2(*, experts: tuple[int, int, int, int], num_layers: int, hidden_size: int, **shape: Any) -> ModelConfig:
    num_experts, top_k, width, shared_width = experts
    return ModelConfig(
        vocab_size=151936,
        hidden_size=hidden_size,
        num_layers=num_layers,
        head_size=128,
        max_length=32768,
        norm_eps=1e-6,
        rope_theta=1e6,
        attention_bias=True,
        moe=MoEConfig(
            hidden_size=hidden_size,
            moe_intermediate_size=width,
            num_experts=num_experts,
            top_k=top_k,
            norm_topk_prob=False,
            num_shared_experts=1,
            shared_intermediate_size=shared_width,
            shared_gate=True,
            load_balancing_coef=_coefficient(0.001, top_k, num_layers),
        ),
        **shape,
    )


def _qwen3(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    experts: tuple[int, int, int],
    rope_theta: float,
    coef: float = 0.001,
) -> ModelConfig:
    num_experts, top_k, width = experts
    return ModelConfig(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=128,
        max_length=262144,
        norm_eps=1e-6,
        rope_theta=rope_theta,
        qk_norm="head",
        moe=MoEConfig(
            hidden_size=hidden_size,
            moe_intermediate_size=width,
            num_experts=num_experts,
            top_k=top_k,
            load_balancing_coef=_coefficient(coef, top_k, num_layers),
        ),
    )


def _coefficient(coef: float, top_k: int, num_layers: int) -> float:
    return equivalent_coefficient(coef, source="hf", target="megatron", top_k=top_k, num_layers=num_layers)
