"""The way down: a grouped GEMM whose rows land at their assignments, then a sum of each token's K rows in slot order.

Two kernels in place of atomic additions: the same bits on every call, and float32 sums. The same two bring the
gradient of the tokens back. Scattering on store as in ScatterMoE, Tan et al. 2024 (arXiv:2403.08245).
Copy alone: needs torch and triton only (with the folder's other files).

T tokens, D hidden size, I expert intermediate size, O output width, K choices, N = T*K assignments, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .address import advance, at, matrix, rows_of_tile, tile_of_program
from .configs import Tile
from .launch import Launch, Launcher, ceil_div, run
from .order import Order


def rows_to_assignments(
    rows_NI: Tensor,
    weight: Tensor,
    order: Order,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    weights_TK: Tensor | None = None,
    launch: Launcher = run,
) -> Tensor:
    """(N, O): row n is an assignment's row times the transpose of its expert's weight, plus its weighted bias.

    Rows of assignments that belong to no expert are not written.

    Args:
        rows_NI: contiguous, in the order of ``order``.
        weight: (E, O, I), any strides: the transposed view of a weight brings gradients back.
        order: from :func:`.order.order_by_expert` with ``tile.rows`` rows a tile.
        tile: sizes.
        bias: (E, O), contiguous.
        weights_TK: combine weights, contiguous; they scale the bias only, rows_NI has them already.
        launch: starts or records the kernel.
    """
    width_out, width_in = weight.shape[1:]
    out_NO = rows_NI.new_empty(len(rows_NI), width_out)
    row_tiles = order.tiles.shape[1]
    args = {
        **{"rows_in": rows_NI, "weight": weight, "bias": bias, "weights": weights_TK},
        **{"assignments": order.assignments, "offsets": order.offsets, "tiles": order.tiles, "out": out_NO},
        **{"num_row_tiles": row_tiles, "width_in": width_in, "width_out": width_out},
        **dict(zip(("weight_stride_e", "weight_stride_out", "weight_stride_in"), weight.stride(), strict=True)),
        **{"EVEN": width_in % tile.step == 0, "ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step},
    }
    launch(Launch(down_kernel, (row_tiles * ceil_div(width_out, tile.columns),), args, tile))
    return out_NO


def combine(
    rows_ND: Tensor,
    ids_TK: Tensor,
    num_experts: int,
    dtype: torch.dtype,
    *,
    merged: bool = False,
    launch: Launcher = run,
) -> Tensor:
    """(T, D) in ``dtype``: the rows of each token's valid slots, added up in float32 from slot 0 on.

    Args:
        rows_ND: one row per assignment; those of ids outside [0, E) are not read.
        ids_TK: contiguous.
        num_experts: number E.
        dtype: of the result.
        merged: equal ids of a token share the row of the first; those of the others are not read.
        launch: starts or records the kernel.
    """
    (num_tokens, top_k), width = ids_TK.shape, rows_ND.shape[1]
    out_TD = rows_ND.new_empty(num_tokens, width, dtype=dtype)
    tile = Tile(1, min(1024, 1 << (width - 1).bit_length()), 1, 4, 1)
    column_tiles = ceil_div(width, tile.columns)
    args = {"rows": rows_ND, "ids": ids_TK, "out": out_TD, "top_k": top_k, "width": width}
    args |= {
        "token_stride": top_k * width,
        "num_experts": num_experts,
        "num_column_tiles": column_tiles,
        "COLUMNS": tile.columns,
    }
    args |= {"MERGED": merged, "CHOICES": triton.next_power_of_2(top_k)}
    launch(Launch(combine_kernel, (num_tokens * column_tiles,), args, tile))
    return out_TD


@triton.jit
def down_kernel(
    rows_in,
    weight,
    bias,
    weights,
    assignments,
    offsets,
    tiles,
    out,
    num_row_tiles,
    width_in,
    width_out,
    weight_stride_e,
    weight_stride_out,
    weight_stride_in,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """out[assignment of n] = rows_in[n] @ weight[expert of n].T + weight of n * bias[expert of n]."""
    row_tile, column_tile = tile_of_program(num_row_tiles, tl.cdiv(width_out, COLUMNS), 8)  # pyright: ignore[reportGeneralTypeIssues]
    expert = tl.load(tiles + row_tile)
    if expert < 0:
        return
    rows, live = rows_of_tile(tiles, offsets, expert, row_tile, num_row_tiles, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width_out
    steps = tl.arange(0, STEP)

    in_pointers = at(rows_in, rows[:, None], width_in, steps[None, :], 1)
    weight_e = matrix(weight, expert, weight_stride_e)
    weight_pointers = at(weight_e, columns[None, :], weight_stride_out, steps[:, None], weight_stride_in)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width_in, STEP):
        if EVEN:
            in_mask = live[:, None]
            weight_mask = inside[None, :]
        else:
            in_mask = live[:, None] & (first + steps < width_in)[None, :]
            weight_mask = inside[None, :] & (first + steps < width_in)[:, None]
        in_block = tl.load(in_pointers, mask=in_mask, other=0.0)
        weight_block = tl.load(weight_pointers, mask=weight_mask, other=0.0)
        total = tl.dot(in_block, weight_block, total, input_precision="ieee")
        in_pointers = advance(in_pointers, STEP, 1)
        weight_pointers = advance(weight_pointers, STEP, weight_stride_in)

    assignment = tl.load(assignments + rows, mask=live, other=0)
    if bias is not None:
        scale = tl.load(weights + assignment, mask=live, other=0.0).to(tl.float32)
        bias_row = tl.load(at(bias, expert, width_out, columns, 1), mask=inside, other=0.0).to(tl.float32)
        total += scale[:, None] * bias_row[None, :]
    pointers = at(out, assignment[:, None], width_out, columns[None, :], 1)
    tl.store(pointers, total.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def combine_kernel(
    rows,
    ids,
    out,
    top_k,
    width,
    token_stride,
    num_experts,
    num_column_tiles,
    MERGED: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[t] = sum over valid slots k of rows[t * K + k]."""
    token = tl.program_id(0) // num_column_tiles
    columns = tl.program_id(0) % num_column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    slots = tl.arange(0, CHOICES)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in range(0, top_k):
        slot = tl.cast(k, tl.int32)
        id = tl.load(at(ids, token, top_k, slot, 1)).to(tl.int64)
        valid = (id >= 0) & (id < num_experts)
        if MERGED:
            earlier = tl.load(at(ids, token, top_k, slots, 1), mask=slots < slot, other=-1).to(tl.int64)
            valid = valid & (tl.sum((earlier == id).to(tl.int32), 0) == 0)
        row = at(rows, token, token_stride, slot, width)
        total += tl.load(row + columns, mask=valid & (columns < width), other=0.0).to(tl.float32)
    tl.store(at(out, token, width, columns, 1), total.to(out.dtype.element_ty), mask=columns < width)
