"""A kernel launch as data: run it, or record it to compile it for a GPU that is not here.

Every host function of this folder takes the function that launches, so that :mod:`.inspect` sees the very launches
that a GPU would get, from tensors on the meta device.
Copy alone: needs torch and triton only (with ``configs.py``).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .configs import Tile


class Launch(NamedTuple):
    """One kernel, its grid, its arguments by name and the tile it was configured with."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    tile: Tile


Launcher = Callable[[Launch], object]


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up: the number of tiles of length b that cover a."""
    return -(-a // b)


def run(launch: Launch) -> None:
    """Start the kernel on the current stream; nothing waits. An empty grid starts nothing.

    Raises:
        ValueError: more programs than a grid holds, 2^31 - 1.
    """
    if launch.grid[0] >= 2**31:
        raise ValueError(f"{launch.kernel.__name__}: grid {launch.grid} exceeds 2^31 - 1: split the tokens")
    if launch.grid[0] > 0:
        launch.kernel[launch.grid](**launch.args, num_warps=launch.tile.warps, num_stages=launch.tile.stages)
