"""gpt-oss: OpenAI 2025 (arXiv:2508.10925); transformers ``models/gpt_oss``.

Its files hold the experts in MXFP4, which ``guide_code.conversion.quantized`` reads as plain tensors of this layout.
"""

from typing import Any

from guide_code.config import ModelConfig, MoEConfig
from guide_code.conversion.common_fields import read_biases, read_shape, write_biases, write_shape
from guide_code.conversion.family import LAYER, NAMES, Family
from guide_code.conversion.fields import Fields
from guide_code.conversion.table import TRANSPOSED, Table, part

EXPERTS = f"{LAYER}.mlp.experts"

TABLE: Table = {
    **NAMES,
    "blocks.{l}.attention.sinks": f"{LAYER}.self_attn.sinks",
    "blocks.{l}.ffn.router.weight": f"{LAYER}.mlp.router.weight",
    "blocks.{l}.ffn.router.bias": f"{LAYER}.mlp.router.bias",
    "blocks.{l}.ffn.experts.gate_up_proj": part(f"{EXPERTS}.gate_up_proj", TRANSPOSED),
    "blocks.{l}.ffn.experts.gate_up_proj_bias": f"{EXPERTS}.gate_up_proj_bias",
    "blocks.{l}.ffn.experts.down_proj": part(f"{EXPERTS}.down_proj", TRANSPOSED),
    "blocks.{l}.ffn.experts.down_proj_bias": f"{EXPERTS}.down_proj_bias",
}


def read_config(fields: Fields) -> ModelConfig:
    """A softmax over the chosen logits alone is a softmax over all, divided by the sum of the chosen."""
    shape, width = read_shape(fields, norm_eps=1e-5, theta=150000.0), fields.take("intermediate_size")
    fields.expect("swiglu_limit", 7.0)
    fields.expect("swiglu_alpha", 1.702)
    fields.skip(["experts_per_token"])  # num_experts_per_tok again
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(shape["num_layers"])]
    types = tuple(fields.take("layer_types", None) or alternating)
    window = fields.take("sliding_window", 128)
    return ModelConfig(
        **shape,
        **read_biases(fields),
        attention_sinks=True,
        layer_types=types,
        sliding_window=window if "sliding_attention" in types else None,
        intermediate_size=width,
        moe=MoEConfig(
            hidden_size=shape["hidden_size"],
            moe_intermediate_size=width,
            num_experts=fields.take("num_local_experts"),
            top_k=fields.take("num_experts_per_tok"),
            router_bias=True,
            activation="swigluoai",
            expert_biases=True,
        ),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_config`."""
    assert config.moe is not None
    values = {
        "layer_types": list(config.layer_types or ("full_attention",) * config.num_layers),
        "sliding_window": config.sliding_window,
        "intermediate_size": config.moe.moe_intermediate_size,
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "swiglu_limit": 7.0,
    }
    return write_shape(config) | write_biases(config) | values


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", TABLE, read_config, write_config)
