"""Who works with whom: sizes by name make one device mesh for dense layers and another, folded, for experts.

Liu et al. 2025, MoE Parallel Folding (arXiv:2504.14960): both meshes hold the same ranks of a pipeline stage, but the
expert mesh forgets how dp, cp and tp split them and cuts the row anew into edp, ep and etp. So ``ep`` may span
dp x cp x tp, and a model may use tp for attention and none inside its experts.
Copy alone: needs torch only.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")
"""Outermost first: neighbours along the last axis have consecutive ranks, so it stays inside one machine."""

_SHARE = {
    "pp": "send activations from stage to stage",
    "dp": "hold the same dense parameters, other sequences",
    "cp": "hold parts of the same sequences",
    "tp": "hold parts of the same dense matrices",
    "edp": "hold the same experts, and average their gradients",
    "ep": "hold different experts, and exchange tokens",
    "etp": "hold parts of the same expert's matrices",
}


@dataclass(frozen=True)
class ParallelSizes:
    """Ranks along each axis. ``edp``, the copies of each expert, follows: dp x cp x tp / (ep x etp).

    Raises:
        ValueError: a size is not a positive integer, or ep x etp does not divide dp x cp x tp.
    """

    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Replicas of the dense layers, sharded or not."""
    cp: int = 1
    """Parts of each sequence (context parallelism)."""
    tp: int = 1
    """Parts of each dense matrix."""
    ep: int = 1
    """Groups of experts."""
    etp: int = 1
    """Parts of each expert's matrices."""

    def __post_init__(self):
        for name, size in vars(self).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} counts ranks: it must be a positive integer, got {size!r}")
        row = self.dp * self.cp * self.tp
        if row % (self.ep * self.etp):
            raise ValueError(
                f"ep x etp must divide dp x cp x tp, the ranks of a pipeline stage: ep={self.ep} x etp={self.etp} = "
                f"{self.ep * self.etp} does not divide dp={self.dp} x cp={self.cp} x tp={self.tp} = {row}. "
                f"Nearest possible: {self._nearest(row)}"
            )

    def _nearest(self, row: int) -> str:
        """One size changed, each to the closest that works below and above."""
        ways = {}
        if row % self.etp == 0:
            ways["ep"] = _around(self.ep, (n for n in range(1, row + 1) if row % (n * self.etp) == 0))
        if row % self.ep == 0:
            ways["etp"] = _around(self.etp, (n for n in range(1, row + 1) if row % (self.ep * n) == 0))
        rest, experts = self.cp * self.tp, self.ep * self.etp
        ways["dp"] = _around(self.dp, (n for n in range(1, self.dp + experts + 1) if n * rest % experts == 0))
        return ", ".join(f"{name}={size}" for name, sizes in ways.items() for size in sizes)

    @property
    def edp(self) -> int:
        """Copies of each expert."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.cp * self.tp

    def shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Sizes of the named axes, in that order."""
        return tuple(getattr(self, axis) for axis in axes)


def check_world_size(sizes: ParallelSizes, world_size: int) -> None:
    """Refuse to start on another number of ranks.

    Raises:
        ValueError: pp x dp x cp x tp is not ``world_size``; the message names a dp or a number of ranks that works.
    """
    if sizes.world_size == world_size:
        return
    without_dp = sizes.pp * sizes.cp * sizes.tp
    low = world_size // without_dp
    if world_size % without_dp == 0:
        fix = f"dp={low}"
    else:
        fix = " or ".join(f"dp={n} on {n * without_dp} ranks" for n in (low, low + 1) if n)
    raise ValueError(
        f"pp x dp x cp x tp must be the number of ranks: pp={sizes.pp} x dp={sizes.dp} x cp={sizes.cp} x "
        f"tp={sizes.tp} = {sizes.world_size}, but {world_size} were started. Nearest possible: {fix}"
    )


def check_experts(sizes: ParallelSizes, num_experts: int) -> int:
    """Experts of one rank, L.

    Raises:
        ValueError: they cannot be split evenly over ``ep``.
    """
    if num_experts % sizes.ep:
        possible = _around(sizes.ep, (n for n in range(1, num_experts + 1) if num_experts % n == 0))
        near = ", ".join(f"ep={n}" for n in possible)
        raise ValueError(
            f"ep must divide the number of experts: ep={sizes.ep} does not divide num_experts={num_experts}. "
            f"Nearest possible: {near}"
        )
    return num_experts // sizes.ep


def build_meshes(sizes: ParallelSizes, device_type: str) -> tuple[DeviceMesh, DeviceMesh]:
    """The dense mesh (pp, dp, cp, tp) and the expert mesh (pp, edp, ep, etp) over all ranks.

    A collective call: every rank of the default process group makes it, with the same sizes.

    Args:
        sizes: ranks along each axis.
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: as :func:`check_world_size`.
    """
    check_world_size(sizes, dist.get_world_size())
    dense = init_device_mesh(device_type, sizes.shape(DENSE_AXES), mesh_dim_names=DENSE_AXES)
    expert = init_device_mesh(device_type, sizes.shape(EXPERT_AXES), mesh_dim_names=EXPERT_AXES)
    return dense, expert


def rank_groups(sizes: ParallelSizes, axis: str) -> list[list[int]]:
    """The ranks that differ only along ``axis``, group by group; no process group is needed to know.

    Raises:
        ValueError: no axis has that name.
    """
    axes = DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
    if axis not in axes:
        raise ValueError(f"axis must be one of {sorted(_SHARE)}, got {axis!r}")
    shape, at = sizes.shape(axes), axes.index(axis)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*map(range, shape))):
        groups.setdefault(place[:at] + place[at + 1 :], []).append(rank)
    return list(groups.values())


def picture(sizes: ParallelSizes, num_experts: int | None = None, max_groups: int = 16) -> str:
    """Which ranks share what, as text: one line per axis, one pair of bars per group.

    Args:
        sizes: ranks along each axis.
        num_experts: also say which experts the ranks of a group along ``ep`` hold.
        max_groups: groups and ranks of a group shown before "...".

    Raises:
        ValueError: as :func:`check_experts`.
    """
    meshes = (("dense layers", DENSE_AXES), ("experts", EXPERT_AXES))
    lines = [f"{sizes.world_size} ranks"]
    for title, axes in meshes:
        shape = sizes.shape(axes)
        assert prod(shape) == sizes.world_size
        lines += ["", f"{title}: " + " x ".join(f"{a} {n}" for a, n in zip(axes, shape, strict=True))]
        for axis, size in zip(axes, shape, strict=True):
            if size > 1:
                groups = [" ".join(_cut(map(str, group), max_groups)) for group in rank_groups(sizes, axis)]
                lines.append(f"  {axis:>3}  |{'|'.join(_cut(groups, max_groups))}|  {_SHARE[axis]}")
    if num_experts is not None:
        each = check_experts(sizes, num_experts)
        held = [f"{i}: {each * i}-{each * i + each - 1}" if each > 1 else f"{i}: {i}" for i in range(sizes.ep)]
        lines += ["", f"experts by place along ep: {', '.join(_cut(held, max_groups))}"]
    return "\n".join(lines)


def _around(wanted: int, possible: Iterable[int]) -> list[int]:
    """The closest at or below and the closest above."""
    sizes = sorted(possible)
    return [n for n in sizes if n <= wanted][-1:] + [n for n in sizes if n > wanted][:1]


def _cut(words: Iterable[str], most: int) -> list[str]:
    words = list(words)
    return words if len(words) <= most else [*words[:most], "..."]
