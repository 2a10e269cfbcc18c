"""Models whose experts stay in CPU memory or on disk: loaded from a checkpoint, or turned into one."""

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from guide_code.checkpoint import load_config
from guide_code.conversion.loading import empty_model
from guide_code.conversion.reader import FolderSource, shorten
from guide_code.experts.expert_cache import ExpertStore, MemoryStore, OffloadStats
from guide_code.experts.offloaded import OffloadedExperts
from guide_code.experts.store import MappedStore, build_store, open_store
from guide_code.moe import MoE
from guide_code.routers import TopKRouter
from guide_code.transformer import Transformer

PLACES = ("cpu", "disk")


class _NoRandomNumbers(TorchFunctionMode):
    """Tensors without memory get no random numbers. For those, torch 2.13 imports 900 modules, which take 78 MB."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensor = kwargs.get("tensor", args[0] if args else None)
        if func in _RANDOM and isinstance(tensor, Tensor) and tensor.is_meta:
            return tensor
        return func(*args, **kwargs)


_RANDOM = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


def load_model(
    folder: Path, *, offload: str | None = None, cache_experts: int = 8, device: torch.device | str = "cpu"
) -> Transformer:
    """A model from one of our checkpoints; each weight goes straight to its place, so memory never holds it twice.

    Args:
        folder: of the checkpoint, in one or several safetensors files.
        offload: "disk" leaves the experts in the files, "cpu" keeps them in CPU memory; None puts everything on the
            device.
        cache_experts: experts of each layer on the device, with ``offload``.
        device: of the model.

    Raises:
        ValueError: files are missing or damaged, or hold other tensors than the configuration asks for; the message
            names them.
    """
    _check_place(offload)
    with _NoRandomNumbers():
        model = empty_model(load_config(folder))
    source = FolderSource(folder)
    wanted: dict[str, Tensor] = model.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for name, tensor in wanted.items():  # of tied weights, files hold one
        if name in source.tensors:
            names.setdefault(id(tensor), name)
    lost = sorted(name for name, tensor in wanted.items() if id(tensor) not in names)
    unknown = sorted(source.tensors.keys() - wanted.keys())
    if lost or unknown:
        raise ValueError(
            f"{folder} does not match its config.json: missing {shorten(lost)}, unknown {shorten(unknown)}"
        )
    for name, tensor in wanted.items():
        found = source.tensors[names[id(tensor)]].shape
        if found != tuple(tensor.shape):
            raise ValueError(f"{folder}: {name} has shape {found}, but config.json asks for {tuple(tensor.shape)}")
    if offload is not None:
        stores = {}
        for path, module in _expert_modules(model).items():
            views = {name: source.read(f"{path}.{name}") for name in module.state_dict()}
            if offload == "cpu":
                pin = torch.device(device).type == "cuda"
                stores[path] = MemoryStore({name: view.clone() for name, view in views.items()}, pin=pin)
            else:
                stores[path] = MappedStore(views)
        _attach_(model, stores, cache_experts)
        wanted = {n: t for n, t in wanted.items() if not any(n.startswith(f"{path}.") for path in stores)}
    new: dict[int, Tensor] = {}
    for tensor in wanted.values():
        if id(tensor) not in new:
            read = source.read(names[id(tensor)]).to(device, copy=True)
            new[id(tensor)] = nn.Parameter(read) if isinstance(tensor, nn.Parameter) else read
    # Not strict: experts in a store are no part of it, and everything was compared above.
    model.load_state_dict({name: new[id(tensor)] for name, tensor in wanted.items()}, strict=False, assign=True)
    return model.to(device).eval()


def offload_experts_(
    model: nn.Module, place: str = "cpu", *, cache_experts: int = 8, folder: Path | None = None
) -> None:
    """Replace the experts of a model in memory by offloaded ones, in place.

    Args:
        model: has stacked experts somewhere, ``MoE`` layers among which the next one's likely experts are prefetched.
        place: "cpu" keeps the weights in CPU memory, "disk" writes them to a store and lets them go.
        cache_experts: experts of each layer on the device.
        folder: of the store, for "disk"; made, or taken as it is when it holds these very weights.

    Raises:
        ValueError: there are no experts, or the store cannot be used, see ``build_store`` and ``open_store``.
        OSError: the store cannot be written.
    """
    _check_place(place)
    modules = _expert_modules(model)
    if not modules:
        raise ValueError("the model has no stacked experts to offload")
    weights = {path: module.state_dict() for path, module in modules.items()}
    if place == "cpu":
        stores: dict[str, ExpertStore] = {
            path: MemoryStore({n: t.cpu() for n, t in w.items()}) for path, w in weights.items()
        }
    else:
        if folder is None:
            raise ValueError("folder=None: the place 'disk' needs a folder for the store")
        build_store(folder, weights)
        stores = {path: open_store(folder, path) for path in weights}
    _attach_(model, stores, cache_experts)


def offload_stats(model: nn.Module) -> OffloadStats:
    """The sum over all layers."""
    each = [module.stats() for module in model.modules() if isinstance(module, OffloadedExperts)]
    return OffloadStats(*(sum(values) for values in zip(*each, strict=True))) if each else OffloadStats()


def _check_place(place: str | None) -> None:
    if place not in (None, *PLACES):
        raise ValueError(f"experts can be offloaded to {' or '.join(PLACES)}, not {place!r}")


def _expert_modules(model: nn.Module) -> dict[str, Any]:
    """Modules that hold the stacked weights of experts, by path."""
    found = {}
    for path, module in model.named_modules():
        down = module._parameters.get("down_proj")
        if down is not None and down.ndim == 3:
            found[path] = module
    return found


def _attach_(model: nn.Module, stores: Mapping[str, ExpertStore], cache_experts: int) -> None:
    """Put offloaded experts where resident ones are, which may be on the meta device; let layers look ahead."""
    for path, module in _expert_modules(model).items():
        num_experts, hidden_size, intermediate_size = module.down_proj.shape
        experts = OffloadedExperts(
            num_experts,
            hidden_size,
            intermediate_size,
            activation=module.activation,
            gated=module.gated,
            bias=module.down_proj_bias is not None,
            store=stores[path],
            cache_experts=cache_experts,
        )
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, experts.train(module.training))
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer, following in itertools.pairwise(layers):
        experts, later = _offloaded(layer), _offloaded(following)
        if experts is not None and later is not None and type(following.router) is TopKRouter:
            experts.look_ahead = functools.partial(_prefetch, following.router, later)


def _offloaded(module: nn.Module) -> OffloadedExperts | None:
    return next((part for part in module.modules() if isinstance(part, OffloadedExperts)), None)


def _prefetch(router: TopKRouter, experts: OffloadedExperts, x_TD: Tensor) -> None:
    """Move what the next layer's router would choose for the tokens of this one: often right, since blocks add little.

    Eliseev and Mazur 2023 (arXiv:2312.17238), section 3.2.
    """
    ids_TK = router(x_TD).ids
    counts_E = torch.bincount(ids_TK.flatten(), minlength=experts.num_experts)[: experts.num_experts]
    order = counts_E.argsort(descending=True, stable=True)[: experts.cache_experts]
    likely_C = order[counts_E[order] > 0]
    experts.cache_on(x_TD.device).prefetch(likely_C.tolist())
