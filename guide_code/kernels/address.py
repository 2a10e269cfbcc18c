"""Addresses in 64 bits, and which tile a program computes.

``row * stride`` leaves 32 bits at 131,072 tokens x 8 choices x 2,048 values, so every product of an index with a
stride in this folder is written here and nowhere else; a test reads the syntax trees.
Copy alone: needs torch and triton only. The grouped walk over tiles is that of Triton's matmul tutorial; row tiles
that never cross experts are those of MegaBlocks, Gale et al. 2022 (arXiv:2211.15841), section 5.
"""

import triton
import triton.language as tl


@triton.jit
def at(base, row, row_stride, column, column_stride):
    """Address of (row, column); the indices broadcast."""
    return base + row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride


@triton.jit
def matrix(base, index, stride):
    """Address where matrix ``index`` of a stack begins."""
    return base + index.to(tl.int64) * stride


@triton.jit
def advance(pointers, steps, stride):
    """The same block, ``steps`` rows or columns further."""
    return pointers + tl.cast(stride, tl.int64) * steps


@triton.jit
def tile_of_program(num_row_tiles, num_column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile). Eight row tiles share a column tile before the next: it stays in the L2 cache."""
    program = tl.program_id(0)
    per_group = GROUP * num_column_tiles
    first = program // per_group * GROUP
    height = tl.minimum(num_row_tiles - first, GROUP)
    return first + program % per_group % height, program % per_group // height


@triton.jit
def rows_of_tile(tiles, offsets, expert, row_tile, num_row_tiles, ROWS: tl.constexpr):
    """(sorted rows, which of them exist) of a row tile that belongs to ``expert``."""
    rows = tl.load(tiles + num_row_tiles + row_tile) + tl.arange(0, ROWS)
    return rows, rows < tl.load(offsets + expert + 1)
