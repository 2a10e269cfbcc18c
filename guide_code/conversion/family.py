"""What a family of models is to the converter, and the lines of tables that most families share."""

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
    "norm.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
    "head.bias": "lm_head.bias",
    "blocks.{l}.attention_norm.weight": f"{LAYER}.input_layernorm.weight",
    "blocks.{l}.attention_norm.bias": f"{LAYER}.input_layernorm.bias",
    "blocks.{l}.ffn_norm.weight": f"{LAYER}.post_attention_layernorm.weight",
    "blocks.{l}.ffn_norm.bias": f"{LAYER}.post_attention_layernorm.bias",
    **{
        f"blocks.{{l}}.attention.{name}": f"{LAYER}.self_attn.{name}"
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj")
        for name in (f"{projection}.weight", f"{projection}.bias")
    },
    "blocks.{l}.attention.q_norm.weight": f"{LAYER}.self_attn.q_norm.weight",
    "blocks.{l}.attention.k_norm.weight": f"{LAYER}.self_attn.k_norm.weight",
}
"""Embedding, norms and attention, as Llama named them. A line without a tensor of ours is not used."""

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

SHARED: Table = {
    "blocks.{l}.ffn.shared.gate_up_proj.weight": gate_up(
        f"{LAYER}.mlp.shared_experts.gate_proj.weight", f"{LAYER}.mlp.shared_experts.up_proj.weight"
    ),
    "blocks.{l}.ffn.shared.down_proj.weight": f"{LAYER}.mlp.shared_experts.down_proj.weight",
}
"""The shared experts of DeepSeek, one feed-forward layer."""

IGNORED = {
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "computed from rope_theta",
    r"model\.rotary_emb\.inv_freq": "computed from rope_theta",
}


@dataclass(frozen=True)
class Family:
    """How one family writes its models."""

    model_type: str
    """In config.json."""
    architecture: str
    """The class of transformers."""
    table: Table
    """Which tensor is which."""
    read_config: Callable[[Fields], ModelConfig]
    """From the fields of config.json."""
    write_config: Callable[[ModelConfig], dict[str, Any]]
    """Back to them. May write a config that reads back otherwise: the caller compares."""
    ignored: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda hf_config: IGNORED
    """Given config.json: why a tensor is left out on purpose, by a regular expression for its name."""
