"""GLM-4.5 of Zhipu AI (arXiv:2508.06471)."""

from guide_code.config import ModelConfig, MoEConfig


def glm_4_5() -> ModelConfig:
    """353 billion parameters, 34 per token. Test files, and THUDM/slime ``scripts/models/glm4.5-355B-A32B.sh``.

    Groups, normalised weights and the norms' eps are defaults of ``Glm4MoeConfig``: not verified.
    """
    return _glm(5120, 12288, 92, first_k_dense=3, experts=(160, 1536), scale=2.5, qk_norm="head")


def glm_4_5_air() -> ModelConfig:
    """107 billion parameters, 13 per token. transformers ``Glm4MoeConfig`` and slime ``glm4.5-106B-A12B.sh``.

    The same fields are not verified.
    """
    return _glm(4096, 10944, 46, first_k_dense=1, experts=(128, 1408), scale=1.0, qk_norm="none")


def _glm(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    *,
    first_k_dense: int,
    experts: tuple[int, int],
    scale: float,
    qk_norm: str,
) -> ModelConfig:
    num_experts, width = experts
    return ModelConfig(
        vocab_size=151552,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=96,
        num_kv_heads=8,
        head_size=128,
        max_length=131072,
        first_k_dense=first_k_dense,
        rope_theta=1e6,
        partial_rotary_factor=0.5,
        attention_bias=True,
        qk_norm=qk_norm,
        moe=MoEConfig(
            hidden_size=hidden_size,
            moe_intermediate_size=width,
            num_experts=num_experts,
            top_k=8,
            score_fn="sigmoid",
            use_expert_bias=True,
            routed_scaling_factor=scale,
            num_shared_experts=1,
        ),
    )
