"""The fields of ``config.json`` that most families share, read and written."""

import dataclasses
from typing import Any

from guide_code.config import ModelConfig
from guide_code.conversion.fields import Fields
from guide_code.rotary import RopeScaling

_NEEDED = {"llama3": ("low_freq_factor", "high_freq_factor")}
"""Fields without a default in transformers."""


def read_shape(fields: Fields, *, norm_eps: float, theta: float, partial: float = 1.0) -> dict[str, Any]:
    """Fields of a :class:`ModelConfig`: sizes, norms, rotary positions.

    Args:
        fields: of ``config.json``.
        norm_eps: default of the class.
        theta: default of the class.
        partial: default of the class for the part of a head that is turned.
    """
    fields.expect("hidden_act", "silu")
    num_heads, hidden_size = fields.take("num_attention_heads"), fields.take("hidden_size")
    shape: dict[str, Any] = {
        "vocab_size": fields.take("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": fields.take("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": fields.take("num_key_value_heads", None) or num_heads,
        "head_size": fields.take("head_dim", None) or hidden_size // num_heads,
        "max_length": fields.take("max_position_embeddings"),
        "tie_embeddings": fields.take("tie_word_embeddings", False),
        "norm_eps": fields.take("rms_norm_eps", norm_eps),
    }
    return shape | _read_rope(fields.rope(theta), shape["max_length"], partial)


def write_shape(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_shape`."""
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tie_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "hidden_act": "silu",
    }
    if config.partial_rotary_factor != 1:
        values["partial_rotary_factor"] = config.partial_rotary_factor
    if config.rope_scaling is not None:
        always = ("factor", "type", *_NEEDED.get(config.rope_scaling.type, ()))
        kept = {
            field.name: getattr(config.rope_scaling, field.name)
            for field in dataclasses.fields(RopeScaling)
            if field.name in always or getattr(config.rope_scaling, field.name) != field.default
        }
        values["rope_scaling"] = {"rope_type": kept.pop("type"), **kept}
    return values


def read_biases(fields: Fields) -> dict[str, Any]:
    """``attention_bias`` where it stands for all four projections."""
    bias = fields.take("attention_bias", False)
    return {"attention_bias": bias, "attention_out_bias": bias}


def write_biases(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_biases`."""
    return {"attention_bias": config.attention_bias}


def read_window(window: int | None, shape: dict[str, Any]) -> dict[str, Any]:
    """The same window in every layer; one as long as the model hides nothing."""
    if not window or window >= shape["max_length"]:
        return {}
    return {"sliding_window": window, "layer_types": ("sliding_attention",) * shape["num_layers"]}


def read_sparse_layers(fields: Fields) -> dict[str, Any]:
    """Which layers have experts, in the words of Qwen."""
    return {
        "moe_layer_step": fields.take("decoder_sparse_step", 1),
        "dense_layers": tuple(sorted(fields.take("mlp_only_layers", None) or ())),
    }


def write_sparse_layers(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_sparse_layers`."""
    dense = sorted({*range(config.first_k_dense), *config.dense_layers})
    return {"decoder_sparse_step": config.moe_layer_step, "mlp_only_layers": dense}


def _read_rope(rope: dict[str, Any], max_length: int, partial: float) -> dict[str, Any]:
    kind: str = "longrope" if rope["rope_type"] == "su" else rope["rope_type"]
    read: dict[str, Any] = {
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope.get("partial_rotary_factor", partial),
    }
    names = {field.name for field in dataclasses.fields(RopeScaling)} - {"type"}
    unknown = sorted(rope.keys() - names - {*read, "rope_type"})
    if unknown:
        raise ValueError(f"rope_scaling has fields whose effect is unknown here: {', '.join(unknown)}")
    if kind == "default":
        return read
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in rope.items() if name in names}
    values.setdefault("original_max_position_embeddings", max_length)
    if kind == "longrope":
        values.setdefault("factor", max_length / values["original_max_position_embeddings"])
    return {**read, "rope_scaling": RopeScaling(type=kind, **values)}
