"""The families by ``model_type``, and the one that can hold a configuration of ours."""

import dataclasses
from typing import Any

from guide_code.config import ModelConfig, MoEConfig, nearest, to_dict
from guide_code.conversion.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from guide_code.conversion.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from guide_code.conversion.families.glm4_moe import GLM4_MOE
from guide_code.conversion.families.gpt_oss import GPT_OSS
from guide_code.conversion.families.llama4 import LLAMA4
from guide_code.conversion.families.mixtral import MIXTRAL
from guide_code.conversion.families.olmoe import OLMOE
from guide_code.conversion.families.phimoe import PHIMOE
from guide_code.conversion.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from guide_code.conversion.family import Family
from guide_code.conversion.fields import Fields

FAMILIES = {
    family.model_type: family
    for family in (
        MIXTRAL,
        OLMOE,
        QWEN3_MOE,
        QWEN2_MOE,
        DEEPSEEK_V3,
        DEEPSEEK_V2,
        GLM4_MOE,
        GPT_OSS,
        LLAMA4,
        PHIMOE,
        LLAMA,
        MISTRAL,
        QWEN3,
        QWEN2,
    )
}
"""By ``model_type``. A configuration of ours is written as the first that computes it."""

TRAINING_ONLY = (
    "router_jitter",
    "capacity_factor",
    "capacity_priority",
    "capacity_renormalize",
    "load_balancing_coef",
    "load_balancing_convention",
    "z_loss_coef",
    "expert_bias_rate",
    "backend",
    "vocab_size",
)
"""Fields of :class:`MoEConfig` that change no number in evaluation; ``vocab_size`` is for routers that hash tokens,
which no family has."""


def family_of(hf_config: dict[str, Any]) -> Family:
    """The family of a ``config.json``.

    Raises:
        ValueError: it is not known.
    """
    name = str(hf_config.get("model_type"))
    if name not in FAMILIES:
        raise ValueError(f"model_type={name!r} is not a family that can be converted{nearest(name, FAMILIES)}")
    return FAMILIES[name]


def read_config(hf_config: dict[str, Any]) -> ModelConfig:
    """The configuration that a ``config.json`` describes.

    Raises:
        ValueError: the family is not known, or a field has a value that we do not compute.
    """
    fields = Fields(hf_config)
    config = family_of(hf_config).read_config(fields)
    fields.skip(["quantization_config"])
    fields.finish()
    return config


def write_config(config: ModelConfig, family: str | None = None) -> dict[str, Any]:
    """A ``config.json`` that describes a configuration exactly, what matters in training only apart.

    Args:
        config: to be described.
        family: its ``model_type``; None for the first that can.

    Raises:
        ValueError: the family, or every one of them, computes something else; the message says what is lost.
    """
    losses = {}
    for candidate in FAMILIES.values() if family is None else [family_of({"model_type": family})]:
        try:
            written = {"model_type": candidate.model_type, "architectures": [candidate.architecture]}
            written |= candidate.write_config(config)
            lost = differences(read_config(written), config)
        except (ValueError, AssertionError) as error:
            lost = [str(error) or "moe=None (dense)"]
        if not lost:
            return written
        losses[candidate.model_type] = lost
    closest = sorted(losses.items(), key=lambda item: len(item[1]))[:3]
    shown = "; ".join(f"{name} loses {', '.join(lost)}" for name, lost in closest)
    who = f"{family} does not compute" if family else "no family of transformers computes"
    raise ValueError(f"{who} this configuration: {shown}")


def differences(a: ModelConfig, b: ModelConfig) -> list[str]:
    """The fields in which two configurations compute another model, as ``field=value`` of the second."""
    if (a.moe is None) != (b.moe is None):
        return ["moe=None (dense)" if b.moe is None else "moe (the mixture)"]
    one, other = (_flat(evaluation_part(config)) for config in (a, b))
    return [f"{name}={value!r}" for name, value in other.items() if name in one and one[name] != value]


def evaluation_part(config: ModelConfig) -> ModelConfig:
    """The configuration in one of the ways to write it: what changes nothing in evaluation is at its default."""
    types = config.layer_types
    config = dataclasses.replace(config, layer_types=None if set(types or ()) <= {"full_attention"} else types)
    moe = config.moe
    if moe is None:
        return config
    defaults = {field.name: field.default for field in dataclasses.fields(MoEConfig)}
    changes = {name: defaults[name] for name in TRAINING_ONLY}
    if moe.router == "sparse_mixer":
        changes["router_jitter"] = moe.router_jitter  # decides who has a share, in evaluation too
    changes["use_expert_bias"] = moe.use_expert_bias or moe.expert_bias_rate > 0
    if moe.shared_width:
        changes |= {"num_shared_experts": 1, "shared_intermediate_size": moe.shared_width}
    if moe.num_groups == 1:
        changes["group_score"] = defaults["group_score"]
    dense = tuple(layer for layer in range(config.num_layers) if layer not in config.sparse_layers)
    return dataclasses.replace(
        config,
        intermediate_size=config.intermediate_size if dense else moe.moe_intermediate_size,  # of no layer
        first_k_dense=0,
        moe_layer_step=1,
        dense_layers=dense,
        moe=dataclasses.replace(moe, **changes),
    )


def _flat(config: ModelConfig) -> dict[str, Any]:
    values = to_dict(config)
    moe = values.pop("moe") or {}
    return values | {f"moe.{name}": value for name, value in moe.items()}
