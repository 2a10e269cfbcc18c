"""What a family of models is to the converter, and the lines that most families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from guide_code.config import ModelConfig
from guide_code.conversion.fields import Fields
from guide_code.conversion.table import Table, gate_up

LAYER = "model.layers.{l}"

NAMES: Table = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "blocks.{l}.attention_norm.weight": f"{LAYER}.input_layernorm.weight",
    "blocks.{l}.ffn_norm.weight": f"{LAYER}.post_attention_layernorm.weight",
    "blocks.{l}.attention.q_proj.weight": f"{LAYER}.self_attn.q_proj.weight",
    "blocks.{l}.attention.k_proj.weight": f"{LAYER}.self_attn.k_proj.weight",
    "blocks.{l}.attention.v_proj.weight": f"{LAYER}.self_attn.v_proj.weight",
    "blocks.{l}.attention.o_proj.weight": f"{LAYER}.self_attn.o_proj.weight",
}
"""Embedding, norms and attention, as Llama named them."""

DENSE: Table = {
    "blocks.{l}.ffn.feed_forward.gate_up_proj.weight": gate_up(
        f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"
    ),
    "blocks.{l}.ffn.feed_forward.down_proj.weight": f"{LAYER}.mlp.down_proj.weight",
}
"""A dense feed-forward layer."""

EXPERTS: Table = {
    "blocks.{l}.ffn.router.weight": f"{LAYER}.mlp.gate.weight",
    "blocks.{l}.ffn.experts.gate_up_proj": [
        gate_up(f"{LAYER}.mlp.experts.{{e}}.gate_proj.weight", f"{LAYER}.mlp.experts.{{e}}.up_proj.weight"),
        f"{LAYER}.mlp.experts.gate_up_proj",
    ],
    "blocks.{l}.ffn.experts.down_proj": [
        f"{LAYER}.mlp.experts.{{e}}.down_proj.weight",
        f"{LAYER}.mlp.experts.down_proj",
    ],
}
"""Router and experts, as Qwen and DeepSeek name them: one by one in files, stacked in the memory of transformers 5."""

IGNORED = {
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "computed from rope_theta",
    r"model\.rotary_emb\.inv_freq": "computed from rope_theta",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family writes its models."""

    model_type: str
    """In config.json."""
    architecture: str
    """The class of transformers."""
    table: Callable[[ModelConfig], Table]
    """Which tensor is which."""
    read_config: Callable[[Fields], ModelConfig]
    """From the fields of config.json."""
    write_config: Callable[[ModelConfig], dict[str, Any]]
    """Back to them. May write a config that reads back otherwise: the caller compares."""
    ignored: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda hf_config: IGNORED
    """Given config.json: why a tensor is left out on purpose, by a regular expression for its name."""


def read_shape(fields: Fields) -> dict[str, Any]:
    """The fields of a :class:`ModelConfig` that every family has under the same names."""
    fields.expect("hidden_act", "silu")
    num_heads, hidden_size = fields.take("num_attention_heads"), fields.take("hidden_size")
    return {
        "vocab_size": fields.take("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": fields.take("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": fields.take("num_key_value_heads", None) or num_heads,
        "head_size": fields.take("head_dim", None) or hidden_size // num_heads,
        "max_length": fields.take("max_position_embeddings"),
        "tie_embeddings": fields.take("tie_word_embeddings", False),
    }


def write_shape(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_shape`."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tie_embeddings,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
    }
