"""Configurations: frozen dataclasses in the words of published ``config.json`` files, checked when they are made."""

from guide_code.rotary import RopeScaling

from .checks import nearest
from .model import ModelConfig
from .moe import ACTIVATIONS, ROUTERS, MoEConfig
from .values import dense_twin, from_dict, override, to_dict

__all__ = [
    "ACTIVATIONS",
    "ROUTERS",
    "MoEConfig",
    "ModelConfig",
    "RopeScaling",
    "dense_twin",
    "from_dict",
    "nearest",
    "override",
    "to_dict",
]
