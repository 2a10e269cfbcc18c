"""The way up: a grouped GEMM that gathers token rows as it loads them and applies the activation before it stores.

No permuted copy of the tokens and no gate/up tensor in memory unless a backward pass will want it: gathering on load
is ScatterMoE's (Tan et al. 2024, arXiv:2403.08245), the activation in the epilogue SonicMoE's (Guo et al.
2025, arXiv:2512.14080). The combine weight is applied here, in float32, so that a float16 result stays finite.
Copy alone: needs torch and triton only (with the folder's other files).

T tokens, D hidden size, I expert intermediate size, J rows of a weight (2I or I), N assignments, E experts.
"""

import triton
import triton.language as tl
from torch import Tensor

from .activation import activate
from .address import advance, at, matrix, rows_of_tile, tile_of_program
from .configs import Tile
from .launch import Launch, Launcher, ceil_div, run
from .order import Order


def up(
    x_TD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights_TK: Tensor,
    order: Order,
    tile: Tile,
    *,
    activation: str,
    gated: bool,
    save: bool,
    launch: Launcher = run,
) -> tuple[Tensor, Tensor]:
    """(weighted activation (N, I), what goes into the activation (N, J) or nothing), rows in the order of ``order``.

    Args:
        x_TD: tokens; columns adjacent in memory.
        weight: (E, J, D), any strides, in the dtype of ``x_TD``.
        bias: (E, J) or nothing.
        weights_TK: combine weights, contiguous.
        order: from :func:`.order.order_by_expert` with ``tile.rows`` rows a tile.
        tile: sizes.
        activation: as in :func:`guide_code.experts.grouped.grouped_experts`.
        gated: likewise.
        save: keep what goes into the activation, for the backward pass.
        launch: starts or records the kernel.
    """
    num_assignments, width = weights_TK.numel(), weight.shape[1] // (2 if gated else 1)
    hidden_NI = x_TD.new_empty(num_assignments, width)
    pre_NJ = x_TD.new_empty(num_assignments if save else 0, weight.shape[1])
    row_tiles = order.tiles.shape[1]
    args = {
        **{"x": x_TD, "weight": weight, "bias": bias, "weights": weights_TK},
        **{"assignments": order.assignments, "offsets": order.offsets, "tiles": order.tiles},
        **{"hidden": hidden_NI, "pre": pre_NJ if save else None},
        **{"num_row_tiles": row_tiles, "top_k": weights_TK.shape[1], "width_in": weight.shape[2], "width_out": width},
        **gate_layout(activation, gated, width),
        "x_stride": x_TD.stride(0),
        **dict(zip(("weight_stride_e", "weight_stride_out", "weight_stride_in"), weight.stride(), strict=True)),
        **{"ACTIVATION": activation, "GATED": gated},
        **{"EVEN": weight.shape[2] % tile.step == 0, "ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step},
    }
    launch(Launch(up_kernel, (row_tiles * ceil_div(width, tile.columns),), args, tile))
    return hidden_NI, pre_NJ


def gate_layout(activation: str, gated: bool, width: int) -> dict[str, int]:
    """Where gate and up rows are: gate i in row i * EACH, up i in row i * EACH + first_up."""
    if activation == "swigluoai":  # gpt-oss: they alternate
        return {"EACH": 2, "first_up": 1}
    return {"EACH": 1, "first_up": width if gated else 0}


@triton.jit
def up_kernel(
    x,
    weight,
    bias,
    weights,
    assignments,
    offsets,
    tiles,
    hidden,
    pre,
    num_row_tiles,
    top_k,
    width_in,
    width_out,
    first_up,
    x_stride,
    weight_stride_e,
    weight_stride_out,
    weight_stride_in,
    EACH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """hidden[n, i] = weight of n * activation(x[token of n] @ weight[expert of n].T)."""
    row_tile, column_tile = tile_of_program(num_row_tiles, tl.cdiv(width_out, COLUMNS), 8)  # pyright: ignore[reportGeneralTypeIssues]
    expert = tl.load(tiles + row_tile)
    if expert < 0:
        return
    rows, live = rows_of_tile(tiles, offsets, expert, row_tile, num_row_tiles, ROWS)
    assignment = tl.load(assignments + rows, mask=live, other=0)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width_out
    gates = columns * EACH
    ups = gates + first_up
    steps = tl.arange(0, STEP)

    x_pointers = at(x, (assignment // top_k)[:, None], x_stride, steps[None, :], 1)
    weight_e = matrix(weight, expert, weight_stride_e)
    gate_pointers = at(weight_e, gates[None, :], weight_stride_out, steps[:, None], weight_stride_in)
    up_pointers = at(weight_e, ups[None, :], weight_stride_out, steps[:, None], weight_stride_in)
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width_in, STEP):
        if EVEN:
            x_mask = live[:, None]
            weight_mask = inside[None, :]
        else:
            x_mask = live[:, None] & (first + steps < width_in)[None, :]
            weight_mask = inside[None, :] & (first + steps < width_in)[:, None]
        x_block = tl.load(x_pointers, mask=x_mask, other=0.0)
        gate_block = tl.load(gate_pointers, mask=weight_mask, other=0.0)
        gate = tl.dot(x_block, gate_block, gate, input_precision="ieee")
        if GATED:
            up_block = tl.load(up_pointers, mask=weight_mask, other=0.0)
            up = tl.dot(x_block, up_block, up, input_precision="ieee")
            up_pointers = advance(up_pointers, STEP, weight_stride_in)
        x_pointers = advance(x_pointers, STEP, 1)
        gate_pointers = advance(gate_pointers, STEP, weight_stride_in)

    stored = live[:, None] & inside[None, :]
    bias_width = width_out * (2 if GATED else 1)
    if bias is not None:
        gate += tl.load(at(bias, expert, bias_width, gates, 1), mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(at(bias, expert, bias_width, ups, 1), mask=inside, other=0.0).to(tl.float32)[None, :]
    if pre is not None:
        kind = pre.dtype.element_ty
        if EACH == 2:  # one store of adjacent pairs: two of every other value would hold an address per value
            pairs = 2 * column_tile * COLUMNS + tl.arange(0, 2 * COLUMNS)
            mask = live[:, None] & (pairs < bias_width)[None, :]
            pair = tl.interleave(gate.to(kind), up.to(kind))
            tl.store(at(pre, rows[:, None], bias_width, pairs[None, :], 1), pair, mask=mask)
        else:
            tl.store(at(pre, rows[:, None], bias_width, gates[None, :], 1), gate.to(kind), mask=stored)
            if GATED:
                tl.store(at(pre, rows[:, None], bias_width, ups[None, :], 1), up.to(kind), mask=stored)
    scale = tl.load(weights + assignment, mask=live, other=0.0).to(tl.float32)
    value = activate(gate, up, ACTIVATION, GATED) * scale[:, None]
    tl.store(at(hidden, rows[:, None], width_out, columns[None, :], 1), value.to(hidden.dtype.element_ty), mask=stored)
