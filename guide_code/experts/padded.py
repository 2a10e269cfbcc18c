"""Every expert gets a box of C rows, padded with zeros: three batched matmuls of a shape known beforehand.

GShard, Lepikhin et al. 2020 (arXiv:2006.16668), section 2.2; Switch, Fedus et al. 2021 (arXiv:2101.03961), section 2.2.
Whatever the routing, E x C rows are computed. With C fixed nothing waits for the host, and assignments that find
their expert's box full are dropped.
Copy alone: needs torch only.

T tokens, D hidden size, I expert intermediate size, J = 2I (I when not gated), E experts, K choices per token,
N = T*K assignments, C rows per expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = ("silu", "gelu", "relu", "swigluoai")


def padded_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    capacity: int | None = None,
) -> Tensor:
    """Weighted sum of the chosen experts' outputs, (T, D) in the dtype of ``x_TD``, added up in float32.

    Args:
        x_TD: tokens.
        ids_TK: experts of each token, distinct within a row. An id outside [0, E) contributes exactly 0, forward
            and backward, whatever its token holds.
        weights_TK: combine weights, kept in their own precision.
        gate_up_proj: (E, 2I, D), rows of the gate above rows of the up projection; (E, I, D) when not gated.
        down_proj: (E, D, I).
        gate_up_proj_bias: (E, 2I) or, when not gated, (E, I).
        down_proj_bias: (E, D).
        activation: "silu", "gelu", "relu", or "swigluoai" (gpt-oss): SwiGLU with clamped inputs, for which rows of
            gate and up alternate: g0, u0, g1, u1, ...
        gated: activation(gate) * up (SwiGLU with "silu"; Shazeer 2020, arXiv:2002.05202) or activation(up).
        capacity: rows C of every expert. An expert keeps its first C assignments in token order and the rest
            contribute 0. None: as many as the fullest expert needs, so that none is dropped; finding that out waits
            for the device once.

    Raises:
        ValueError: the capacity is negative.
    """
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity must be at least 0 or None, got {capacity}")
    device = "cpu" if x_TD.is_meta else x_TD.device.type  # autocast knows no meta device
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else gate_up_proj.dtype
    wide, num_experts, hidden_size = torch.promote_types(dtype, torch.float32), *down_proj.shape[:2]
    with torch.autocast(device, enabled=False):
        ids_N = ids_TK.flatten()
        expert_N, order_N = torch.where((ids_N >= 0) & (ids_N < num_experts), ids_N, num_experts).sort(stable=True)
        experts_E = torch.arange(num_experts + 1, device=ids_N.device)
        starts = torch.searchsorted(expert_N, experts_E)
        if capacity is None:
            capacity = int(starts.diff().max())
        row_N = torch.arange(len(ids_N), device=ids_N.device) - starts[expert_N]
        kept_N = (row_N < capacity) & (expert_N < num_experts)
        # Where an assignment lives in the boxes; what has no place goes to one more row, which is cut off.
        place_N = torch.where(kept_N, expert_N * capacity + row_N, num_experts * capacity)

        tokens_N, num_rows = order_N // ids_TK.shape[1], num_experts * capacity
        weight_N1 = torch.where(kept_N, weights_TK.flatten()[order_N], 0.0)[:, None]
        rows_ND = torch.where(kept_N[:, None], x_TD.to(dtype)[tokens_N], 0.0)
        x_ECD = _put(rows_ND, place_N, num_rows).view(num_experts, capacity, hidden_size)
        weight_EC1 = _put(weight_N1, place_N, num_rows).view(num_experts, capacity, 1)

        hidden = torch.bmm(x_ECD, gate_up_proj.to(dtype).mT)
        if gate_up_proj_bias is not None:
            hidden = hidden + gate_up_proj_bias.to(dtype)[:, None]
        hidden_NI = _activate(hidden.flatten(0, 1), activation, gated)
        hidden_ECI = (
            hidden_NI.view(num_experts, capacity, hidden_NI.shape[1]) * weight_EC1
        )  # before down: float16 stays finite
        y_ECD = torch.bmm(hidden_ECI.to(dtype), down_proj.to(dtype).mT).to(wide)
        if down_proj_bias is not None:
            y_ECD = y_ECD + weight_EC1 * down_proj_bias.to(wide)[:, None]

        y_ND = F.pad(y_ECD.flatten(0, 1), (0, 0, 0, 1))[place_N]
        slot_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
        out_TD = y_ND[slot_N].view(*ids_TK.shape, hidden_size).sum(dim=1)
    return out_TD.to(x_TD.dtype)


class PaddedExperts(nn.Module):
    """The parameters of E feed-forward experts, computed by :func:`padded_experts`.

    Args:
        num_experts: number E of experts.
        hidden_size: width D of a token.
        intermediate_size: width I inside an expert.
        activation: "silu", "gelu", "relu" or, gated only, "swigluoai".
        gated: two projections up, one of them the gate; the parameter is ``gate_up_proj``, else ``up_proj``.
        bias: add biases to both projections.
        capacity: rows of every expert, see :func:`padded_experts`.

    Raises:
        ValueError: the activation is not known, or needs a gate.
    """

    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        capacity: int | None = None,
    ):
        super().__init__()
        self.capacity = capacity
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}")
        if activation == "swigluoai" and not gated:
            raise ValueError(f"activation={activation!r} is a gate: it needs gated=True, got gated={gated}")
        self.num_experts, self.activation, self.gated = num_experts, activation, gated
        name, width = ("gate_up_proj", 2 * intermediate_size) if gated else ("up_proj", intermediate_size)
        self.register_parameter(name, nn.Parameter(torch.empty(num_experts, width, hidden_size)))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        up_bias = nn.Parameter(torch.zeros(num_experts, width)) if bias else None
        down_bias = nn.Parameter(torch.zeros(num_experts, hidden_size)) if bias else None
        self.register_parameter(f"{name}_bias", up_bias)
        self.register_parameter("down_proj_bias", down_bias)
        nn.init.normal_(self.get_parameter(name), std=hidden_size**-0.5)
        nn.init.normal_(self.down_proj, std=intermediate_size**-0.5)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D) in the dtype of ``x_TD``; ids outside [0, E) contribute exactly 0."""
        name = "gate_up_proj" if self.gated else "up_proj"
        return padded_experts(
            x_TD,
            ids_TK,
            weights_TK,
            getattr(self, name),
            self.down_proj,
            gate_up_proj_bias=getattr(self, f"{name}_bias"),
            down_proj_bias=self.down_proj_bias,
            activation=self.activation,
            gated=self.gated,
            capacity=self.capacity,
        )

    def extra_repr(self) -> str:
        num_experts, hidden_size, intermediate_size = self.down_proj.shape
        shape = f"{num_experts}, {hidden_size}, {intermediate_size}"
        return f"{shape}, activation={self.activation!r}, gated={self.gated}"


def _activate(hidden: Tensor, activation: str, gated: bool) -> Tensor:
    """(N, 2I), or (N, I) when not gated, to (N, I) in float32 or wider."""
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if activation == "swigluoai":  # openai/gpt-oss, gpt_oss/torch/model.py, swiglu
        gate_NI, up_NI = hidden[:, ::2].clamp(max=7.0), hidden[:, 1::2].clamp(-7.0, 7.0)
        return gate_NI * torch.sigmoid(1.702 * gate_NI) * (up_NI + 1.0)
    function = getattr(F, activation)
    if not gated:
        return function(hidden)
    gate_NI, up_NI = hidden.chunk(2, dim=-1)
    return function(gate_NI) * up_NI


def _put(rows: Tensor, place_N: Tensor, num_rows: int) -> Tensor:
    """Rows at their places among ``num_rows``; those whose place is ``num_rows`` are left out."""
    return rows.new_zeros(num_rows + 1, rows.shape[1]).index_copy(0, place_N, rows)[:num_rows]
