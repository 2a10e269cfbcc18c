"""Experts that live in a store and visit the device: inference with less memory than the model has weights.

Least recently used cache and loading ahead: Eliseev and Mazur 2023 (arXiv:2312.17238), section 3.
Copy with grouped.py and expert_cache.py into one package: needs torch only.

T tokens, D hidden size, I expert intermediate size, E experts, C experts on the device, K choices per token,
N = T*K assignments.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .expert_cache import ExpertCache, ExpertStore, MemoryStore, OffloadStats
from .grouped import ACTIVATIONS, _activate, _sum_slots


class OffloadedExperts(nn.Module):
    """E feed-forward experts of which ``cache_experts`` are on the device.

    The output has the same bits as that of :class:`~guide_code.experts.grouped.GroupedExperts` for every cache size:
    each expert multiplies the same rows, activations stand at the same places of a tensor, and the K outputs of a
    token are added in the same order. That is tested on the CPU; on a GPU, whose grouped matmul is another kernel
    than its plain one, it was not measured. When a call needs more experts than fit, it works in waves.

    There are no parameters and no gradients. ``state_dict`` gives the weights of all experts under the names that
    other backends use, and ``load_state_dict`` takes them while the store is in memory. Casts (``half()``) change
    nothing: the dtype is that of the store, and tokens are converted to it.

    Args:
        num_experts: number E of experts.
        hidden_size: width D of a token.
        intermediate_size: width I inside an expert.
        activation: "silu", "gelu", "relu" or, gated only, "swigluoai".
        gated: two projections up, one of them the gate; the weight is ``gate_up_proj``, else ``up_proj``.
        bias: both projections have biases.
        store: where the experts are; None makes a :class:`MemoryStore` with random weights, on the CPU.
        cache_experts: number C of experts on the device, at least 1.

    Raises:
        ValueError: the activation is not known or needs a gate, the store holds other tensors, or the cache is empty.
    """

    look_ahead: Callable[[Tensor], Any] | None
    """Called with the tokens (T, D) of every call once its own experts are there: the place to prefetch those of
    another layer. (Those of this one are in use.)"""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        store: ExpertStore | None = None,
        cache_experts: int = 8,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}")
        if activation == "swigluoai" and not gated:
            raise ValueError(f"activation={activation!r} is a gate: it needs gated=True, got gated={gated}")
        if cache_experts < 1:
            raise ValueError(f"cache_experts={cache_experts} must be at least 1")
        self.num_experts, self.activation, self.gated, self.cache_experts = (
            num_experts,
            activation,
            gated,
            cache_experts,
        )
        self.up_name, width = ("gate_up_proj", 2 * intermediate_size) if gated else ("up_proj", intermediate_size)
        shapes: dict[str, tuple[int, ...]] = {
            self.up_name: (width, hidden_size), "down_proj": (hidden_size, intermediate_size)
        }  # fmt: skip
        if bias:
            shapes |= {f"{self.up_name}_bias": (width,), "down_proj_bias": (hidden_size,)}
        self.shapes: dict[str, tuple[int, ...]] = shapes
        self.look_ahead, self._cache = None, None
        self.store = _random_store(num_experts, shapes) if store is None else store

    @property
    def store(self) -> ExpertStore:
        """Where the experts are. Setting another one empties the cache.

        Raises:
            ValueError: it holds other tensors than these experts have.
        """
        return self._store

    @store.setter
    def store(self, store: ExpertStore) -> None:
        if store.num_experts != self.num_experts:
            raise ValueError(f"the store holds {store.num_experts} experts, but num_experts={self.num_experts}")
        found = {name: tuple(shape) for name, shape in store.shapes.items()}
        if found != self.shapes:
            raise ValueError(f"the store's experts have {found}, but {self.shapes} is asked for")
        self._store, self._cache = store, None

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D) in the dtype of ``x_TD``; ids outside [0, E) contribute exactly 0.

        Raises:
            ValueError: a gradient would be needed.
        """
        if torch.is_grad_enabled() and (x_TD.requires_grad or weights_TK.requires_grad):
            raise ValueError(
                "offloaded experts compute no gradients: call under torch.inference_mode() or torch.no_grad(), or "
                "train with another backend"
            )
        device, top_k = x_TD.device.type, ids_TK.shape[1]
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.store.dtype
        with torch.autocast(device, enabled=False):
            valid_TK = (ids_TK >= 0) & (ids_TK < self.num_experts)
            expert_N, order_N = torch.where(valid_TK, ids_TK, self.num_experts).flatten().sort(stable=True)
            places_N = torch.arange(len(order_N), device=order_N.device)
            place_TK = torch.empty_like(order_N).scatter_(0, order_N, places_N).view_as(ids_TK)  # inverse of the sort
            counts = torch.bincount(expert_N, minlength=self.num_experts)[: self.num_experts].tolist()
            ends = accumulate(counts)
            rows_of = {e: slice(end - n, end) for e, (n, end) in enumerate(zip(counts, ends, strict=True)) if n}
            weight_N1 = torch.where(valid_TK, weights_TK, 0.0).flatten()[order_N, None]
            y_ND = self._compute(x_TD, x_TD.to(dtype)[order_N // top_k], weight_N1, rows_of)
            out_TD = _sum_slots(y_ND, place_TK, valid_TK)
        return out_TD.to(x_TD.dtype)

    def _compute(self, x_TD: Tensor, rows_ND: Tensor, weight_N1: Tensor, rows_of: dict[int, slice]) -> Tensor:
        """Outputs (N, D) of rows in the order of experts; those that belong to none are 0."""
        cache, dtype, down_bias = self.cache_on(x_TD.device), rows_ND.dtype, "down_proj_bias" in self.shapes
        wide = torch.promote_types(torch.promote_types(dtype, weight_N1.dtype), self.store.dtype)
        y_ND = torch.zeros_like(rows_ND, dtype=wide if down_bias else dtype)
        hidden = rows_ND.new_zeros(len(rows_ND), self.shapes[self.up_name][0])
        waves = list(cache.waves(list(rows_of)))
        for wave in waves:
            slots = dict(zip(wave, cache.fetch(wave), strict=True))
            if wave is waves[-1] and self.look_ahead is not None:
                self.look_ahead(x_TD)
            for expert, slot in slots.items():
                rows = rows_of[expert]
                hidden[rows] = F.linear(rows_ND[rows], cache.slots[self.up_name][slot].to(dtype))
                if down_bias:
                    hidden[rows] += cache.slots[f"{self.up_name}_bias"][slot].to(dtype)
            # All rows in every wave: vectorised exp and erf round by where in the tensor a number stands.
            inner_NI = (_activate(hidden, self.activation, self.gated) * weight_N1).to(dtype)
            for expert, slot in slots.items():
                rows = rows_of[expert]
                y_ND[rows] = F.linear(inner_NI[rows], cache.slots["down_proj"][slot].to(dtype)).to(y_ND.dtype)
                if down_bias:
                    y_ND[rows] += weight_N1[rows] * cache.slots["down_proj_bias"][slot]
        return y_ND

    def cache_on(self, device: torch.device) -> ExpertCache:
        """The cache, which moves (and forgets) when the tokens come from another device than before."""
        if self._cache is None or self._cache.device != device:
            self._cache = ExpertCache(self.store, self.cache_experts, device)
        return self._cache

    def stats(self) -> OffloadStats:
        """What the cache has done so far."""
        return OffloadStats() if self._cache is None else self._cache.stats

    def pin_hottest(self, count: int) -> list[int]:
        """Keep the ``count`` experts that were needed most often on the device from now on; returns them.

        Raises:
            ValueError: no call was made yet, or no slot would be left for the others.
        """
        if self._cache is None:
            raise ValueError("which experts are the hottest is known after some calls only")
        hottest = [expert for expert, _ in self._cache.uses.most_common(count)]
        self._cache.pin(hottest)
        return hottest

    def extra_repr(self) -> str:
        kind = type(self.store).__name__
        return f"{self.num_experts}, {self.shapes}, store={kind}, cache_experts={self.cache_experts}"

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts with an empty cache, and does not look ahead into the layers of its model of origin.
        return self.__dict__ | {"_cache": None, "look_ahead": None}

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for name in self.shapes:
            destination[prefix + name] = self.store.stacked(name)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        missing_keys += [prefix + name for name in self.shapes if name not in given]
        unexpected_keys += [prefix + name for name in given if strict and name not in self.shapes]
        tensors = {name: given.get(name) for name in self.shapes}
        wrong = {n: tuple(t.shape) for n, t in tensors.items() if t is not None and self._shape(n) != tuple(t.shape)}
        error_msgs += [f"{prefix}{n} has shape {shape}, but {self._shape(n)} is wanted" for n, shape in wrong.items()]
        if not given:
            return  # with strict=False, experts in a store are often no part of what is loaded
        if type(self.store) is not MemoryStore:
            error_msgs.append(f"{prefix}store is a {type(self.store).__name__}, which is read only: build another one")
        elif not wrong:
            stacked = {n: self.store.stacked(n) if t is None else t.detach().cpu() for n, t in tensors.items()}
            if not local_metadata.get("assign_to_params_buffers", False):
                stacked = {name: tensor.to(self.store.dtype, copy=True) for name, tensor in stacked.items()}
            self.store = MemoryStore(stacked)

    def _shape(self, name: str) -> tuple[int, ...]:
        return (self.num_experts, *self.shapes[name])


def _random_store(num_experts: int, shapes: dict[str, tuple[int, ...]]) -> MemoryStore:
    """As other backends begin: normal with 1 / sqrt(width of the input), biases 0."""
    tensors = {name: torch.zeros(num_experts, *shape, device="cpu") for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if not name.endswith("bias"):
            nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)
    return MemoryStore(tensors)
