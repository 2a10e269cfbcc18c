"""Gradients of weights and biases: sums over the rows of each expert, however many it has, without atomic additions.

Every expert's gradient is written once, zeros for an idle one. MegaBlocks, Gale et al. 2022 (arXiv:2211.15841), section
5, computes the same sums as a block-sparse product; here rows are gathered as they are loaded.
Copy alone: needs torch and triton only (with the folder's other files).

T tokens, K choices, N = T*K assignments, E experts, P and Q sides of a weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .address import at, matrix
from .configs import Tile
from .launch import Launch, Launcher, ceil_div, run
from .order import Order


def weight_gradient(
    left: Tensor,
    right: Tensor,
    order: Order,
    top_k: int,
    tile: Tile,
    dtype: torch.dtype,
    *,
    gather_left: bool = False,
    gather_right: bool = False,
    launch: Launcher = run,
) -> Tensor:
    """(E, P, Q) in ``dtype``: for each expert the sum over its rows of left (P) times right (Q).

    Each expert's gradient is written once, zeros for an idle one. The rows of one expert are added by one program per
    tile, in order; a heavily loaded expert therefore takes as long as its rows need.

    Args:
        left: (N, P) in the order of experts, or (T, P) by token when ``gather_left``; columns adjacent in memory.
        right: (N, Q) or (T, Q), likewise.
        order: the same as in the forward pass.
        top_k: number K.
        tile: rows of the tile run over P, columns over Q, steps over the expert's rows.
        dtype: of the result.
        gather_left: left is by token.
        gather_right: right is by token.
        launch: starts or records the kernel.
    """
    num_experts, width_left, width_right = len(order.offsets) - 1, left.shape[1], right.shape[1]
    out = left.new_empty(num_experts, width_left, width_right, dtype=dtype)
    tiles_left, tiles_right = ceil_div(width_left, tile.rows), ceil_div(width_right, tile.columns)
    args = {
        **{"left": left, "right": right, "assignments": order.assignments, "offsets": order.offsets, "out": out},
        **{"top_k": top_k, "width_left": width_left, "width_right": width_right},
        **{"left_stride": left.stride(0), "right_stride": right.stride(0), "out_stride_e": out.stride(0)},
        **{"tiles_left": tiles_left, "tiles_right": tiles_right},
        **{"GATHER_LEFT": gather_left, "GATHER_RIGHT": gather_right},
        **{"ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step},
    }
    launch(Launch(weight_gradient_kernel, (num_experts * tiles_left * tiles_right,), args, tile))
    return out


def bias_gradient(
    rows: Tensor,
    order: Order,
    top_k: int,
    dtype: torch.dtype,
    *,
    weights_TK: Tensor | None = None,
    launch: Launcher = run,
) -> Tensor:
    """(E, P) in ``dtype``: the sum of each expert's rows.

    Args:
        rows: (N, P) in the order of experts; with ``weights_TK`` (T, P) by token, and the sum is weighted.
        order: the same as in the forward pass.
        top_k: number K.
        dtype: of the result.
        weights_TK: combine weights, contiguous.
        launch: starts or records the kernel.
    """
    num_experts, width = len(order.offsets) - 1, rows.shape[1]
    out_EP = rows.new_empty(num_experts, width, dtype=dtype)
    tile = Tile(32, 64, 1, 4, 3)
    args = {
        **{"rows_in": rows, "weights": weights_TK, "assignments": order.assignments, "offsets": order.offsets},
        **{"out": out_EP, "top_k": top_k, "width": width, "stride": rows.stride(0)},
        **{"num_column_tiles": ceil_div(width, tile.columns), "ROWS": tile.rows, "COLUMNS": tile.columns},
    }
    launch(Launch(bias_gradient_kernel, (num_experts * ceil_div(width, tile.columns),), args, tile))
    return out_EP


@triton.jit
def weight_gradient_kernel(
    left,
    right,
    assignments,
    offsets,
    out,
    top_k,
    width_left,
    width_right,
    left_stride,
    right_stride,
    out_stride_e,
    tiles_left,
    tiles_right,
    GATHER_LEFT: tl.constexpr,
    GATHER_RIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """out[e] = left[rows of e].T @ right[rows of e]."""
    expert = tl.program_id(0) // (tiles_left * tiles_right)
    tile = tl.program_id(0) % (tiles_left * tiles_right)
    rows = tile // tiles_right * ROWS + tl.arange(0, ROWS)
    columns = tile % tiles_right * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.load(offsets + expert), end, STEP):
        places = first + tl.arange(0, STEP)
        live = places < end
        left_places = places
        right_places = places
        if GATHER_LEFT:
            left_places = tl.load(assignments + places, mask=live, other=0) // top_k
        if GATHER_RIGHT:
            right_places = tl.load(assignments + places, mask=live, other=0) // top_k
        left_mask = live[None, :] & (rows < width_left)[:, None]
        left_block = tl.load(at(left, left_places[None, :], left_stride, rows[:, None], 1), mask=left_mask, other=0.0)
        right_mask = live[:, None] & (columns < width_right)[None, :]
        pointers = at(right, right_places[:, None], right_stride, columns[None, :], 1)
        right_block = tl.load(pointers, mask=right_mask, other=0.0)
        total = tl.dot(left_block, right_block, total, input_precision="ieee")
    pointers = at(matrix(out, expert, out_stride_e), rows[:, None], width_right, columns[None, :], 1)
    mask = (rows < width_left)[:, None] & (columns < width_right)[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def bias_gradient_kernel(
    rows_in,
    weights,
    assignments,
    offsets,
    out,
    top_k,
    width,
    stride,
    num_column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[e] = sum over the rows of e, weighted and by token if there are weights."""
    expert = tl.program_id(0) // num_column_tiles
    columns = tl.program_id(0) % num_column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(tl.load(offsets + expert), end, ROWS):
        rows = first + tl.arange(0, ROWS)
        live = rows < end
        mask = live[:, None] & (columns < width)[None, :]
        if weights is not None:
            assignment = tl.load(assignments + rows, mask=live, other=0)
            scale = tl.load(weights + assignment, mask=live, other=0.0).to(tl.float32)
            pointers = at(rows_in, (assignment // top_k)[:, None], stride, columns[None, :], 1)
            total += tl.sum(tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * scale[:, None], 0)
        else:
            pointers = at(rows_in, rows[:, None], stride, columns[None, :], 1)
            total += tl.sum(tl.load(pointers, mask=mask, other=0.0).to(tl.float32), 0)
    tl.store(at(out, expert, width, columns, 1), total.to(out.dtype.element_ty), mask=columns < width)
