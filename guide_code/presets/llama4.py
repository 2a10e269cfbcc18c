"""Llama 4 of Meta, the text part: transformers ``models/llama4``; layers without positions: Kazemnejad et al. 2023
(arXiv:2305.19466)."""

from typing import Any

from guide_code.balance import equivalent_coefficient
from guide_code.config import ModelConfig, MoEConfig, RopeScaling


def llama_4_scout() -> ModelConfig:
    """108 billion parameters, 17 per token. transformers ``Llama4TextConfig``, and MaxText ``llama4-17b-16e.yml``.

    MaxText scales rotary positions as Llama 3.1 does, by 8: not verified, nor is the longest context.
    """
    scaling = RopeScaling(type="llama3", factor=8.0, original_max_position_embeddings=8192)
    return _llama4(16, qk_norm="l2", rope_scaling=scaling, max_length=10485760)


def llama_4_maverick() -> ModelConfig:
    """400 billion parameters, 17 per token. MaxText ``llama4-17b-128e.yml``.

    Every second layer is dense. The longest context is Meta's announcement of one million tokens: not verified.
    """
    return _llama4(128, moe_layer_step=2, max_length=1048576)


def _llama4(num_experts: int, moe_layer_step: int = 1, **fields: Any) -> ModelConfig:
    no_positions = tuple(range(3, 48, 4))
    kinds = ("chunked_attention", "chunked_attention", "chunked_attention", "full_attention") * 12
    return ModelConfig(
        vocab_size=202048,
        hidden_size=5120,
        intermediate_size=16384,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_size=128,
        rope_theta=500000.0,
        rope_interleaved=True,
        nope_layers=no_positions,
        attn_temperature_tuning=True,
        attention_chunk_size=8192,
        layer_types=kinds,
        moe_layer_step=moe_layer_step,
        moe=MoEConfig(
            hidden_size=5120,
            moe_intermediate_size=8192,
            num_experts=num_experts,
            top_k=1,
            score_fn="sigmoid",
            norm_topk_prob=False,
            weight_on_input=True,
            num_shared_experts=1,
            load_balancing_coef=equivalent_coefficient(
                0.001, source="hf", target="megatron", top_k=1, num_layers=48 // moe_layer_step
            ),
        ),
        **fields,
    )
