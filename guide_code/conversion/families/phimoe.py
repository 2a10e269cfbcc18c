"""Phi-3.5-MoE: Abdin et al. 2024 (arXiv:2404.14219), section 6; its router: SparseMixer, Liu et al. 2023
(arXiv:2310.00811); transformers ``models/phimoe``.
"""

from typing import Any

from guide_code.config import ModelConfig, MoEConfig
from guide_code.conversion.common_fields import read_biases, read_shape, read_window, write_biases
from guide_code.conversion.families import mixtral
from guide_code.conversion.family import LAYER, Family
from guide_code.conversion.fields import Fields
from guide_code.conversion.table import Table

TABLE: Table = {
    **mixtral.TABLE,
    "blocks.{l}.ffn.router.weight": [f"{mixtral.MOE}.gate.weight", f"{LAYER}.mlp.router.weight"],
}


def read_config(fields: Fields) -> ModelConfig:
    """LayerNorm with biases, and a bias on every projection that can have one."""
    shape, width = read_shape(fields, norm_eps=1e-5, theta=1e6), fields.take("intermediate_size")
    fields.skip(["original_max_position_embeddings"])  # again in rope_scaling
    return ModelConfig(
        **shape,
        **read_biases(fields),
        **read_window(fields.take("sliding_window", None), shape),
        norm="layer",
        head_bias=fields.take("lm_head_bias", False),
        intermediate_size=width,
        moe=MoEConfig(
            hidden_size=shape["hidden_size"],
            moe_intermediate_size=width,
            num_experts=fields.take("num_local_experts"),
            top_k=fields.take("num_experts_per_tok"),
            router="sparse_mixer",
            norm_topk_prob=False,
            router_jitter=fields.take("router_jitter_noise", 0.01),
        ),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_config`."""
    assert config.moe is not None
    return mixtral.write_config(config) | write_biases(config) | {"lm_head_bias": config.head_bias}


PHIMOE = Family("phimoe", "PhimoeForCausalLM", TABLE, read_config, write_config)
