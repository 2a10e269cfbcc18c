"""Configurations by name: our own, sized for laptops, and those of published models, each with its source.

Values are those of published ``config.json`` files, never class defaults of transformers, which match few released
models. The load-balancing coefficient is the published one, translated from transformers' convention into ours; most
published models were trained with it, and all are distributed with the loss turned off.

Sources: "MaxText" is AI-Hypercomputer/maxtext, ``src/MaxText/utils/ckpt_conversion/utils/hf_model_configs.py`` at
02b47fd (copies of the published files) or ``src/MaxText/configs/models``; "transformers" is 5.24.0.
"""

from collections.abc import Callable

from guide_code.config import ModelConfig, nearest

from .deepseek import deepseek_moe_16b, deepseek_v2, deepseek_v2_lite, deepseek_v3, kimi_k2
from .glm import glm_4_5, glm_4_5_air
from .gpt_oss import gpt_oss_20b, gpt_oss_120b
from .guide import small, tiny
from .llama4 import llama_4_maverick, llama_4_scout
from .mixtral import mixtral_8x7b, mixtral_8x22b
from .olmoe import olmoe_1b_7b
from .qwen import qwen1_5_moe, qwen2_57b, qwen3_30b, qwen3_235b, qwen3_coder_480b

__all__ = ["PRESETS", "UNVERIFIED", "preset", "small", "tiny"]

PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "tiny": tiny,
    "small": small,
    "mixtral-8x7b": mixtral_8x7b,
    "mixtral-8x22b": mixtral_8x22b,
    "qwen1.5-moe-a2.7b": qwen1_5_moe,
    "qwen3-30b-a3b": qwen3_30b,
    "qwen3-235b-a22b": qwen3_235b,
    "qwen3-coder-480b-a35b": qwen3_coder_480b,
    "olmoe-1b-7b": olmoe_1b_7b,
    "deepseek-v2-lite": deepseek_v2_lite,
    "deepseek-v2": deepseek_v2,
    "deepseek-v3": deepseek_v3,
    "kimi-k2": kimi_k2,
    "gpt-oss-20b": gpt_oss_20b,
    "gpt-oss-120b": gpt_oss_120b,
}
"""Every value of these was read in a copy of the published configuration, or in two independent sources."""

_WITH_DOUBT: dict[str, tuple[Callable[[], ModelConfig], tuple[str, ...]]] = {
    "qwen2-57b-a14b": (qwen2_57b, ("vocab_size", "max_length", "rope_theta")),
    "deepseek-moe-16b": (deepseek_moe_16b, ("norm_topk_prob",)),
    "llama-4-scout": (llama_4_scout, ("rope_scaling", "max_length")),
    "llama-4-maverick": (llama_4_maverick, ("max_length",)),
    "glm-4.5": (glm_4_5, ("norm_topk_prob", "num_groups", "norm_eps")),
    "glm-4.5-air": (glm_4_5_air, ("norm_topk_prob", "num_groups", "norm_eps")),
}

UNVERIFIED: dict[str, tuple[str, ...]] = {name: fields for name, (_, fields) in _WITH_DOUBT.items()}
"""Presets with fields for which we found no published value, and which fields those are."""


def preset(name: str, *, allow_unverified: bool = False) -> ModelConfig:
    """The configuration called ``name``.

    Args:
        name: one of :data:`PRESETS` or :data:`UNVERIFIED`.
        allow_unverified: take a preset some of whose fields are in doubt.

    Raises:
        ValueError: there is none, and the nearest names are given; or fields of it are in doubt, and it says which.
    """
    if name in PRESETS:
        return PRESETS[name]()
    if name not in _WITH_DOUBT:
        raise ValueError(f"no preset is called {name!r}{nearest(name, (*PRESETS, *UNVERIFIED))}")
    make, fields = _WITH_DOUBT[name]
    config = make()
    if not allow_unverified:
        shown = ", ".join(f"{field}={getattr(config, field, getattr(config.moe, field, None))}" for field in fields)
        raise ValueError(f"preset {name!r} has unverified values ({shown}); pass allow_unverified=True to take them")
    return config
