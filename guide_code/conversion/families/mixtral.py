"""Mixtral: Jiang et al. 2024 (arXiv:2401.04088); transformers ``models/mixtral``."""

from typing import Any

from guide_code.config import ModelConfig, MoEConfig
from guide_code.conversion.common_fields import read_shape, read_window, write_shape
from guide_code.conversion.family import LAYER, NAMES, Family
from guide_code.conversion.fields import Fields
from guide_code.conversion.table import Table, gate_up

MOE = f"{LAYER}.block_sparse_moe"

TABLE: Table = {
    **NAMES,
    "blocks.{l}.ffn.router.weight": [f"{MOE}.gate.weight", f"{LAYER}.mlp.gate.weight"],
    "blocks.{l}.ffn.experts.gate_up_proj": [
        gate_up(f"{MOE}.experts.{{e}}.w1.weight", f"{MOE}.experts.{{e}}.w3.weight"),
        f"{LAYER}.mlp.experts.gate_up_proj",
    ],
    "blocks.{l}.ffn.experts.down_proj": [f"{MOE}.experts.{{e}}.w2.weight", f"{LAYER}.mlp.experts.down_proj"],
}


def read_config(fields: Fields) -> ModelConfig:
    """The weights of the chosen experts always sum to 1."""
    shape, width = read_shape(fields, norm_eps=1e-5, theta=1e6), fields.take("intermediate_size")
    return ModelConfig(
        **shape,
        **read_window(fields.take("sliding_window", None), shape),
        intermediate_size=width,
        moe=MoEConfig(
            hidden_size=shape["hidden_size"],
            moe_intermediate_size=width,
            num_experts=fields.take("num_local_experts"),
            top_k=fields.take("num_experts_per_tok"),
            router_jitter=fields.take("router_jitter_noise", 0.0),
        ),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_config`."""
    assert config.moe is not None
    return write_shape(config) | {
        "sliding_window": config.sliding_window,
        "intermediate_size": config.moe.moe_intermediate_size,
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "router_jitter_noise": config.moe.router_jitter,
    }


MIXTRAL = Family("mixtral", "MixtralForCausalLM", TABLE, read_config, write_config)
