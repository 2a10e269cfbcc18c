"""LoRA for stacked experts: the weights stay, a product of two thin matrices per expert is trained.

Hu et al. 2021 (arXiv:2106.09685), section 4.1: W x + (alpha / r) B A x, where A begins at random and B at zero.
Copy with grouped.py into one package: needs torch only.

T tokens, D hidden size, I expert intermediate size, E experts, K choices per token, N = T*K assignments.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .grouped import _activate, _Combine, _Dispatch, _grouped_linear


class LowRank(nn.Module):
    """The update of one weight: ``a`` (E, r, in) and ``b`` (E, out, r), or (1, ...) when shared, or no E at all.

    In float32 or wider, whatever the dtype of the weight: a step of 1e-4 is lost in bfloat16.

    Args:
        weight: to be adapted, (out, in) or (E, out, in); it is not kept.
        rank: r, of each expert or of all together.
        alpha: the update is multiplied by alpha / rank.
        shared: one update for all E.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float, *, shared: bool = False):
        super().__init__()
        *stack, rows, columns = weight.shape
        stack = [1] if stack and shared else stack
        options = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
        self.a = nn.Parameter(torch.randn(*stack, rank, columns, **options) * columns**-0.5)
        self.b = nn.Parameter(torch.zeros(*stack, rows, rank, **options))
        self.scale = alpha / rank
        self._original: Tensor | None = None

    @property
    def merged(self) -> bool:
        """Whether the weight contains the update now."""
        return self._original is not None

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with its update, rounded once to the dtype of the weight; the weight itself while merged."""
        self.check_training()
        return weight if self.merged else (weight.to(self.a.dtype) + self.scale * self.b @ self.a).to(weight.dtype)

    @torch.no_grad()
    def merge_(self, weight: nn.Parameter) -> None:
        """Add the update to the weight. The original is kept beside it, since adding and subtracting is not exact."""
        if not self.merged:
            updated = self(weight)
            self._original, weight.data = weight.data, updated

    def unmerge_(self, weight: nn.Parameter) -> None:
        """Put the original back, bit by bit."""
        if self._original is not None:
            weight.data, self._original = self._original.to(weight), None

    def check_training(self) -> None:
        """Refuse to train an update that is merged: it would get no gradient, silently.

        Raises:
            ValueError: it is, and a gradient could be wanted.
        """
        if self.merged and self.training and torch.is_grad_enabled():
            raise ValueError("the adapters are merged and would not be trained: call unmerge_lora_(model) first")

    def extra_repr(self) -> str:
        return f"a={tuple(self.a.shape)}, b={tuple(self.b.shape)}, scale={self.scale}"


class LoRAExperts(nn.Module):
    """Stacked experts and their updates.

    The update is computed on the rows of each expert, sorted as in ``grouped_experts``: no adapted copy of the
    weights exists, which for 64 experts would be 64 matrices a layer, kept for the backward pass. The backend of
    ``base`` computes while merged; until then its parameters are used, by grouped matmuls.

    Args:
        base: experts with ``gate_up_proj`` or ``up_proj``, ``down_proj``, ``activation`` and ``gated``.
        rank: r, of each expert or of all together.
        alpha: the updates are multiplied by alpha / rank.
        shared: one update for all experts of the layer.
    """

    def __init__(self, base: nn.Module, rank: int, alpha: float, *, shared: bool = False):
        super().__init__()
        options: Any = base
        self.base = base
        self.num_experts, self.activation, self.gated = len(options.down_proj), options.activation, options.gated
        self.up_name = "gate_up_proj" if options.gated else "up_proj"
        self.up_update = LowRank(base.get_parameter(self.up_name), rank, alpha, shared=shared)
        self.down_update = LowRank(options.down_proj, rank, alpha, shared=shared)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D) in the dtype of ``x_TD``; ids outside [0, E) contribute exactly 0."""
        self.up_update.check_training()
        if self.up_update.merged:
            return self.base(x_TD, ids_TK, weights_TK)
        up, down = self.base.get_parameter(self.up_name), self.base.get_parameter("down_proj")
        biases = self.base._parameters
        up_bias, down_bias = biases.get(f"{self.up_name}_bias"), biases.get("down_proj_bias")
        device = "cpu" if x_TD.is_meta else x_TD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else up.dtype
        with torch.autocast(device, enabled=False):
            valid_TK = (ids_TK >= 0) & (ids_TK < self.num_experts)
            expert_N, order_N = torch.where(valid_TK, ids_TK, self.num_experts).flatten().sort(stable=True)
            places_N = torch.arange(len(order_N), device=order_N.device)
            slot_TK = torch.empty_like(order_N).scatter_(0, order_N, places_N).view_as(ids_TK)
            experts_E = torch.arange(self.num_experts, device=order_N.device)
            ends_E = torch.searchsorted(expert_N, experts_E, right=True, out_int32=True)

            rows_ND = _Dispatch.apply(x_TD.to(dtype), order_N, slot_TK, valid_TK)
            weight_N1 = torch.where(valid_TK, weights_TK, 0.0).flatten()[order_N, None]
            hidden = _adapted_linear(rows_ND, up.to(dtype), self.up_update, ends_E)
            if up_bias is not None:
                hidden = hidden + F.pad(up_bias.to(dtype), (0, 0, 0, 1))[expert_N]
            hidden_NI = _activate(hidden, self.activation, self.gated) * weight_N1
            y_ND = _adapted_linear(hidden_NI.to(dtype), down.to(dtype), self.down_update, ends_E)
            if down_bias is not None:
                y_ND = y_ND + weight_N1 * F.pad(down_bias, (0, 0, 0, 1))[expert_N]
            out_TD = _Combine.apply(y_ND, order_N, slot_TK, valid_TK)
        return out_TD.to(x_TD.dtype)

    def adapted(self) -> Iterator[tuple[nn.Parameter, LowRank]]:
        """The weights and their updates."""
        yield self.base.get_parameter(self.up_name), self.up_update
        yield self.base.get_parameter("down_proj"), self.down_update


def _adapted_linear(rows_NI: Tensor, weight: Tensor, update: LowRank, ends_E: Tensor) -> Tensor:
    """Each expert's rows times its weight and update: (N, O). Rows past the last end: anything."""
    a, b = update.a.to(rows_NI.dtype), update.b.to(rows_NI.dtype)
    ends = ends_E[-1:] if len(a) == 1 else ends_E  # a shared update is one expert with all rows
    low = _grouped_linear(rows_NI, a, ends) * update.scale
    return _grouped_linear(rows_NI, weight, ends_E) + _grouped_linear(low, b, ends)
