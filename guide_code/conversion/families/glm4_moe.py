"""GLM-4.5 and GLM-4.5-Air: GLM-4.5 team 2025 (arXiv:2508.06471); transformers ``models/glm4_moe``."""

from typing import Any

from guide_code.config import ModelConfig, MoEConfig
from guide_code.conversion.common_fields import read_shape, write_shape
from guide_code.conversion.families import deepseek
from guide_code.conversion.family import Family
from guide_code.conversion.fields import Fields


def read_config(fields: Fields) -> ModelConfig:
    """The layers of DeepSeek-V3 with grouped queries, half of every head turned."""
    shape = read_shape(fields, norm_eps=1e-5, theta=1e4, partial=0.5)
    fields.skip(["num_nextn_predict_layers"])
    return ModelConfig(
        **shape,
        attention_bias=fields.take("attention_bias", False),
        qk_norm="head" if fields.take("use_qk_norm", False) else "none",
        intermediate_size=fields.take("intermediate_size"),
        first_k_dense=fields.take("first_k_dense_replace", 1),
        moe=MoEConfig(
            **deepseek.read_moe(fields, norm_topk_prob=True),
            num_groups=fields.take("n_group", 1),
            top_k_groups=fields.take("topk_group", 1),
            score_fn="sigmoid",
            use_expert_bias=True,
        ),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_config`."""
    values = {
        "attention_bias": config.attention_bias,
        "use_qk_norm": config.qk_norm == "head",
        "partial_rotary_factor": config.partial_rotary_factor,
    }
    return write_shape(config) | deepseek.write_moe(config) | values


GLM4_MOE = Family("glm4_moe", "Glm4MoeForCausalLM", deepseek.TABLE, read_config, write_config, deepseek.ignored)
