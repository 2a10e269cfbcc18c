"""gpt-oss of OpenAI (arXiv:2508.10925)."""

from guide_code.balance import equivalent_coefficient
from guide_code.config import ModelConfig, MoEConfig, RopeScaling


def gpt_oss_20b() -> ModelConfig:
    """20.9 billion parameters, 4.2 per token; OpenAI counts 3.6, without the embedding.

    MaxText, from openai/gpt-oss-20b; also pith-train.
    """
    return _gpt_oss(24, 32)


def gpt_oss_120b() -> ModelConfig:
    """116.8 billion parameters, 5.7 per token, 5.1 without the embedding.

    MaxText, from openai/gpt-oss-120b; also openai/gpt-oss.
    """
    return _gpt_oss(36, 128)


def _gpt_oss(num_layers: int, num_experts: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=8,
        head_size=64,
        max_length=131072,
        rope_theta=150000.0,
        rope_scaling=RopeScaling(type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
        attention_bias=True,
        attention_out_bias=True,
        attention_sinks=True,
        sliding_window=128,
        layer_types=("sliding_attention", "full_attention") * (num_layers // 2),
        moe=MoEConfig(
            hidden_size=2880,
            moe_intermediate_size=2880,
            num_experts=num_experts,
            top_k=4,
            activation="swigluoai",
            router_bias=True,
            expert_biases=True,
            load_balancing_coef=equivalent_coefficient(
                0.9, source="hf", target="megatron", top_k=4, num_layers=num_layers
            ),
        ),
    )
