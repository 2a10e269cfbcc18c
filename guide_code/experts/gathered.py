"""Every assignment fetches its own expert's weights: two products of a matrix with one row each. For decoding.

The "weight gathering" of gpt-fast, ``mixtral-moe/model.py``, on the layer of Shazeer et al. 2017 (arXiv:1701.06538),
eq. 1. Nothing waits for the host and every shape is known beforehand. The price is memory: copies of N x 3 x I x D
numbers, so it is for a handful of tokens. On a CPU, where no gradient is wanted, the weights are read where they lie.
Copy alone: needs torch only.

T tokens, D hidden size, I expert intermediate size, J = 2I (I when not gated), E experts, K choices per token,
N = T*K assignments.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = ("silu", "gelu", "relu", "swigluoai")


def gathered_experts(
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
    wide, num_experts, top_k = torch.promote_types(dtype, torch.float32), len(down_proj), ids_TK.shape[1]
    arguments = x_TD, weights_TK, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments)
    with torch.autocast(device, enabled=False):
        if x_TD.device.type == "cpu" and not training and not torch.compiler.is_compiling():
            ids = ids_TK.flatten().tolist()
            rows, weight_N1 = [row for row in x_TD.to(dtype) for _ in range(top_k)], weights_TK.reshape(-1, 1)
            hidden = _times_in_place(gate_up_proj, ids, rows, gate_up_proj_bias)
            hidden_NI = _activate(hidden, activation, gated) * weight_N1  # before down: float16 stays finite
            y_ND = _times_in_place(down_proj, ids, hidden_NI.to(dtype).unbind(), down_proj_bias, weight_N1)
            return y_ND.view(*ids_TK.shape, y_ND.shape[1]).sum(dim=1, dtype=wide).to(x_TD.dtype)

        valid_N1 = ((ids_TK >= 0) & (ids_TK < num_experts)).flatten()[:, None]
        ids_N = torch.where(valid_N1[:, 0], ids_TK.flatten(), 0)  # any expert will do for what counts nothing
        weight_N1 = torch.where(valid_N1, weights_TK.flatten()[:, None], 0.0)
        rows_ND = torch.where(valid_N1, x_TD.to(dtype).repeat_interleave(top_k, dim=0), 0.0)

        hidden = _times(gate_up_proj.index_select(0, ids_N).to(dtype), rows_ND)
        if gate_up_proj_bias is not None:
            hidden = hidden + gate_up_proj_bias.to(dtype)[ids_N]
        hidden_NI = _activate(hidden, activation, gated) * weight_N1  # before down: float16 stays finite
        y_ND = _times(down_proj.index_select(0, ids_N).to(dtype), hidden_NI.to(dtype)).to(wide)
        if down_proj_bias is not None:
            y_ND = y_ND + weight_N1 * down_proj_bias.to(wide)[ids_N]
        out_TD = y_ND.view(*ids_TK.shape, y_ND.shape[1]).sum(dim=1)
    return out_TD.to(x_TD.dtype)


class GatheredExperts(nn.Module):
    """The parameters of E feed-forward experts, computed by :func:`gathered_experts`.

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
        return gathered_experts(
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


def _times(weight_NOI: Tensor, rows_NI: Tensor) -> Tensor:
    """Each row times the transpose of its own matrix: (N, O)."""
    return torch.bmm(weight_NOI, rows_NI[:, :, None])[:, :, 0]


def _times_in_place(
    weight_EOI: Tensor,
    ids: list[int],
    rows: Sequence[Tensor],
    bias_EO: Tensor | None,
    scale_N1: Tensor | None = None,
) -> Tensor:
    """Each row times the transpose of its expert's matrix, plus its (scaled) bias: (N, O); zeros without an expert.

    Visited in the order of experts: a matrix that several rows need comes from memory once, then from the cache.
    """
    (num_experts, width, _), dtype = weight_EOI.shape, rows[0].dtype if rows else weight_EOI.dtype
    out_NO = weight_EOI.new_zeros(len(ids), width, dtype=dtype)
    for n in sorted(range(len(ids)), key=ids.__getitem__):
        expert = ids[n]
        if 0 <= expert < num_experts:
            torch.mv(weight_EOI[expert].to(dtype), rows[n], out=out_NO[n])
            if bias_EO is not None:
                bias_O = bias_EO[expert].to(dtype)
                out_NO[n] += bias_O if scale_N1 is None else (scale_N1[n] * bias_O).to(dtype)
    return out_NO
