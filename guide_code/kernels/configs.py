"""Tile sizes by architecture: one entry each, chosen by a table and never by a search at the first call.

The shapes follow from counting, and nothing here was timed on a GPU: the compiler's report (``python -m
guide_code.kernels.inspect``) shows that they fit; ``python -m guide_code.kernels.tune`` measures others.
Tiling as in grouped GEMMs of MegaBlocks, Gale et al. 2022 (arXiv:2211.15841), section 5.
Copy alone: needs torch and triton only.
"""

from functools import lru_cache
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Rows x columns of the output and length of one step of the reduction, per program."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


class Config(NamedTuple):
    """One tile per kernel. The three row kernels share ``rows``: they walk the same list of row tiles."""

    up: Tile
    down: Tile
    hidden_gradient: Tile
    weight_gradient: Tile

    @property
    def rows(self) -> int:
        """Assignments per tile of rows."""
        return self.up.rows


CONFIGS = {
    # Ampere (mma.sync). Also 8.6, 8.9 and 12.0, whose 99 KiB of shared memory bound the stages.
    80: Config(
        up=Tile(128, 64, 32, 8, 4),  # two accumulators, gate and up: 64 columns of each
        down=Tile(128, 128, 32, 8, 4),
        hidden_gradient=Tile(128, 64, 32, 8, 4),  # its epilogue holds gate, up and both gradients
        weight_gradient=Tile(128, 128, 32, 8, 4),
    ),
    # Hopper (wgmma: 64 rows per warp group, so 128 rows keep both groups of 4 warps at work; 227 KiB of shared memory).
    90: Config(
        up=Tile(128, 128, 64, 8, 3),
        down=Tile(128, 256, 64, 8, 3),
        hidden_gradient=Tile(128, 64, 64, 8, 3),
        weight_gradient=Tile(128, 256, 64, 8, 3),
    ),
    # Blackwell (tcgen05: accumulators live in tensor memory, 512 columns of 128 rows, not in registers).
    100: Config(
        up=Tile(128, 128, 64, 8, 3),
        down=Tile(128, 256, 64, 8, 3),
        hidden_gradient=Tile(128, 64, 64, 8, 3),
        weight_gradient=Tile(128, 256, 64, 8, 3),
    ),
}
"""For bfloat16 and float16 where an expert has more than ``FEW_ROWS`` rows on average."""

FEW = Config(
    # Reading weights is the cost, so a tile has few rows and asks for many bytes at once. mma.sync on every
    # architecture: wgmma and tcgen05 start at 64 rows.
    up=Tile(32, 64, 64, 4, 4),
    down=Tile(32, 64, 64, 4, 4),
    hidden_gradient=Tile(32, 64, 64, 4, 4),
    weight_gradient=Tile(128, 128, 32, 8, 3),
)
FEW_ROWS = 32

FLOAT32 = Config(
    # Exact float32 products run on the ordinary cores: accumulators and operands share the registers.
    up=Tile(64, 32, 16, 8, 3),
    down=Tile(64, 64, 16, 8, 3),
    hidden_gradient=Tile(64, 32, 16, 8, 3),
    weight_gradient=Tile(64, 64, 16, 8, 3),
)

UNALIGNED = FLOAT32
"""For widths that are no multiple of 16: Triton tells its compiler of no smaller factor, so values are loaded one by
one, each with an address in registers of its own. The large tiles would spill thousands of bytes."""

INTERPRETED = Config(*(Tile(16, 16, 16, 1, 1),) * 4)
"""For Triton's interpreter on a CPU: small, so that small problems have several tiles."""

DECODE_TOKENS = 16
"""The decode path takes at most as many tokens as one tile has rows: more would read a weight twice."""

DECODE = Tile(DECODE_TOKENS, 32, 128, 4, 4)
DECODE_FLOAT32 = Tile(DECODE_TOKENS, 32, 32, 4, 3)
DECODE_INTERPRETED = Tile(DECODE_TOKENS, 16, 16, 1, 1)


def choose_config(
    architecture: int, dtype: torch.dtype, num_assignments: int, down_shape: tuple[int, ...], activation: str
) -> Config:
    """The entry for one layer call; it depends on shapes only, so a CUDA graph captures it.

    Args:
        architecture: from :func:`architecture_of`; 0 is the interpreter.
        dtype: of the products.
        num_assignments: tokens times choices.
        down_shape: of the weight down: experts that share the assignments, hidden size, expert intermediate size.
        activation: of the experts.
    """
    if architecture == 0:
        return INTERPRETED
    if dtype == torch.float32:
        return FLOAT32
    num_experts, *widths = down_shape
    if any(width % 16 for width in widths):
        return UNALIGNED
    if num_assignments <= FEW_ROWS * num_experts:
        return FEW
    config = CONFIGS[architecture]
    if activation != "silu":  # erf and clamps next to two accumulators of 128 columns need more than 255 registers
        config = config._replace(up=config.up._replace(columns=64))
    return config


def choose_decode_tile(architecture: int, dtype: torch.dtype) -> Tile:
    """The tile of both decode kernels."""
    if architecture == 0:
        return DECODE_INTERPRETED
    return DECODE_FLOAT32 if dtype == torch.float32 else DECODE


@lru_cache
def architecture_of(device: torch.device) -> int:
    """80, 90 or 100: the table that serves a device; 0 for a CPU, which interprets."""
    if device.type != "cuda":
        return 0
    major, _ = torch.cuda.get_device_capability(device)
    return {9: 90, 10: 100}.get(major, 80)
