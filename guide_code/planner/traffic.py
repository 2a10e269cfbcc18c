"""Bytes that a rank sends per step along every axis, and over which link: inside a machine or between machines.

Collectives are rings: a gather or a scattered sum of F bytes over n ranks sends F (n - 1) / n. A ring that leaves the
machine counts as traffic between machines altogether: its slowest link decides. Of an all-to-all each pair counts by
itself.
"""

from dataclasses import dataclass

from guide_code.parallel.expert import all_to_all_bytes
from guide_code.parallel.mesh import ParallelSizes


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends per step."""

    intra: float = 0.0
    """To ranks of the same machine."""
    inter: float = 0.0
    """To other machines."""


def neighbours(sizes: ParallelSizes, axis: str, gpus_per_node: int) -> tuple[int, int]:
    """Ranks along an axis ("fsdp": dp x cp), and how many of them, at the least, are on the machine of any of them."""
    size = sizes.dp * sizes.cp if axis == "fsdp" else getattr(sizes, axis)
    row = sizes.dp * sizes.cp * sizes.tp
    stride = {
        "tp": 1, "cp": sizes.tp, "fsdp": sizes.tp, "dp": sizes.cp * sizes.tp, "pp": row,
        "etp": 1, "ep": sizes.etp, "edp": sizes.ep * sizes.etp,
    }[axis]  # fmt: skip
    if size == 1 or gpus_per_node % (stride * size) == 0:
        return size, size
    aligned = gpus_per_node % stride == 0 and stride * size % gpus_per_node == 0
    return size, gpus_per_node // stride if aligned else 1


def ring(sizes: ParallelSizes, axis: str, gpus_per_node: int, full_bytes: float) -> Traffic:
    """Of gathers, or sums that are scattered, of so many bytes in all."""
    size, near = neighbours(sizes, axis, gpus_per_node)
    sent = full_bytes * (size - 1) / size
    return Traffic(intra=sent) if near == size else Traffic(inter=sent)


def exchange(
    sizes: ParallelSizes,
    gpus_per_node: int,
    *,
    tokens: int,
    top_k: int,
    hidden_size: int,
    num_experts: int,
    element_size: int,
    forwards: int,
    backwards: int,
) -> Traffic:
    """All-to-alls along ep of an even load: ``tokens`` of this rank in each pass of one layer."""
    size, near = neighbours(sizes, "ep", gpus_per_node)
    if size == 1:
        return Traffic()
    rows = tokens * top_k
    once = all_to_all_bytes(rows, rows, hidden_size, num_experts, element_size=element_size)
    total = once * (forwards + backwards) - backwards * num_experts * 8
    return Traffic(intra=total * (near - 1) / size, inter=total * (size - near) / size)


def point_to_point(sizes: ParallelSizes, gpus_per_node: int, sent: float) -> Traffic:
    """To the next stage."""
    size, near = neighbours(sizes, "pp", gpus_per_node)
    return Traffic(intra=sent) if near == size else Traffic(inter=sent)
