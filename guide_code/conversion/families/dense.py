"""Dense models to upcycle: Llama (Touvron et al. 2023, arXiv:2307.09288), Mistral (Jiang et al. 2023,
arXiv:2310.06825), Qwen2 and Qwen3 (Yang et al. 2025, arXiv:2505.09388); transformers ``models/llama`` and so on.
"""

from typing import Any

from guide_code.config import ModelConfig
from guide_code.conversion.common_fields import read_biases, read_shape, read_window, write_biases, write_shape
from guide_code.conversion.family import DENSE, NAMES, Family
from guide_code.conversion.fields import Fields
from guide_code.conversion.table import Table

TABLE: Table = {**NAMES, **DENSE}


def read_llama(fields: Fields) -> ModelConfig:
    """One switch for the biases of all four projections."""
    fields.expect("mlp_bias", False)
    return ModelConfig(**_shape(fields), **read_biases(fields))


def read_mistral(fields: Fields) -> ModelConfig:
    """A window in the first version."""
    shape = _shape(fields)
    return ModelConfig(**shape, **read_window(fields.take("sliding_window", 4096), shape))


def read_qwen2(fields: Fields) -> ModelConfig:
    """Biases on queries, keys and values."""
    _no_window(fields)
    return ModelConfig(**_shape(fields), attention_bias=True)


def read_qwen3(fields: Fields) -> ModelConfig:
    """A norm of every query and key."""
    _no_window(fields)
    return ModelConfig(**_shape(fields), **read_biases(fields), qk_norm="head")


def _shape(fields: Fields) -> dict[str, Any]:
    shape = read_shape(fields, norm_eps=1e-6, theta=1e4)
    return shape | {"intermediate_size": fields.take("intermediate_size")}


def _no_window(fields: Fields) -> None:
    fields.expect("use_sliding_window", False)
    fields.skip(["max_window_layers", "sliding_window", "layer_types"])  # of no effect without it


def write_llama(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_llama`."""
    return write_qwen2(config) | write_biases(config)


def write_mistral(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_mistral`."""
    return write_qwen2(config) | {"sliding_window": config.sliding_window}


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_qwen2`."""
    return write_shape(config) | {"intermediate_size": config.intermediate_size}


LLAMA = Family("llama", "LlamaForCausalLM", TABLE, read_llama, write_llama)
MISTRAL = Family("mistral", "MistralForCausalLM", TABLE, read_mistral, write_mistral)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", TABLE, read_qwen2, write_qwen2)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", TABLE, read_qwen3, write_llama)
