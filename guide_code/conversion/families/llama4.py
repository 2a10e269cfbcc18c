"""Llama-4, its text model: Meta 2025 (the model card of Llama-4-Scout-17B-16E); transformers ``models/llama4``."""

from typing import Any

from guide_code.config import ModelConfig, MoEConfig
from guide_code.conversion.common_fields import read_biases, read_shape, write_biases, write_shape
from guide_code.conversion.family import IGNORED, LAYER, NAMES, Family
from guide_code.conversion.fields import Fields
from guide_code.conversion.table import TRANSPOSED, Table, gate_up, part

FFN = f"{LAYER}.feed_forward"

TABLE: Table = {
    **NAMES,
    "blocks.{l}.ffn.feed_forward.gate_up_proj.weight": gate_up(f"{FFN}.gate_proj.weight", f"{FFN}.up_proj.weight"),
    "blocks.{l}.ffn.feed_forward.down_proj.weight": f"{FFN}.down_proj.weight",
    "blocks.{l}.ffn.router.weight": f"{FFN}.router.weight",
    "blocks.{l}.ffn.experts.gate_up_proj": [
        part(f"{FFN}.experts.gate_up_proj", TRANSPOSED),
        gate_up(f"{FFN}.experts.{{e}}.gate_proj.weight", f"{FFN}.experts.{{e}}.up_proj.weight"),
    ],
    "blocks.{l}.ffn.experts.down_proj": [
        part(f"{FFN}.experts.down_proj", TRANSPOSED),
        f"{FFN}.experts.{{e}}.down_proj.weight",
    ],
    "blocks.{l}.ffn.shared.gate_up_proj.weight": gate_up(
        f"{FFN}.shared_expert.gate_proj.weight", f"{FFN}.shared_expert.up_proj.weight"
    ),
    "blocks.{l}.ffn.shared.down_proj.weight": f"{FFN}.shared_expert.down_proj.weight",
}


def read_config(fields: Fields) -> ModelConfig:
    """Sigmoid of the chosen logits, multiplied into the input of the expert; some layers without positions."""
    shape = read_shape(fields, norm_eps=1e-5, theta=500000.0)
    layers, step = range(shape["num_layers"]), fields.take("interleave_moe_layer_step", 1)
    sparse = fields.take("moe_layers", None)
    sparse = range(step - 1, len(layers), step) if sparse is None else sparse
    interval = fields.take("no_rope_layer_interval", 4)
    turned = fields.take("no_rope_layers", None) or [(layer + 1) % interval for layer in layers]
    chunk = fields.take("attention_chunk_size", 8192)
    default = ["chunked_attention" if turns and chunk else "full_attention" for turns in turned]
    types = tuple(fields.take("layer_types", None) or default)
    nope = tuple(layer for layer in layers if not turned[layer])
    fields.skip(["for_llm_compressor"])
    return ModelConfig(
        **shape,
        **read_biases(fields),
        rope_interleaved=True,
        qk_norm="l2" if fields.take("use_qk_norm", True) else "none",
        layer_types=types,
        attention_chunk_size=chunk if "chunked_attention" in types else None,
        nope_layers=nope,
        attn_temperature_tuning=bool(fields.take("attn_temperature_tuning", True) and nope),
        floor_scale=fields.take("floor_scale", 8192),
        attn_scale=fields.take("attn_scale", 0.1),
        intermediate_size=fields.take("intermediate_size_mlp"),
        dense_layers=tuple(layer for layer in layers if layer not in sparse),
        moe=MoEConfig(
            hidden_size=shape["hidden_size"],
            moe_intermediate_size=fields.take("intermediate_size"),
            num_experts=fields.take("num_local_experts"),
            top_k=fields.take("num_experts_per_tok", 1),
            score_fn="sigmoid",
            norm_topk_prob=False,
            weight_on_input=True,
            num_shared_experts=1,
            router_jitter=fields.take("router_jitter_noise", 0.0),
        ),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_config`."""
    assert config.moe is not None
    values = {
        "interleave_moe_layer_step": 1,
        "moe_layers": list(config.sparse_layers),
        "no_rope_layers": [int(layer not in config.nope_layers) for layer in range(config.num_layers)],
        "layer_types": list(config.layer_types or ("full_attention",) * config.num_layers),
        "attention_chunk_size": config.attention_chunk_size,
        "use_qk_norm": config.qk_norm == "l2",
        "attn_temperature_tuning": config.attn_temperature_tuning,
        "floor_scale": config.floor_scale,
        "attn_scale": config.attn_scale,
        "intermediate_size_mlp": config.intermediate_size,
        "intermediate_size": config.moe.moe_intermediate_size,
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "router_jitter_noise": 0.0,
    }
    return write_shape(config) | write_biases(config) | values


EYES = {
    r"vision_model\..*": "sees images: only the language model is converted",
    r"multi_modal_projector\..*": "sees images: only the language model is converted",
}

LLAMA4 = Family(
    "llama4_text", "Llama4ForCausalLM", TABLE, read_config, write_config, lambda hf_config: {**IGNORED, **EYES}
)
