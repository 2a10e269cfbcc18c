"""Qwen2-MoE (Yang et al. 2024, arXiv:2407.10671) and Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388); transformers
``models/qwen2_moe``, ``models/qwen3_moe``.
"""

from typing import Any

from guide_code.config import ModelConfig, MoEConfig
from guide_code.conversion.common_fields import (
    read_biases,
    read_shape,
    read_sparse_layers,
    read_window,
    write_biases,
    write_shape,
    write_sparse_layers,
)
from guide_code.conversion.family import DENSE, EXPERTS, LAYER, NAMES, Family
from guide_code.conversion.fields import Fields
from guide_code.conversion.table import Table, gate_up

SHARED = f"{LAYER}.mlp.shared_expert"

QWEN3_TABLE: Table = {**NAMES, **DENSE, **EXPERTS}
QWEN2_TABLE: Table = {
    **QWEN3_TABLE,
    "blocks.{l}.ffn.shared.gate_up_proj.weight": gate_up(f"{SHARED}.gate_proj.weight", f"{SHARED}.up_proj.weight"),
    "blocks.{l}.ffn.shared.down_proj.weight": f"{SHARED}.down_proj.weight",
    "blocks.{l}.ffn.shared.gate.weight": f"{LAYER}.mlp.shared_expert_gate.weight",
}


def read_qwen2(fields: Fields) -> ModelConfig:
    """A shared expert that each token scales by a sigmoid; biases on queries, keys and values."""
    shape = read_shape(fields, norm_eps=1e-6, theta=1e4)
    fields.expect("use_sliding_window", False)
    fields.skip(["max_window_layers", "sliding_window", "layer_types"])  # of no effect without it
    return ModelConfig(
        **shape,
        **read_sparse_layers(fields),
        attention_bias=fields.take("qkv_bias", True),
        intermediate_size=fields.take("intermediate_size"),
        moe=MoEConfig(
            **_read_moe(fields, fields.take("num_experts")),
            num_shared_experts=1,
            shared_intermediate_size=fields.take("shared_expert_intermediate_size"),
            shared_gate=True,
        ),
    )


def read_qwen3(fields: Fields) -> ModelConfig:
    """A norm of every query and key; no shared expert."""
    shape = read_shape(fields, norm_eps=1e-6, theta=1e4)
    window = fields.take("sliding_window", None)
    window = window if fields.take("use_sliding_window", False) else None
    fields.skip(["max_window_layers"])
    num_experts = fields.take("num_experts", None) or fields.take("num_local_experts")
    fields.skip(["num_local_experts"])  # the name that transformers 5 writes
    return ModelConfig(
        **shape,
        **read_biases(fields),
        **read_window(window, shape),
        **read_sparse_layers(fields),
        qk_norm="head",
        intermediate_size=fields.take("intermediate_size"),
        moe=MoEConfig(**_read_moe(fields, num_experts)),
    )


def _read_moe(fields: Fields, num_experts: int) -> dict[str, Any]:
    return {
        "hidden_size": fields.take("hidden_size"),
        "moe_intermediate_size": fields.take("moe_intermediate_size"),
        "num_experts": num_experts,
        "top_k": fields.take("num_experts_per_tok"),
        "norm_topk_prob": fields.take("norm_topk_prob", False),
    }


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_qwen2`."""
    assert config.moe is not None
    return _write(config) | {
        "qkv_bias": config.attention_bias,
        "shared_expert_intermediate_size": config.moe.shared_width,
        "use_sliding_window": False,
    }


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_qwen3`."""
    window = {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}
    return _write(config) | write_biases(config) | window


def _write(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None
    sizes = {
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe.moe_intermediate_size,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "norm_topk_prob": config.moe.norm_topk_prob,
    }
    return write_shape(config) | write_sparse_layers(config) | sizes


QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", QWEN2_TABLE, read_qwen2, write_qwen2)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", QWEN3_TABLE, read_qwen3, write_qwen3)
