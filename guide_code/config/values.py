"""Configurations from and to plain values: command-line overrides, JSON, and the dense model to compare with."""

import dataclasses
import types
import typing

from guide_code.config.checks import nearest
from guide_code.config.model import ModelConfig
from guide_code.config.moe import MoEConfig
from guide_code.rotary import RopeScaling


def override(config: ModelConfig, changes: dict[str, typing.Any]) -> ModelConfig:
    """A copy with some fields changed, of the model or of its MoE layer; a field of both is set in both.

    Args:
        config: what to start from.
        changes: value by field name; a string is read as the type of the field ("4", "true", "none", "0,3,7").

    Raises:
        ValueError: no field has that name (the nearest ones are given), or the value does not fit.
    """
    model, moe = {}, {}
    model_types, moe_types = typing.get_type_hints(ModelConfig), typing.get_type_hints(MoEConfig)
    names = sorted({*model_types, *moe_types} - {"moe"})
    for name, value in changes.items():
        if name not in names:
            raise ValueError(f"no config field is called {name!r}{nearest(name, names)}")
        if name in model_types:
            model[name] = _read(name, value, model_types[name])
        if name in moe_types and config.moe is not None:
            moe[name] = _read(name, value, moe_types[name])
        elif name not in model_types:
            raise ValueError(f"{name} is a field of the MoE layer, but this config is dense (moe is None)")
    if moe and config.moe is not None:
        model["moe"] = dataclasses.replace(config.moe, **moe)
    return dataclasses.replace(config, **model)


def dense_twin(config: ModelConfig) -> ModelConfig:
    """The dense model that uses as many parameters per token in its feed-forward layers, routers apart."""
    if config.moe is None:
        return config
    if len(config.sparse_layers) < config.num_layers:
        raise ValueError(
            f"first_k_dense={config.first_k_dense}, moe_layer_step={config.moe_layer_step}, "
            f"dense_layers={config.dense_layers}: dense and sparse layers would need two widths"
        )
    width = config.moe.top_k * config.moe.moe_intermediate_size + config.moe.shared_width
    return dataclasses.replace(config, moe=None, intermediate_size=width)


def to_dict(config: ModelConfig) -> dict[str, typing.Any]:
    """Plain values, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, typing.Any]) -> ModelConfig:
    """The inverse of :func:`to_dict`.

    Raises:
        ValueError: a name is unknown or missing.
    """
    values = dict(values)
    for name, kind in (("moe", MoEConfig), ("rope_scaling", RopeScaling)):
        if isinstance(values.get(name), dict):
            values[name] = _make(kind, values[name])
    return _make(ModelConfig, values)


def _make(cls, values):
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            raise ValueError(f"{cls.__name__} has no field {name!r}{nearest(name, fields)}")
    missing = [n for n, f in fields.items() if n not in values and f.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{cls.__name__} lacks {', '.join(missing)}")
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _read(name, value, hint):
    if not isinstance(value, str) or hint is str:
        return value
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value.lower() == "none" and types.NoneType in kinds:
        return None
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            return tuple(_read(name, part.strip(), typing.get_args(kind)[0]) for part in value.split(",") if part)
    try:
        if bool in kinds:
            return {"true": True, "false": False}[value.lower()]
        if int in kinds or float in kinds:
            return int(value) if int in kinds else float(value)
    except (ValueError, KeyError):
        pass
    wanted = " or ".join(kind.__name__.replace("NoneType", "none") for kind in kinds)
    raise ValueError(f"{name}={value!r} is not a valid {wanted}")
