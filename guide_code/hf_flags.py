"""What an experts module of transformers asks for, read from the flags of its interface and from its gate.

transformers 5.24, ``integrations/moe.py``: a class decorated with ``use_experts_implementation`` carries flags on how
its weights are laid out, and an ``_apply_gate`` for what happens between its two projections.
"""

import sys
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

FLAGS = {
    "is_concatenated": True,
    "is_transposed": False,
    "has_bias": False,
    "has_gate": True,
    "has_post_expert_norm": False,
}
"""The flags that are honoured, with what an older transformers that lacks one stands for."""

_ACTIVATIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", nn.SiLU: "silu", nn.ReLU: "relu"}


def interface() -> ModuleType:
    """The module of transformers that holds its experts interface.

    Raises:
        ImportError: transformers is missing, or too old to have one.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("this needs transformers 5 or later: pip install 'moe-guide[hf]'") from error
    try:
        from transformers.integrations import moe
    except ImportError:
        moe = None
    if not isinstance(moe, ModuleType) or not hasattr(moe, "ExpertsInterface"):
        raise ImportError(f"transformers {transformers.__version__} has no experts interface: install 5 or later")
    return moe


def takes_part(module: nn.Module) -> bool:
    """Whether a module is an experts module of the interface."""
    return all(hasattr(module, name) for name in ("has_bias", "is_transposed", "down_proj"))


def flag(experts: Any, name: str) -> bool:
    """One of ``FLAGS`` as ``experts`` has it."""
    return getattr(experts, name, FLAGS[name])


def up_name(experts: Any) -> str:
    """The name of the parameter of the first projection."""
    return "gate_up_proj" if flag(experts, "has_gate") else "up_proj"


def obstacle(experts: Any) -> str:
    """Why an experts module cannot be computed by this package; "" when it can."""
    owner = type(experts).__name__
    for name, default in (interface().use_experts_implementation.__kwdefaults__ or {}).items():
        known = name in FLAGS or name == "experts_interface"
        if not known and (value := getattr(experts, name, default)) != default:
            return f"{owner} has {name}={value!r}, a flag that this version of moe-guide does not know"
    if not flag(experts, "is_concatenated") and flag(experts, "has_gate") and _has_default_gate(experts):
        return f"{owner} has is_concatenated=False (gate and up alternate), but its _apply_gate splits them in halves"
    for name in (up_name(experts), "down_proj"):
        weight = getattr(experts, name, None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.element_size() < 2:
            kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            return f"{owner}.{name} is quantised ({kind}): a floating-point tensor of 16 bits or more is needed"
    return ""


def activation(experts: Any) -> str | None:
    """What ``grouped_experts`` calls the function between the projections; None when it does not know it."""
    if flag(experts, "has_post_expert_norm"):
        return None
    if flag(experts, "has_gate") and not _has_default_gate(experts):
        return "swigluoai" if _has_gpt_oss_gate(experts) else None
    act_fn = experts.act_fn
    if type(act_fn) is nn.GELU:
        return "gelu" if act_fn.approximate == "none" else None
    if not isinstance(act_fn, nn.Module):
        return _ACTIVATIONS.get(act_fn)
    theirs = {"SiLUActivation": "silu", "GELUActivation": "gelu"} if _is_of_transformers(act_fn) else {}
    return theirs.get(type(act_fn).__name__) or _ACTIVATIONS.get(type(act_fn))


def what_is_unknown(experts: Any) -> str:
    """What made :func:`activation` give None."""
    if flag(experts, "has_post_expert_norm"):
        return "has_post_expert_norm"
    if flag(experts, "has_gate") and not _has_default_gate(experts):
        return f"{type(experts).__name__}._apply_gate"
    return f"act_fn={experts.act_fn}"


def _has_default_gate(experts: Any) -> bool:
    return _gate(experts) is getattr(interface(), "_default_apply_gate", None)


def _has_gpt_oss_gate(experts: Any) -> bool:
    gpt_oss = sys.modules.get("transformers.models.gpt_oss.modeling_gpt_oss")
    known = gpt_oss is not None and _gate(experts) is gpt_oss.GptOssExperts._apply_gate
    return known and (experts.alpha, experts.limit) == (1.702, 7.0)


def _is_of_transformers(act_fn: nn.Module) -> bool:
    return type(act_fn).__module__ == "transformers.activations"


def _gate(experts: Any) -> Any:
    return getattr(experts._apply_gate, "__func__", experts._apply_gate)
