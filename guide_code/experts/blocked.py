"""For CPUs: sort once, then pass a block of rows through all three steps while it is in the cache.

Cache blocking, Lam et al. 1991 (doi:10.1145/106972.106981), on the dropless layer of MegaBlocks, Gale et al. 2022
(arXiv:2211.15841). A grouped matmul on a CPU is a loop over experts in any case. Here the loop reads each active
expert once, and what lies between its matmuls never travels to memory.
Copy alone: needs torch only.

T tokens, D hidden size, I expert intermediate size, J = 2I (I when not gated), E experts, K choices per token,
N assignments, R rows of a block.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ACTIVATIONS = ("silu", "gelu", "relu", "swigluoai")

BLOCK_ROWS = 256
"""A block closes when it has this many rows: 1 MB of float32 at D = 1024. Blocks hold whole experts."""


def blocked_experts(
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

    Saves for the backward pass, beyond its arguments, N x J numbers in the dtype of the weights (what the up
    projection gives) and the order of the assignments. It cannot be differentiated twice, and ``torch.compile``
    breaks the graph here: how many rows an expert has is read on the host.

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
    device = x_TD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else gate_up_proj.dtype
    with torch.autocast(device, enabled=False):
        biases = [b if b is None else b.to(dtype) for b in (gate_up_proj_bias, down_proj_bias)]
        arguments = x_TD.to(dtype), weights_TK, gate_up_proj.to(dtype), down_proj.to(dtype), *biases
        out_TD = _BlockedFunction.apply(ids_TK, activation, gated, torch.is_grad_enabled(), *arguments)
    return out_TD.to(x_TD.dtype)


class BlockedExperts(nn.Module):
    """The parameters of E feed-forward experts, computed by :func:`blocked_experts`.

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
        return blocked_experts(
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


class _Block(NamedTuple):
    """Consecutive experts with, for each assignment to them, its token and its combine weight."""

    experts: list[tuple[int, int]]
    """(expert, rows) of those that have any."""
    experts_R: Tensor
    tokens_R: Tensor
    weights_R1: Tensor
    order_R: Tensor
    """Places of the assignments in ``weights_TK.flatten()``."""


def _blocks(ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> list[_Block]:
    valid_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    expert_N, order_N = torch.where(valid_TK, ids_TK, num_experts).flatten().sort(stable=True)
    counts = torch.bincount(expert_N, minlength=num_experts + 1).tolist()[:num_experts]
    blocks, sizes = [[]], [0]
    for expert, rows in enumerate(counts):
        if sizes[-1] >= BLOCK_ROWS:
            blocks.append([])
            sizes.append(0)
        if rows:
            blocks[-1].append((expert, rows))
            sizes[-1] += rows
    order_N = order_N[: sum(sizes)]
    tokens_N, weights_N1 = order_N // ids_TK.shape[1], weights_TK.detach().flatten()[order_N, None]
    rows = (r.split(sizes) for r in (expert_N[: sum(sizes)], tokens_N, weights_N1, order_N))
    return [_Block(*parts) for parts in zip(blocks, *rows, strict=True)]


class _BlockedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids_TK, activation, gated, training, x_TD, weights_TK, gate_up, down, gate_up_bias, down_bias):
        dtype, compute = x_TD.dtype, _matmul_dtype(x_TD)
        wide = torch.promote_types(dtype, torch.float32)
        blocks, hiddens = _blocks(ids_TK, weights_TK, len(down)), []
        out_TD = torch.zeros(x_TD.shape, dtype=wide, device=x_TD.device)
        for block in blocks:
            hidden = _linear(block, x_TD.index_select(0, block.tokens_R).to(compute), gate_up.mT, gate_up_bias)
            hidden_RI = _activate(hidden, activation, gated).mul_(block.weights_R1)  # before down: float16 stays finite
            y_RD = _linear(block, hidden_RI.to(compute), down.mT).to(wide)
            if down_bias is not None:
                y_RD += block.weights_R1 * down_bias[block.experts_R]
            out_TD.index_add_(0, block.tokens_R, y_RD)
            if training:
                hiddens.append(hidden.to(dtype))
        ctx.save_for_backward(x_TD, weights_TK, gate_up, down, gate_up_bias, down_bias, *hiddens)
        ctx.blocks, ctx.activation, ctx.gated = blocks, activation, gated
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        x_TD, weights_TK, gate_up, down, gate_up_bias, down_bias, *hiddens = ctx.saved_tensors
        dtype, wide, compute = x_TD.dtype, grad_TD.dtype, _matmul_dtype(x_TD)
        grad_TD, grad_x_TD = grad_TD.to(dtype), torch.zeros(x_TD.shape, dtype=wide, device=x_TD.device)
        grad_weights_N = weights_TK.new_zeros(weights_TK.numel())
        parameters = gate_up, down, gate_up_bias, down_bias
        wanted = zip(parameters, ctx.needs_input_grad[6:], strict=True)
        grads = [torch.empty_like(p) if needed else None for p, needed in wanted]  # each expert's part is written once
        _zero_idle_(grads, {expert for block in ctx.blocks for expert, _ in block.experts})

        for block, hidden in zip(ctx.blocks, hiddens, strict=True):
            x_RD = x_TD.index_select(0, block.tokens_R).to(compute)
            grad_RD = grad_TD.index_select(0, block.tokens_R).to(compute)
            with torch.enable_grad():
                hidden = hidden.detach().to(wide).requires_grad_()
                act_RI = _activate(hidden, ctx.activation, ctx.gated)
            weights_R1 = block.weights_R1
            grad_act_RI = _linear(block, grad_RD, down).to(wide)
            grad_weights_R1 = (grad_act_RI * act_RI.detach()).sum(dim=1, keepdim=True)
            _outer_(block, grads[1], grad_RD, (act_RI.detach() * weights_R1).to(compute))
            if down_bias is not None:
                grad_weights_R1 += (grad_RD.to(wide) * down_bias[block.experts_R]).sum(dim=1, keepdim=True)
                _sum_(block, grads[3], grad_RD * weights_R1)
            (grad_hidden,) = torch.autograd.grad(act_RI, hidden, grad_act_RI.mul_(weights_R1))
            if gate_up_bias is not None:
                _sum_(block, grads[2], grad_hidden)
            grad_hidden = grad_hidden.to(compute)
            _outer_(block, grads[0], grad_hidden, x_RD)
            grad_x_TD.index_add_(0, block.tokens_R, _linear(block, grad_hidden, gate_up).to(wide))
            grad_weights_N[block.order_R] = grad_weights_R1[:, 0].to(weights_TK.dtype)
        return None, None, None, None, grad_x_TD.to(dtype), grad_weights_N.view_as(weights_TK), *grads


def _zero_idle_(grads: list[Tensor | None], active: set[int]) -> None:
    for grad in grads:
        if grad is not None:
            for expert in set(range(len(grad))) - active:
                grad[expert].zero_()


def _parts(block: _Block, *rows: Tensor) -> Iterator:
    sizes = [size for _, size in block.experts]
    return zip((expert for expert, _ in block.experts), *(r.split(sizes) for r in rows), strict=True)


def _narrow(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _is_avx2(device: torch.device) -> bool:
    """Whether this is an x86 CPU without AVX-512, so without instructions for bfloat16."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def _matmul_dtype(x_TD: Tensor) -> torch.dtype:
    """What matmuls compute in: float32 where PyTorch multiplies a narrow type number by number.

    On an AVX2 processor (EPYC of 2019, torch 2.13) that took 10 times as long as float32 for weights stored by column
    and 100 times as long for others.
    """
    return torch.float32 if _narrow(x_TD.dtype) and _is_avx2(x_TD.device) else x_TD.dtype


def _turned(rows_RI: Tensor) -> tuple[int, int]:
    """From how many to how many rows of an expert it is faster to multiply the other way round, matrix x columns.

    Measured with torch 2.13 on two cores: MKL on an EPYC with AVX2; MKL for float32 and AMX for bfloat16 on a Xeon.
    """
    if _is_avx2(rows_RI.device):
        return 1, 192
    return (2, 16) if _narrow(rows_RI.dtype) else (12, 48)


def _linear(block: _Block, rows_RI: Tensor, weight_EIO: Tensor, bias_EO: Tensor | None = None) -> Tensor:
    """Each row times its expert's matrix, plus its bias: (R, O) in the dtype of the rows.

    A narrower weight is widened one expert at a time, in a buffer that stays in the cache; not for a single row, which
    reads the weight once and no more.
    """
    by_column, widen = weight_EIO.stride(1) == 1, weight_EIO.dtype != rows_RI.dtype
    first, last = _turned(rows_RI) if by_column else (1, 0)
    out_RO = rows_RI.new_empty(len(rows_RI), weight_EIO.shape[2])
    wide_IO = torch.empty_like(weight_EIO[0], dtype=rows_RI.dtype) if widen else None
    for expert, rows, out in _parts(block, rows_RI, out_RO):
        weight_IO = weight_EIO[expert]
        if by_column and len(rows) == 1:
            out[0] = torch.mv(weight_IO.t(), rows[0].to(weight_IO.dtype))
            continue
        if wide_IO is not None:
            weight_IO = wide_IO.copy_(weight_IO)
        if not first <= len(rows) <= last:
            torch.mm(rows, weight_IO, out=out)
        else:
            out.copy_(torch.mm(weight_IO.t(), rows.t()).t())
    return out_RO if bias_EO is None else out_RO.add_(bias_EO[block.experts_R])


def _outer_(block: _Block, grad: Tensor | None, left: Tensor, right: Tensor) -> None:
    """Write the gradient of each expert's weight, the sum over its rows of left x right."""
    if grad is None:
        return
    wide = torch.empty_like(grad[0], dtype=left.dtype) if grad.dtype != left.dtype else None
    for expert, left_part, right_part in _parts(block, left, right):
        if len(left_part) == 1:
            torch.mul(left_part.t(), right_part, out=grad[expert])
        elif wide is None:
            torch.mm(left_part.t(), right_part, out=grad[expert])
        else:
            grad[expert].copy_(torch.mm(left_part.t(), right_part, out=wide))


def _sum_(block: _Block, grad: Tensor | None, rows: Tensor) -> None:
    """Write the gradient of each expert's bias, the sum over its rows."""
    if grad is not None:
        for expert, part in _parts(block, rows):
            grad[expert] = part.sum(dim=0)
