"""From routing to an order by expert, on the device: histogram, offsets, stable permutation, list of row tiles.

A counting sort in four kernels. No atomics, so the same order on every call; no value goes back to the host, so a
CUDA graph captures it. The list of row tiles is as long as the worst routing needs; tiles past the last say so.
Dropless tiles as in MegaBlocks, Gale et al. 2022 (arXiv:2211.15841), section 5, without its padded copy.
Copy alone: needs torch and triton only (with the folder's other files).

T tokens, K choices per token, N = T*K assignments, E experts, M row tiles, C chunks of assignments.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .address import at
from .configs import Tile
from .launch import Launch, Launcher, ceil_div, run

CHUNK = 128


class Order(NamedTuple):
    """Assignments grouped by expert. Assignment n belongs to token n // K and slot n % K."""

    assignments: Tensor
    """(N,) int32: at each sorted row its assignment, in their own order within an expert; the tail beyond
    ``offsets[E]`` is unwritten."""
    offsets: Tensor
    """(E + 1,) int32: expert e has the rows from offsets[e] to offsets[e + 1]."""
    tiles: Tensor
    """(2, M) int32: expert and first row of each row tile; expert -1, row 0: no tile."""


def num_row_tiles(num_assignments: int, num_experts: int, rows: int) -> int:
    """Row tiles M of the routing that needs most: one row on as many experts as there can be, the rest on one."""
    busy = min(num_assignments, num_experts)
    return busy + (num_assignments - busy) // rows


def order_by_expert(ids_TK: Tensor, num_experts: int, rows: int, *, launch: Launcher = run) -> Order:
    """Group assignments by expert; ids outside [0, E) fall out.

    Args:
        ids_TK: contiguous, any integer type.
        num_experts: number E.
        rows: rows per tile.
        launch: starts or records the kernels.
    """
    num_assignments, device = ids_TK.numel(), ids_TK.device
    chunks = ceil_div(num_assignments, CHUNK)
    num_tiles = num_row_tiles(num_assignments, num_experts, rows)
    new = lambda *shape: torch.empty(shape, dtype=torch.int32, device=device)
    starts_EC, totals_E = new(num_experts, chunks), new(num_experts)
    order = Order(new(num_assignments), new(num_experts + 1), new(2, num_tiles))
    experts = triton.next_power_of_2(num_experts + 1)
    common = {"num_experts": num_experts, "num_chunks": chunks}
    ids = {"ids": ids_TK, "num_assignments": num_assignments, "CHUNK": CHUNK}
    tile = Tile(CHUNK, 1, 1, 4, 1)
    launch(Launch(count_kernel, (chunks,), {**ids, **common, "counts": starts_EC, "EXPERTS": experts}, tile))
    launch(
        Launch(scan_kernel, (num_experts,), {"starts": starts_EC, "totals": totals_E, **common, "BLOCK": 1024}, tile)
    )
    args = {"totals": totals_E, "offsets": order.offsets, "tiles": order.tiles, "num_tiles": num_tiles}
    launch(
        Launch(
            tiles_kernel, (num_experts,), {**args, "num_experts": num_experts, "ROWS": rows, "EXPERTS": experts}, tile
        )
    )
    args = {"starts": starts_EC, "offsets": order.offsets, "assignments": order.assignments}
    launch(Launch(place_kernel, (chunks,), {**ids, **common, **args}, tile))
    return order


@triton.jit
def count_kernel(ids, counts, num_assignments, num_experts, num_chunks, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """counts[e, c]: how often chunk c names expert e."""
    chunk = tl.program_id(0)
    places = chunk * CHUNK + tl.arange(0, CHUNK)
    id = tl.load(ids + places, mask=places < num_assignments, other=-1).to(tl.int64)
    valid = (id >= 0) & (id < num_experts)
    count = tl.histogram(tl.where(valid, id, 0).to(tl.int32), EXPERTS, mask=valid)
    experts = tl.arange(0, EXPERTS)
    tl.store(at(counts, experts, num_chunks, chunk, 1), count, mask=experts < num_experts)


@triton.jit
def scan_kernel(starts, totals, num_experts, num_chunks, BLOCK: tl.constexpr):
    """Counts of one expert by chunk become, in place, how many rows of it earlier chunks hold; and their total."""
    expert = tl.program_id(0)
    total = tl.full((), 0, tl.int32)
    for first in range(0, num_chunks, BLOCK):
        chunks = first + tl.arange(0, BLOCK)
        pointers = at(starts, expert, num_chunks, chunks, 1)
        count = tl.load(pointers, mask=chunks < num_chunks, other=0)
        tl.store(pointers, total + tl.cumsum(count, 0) - count, mask=chunks < num_chunks)
        total += tl.sum(count, 0)
    tl.store(totals + expert, total)


@triton.jit
def tiles_kernel(totals, offsets, tiles, num_tiles, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """One expert's offset and row tiles; the last expert ends the list."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    totals_E = tl.load(totals + experts, mask=experts < num_experts, other=0)
    before = tl.where(experts < expert, totals_E, 0)
    first_row = tl.sum(before, 0)
    first_tile = tl.sum((before + ROWS - 1) // ROWS, 0)
    total = tl.load(totals + expert)
    end_tile = first_tile + (total + ROWS - 1) // ROWS
    tl.store(offsets + expert, first_row)
    last = expert == num_experts - 1
    tl.store(offsets + num_experts, first_row + total, mask=last)
    for first in range(first_tile, tl.where(last, num_tiles, end_tile), 128):
        tile = first + tl.arange(0, 128)
        mine = tile < end_tile
        mask = mine | (last & (tile < num_tiles))
        row = first_row + (tile - first_tile) * ROWS
        tl.store(tiles + tile, tl.where(mine, expert, -1), mask=mask)
        tl.store(tiles + num_tiles + tile, tl.where(mine, row, 0), mask=mask)


@triton.jit
def place_kernel(ids, starts, offsets, assignments, num_assignments, num_experts, num_chunks, CHUNK: tl.constexpr):
    """Each assignment to its row: expert's offset, plus rows of earlier chunks, plus equal ids before it here."""
    chunk = tl.program_id(0)
    here = tl.arange(0, CHUNK)
    places = chunk * CHUNK + here
    id = tl.load(ids + places, mask=places < num_assignments, other=-1).to(tl.int64)
    valid = (id >= 0) & (id < num_experts)
    expert = tl.where(valid, id, 0).to(tl.int32)
    earlier = (id[:, None] == id[None, :]) & (here[None, :] < here[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    row = tl.load(offsets + expert) + tl.load(at(starts, expert, num_chunks, chunk, 1)) + rank
    tl.store(assignments + row, places, mask=valid)
