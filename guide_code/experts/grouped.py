"""The default: sort the assignments by expert, then multiply each expert's rows in one grouped matmul.

Dropless, as in MegaBlocks, Gale et al. 2022 (arXiv:2211.15841), section 5; every tensor has T*K rows however
uneven the routing, and nothing waits for the host.
Copy alone: needs torch only (2.10 or later).

T tokens, D hidden size, I expert intermediate size, E experts, K choices per token, N = T*K assignments.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = ("silu", "gelu", "relu", "swigluoai")


def grouped_experts(
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
) -> Tensor:
    """Weighted sum of the chosen experts' outputs, (T, D) in the dtype of ``x_TD``, added up in float32.

    The same numbers in the same order on every call: no atomic additions, forward or backward.

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
    """
    device = "cpu" if x_TD.is_meta else x_TD.device.type  # autocast knows no meta device
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else gate_up_proj.dtype
    num_experts = gate_up_proj.shape[0]
    with torch.autocast(device, enabled=False):
        valid_TK = (ids_TK >= 0) & (ids_TK < num_experts)
        expert_N, order_N = torch.where(valid_TK, ids_TK, num_experts).flatten().sort(stable=True)
        places_N = torch.arange(len(order_N), device=order_N.device)
        slot_TK = torch.empty_like(order_N).scatter_(0, order_N, places_N).view_as(ids_TK)  # the inverse of the sort
        experts_E = torch.arange(num_experts, device=order_N.device)
        ends_E = torch.searchsorted(expert_N, experts_E, right=True, out_int32=True)

        # Rows past the last end belong to no expert. A grouped matmul leaves them unwritten, so whatever they hold
        # is cut off where rows become tokens again, and their weight is a 0 that takes no gradient.
        rows_ND = _Dispatch.apply(x_TD.to(dtype), order_N, slot_TK, valid_TK)
        weight_N1 = torch.where(valid_TK, weights_TK, 0.0).flatten()[order_N, None]
        hidden = _grouped_linear(rows_ND, gate_up_proj.to(dtype), ends_E)
        if gate_up_proj_bias is not None:
            hidden = hidden + F.pad(gate_up_proj_bias.to(dtype), (0, 0, 0, 1))[expert_N]
        hidden_NI = _activate(hidden, activation, gated) * weight_N1  # before down: float16 stays finite
        y_ND = _grouped_linear(hidden_NI.to(dtype), down_proj.to(dtype), ends_E)
        if down_proj_bias is not None:
            y_ND = y_ND + weight_N1 * F.pad(down_proj_bias, (0, 0, 0, 1))[expert_N]
        out_TD = _Combine.apply(y_ND, order_N, slot_TK, valid_TK)
    return out_TD.to(x_TD.dtype)


def grouped_mm_obstacle(weight: Tensor) -> str:
    """Why ``F.grouped_mm`` cannot take a stacked weight (E, out, in) in its present dtype; "" when it can.

    Where it cannot, :func:`grouped_experts` multiplies the experts' rows one expert at a time: same numbers.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {weight.dtype} is not float32, bfloat16 or float16"
    for side, width in zip(("out", "in"), weight.shape[1:], strict=True):
        if width * weight.element_size() % 16:
            return f"{side} width {width} x {weight.element_size()} bytes is not a multiple of 16 bytes"
    if not (weight.is_contiguous() or weight.mT.is_contiguous()) or weight.data_ptr() % 16:
        return "the weight, or its transpose, is not contiguous or does not start at a multiple of 16 bytes"
    return ""


class GroupedExperts(nn.Module):
    """The parameters of E feed-forward experts, computed by :func:`grouped_experts`.

    Args:
        num_experts: number E of experts.
        hidden_size: width D of a token.
        intermediate_size: width I inside an expert.
        activation: "silu", "gelu", "relu" or, gated only, "swigluoai".
        gated: two projections up, one of them the gate; the parameter is ``gate_up_proj``, else ``up_proj``.
        bias: add biases to both projections.

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
    ):
        super().__init__()
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
        return grouped_experts(
            x_TD,
            ids_TK,
            weights_TK,
            getattr(self, name),
            self.down_proj,
            gate_up_proj_bias=getattr(self, f"{name}_bias"),
            down_proj_bias=self.down_proj_bias,
            activation=self.activation,
            gated=self.gated,
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


def _grouped_linear(rows_NI: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    """Rows ends[e-1]:ends[e] times the transpose of weight[e] (E, O, I): (N, O). Rows past the last end: anything."""
    if torch.compiler.is_compiling():  # F.grouped_mm compiles in bfloat16 only, and a loop over experts not at all
        return _grouped_linear_op(rows_NI, weight, ends_E)
    if not grouped_mm_obstacle(weight):
        return F.grouped_mm(rows_NI, weight.transpose(-2, -1), offs=ends_E)
    ends = ends_E.tolist()
    parts = [F.linear(rows_NI[a:b], w) for a, b, w in zip([0, *ends], ends, weight.unbind(), strict=False)]
    return torch.cat([*parts, rows_NI.new_zeros(len(rows_NI) - ends[-1], weight.shape[1])])


# Named after the module: a copy of this file in another package registers operators of its own.
@torch.library.custom_op(f"{__name__.replace('.', '_')}::grouped_linear", mutates_args=())
def _grouped_linear_op(rows_NI: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    return _grouped_linear(rows_NI, weight, ends_E)


@torch.library.custom_op(f"{__name__.replace('.', '_')}::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward_op(
    grad_NO: Tensor, rows_NI: Tensor, weight: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    grad_rows_NI = _grouped_linear(grad_NO, weight.mT, ends_E)
    if not grouped_mm_obstacle(weight):
        return grad_rows_NI, F.grouped_mm(grad_NO.t(), rows_NI, offs=ends_E)
    ends = ends_E.tolist()
    grads = [grad_NO[a:b].t() @ rows_NI[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return grad_rows_NI, torch.stack(grads)


@_grouped_linear_op.register_fake
def _grouped_linear_fake(rows_NI, weight, ends_E):
    return rows_NI.new_empty(len(rows_NI), weight.shape[1])


@_grouped_linear_backward_op.register_fake
def _grouped_linear_backward_fake(grad_NO, rows_NI, weight, ends_E):
    return rows_NI.new_empty(rows_NI.shape), weight.new_empty(weight.shape)


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@functools.partial(_grouped_linear_op.register_autograd, setup_context=_save_for_backward)
def _grouped_linear_gradient(ctx, grad_NO):
    return *_grouped_linear_backward_op(grad_NO.contiguous(), *ctx.saved_tensors), None


class _Dispatch(torch.autograd.Function):
    """Token rows to assignment rows in expert order. Backward is :class:`_Combine`: a sum in a fixed order."""

    @staticmethod
    def forward(ctx, x_TD, order_N, slot_TK, valid_TK):
        ctx.save_for_backward(slot_TK, valid_TK)
        return x_TD[order_N // slot_TK.shape[1]]

    @staticmethod
    def backward(ctx, grad_ND):
        return _sum_slots(grad_ND, *ctx.saved_tensors).to(grad_ND.dtype), None, None, None


class _Combine(torch.autograd.Function):
    """Assignment rows to token rows, the K of a token added up in float32. Backward is :class:`_Dispatch`."""

    @staticmethod
    def forward(ctx, y_ND, order_N, slot_TK, valid_TK):
        ctx.save_for_backward(order_N)
        ctx.top_k, ctx.dtype = slot_TK.shape[1], y_ND.dtype
        return _sum_slots(y_ND, slot_TK, valid_TK)

    @staticmethod
    def backward(ctx, grad_TD):
        (order_N,) = ctx.saved_tensors
        return grad_TD.to(ctx.dtype)[order_N // ctx.top_k], None, None, None


def _sum_slots(rows_ND: Tensor, slot_TK: Tensor, valid_TK: Tensor) -> Tensor:
    wide = torch.promote_types(rows_ND.dtype, torch.float32)
    rows_TKD = torch.where(valid_TK[..., None], rows_ND[slot_TK], 0.0)
    return rows_TKD.sum(dim=1, dtype=wide)
