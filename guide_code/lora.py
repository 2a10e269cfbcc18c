"""Fine-tune a model with LoRA: experts, linear layers and routers get adapters, the weights stay.

Hu et al. 2021 (arXiv:2106.09685), section 4. Stacked experts are parameters of three dimensions and no linear layers:
see ``guide_code/experts/low_rank.py``.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from guide_code.experts.low_rank import LoRAExperts, LowRank


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """What is adapted, and how.

    Raises:
        ValueError: a value is out of range, or nothing would be adapted.
    """

    rank: int = 8
    """Rows r of A and columns of B: of each expert, or of the one pair that all experts of a layer share."""
    alpha: float = 16.0
    """The update is multiplied by alpha / rank."""
    experts: bool = True
    """Adapt both projections of stacked experts."""
    shared: bool = False
    """One A and one B for all experts of a layer, which then all get the same update: 1 / E of the parameters."""
    linears: tuple[str, ...] = ()
    """Names of linear layers to adapt as well, such as ("q_proj", "v_proj")."""
    router: bool = False
    """Adapt the routers. It moves tokens to other experts, which experts alone never do."""

    def __post_init__(self):
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(f"rank={self.rank} must be at least 1 and alpha={self.alpha} above 0")
        if isinstance(self.linears, str):
            raise ValueError(f"linears={self.linears!r} must be a tuple of names, ({self.linears!r},)")
        if not (self.experts or self.linears or self.router):
            raise ValueError("experts=False, linears=() and router=False: nothing would be adapted")


class LoRALinear(nn.Module):
    """A linear layer and its update, which costs two thin products and no copy of the weight."""

    def __init__(self, base: nn.Linear, config: LoRAConfig):
        super().__init__()
        self.base, self.low_rank = base, LowRank(base.weight, config.rank, config.alpha)

    @property
    def weight(self) -> Tensor:
        """Of the layer, without the update unless merged."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """Of the layer."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        self.low_rank.check_training()
        if self.low_rank.merged:
            return self.base(x)
        low = F.linear(x, self.low_rank.a.to(x.dtype)) * self.low_rank.scale
        return self.base(x) + F.linear(low, self.low_rank.b.to(x.dtype))

    def adapted(self) -> Iterator[tuple[nn.Parameter, LowRank]]:
        """The weight and its update."""
        yield self.base.get_parameter("weight"), self.low_rank


def apply_lora_(model: nn.Module, config: LoRAConfig) -> None:
    """Freeze a model and give it adapters, in place. Its outputs are the same until the adapters are trained.

    Raises:
        ValueError: it has adapters already, or nothing that ``config`` names.
    """
    if any(isinstance(module, LowRank) for module in model.modules()):
        raise ValueError("the model has adapters already: remove_lora_(model) first")
    found = dict(model.named_modules())
    if _is_experts(model) or isinstance(model, nn.Linear):
        raise ValueError(f"{type(model).__name__} itself cannot be replaced in place: give the module that holds it")
    experts = {path: m for path, m in found.items() if config.experts and _is_experts(m)}
    routers = {path: m for path, m in found.items() if config.router and path.rpartition(".")[2] == "router"}
    linears = {p: m for p, m in found.items() if isinstance(m, nn.Linear) and p.rpartition(".")[2] in config.linears}
    absent = [name for name in config.linears if name not in {path.rpartition(".")[2] for path in linears}]
    absent += ["stacked experts"] * (config.experts and not experts) + ["router"] * (config.router and not routers)
    if absent:
        raise ValueError(f"the model has no {', '.join(absent)} to adapt")
    model.__dict__["_lora"] = config, [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    for path, module in experts.items():
        _replace_(model, path, LoRAExperts(module, config.rank, config.alpha, shared=config.shared))
    for path, module in linears.items():
        _replace_(model, path, LoRALinear(module, config))
    for module in routers.values():
        update = LowRank(module.get_parameter("weight"), config.rank, config.alpha)
        parametrize.register_parametrization(module, "weight", update)
    model.train(model.training)


def lora_config(model: nn.Module) -> LoRAConfig | None:
    """What :func:`apply_lora_` was called with; None for a model without adapters."""
    return model.__dict__["_lora"][0] if "_lora" in model.__dict__ else None


def merge_lora_(model: nn.Module) -> None:
    """Add every update to its weight, in place: the model is as fast as without, and keeps the originals aside."""
    for weight, update in _adapted(model):
        update.merge_(weight)


def unmerge_lora_(model: nn.Module) -> None:
    """Put the original weights back, bit by bit."""
    for weight, update in _adapted(model):
        update.unmerge_(weight)


def remove_lora_(model: nn.Module) -> None:
    """Take the adapters away, in place. Weights stay as they are: with the updates if they are merged, else without.

    What could be trained before :func:`apply_lora_` can be trained again.
    """
    for path, module in list(model.named_modules()):
        if isinstance(module, LoRAExperts | LoRALinear):
            _replace_(model, path, module.base)
        elif _parametrized(module):
            weight: Any = module.parametrizations.weight.original  # pyright: ignore
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
            assert module.get_parameter("weight") is weight
    for parameter in model.__dict__.pop("_lora", (None, []))[1]:
        parameter.requires_grad_(True)


def trainable_parameters(model: nn.Module) -> tuple[int, int]:
    """Parameters that are trained, and all of them, adapters included."""
    each = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trained in each if trained), sum(size for size, _ in each)


def _adapted(model: nn.Module) -> Iterator[tuple[nn.Parameter, LowRank]]:
    for module in model.modules():
        if isinstance(module, LoRAExperts | LoRALinear):
            yield from module.adapted()
        elif _parametrized(module):
            weights: Any = module.parametrizations.weight  # pyright: ignore
            yield weights.original, weights[0]


def _parametrized(module: nn.Module) -> bool:
    if not parametrize.is_parametrized(module, "weight"):
        return False
    return isinstance(module.parametrizations.weight[0], LowRank)  # pyright: ignore


def _is_experts(module: nn.Module) -> bool:
    down = module._parameters.get("down_proj")
    return down is not None and down.ndim == 3


def _replace_(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
