"""What a layer and a model are made of: frozen dataclasses in the words of published ``config.json`` files.

A combination that cannot work is refused here, when the object is made, with every field and value concerned.
"""

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass

from guide_code.backends import BACKENDS
from guide_code.balance import CONVENTIONS
from guide_code.capacity import PRIORITIES
from guide_code.routers import GROUP_SCORES, SCORE_FNS

ACTIVATIONS = ("gelu", "relu", "silu", "swigluoai")
ROUTERS = ("top_k", "expert_choice", "hash", "sinkhorn", "quantile")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer.

    Raises:
        ValueError: a field is out of range, or fields contradict each other.
    """

    hidden_size: int
    """Width D of a token."""
    moe_intermediate_size: int
    """Width I inside one expert."""
    num_experts: int
    """Number E of routed experts; 1 means a plain dense feed-forward layer."""
    top_k: int
    """Experts per token; on average when ``router="expert_choice"``."""
    router: str = "top_k"
    """How experts are chosen: one of ``ROUTERS``, see ``guide_code.routers``. Zhou et al. take "expert_choice", and
    Megatron-LM "sinkhorn", with ``norm_topk_prob=False``."""
    score_fn: str = "softmax"
    norm_topk_prob: bool = True
    """Whether the weights of a token sum to 1 (before scaling)."""
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    """``n_group`` of DeepSeek."""
    top_k_groups: int = 1
    """``topk_group`` of DeepSeek."""
    group_score: str = "top2_sum"
    router_bias: bool = False
    router_jitter: float = 0.0
    use_expert_bias: bool = False
    """Keep a bias that moves the choice; on by itself when ``expert_bias_rate`` is above 0."""
    expert_bias_rate: float = 0.0
    """Step of that bias per optimizer step (DeepSeek-V3: 0.001)."""
    num_shared_experts: int = 0
    """Shared experts of width I each, computed as one feed-forward layer."""
    num_identity_experts: int = 0
    """Choices beyond the E experts that give the token back (``zero_expert_num`` of LongCat-Flash)."""
    weight_on_input: bool = False
    """Multiply the inputs of experts by the weights, not their outputs (Llama-4)."""
    vocab_size: int | None = None
    """Token ids that a hash router has a row for; needed there only."""
    capacity_factor: float | None = None
    """Slack over an even load in training; None drops nothing."""
    capacity_priority: str = "arrival"
    """Who is dropped last: one of ``PRIORITIES``, see ``guide_code.capacity``."""
    capacity_renormalize: bool = False
    """Whether the weights that survive a drop are divided by their sum."""
    load_balancing_coef: float = 0.0
    load_balancing_convention: str = "megatron"
    z_loss_coef: float = 0.0
    activation: str = "silu"
    gated: bool = True
    expert_biases: bool = False
    backend: str = "auto"
    """How experts are computed: "auto" or one of ``BACKENDS``; the numbers are the same."""

    def __post_init__(self):
        _at_least(self, 1, "hidden_size", "moe_intermediate_size", "num_experts", "top_k", "num_groups")
        _at_least(self, 0, "num_shared_experts", "num_identity_experts")
        _at_least(self, 0, "expert_bias_rate", "load_balancing_coef", "z_loss_coef")
        _one_of(self, "score_fn", SCORE_FNS)
        _one_of(self, "group_score", GROUP_SCORES)
        _one_of(self, "load_balancing_convention", CONVENTIONS)
        _one_of(self, "activation", ACTIVATIONS)
        _one_of(self, "backend", ("auto", *BACKENDS))
        if self.activation == "swigluoai" and (not self.gated or self.num_shared_experts or self.num_experts == 1):
            raise ValueError(
                f"activation='swigluoai' is the gate of routed experts: it needs gated=True, num_shared_experts=0 and "
                f"several experts, got gated={self.gated}, num_shared_experts={self.num_shared_experts}, "
                f"num_experts={self.num_experts}"
            )
        _one_of(self, "capacity_priority", PRIORITIES)
        _one_of(self, "router", ROUTERS)
        self._check_router()
        if self.top_k > self.num_experts + self.num_identity_experts:
            with_identity = f" + num_identity_experts={self.num_identity_experts}" * (self.num_identity_experts > 0)
            raise ValueError(f"top_k={self.top_k} exceeds num_experts={self.num_experts}{with_identity}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide num_experts={self.num_experts}")
        if not 1 <= self.top_k_groups <= self.num_groups:
            raise ValueError(f"top_k_groups={self.top_k_groups} must be in [1, num_groups={self.num_groups}]")
        if self.top_k > self.top_k_groups * self.num_experts // self.num_groups:
            raise ValueError(
                f"top_k={self.top_k} experts cannot come from top_k_groups={self.top_k_groups} groups of "
                f"num_experts={self.num_experts} / num_groups={self.num_groups}"
            )
        if not 0 <= self.router_jitter < 1:
            raise ValueError(f"router_jitter={self.router_jitter} must be in [0, 1)")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"capacity_factor={self.capacity_factor} must be above 0, or None to drop nothing")

    def _check_router(self):
        """Refuse what would have no effect with this router, or an effect that nobody means."""
        router = f"router={self.router!r}"
        if self.router == "top_k" and self.num_identity_experts == 0:
            return
        if self.num_identity_experts and (self.router != "top_k" or self.num_groups > 1 or self.num_experts == 1):
            raise ValueError(
                f"num_identity_experts={self.num_identity_experts} needs router='top_k', num_groups=1 and several "
                f"experts, got {router}, num_groups={self.num_groups}, num_experts={self.num_experts}"
            )
        if self.num_groups > 1:
            raise ValueError(f"num_groups={self.num_groups} needs router='top_k', got {router}: it knows no groups")
        if self.router != "top_k" and (self.use_expert_bias or self.expert_bias_rate):
            raise ValueError(
                f"use_expert_bias={self.use_expert_bias} and expert_bias_rate={self.expert_bias_rate} need "
                f"router='top_k', got {router}: it has no bias, or moves its own"
            )
        if self.router in ("expert_choice", "hash") and self.load_balancing_coef:
            raise ValueError(f"load_balancing_coef={self.load_balancing_coef} cannot change the load of {router}")
        if self.router == "expert_choice" and self.capacity_factor is not None:
            raise ValueError(f"capacity_factor={self.capacity_factor}: {router} never overfills an expert")
        if self.router == "hash" and self.vocab_size is None:
            raise ValueError(f"vocab_size=None: {router} needs the number of token ids")
        if self.router == "quantile" and self.top_k >= self.num_experts > 1:
            raise ValueError(f"top_k={self.top_k} must be below num_experts={self.num_experts} with {router}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only Transformer. ``moe=None`` makes every layer dense.

    Raises:
        ValueError: a field is out of range, or fields contradict each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense feed-forward layers."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_length: int
    """Most positions of a sequence."""
    moe: MoEConfig | None = None
    first_k_dense: int = 0
    """Layers at the bottom that stay dense (DeepSeek)."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """Whether the output projection is the embedding."""

    def __post_init__(self):
        _at_least(self, 1, "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        _at_least(self, 1, "num_kv_heads", "head_size", "max_length")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size={self.head_size} must be even: rotary positions turn pairs")
        if not 0 <= self.first_k_dense <= self.num_layers:
            raise ValueError(f"first_k_dense={self.first_k_dense} must be in [0, num_layers={self.num_layers}]")
        if self.moe is not None and self.moe.hidden_size != self.hidden_size:
            raise ValueError(
                f"hidden_size={self.hidden_size} differs from moe.hidden_size={self.moe.hidden_size}; "
                "set both, as override() does"
            )
        if self.moe is not None and self.moe.router == "hash" and self.moe.vocab_size != self.vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size} differs from moe.vocab_size={self.moe.vocab_size}; "
                "set both, as override() does"
            )


def override(config: ModelConfig, changes: dict[str, typing.Any]) -> ModelConfig:
    """A copy with some fields changed, of the model or of its MoE layer; a field of both is set in both.

    Args:
        config: what to start from.
        changes: value by field name; a string is read as the type of the field ("4", "true", "none").

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
    if config.first_k_dense:
        raise ValueError(f"first_k_dense={config.first_k_dense}: dense and sparse layers would need two widths")
    active = config.moe.top_k + config.moe.num_shared_experts
    return dataclasses.replace(config, moe=None, intermediate_size=active * config.moe.moe_intermediate_size)


def to_dict(config: ModelConfig) -> dict[str, typing.Any]:
    """Plain values, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, typing.Any]) -> ModelConfig:
    """The inverse of :func:`to_dict`.

    Raises:
        ValueError: a name is unknown or missing.
    """
    values = dict(values)
    if isinstance(values.get("moe"), dict):
        values["moe"] = _make(MoEConfig, values["moe"])
    return _make(ModelConfig, values)


def nearest(name: str, names: typing.Iterable[str]) -> str:
    """ "; did you mean ...?" with the valid names closest to a wrong one, or all of them when none is close."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; valid names: {', '.join(names)}"


def _make(cls, values):
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            raise ValueError(f"{cls.__name__} has no field {name!r}{nearest(name, fields)}")
    missing = [n for n, f in fields.items() if n not in values and f.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{cls.__name__} lacks {', '.join(missing)}")
    return cls(**values)


def _read(name, value, hint):
    if not isinstance(value, str) or hint is str:
        return value
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value.lower() == "none" and types.NoneType in kinds:
        return None
    try:
        if bool in kinds:
            return {"true": True, "false": False}[value.lower()]
        return int(value) if int in kinds else float(value)
    except (ValueError, KeyError):
        wanted = " or ".join(kind.__name__.replace("NoneType", "none") for kind in kinds)
        raise ValueError(f"{name}={value!r} is not a valid {wanted}") from None


def _at_least(config, least, *names):
    for name in names:
        if getattr(config, name) < least:
            raise ValueError(f"{name}={getattr(config, name)} must be at least {least}")


def _one_of(config, name, valid):
    value = getattr(config, name)
    if value not in valid:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(valid)}{nearest(str(value), valid)}")
