"""Dense models to upcycle: Llama (Touvron et al. 2023, arXiv:2307.09288) and Mistral (Jiang et al. 2023,
arXiv:2310.06825); transformers ``models/llama``, ``models/mistral``.
"""

from typing import Any

from guide_code.config import ModelConfig
from guide_code.conversion.family import DENSE, NAMES, Family, read_shape, write_shape
from guide_code.conversion.fields import Fields
from guide_code.conversion.table import Table

TABLE: Table = {**NAMES, **DENSE}


def read_llama(fields: Fields) -> ModelConfig:
    """No biases, no window."""
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    return _read(fields)


def read_mistral(fields: Fields) -> ModelConfig:
    """As Llama, with a window in the first version."""
    fields.expect("sliding_window", None)
    return _read(fields)


def _read(fields: Fields) -> ModelConfig:
    return ModelConfig(
        **read_shape(fields),
        intermediate_size=fields.take("intermediate_size"),
        norm_eps=fields.take("rms_norm_eps", 1e-6),
        rope_theta=fields.rope(theta=1e4)["rope_theta"],
    )


def write_llama(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_llama`."""
    return write_shape(config) | {"intermediate_size": config.intermediate_size, "rope_theta": config.rope_theta}


def write_mistral(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`read_mistral`."""
    return write_llama(config) | {"sliding_window": None}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    table=lambda config: TABLE,
    read_config=read_llama,
    write_config=write_llama,
)
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    table=lambda config: TABLE,
    read_config=read_mistral,
    write_config=write_mistral,
)
