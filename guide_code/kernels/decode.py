"""Few tokens: no sorting, each chosen expert's weights read once, whatever number of tokens chose it.

At most as many tokens as a tile has rows (``DECODE_TOKENS``), so all tokens form one tile and an expert is one
program per column tile: the program of the first assignment that names it; the others leave at once. The time to
beat is that of streaming the chosen weights (SonicMoE, Guo et al. 2025, arXiv:2512.14080, on the cost of many small
experts). Forward only.
Copy alone: needs torch and triton only (with the folder's other files).

T tokens, D hidden size, I expert intermediate size, K choices, N = T*K assignments, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import activate
from .address import advance, at, matrix
from .configs import Tile
from .down import combine
from .launch import Launch, Launcher, ceil_div, run
from .up import gate_layout


def decode(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    tile: Tile,
    dtype: torch.dtype,
    *,
    activation: str,
    gated: bool,
    launch: Launcher = run,
) -> Tensor:
    """(T, D) in ``dtype``: as the main path, the same numbers but for the order of the sums.

    Args:
        x_TD: at most ``tile.rows`` tokens; columns adjacent in memory.
        ids_TK: contiguous.
        weights_TK: contiguous.
        up_weight: (E, J, D), any strides.
        down_weight: (E, D, I), any strides.
        up_bias: (E, J), contiguous.
        down_bias: (E, D), contiguous.
        tile: sizes.
        dtype: of the result.
        activation: as in :func:`guide_code.experts.grouped.grouped_experts`.
        gated: likewise.
        launch: starts or records the kernels.
    """
    num_tokens, top_k = ids_TK.shape
    assert num_tokens <= tile.rows
    num_experts, hidden_size, width = down_weight.shape
    hidden_NI = x_TD.new_empty(ids_TK.numel(), width)
    rows_ND = x_TD.new_empty(ids_TK.numel(), hidden_size)
    common = {
        **{"ids": ids_TK, "weights": weights_TK, "num_tokens": num_tokens, "top_k": top_k},
        **{"num_experts": num_experts, "CHOICES": triton.next_power_of_2(top_k)},
        **{"ASSIGNMENTS": triton.next_power_of_2(ids_TK.numel())},
        **{"ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step},
    }
    args = {
        **{"x": x_TD, "weight": up_weight, "bias": up_bias, "hidden": hidden_NI},
        **{"width_in": hidden_size, "width_out": width, "x_stride": x_TD.stride(0)},
        **{"num_column_tiles": ceil_div(width, tile.columns), "EVEN": hidden_size % tile.step == 0},
        **dict(zip(("weight_stride_e", "weight_stride_out", "weight_stride_in"), up_weight.stride(), strict=True)),
        **gate_layout(activation, gated, width),
        **{"ACTIVATION": activation, "GATED": gated},
    }
    programs = ids_TK.numel() * ceil_div(width, tile.columns)
    launch(Launch(decode_up_kernel, (programs,), {**common, **args}, tile))
    args = {
        **{"hidden": hidden_NI, "weight": down_weight, "bias": down_bias, "out": rows_ND},
        **{"width_in": width, "width_out": hidden_size},
        **{"num_column_tiles": ceil_div(hidden_size, tile.columns), "EVEN": width % tile.step == 0},
        **dict(zip(("weight_stride_e", "weight_stride_out", "weight_stride_in"), down_weight.stride(), strict=True)),
    }
    programs = ids_TK.numel() * ceil_div(hidden_size, tile.columns)
    launch(Launch(decode_down_kernel, (programs,), {**common, **args}, tile))
    return combine(rows_ND, ids_TK, num_experts, dtype, merged=True, launch=launch)


@triton.jit
def _is_first(ids, place, expert, ASSIGNMENTS: tl.constexpr):
    """Whether no earlier assignment names the expert."""
    places = tl.arange(0, ASSIGNMENTS)
    earlier = tl.load(ids + places, mask=places < place, other=-1).to(tl.int64)
    return tl.sum((earlier == expert).to(tl.int32), 0) == 0


@triton.jit
def _rows_of_expert(ids, weights, expert, num_tokens, top_k, ROWS: tl.constexpr, CHOICES: tl.constexpr):
    """(assignment, whether there is one, combine weight) of each token that chose the expert.

    A token that names the expert twice has the row of its first slot and the sum of the weights.
    """
    tokens = tl.arange(0, ROWS)
    slots = tl.arange(0, CHOICES)
    mask = (tokens < num_tokens)[:, None] & (slots < top_k)[None, :]
    chosen = tl.load(at(ids, tokens[:, None], top_k, slots[None, :], 1), mask=mask, other=-1).to(tl.int64) == expert
    slot = tl.min(tl.where(chosen, slots[None, :], CHOICES), 1)
    scale = tl.load(at(weights, tokens[:, None], top_k, slots[None, :], 1), mask=chosen, other=0.0).to(tl.float32)
    return tokens * top_k + slot, slot < CHOICES, tl.sum(scale, 1)


@triton.jit
def decode_up_kernel(
    x,
    ids,
    weights,
    weight,
    bias,
    hidden,
    num_tokens,
    top_k,
    num_experts,
    width_in,
    width_out,
    first_up,
    x_stride,
    weight_stride_e,
    weight_stride_out,
    weight_stride_in,
    num_column_tiles,
    EACH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    ASSIGNMENTS: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """hidden[n, i] = weight of n * activation(x[token of n] @ weight[expert of n].T), rows by assignment."""
    place = tl.program_id(0) // num_column_tiles
    expert = tl.load(ids + place).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    if not _is_first(ids, place, expert, ASSIGNMENTS):
        return
    assignment, live, scale = _rows_of_expert(ids, weights, expert, num_tokens, top_k, ROWS, CHOICES)
    columns = tl.program_id(0) % num_column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width_out
    gates = columns * EACH
    ups = gates + first_up
    steps = tl.arange(0, STEP)

    x_pointers = at(x, tl.arange(0, ROWS)[:, None], x_stride, steps[None, :], 1)
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

    if bias is not None:
        bias_width = width_out * (2 if GATED else 1)
        gate += tl.load(at(bias, expert, bias_width, gates, 1), mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(at(bias, expert, bias_width, ups, 1), mask=inside, other=0.0).to(tl.float32)[None, :]
    value = activate(gate, up, ACTIVATION, GATED) * scale[:, None]
    pointers = at(hidden, assignment[:, None], width_out, columns[None, :], 1)
    tl.store(pointers, value.to(hidden.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def decode_down_kernel(
    hidden,
    ids,
    weights,
    weight,
    bias,
    out,
    num_tokens,
    top_k,
    num_experts,
    width_in,
    width_out,
    weight_stride_e,
    weight_stride_out,
    weight_stride_in,
    num_column_tiles,
    EVEN: tl.constexpr,
    ASSIGNMENTS: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """out[n] = hidden[n] @ weight[expert of n].T + weight of n * bias[expert of n], rows by assignment."""
    place = tl.program_id(0) // num_column_tiles
    expert = tl.load(ids + place).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    if not _is_first(ids, place, expert, ASSIGNMENTS):
        return
    assignment, live, scale = _rows_of_expert(ids, weights, expert, num_tokens, top_k, ROWS, CHOICES)
    columns = tl.program_id(0) % num_column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width_out
    steps = tl.arange(0, STEP)

    hidden_pointers = at(hidden, assignment[:, None], width_in, steps[None, :], 1)
    weight_e = matrix(weight, expert, weight_stride_e)
    weight_pointers = at(weight_e, columns[None, :], weight_stride_out, steps[:, None], weight_stride_in)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width_in, STEP):
        if EVEN:
            hidden_mask = live[:, None]
            weight_mask = inside[None, :]
        else:
            hidden_mask = live[:, None] & (first + steps < width_in)[None, :]
            weight_mask = inside[None, :] & (first + steps < width_in)[:, None]
        hidden_block = tl.load(hidden_pointers, mask=hidden_mask, other=0.0)
        weight_block = tl.load(weight_pointers, mask=weight_mask, other=0.0)
        total = tl.dot(hidden_block, weight_block, total, input_precision="ieee")
        hidden_pointers = advance(hidden_pointers, STEP, 1)
        weight_pointers = advance(weight_pointers, STEP, weight_stride_in)

    if bias is not None:
        bias_row = tl.load(at(bias, expert, width_out, columns, 1), mask=inside, other=0.0).to(tl.float32)
        total += scale[:, None] * bias_row[None, :]
    pointers = at(out, assignment[:, None], width_out, columns[None, :], 1)
    tl.store(pointers, total.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])
