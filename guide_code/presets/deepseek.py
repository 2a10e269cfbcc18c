"""DeepSeek: DeepSeekMoE, Dai et al. 2024 (arXiv:2401.06066); V2 (arXiv:2405.04434); V3 (arXiv:2412.19437); and Kimi K2
of Moonshot AI (arXiv:2507.20534), which has the architecture of V3.

The next-token heads of V3 beyond the first (``num_nextn_predict_layers``) are left out, as transformers leaves them
out. The bias that moves the choice is kept, its step is 0: training set it, inference does not.
"""

from typing import Any

from guide_code.config import ModelConfig, MoEConfig, RopeScaling


def deepseek_moe_16b() -> ModelConfig:
    """16.4 billion parameters, 2.8 per token. Test files that quote the published configuration.

    Whether the weights of a token are normalised differs between copies: not verified.
    """
    return ModelConfig(
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        num_layers=28,
        num_heads=16,
        num_kv_heads=16,
        head_size=128,
        max_length=4096,
        norm_eps=1e-6,
        first_k_dense=1,
        moe=MoEConfig(
            hidden_size=2048,
            moe_intermediate_size=1408,
            num_experts=64,
            top_k=6,
            num_shared_experts=2,
            norm_topk_prob=False,
        ),
    )


def deepseek_v2_lite() -> ModelConfig:
    """15.7 billion parameters, 2.7 per token. MaxText, from deepseek-ai/DeepSeek-V2-Lite.

    Its balancing loss is per sequence, with coefficient 0.001; it is left out here.
    """
    return _latent(
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        num_layers=27,
        num_heads=16,
        q_lora_rank=None,
        rope_scaling=_yarn(40.0, 0.707),
        experts={"moe_intermediate_size": 1408, "num_experts": 64, "top_k": 6, "num_shared_experts": 2}
        | {"norm_topk_prob": False},
    )


def deepseek_v2() -> ModelConfig:
    """236 billion parameters, 21 per token. MaxText ``deepseek2-236b.yml``; groups and their rule from the paper."""
    return _latent(
        vocab_size=102400,
        hidden_size=5120,
        intermediate_size=12288,
        num_layers=60,
        num_heads=128,
        rope_scaling=_yarn(40.0, 0.707),
        experts={"moe_intermediate_size": 1536, "num_experts": 160, "top_k": 6, "num_shared_experts": 2}
        | {"norm_topk_prob": False, "routed_scaling_factor": 16.0}
        | {"num_groups": 8, "top_k_groups": 3, "group_score": "max"},
    )


def deepseek_v3() -> ModelConfig:
    """671 billion parameters, 37 per token; R1 is the same. MaxText, from deepseek-ai/DeepSeek-V3."""
    return _latent(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_layers=61,
        num_heads=128,
        first_k_dense=3,
        rope_scaling=_yarn(40.0, 1.0),
        experts={"moe_intermediate_size": 2048, "num_experts": 256, "top_k": 8, "num_shared_experts": 1}
        | {"score_fn": "sigmoid", "use_expert_bias": True, "routed_scaling_factor": 2.5}
        | {"num_groups": 8, "top_k_groups": 4},
    )


def kimi_k2() -> ModelConfig:
    """1,026 billion parameters, 33 per token. Moonshot AI's README and MaxText ``kimi-k2-1t.yml``."""
    return _latent(
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=18432,
        num_layers=61,
        num_heads=64,
        max_length=131072,
        rope_theta=50000.0,
        rope_scaling=_yarn(32.0, 1.0, beta_fast=1.0),
        experts={"moe_intermediate_size": 2048, "num_experts": 384, "top_k": 8, "num_shared_experts": 1}
        | {"score_fn": "sigmoid", "use_expert_bias": True, "routed_scaling_factor": 2.827},
    )


def _latent(*, hidden_size: int, num_heads: int, experts: dict[str, Any], **fields: Any) -> ModelConfig:
    common: dict[str, Any] = {"max_length": 163840, "q_lora_rank": 1536, "first_k_dense": 1}
    return ModelConfig(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=192,
        norm_eps=1e-6,
        rope_interleaved=True,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe=MoEConfig(hidden_size=hidden_size, **experts),
        **common | fields,
    )


def _yarn(factor: float, mscale: float, beta_fast: float = 32.0) -> RopeScaling:
    return RopeScaling(
        type="yarn",
        factor=factor,
        original_max_position_embeddings=4096,
        beta_fast=beta_fast,
        mscale=mscale,
        mscale_all_dim=mscale,
    )
