"""``tiny`` and ``small``: our own, sized for laptops."""

from guide_code.config import ModelConfig, MoEConfig


def tiny() -> ModelConfig:
    """16 narrow experts, 2 per token: 500 steps take half a minute on two CPU cores.

    The feed-forward layers are narrow on purpose. A model this small is limited by what they can hold, so the effect
    of more experts shows within 500,000 tokens.
    """
    return ModelConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        max_length=256,
        tie_embeddings=True,
        moe=MoEConfig(
            hidden_size=128,
            moe_intermediate_size=32,
            num_experts=16,
            top_k=2,
            load_balancing_coef=0.005,
            z_loss_coef=0.001,
        ),
    )


def small() -> ModelConfig:
    """32 fine-grained experts, 4 per token, one shared (the shape of DeepSeekMoE): minutes to hours on a laptop."""
    return ModelConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1280,
        num_layers=8,
        num_heads=6,
        num_kv_heads=2,
        head_size=64,
        max_length=1024,
        first_k_dense=1,
        tie_embeddings=True,
        moe=MoEConfig(
            hidden_size=384,
            moe_intermediate_size=256,
            num_experts=32,
            top_k=4,
            num_shared_experts=1,
            load_balancing_coef=0.01,
            z_loss_coef=0.001,
        ),
    )
