"""OLMoE of the Allen Institute for AI: Muennighoff et al. 2024 (arXiv:2409.02060)."""

from guide_code.balance import equivalent_coefficient
from guide_code.config import ModelConfig, MoEConfig


def olmoe_1b_7b() -> ModelConfig:
    """6.9 billion parameters, 1.3 per token.

    Sizes from two test files that quote the published configuration, and the paper's table 1; the width of an expert is
    1024, not the 2048 of ``OlmoeConfig``.
    """
    return ModelConfig(
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=1024,
        num_layers=16,
        num_heads=16,
        num_kv_heads=16,
        head_size=128,
        max_length=4096,
        qk_norm="full",
        moe=MoEConfig(
            hidden_size=2048,
            moe_intermediate_size=1024,
            num_experts=64,
            top_k=8,
            norm_topk_prob=False,
            load_balancing_coef=equivalent_coefficient(0.01, source="hf", target="megatron", top_k=8, num_layers=16),
        ),
    )
