"""Backward through an expert's activation, to its input and to the combine weights.

With a = activation(pre) and y = weight * (a @ down.T + bias), the gradient of the combine weight is the product of a
with (out's gradient @ down), which the gradient of ``pre`` needs anyway: y is not kept, and the activation is
recomputed from ``pre``. That order of work is SonicMoE's (Guo et al. 2025, arXiv:2512.14080).
Copy alone: needs torch and triton only (with the folder's other files).

T tokens, D hidden size, I expert intermediate size, J rows of the weight up (2I or I), K choices, N = T*K
assignments, E experts, C column tiles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import activate_backward
from .address import advance, at, matrix, rows_of_tile, tile_of_program
from .configs import Tile
from .launch import Launch, Launcher, ceil_div, run
from .order import Order
from .up import gate_layout


class HiddenGradient(NamedTuple):
    """What :func:`hidden_gradient` returns. Rows of the first two are in the order of experts."""

    pre_NJ: Tensor
    hidden_NI: Tensor
    """the weighted activation once more, for the gradient of the weight down"""
    parts_CN: Tensor
    """float32, by assignment: each column tile's share of the combine weight's gradient; for ids outside [0, E)
    unwritten"""


def hidden_gradient(
    grad_TD: Tensor,
    weight: Tensor,
    weights_TK: Tensor,
    pre_NJ: Tensor,
    order: Order,
    tile: Tile,
    *,
    activation: str,
    gated: bool,
    launch: Launcher = run,
) -> HiddenGradient:
    """From the gradient of the output to that of what went into the activation.

    Args:
        grad_TD: gradient of the output, in the dtype of ``weight``; columns adjacent in memory.
        weight: (E, D, I), the weight down, any strides.
        weights_TK: combine weights, contiguous.
        pre_NJ: what :func:`.up.up` kept.
        order: the same as in the forward pass.
        tile: sizes.
        activation: as in the forward pass.
        gated: likewise.
        launch: starts or records the kernel.
    """
    width_in, width = weight.shape[1:]
    row_tiles, column_tiles = order.tiles.shape[1], ceil_div(width, tile.columns)
    result = HiddenGradient(
        torch.empty_like(pre_NJ),
        pre_NJ.new_empty(len(pre_NJ), width),
        pre_NJ.new_empty(column_tiles, len(pre_NJ), dtype=torch.float32),
    )
    args = {
        **{"grad": grad_TD, "weight": weight, "weights": weights_TK, "pre": pre_NJ},
        **{"assignments": order.assignments, "offsets": order.offsets, "tiles": order.tiles},
        **{"grad_pre": result.pre_NJ, "hidden": result.hidden_NI, "parts": result.parts_CN},
        **{"num_row_tiles": row_tiles, "num_assignments": len(pre_NJ), "top_k": weights_TK.shape[1]},
        **{"width_in": width_in, "width_out": width},
        **gate_layout(activation, gated, width),
        "grad_stride": grad_TD.stride(0),
        **dict(zip(("weight_stride_e", "weight_stride_in", "weight_stride_out"), weight.stride(), strict=True)),
        **{"ACTIVATION": activation, "GATED": gated},
        **{"EVEN": width_in % tile.step == 0, "ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step},
    }
    launch(Launch(hidden_gradient_kernel, (row_tiles * column_tiles,), args, tile))
    return result


def combine_weight_gradient(
    parts_CN: Tensor,
    ids_TK: Tensor,
    grad_TD: Tensor,
    bias: Tensor | None,
    num_experts: int,
    dtype: torch.dtype,
    *,
    launch: Launcher = run,
) -> Tensor:
    """(T, K) in ``dtype``: shares added in order, plus the down bias times the output's gradient; 0 at invalid ids.

    Args:
        parts_CN: from :func:`hidden_gradient`.
        ids_TK: contiguous.
        grad_TD: gradient of the output; columns adjacent in memory.
        bias: (E, D), contiguous.
        num_experts: number E.
        dtype: of the result.
        launch: starts or records the kernel.
    """
    out_TK = parts_CN.new_empty(ids_TK.shape, dtype=dtype)
    tile = Tile(16, 128, 1, 4, 2)
    args = {
        **{"parts": parts_CN, "ids": ids_TK, "grad": grad_TD, "bias": bias, "out": out_TK},
        **{"num_parts": len(parts_CN), "num_assignments": ids_TK.numel(), "top_k": ids_TK.shape[1]},
        **{"width": grad_TD.shape[1], "grad_stride": grad_TD.stride(0), "num_experts": num_experts},
        **{"ROWS": tile.rows, "COLUMNS": tile.columns},
    }
    launch(Launch(combine_weight_gradient_kernel, (ceil_div(ids_TK.numel(), tile.rows),), args, tile))
    return out_TK


@triton.jit
def hidden_gradient_kernel(
    grad,
    weight,
    weights,
    pre,
    assignments,
    offsets,
    tiles,
    grad_pre,
    hidden,
    parts,
    num_row_tiles,
    num_assignments,
    top_k,
    width_in,
    width_out,
    first_up,
    grad_stride,
    weight_stride_e,
    weight_stride_in,
    weight_stride_out,
    EACH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """grad[token of n] @ weight[expert of n], then through the activation."""
    row_tile, column_tile = tile_of_program(num_row_tiles, tl.cdiv(width_out, COLUMNS), 8)  # pyright: ignore[reportGeneralTypeIssues]
    expert = tl.load(tiles + row_tile)
    if expert < 0:
        return
    rows, live = rows_of_tile(tiles, offsets, expert, row_tile, num_row_tiles, ROWS)
    assignment = tl.load(assignments + rows, mask=live, other=0)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width_out
    steps = tl.arange(0, STEP)

    grad_pointers = at(grad, (assignment // top_k)[:, None], grad_stride, steps[None, :], 1)
    weight_e = matrix(weight, expert, weight_stride_e)
    weight_pointers = at(weight_e, columns[None, :], weight_stride_out, steps[:, None], weight_stride_in)
    grad_a = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width_in, STEP):
        if EVEN:
            grad_mask = live[:, None]
            weight_mask = inside[None, :]
        else:
            grad_mask = live[:, None] & (first + steps < width_in)[None, :]
            weight_mask = inside[None, :] & (first + steps < width_in)[:, None]
        grad_block = tl.load(grad_pointers, mask=grad_mask, other=0.0)
        weight_block = tl.load(weight_pointers, mask=weight_mask, other=0.0)
        grad_a = tl.dot(grad_block, weight_block, grad_a, input_precision="ieee")
        grad_pointers = advance(grad_pointers, STEP, 1)
        weight_pointers = advance(weight_pointers, STEP, weight_stride_in)

    mask = live[:, None] & inside[None, :]
    pre_width = width_out * (2 if GATED else 1)
    gates = columns[None, :] * EACH
    gate = tl.load(at(pre, rows[:, None], pre_width, gates, 1), mask=mask, other=0.0).to(tl.float32)
    if GATED:
        ups = gates + first_up
        up = tl.load(at(pre, rows[:, None], pre_width, ups, 1), mask=mask, other=0.0).to(tl.float32)
    else:
        up = gate
    value, by_gate, by_up = activate_backward(gate, up, ACTIVATION, GATED)
    scale = tl.load(weights + assignment, mask=live, other=0.0).to(tl.float32)
    share = tl.sum(tl.where(mask, value * grad_a, 0.0), 1)
    tl.store(at(parts, column_tile, num_assignments, assignment, 1), share, mask=live)
    kind = hidden.dtype.element_ty
    tl.store(at(hidden, rows[:, None], width_out, columns[None, :], 1), (value * scale[:, None]).to(kind), mask=mask)
    grad_a *= scale[:, None]
    tl.store(at(grad_pre, rows[:, None], pre_width, gates, 1), (grad_a * by_gate).to(kind), mask=mask)
    if GATED:
        tl.store(at(grad_pre, rows[:, None], pre_width, ups, 1), (grad_a * by_up).to(kind), mask=mask)


@triton.jit
def combine_weight_gradient_kernel(
    parts,
    ids,
    grad,
    bias,
    out,
    num_parts,
    num_assignments,
    top_k,
    width,
    grad_stride,
    num_experts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[n] = sum over column tiles of parts[:, n], plus bias[expert of n] . grad[token of n]."""
    assignment = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = assignment < num_assignments
    id = tl.load(ids + assignment, mask=exists, other=-1).to(tl.int64)
    valid = (id >= 0) & (id < num_experts)
    total = tl.zeros((ROWS,), tl.float32)
    for part in range(0, num_parts):
        total += tl.load(at(parts, tl.cast(part, tl.int32), num_assignments, assignment, 1), mask=valid, other=0.0)
    if bias is not None:
        for first in range(0, width, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            mask = valid[:, None] & (columns < width)[None, :]
            bias_block = tl.load(at(bias, id[:, None], width, columns[None, :], 1), mask=mask, other=0.0)
            pointers = at(grad, (assignment // top_k)[:, None], grad_stride, columns[None, :], 1)
            grad_block = tl.load(pointers, mask=mask, other=0.0)
            total += tl.sum(bias_block.to(tl.float32) * grad_block.to(tl.float32), 1)
    tl.store(out + assignment, total.to(out.dtype.element_ty), mask=exists)
