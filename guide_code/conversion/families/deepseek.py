"""DeepSeek-V2 (2024, arXiv:2405.04434) and DeepSeek-V3 (2024, arXiv:2412.19437); transformers ``models/deepseek_v2``,
``models/deepseek_v3``.
"""

from collections.abc import Mapping
from typing import Any

from guide_code.config import ModelConfig, MoEConfig
from guide_code.conversion.common_fields import read_shape, write_shape
from guide_code.conversion.family import DENSE, EXPERTS, IGNORED, LAYER, NAMES, SHARED, Family
from guide_code.conversion.fields import Fields
from guide_code.conversion.table import Table

ATTENTION = f"{LAYER}.self_attn"

TABLE: Table = {
    **NAMES,
    **DENSE,
    **EXPERTS,
    **SHARED,
    "blocks.{l}.ffn.router.expert_bias": f"{LAYER}.mlp.gate.e_score_correction_bias",
    "blocks.{l}.attention.q_a_proj.weight": f"{ATTENTION}.q_a_proj.weight",
    "blocks.{l}.attention.q_a_norm.weight": f"{ATTENTION}.q_a_layernorm.weight",
    "blocks.{l}.attention.q_b_proj.weight": f"{ATTENTION}.q_b_proj.weight",
    "blocks.{l}.attention.kv_a_proj.weight": f"{ATTENTION}.kv_a_proj_with_mqa.weight",
    "blocks.{l}.attention.kv_a_norm.weight": f"{ATTENTION}.kv_a_layernorm.weight",
    "blocks.{l}.attention.kv_b_proj.weight": f"{ATTENTION}.kv_b_proj.weight",
}


def read_v2(fields: Fields) -> ModelConfig:
    """Softmax scores, unscaled choice within the groups of the best single expert."""
    fields.expect("scoring_func", "softmax")
    fields.expect("norm_topk_prob", False)
    fields.expect("mlp_bias", False)
    method = fields.take("topk_method", "greedy")
    groups: dict[str, Any] = {
        "num_groups": fields.take("n_group", None),
        "top_k_groups": fields.take("topk_group", None),
    }
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"config.json has topk_method={method!r}; only greedy and group_limited_greedy are supported")
    groups = groups | {"group_score": "max"} if method != "greedy" else {}
    moe = read_moe(fields, norm_topk_prob=False) | groups
    return ModelConfig(**_read_latent(fields), rope_interleaved=True, moe=MoEConfig(**moe))


def read_v3(fields: Fields) -> ModelConfig:
    """Sigmoid scores, a bias that moves the choice, groups by their best two experts."""
    fields.expect("scoring_func", "sigmoid")
    fields.expect("topk_method", "noaux_tc")
    fields.skip(["num_nextn_predict_layers"])
    moe = read_moe(fields, norm_topk_prob=True) | {
        "num_groups": fields.take("n_group", 8),
        "top_k_groups": fields.take("topk_group", 4),
        "score_fn": "sigmoid",
        "use_expert_bias": True,
    }
    return ModelConfig(
        **_read_latent(fields), rope_interleaved=fields.take("rope_interleave", True), moe=MoEConfig(**moe)
    )


def read_moe(fields: Fields, *, norm_topk_prob: bool) -> dict[str, Any]:
    """What the layers of DeepSeek and GLM have in common; ``norm_topk_prob`` is the default."""
    fields.expect("moe_layer_freq", 1)
    return {
        "hidden_size": fields.take("hidden_size"),
        "moe_intermediate_size": fields.take("moe_intermediate_size"),
        "num_experts": fields.take("n_routed_experts"),
        "top_k": fields.take("num_experts_per_tok"),
        "num_shared_experts": fields.take("n_shared_experts"),
        "norm_topk_prob": fields.take("norm_topk_prob", norm_topk_prob),
        "routed_scaling_factor": fields.take("routed_scaling_factor"),
    }


def _read_latent(fields: Fields) -> dict[str, Any]:
    fields.expect("attention_bias", False)
    nope, rope = fields.take("qk_nope_head_dim"), fields.take("qk_rope_head_dim")
    fields.skip(["qk_head_dim"])  # their sum
    shape = read_shape(fields, norm_eps=1e-6, theta=1e4)
    return shape | {
        "num_kv_heads": shape["num_heads"],
        "head_size": nope + rope,
        "intermediate_size": fields.take("intermediate_size"),
        "first_k_dense": fields.take("first_k_dense_replace"),
        "kv_lora_rank": fields.take("kv_lora_rank"),
        "q_lora_rank": fields.take("q_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": fields.take("v_head_dim"),
    }


def write_v2(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_v2`."""
    assert config.moe is not None
    method = "greedy" if config.moe.num_groups == 1 else "group_limited_greedy"
    return _write_latent(config) | write_moe(config) | {"topk_method": method}


def write_v3(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_v3`."""
    return _write_latent(config) | write_moe(config) | {"rope_interleave": config.rope_interleaved}


def write_moe(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_moe`, and the groups."""
    moe = config.moe
    assert moe is not None
    return {
        "intermediate_size": config.intermediate_size,
        "first_k_dense_replace": config.num_layers - len(config.sparse_layers),
        "moe_intermediate_size": moe.moe_intermediate_size,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "n_shared_experts": moe.shared_width // moe.moe_intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "n_group": moe.num_groups,
        "topk_group": moe.top_k_groups,
    }


def _write_latent(config: ModelConfig) -> dict[str, Any]:
    if config.kv_lora_rank is None:
        raise ValueError("kv_lora_rank=None")
    values = write_shape(config) | {
        "kv_lora_rank": config.kv_lora_rank,
        "q_lora_rank": config.q_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
    }
    del values["head_dim"]  # the class makes it the turned part of a head
    return values


def ignored(hf_config: Mapping[str, Any]) -> Mapping[str, str]:
    """Layers past the last one, which predict further tokens in training, beside what is computed."""
    first = hf_config["num_hidden_layers"]
    further = range(first, first + hf_config.get("num_nextn_predict_layers", 0))
    reason = "predicts further tokens in training (num_nextn_predict_layers)"
    return {**IGNORED, **{rf"model\.layers\.{layer}\..*": reason for layer in further}}


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", TABLE, read_v2, write_v2)
DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", TABLE, read_v3, write_v3, ignored)
