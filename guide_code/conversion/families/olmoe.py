"""OLMoE: Muennighoff et al. 2024 (arXiv:2409.02060); transformers ``models/olmoe``."""

from typing import Any

from guide_code.config import ModelConfig, MoEConfig
from guide_code.conversion.common_fields import read_biases, read_shape, write_biases, write_shape
from guide_code.conversion.family import EXPERTS, NAMES, Family
from guide_code.conversion.fields import Fields
from guide_code.conversion.table import Table

TABLE: Table = {**NAMES, **EXPERTS}


def read_config(fields: Fields) -> ModelConfig:
    """A norm of queries and keys over all heads together."""
    shape, width = read_shape(fields, norm_eps=1e-5, theta=1e4), fields.take("intermediate_size")
    fields.expect("clip_qkv", None)
    return ModelConfig(
        **shape,
        **read_biases(fields),
        qk_norm="full",
        intermediate_size=width,
        moe=MoEConfig(
            hidden_size=shape["hidden_size"],
            moe_intermediate_size=width,
            num_experts=fields.take("num_experts"),
            top_k=fields.take("num_experts_per_tok"),
            norm_topk_prob=fields.take("norm_topk_prob", False),
        ),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_config`."""
    assert config.moe is not None
    values = {
        "intermediate_size": config.moe.moe_intermediate_size,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "norm_topk_prob": config.moe.norm_topk_prob,
    }
    return write_shape(config) | write_biases(config) | values


OLMOE = Family("olmoe", "OlmoeForCausalLM", TABLE, read_config, write_config)
