"""Bytes that a launch asks of memory, counted from its tiles, against the least that its result could need.

Counted is what the programs' loads and stores request, masks taken into account; the L2 cache turns repeated requests
into fewer transfers, so the bytes that memory really moves lie between the two numbers. Small index arrays are left
out. Routing is taken as balanced. Counting tile re-reads as in Gale et al. 2022 (arXiv:2211.15841), section 5.
Copy alone: needs torch and triton only (with ``launch.py`` and ``configs.py``).
"""

from typing import Any, NamedTuple

from torch import Tensor

from .launch import Launch, ceil_div


class Traffic(NamedTuple):
    """Bytes."""

    counted: int
    least: int


def traffic(launch: Launch) -> Traffic | None:
    """Of one launch; None for kernels whose arguments are indices only.

    Args:
        launch: recorded or real; shapes are read, values are not.
    """
    name = launch.kernel.__name__.removesuffix("_kernel")
    args, tile = launch.args, launch.tile
    if name in ("up", "down", "hidden_gradient"):
        return _rows(name, args, tile.rows, tile.columns)
    if name in ("decode_up", "decode_down"):
        return _decode(name, args, tile.columns)
    if name == "weight_gradient":
        return _weight_gradient(args)
    if name == "combine":
        each = _bytes(args["rows"]) + _bytes(args["out"])
        return Traffic(each, each)
    if name == "combine_weight_gradient":
        each = _bytes(args["parts"]) + _bytes(args["out"])
        bias = args["bias"]
        if bias is None:
            return Traffic(each, each)
        row = args["width"] * bias.element_size()
        counted = each + 2 * args["num_assignments"] * row
        return Traffic(counted, each + _bytes(args["grad"]) + _bytes(bias))
    if name == "bias_gradient":
        rows, least = args["rows_in"], _bytes(args["rows_in"]) + _bytes(args["out"])
        if args["weights"] is None:
            return Traffic(least, least)
        return Traffic(least + (args["top_k"] - 1) * _bytes(rows), least)
    return None


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _rows(name: str, args: dict[str, Any], rows: int, columns: int) -> Traffic:
    """A row tile reads its rows and its expert's slice of the weight, once per tile of the other side."""
    weight = args["weight"]
    source = args[{"up": "x", "down": "rows_in", "hidden_gradient": "grad"}[name]]
    outputs = {"up": ("hidden", "pre"), "down": ("out",), "hidden_gradient": ("pre", "grad_pre", "hidden", "parts")}
    num_experts, num_assignments = len(weight), args["assignments"].numel()
    row_tiles = num_experts * ceil_div(num_assignments, num_experts * rows)
    column_tiles = ceil_div(args["width_out"], columns)
    written = sum(_bytes(args[output]) for output in outputs[name])
    row = args["width_in"] * source.element_size()
    counted = num_assignments * row * column_tiles + row_tiles * _bytes(weight) // num_experts + written
    return Traffic(counted, _bytes(source) + _bytes(weight) + written)


def _decode(name: str, args: dict[str, Any], columns: int) -> Traffic:
    """As many experts as there are assignments, or all: each one's weight once, however many tokens chose it."""
    weight, num_assignments = args["weight"], args["ids"].numel()
    chosen = min(num_assignments, len(weight)) * _bytes(weight) // len(weight)
    source, written = args["x" if name == "decode_up" else "hidden"], args["hidden" if name == "decode_up" else "out"]
    row = args["width_in"] * source.element_size()
    counted = chosen + num_assignments * row * ceil_div(args["width_out"], columns) + _bytes(written)
    return Traffic(counted, chosen + _bytes(source) + _bytes(written))


def _weight_gradient(args: dict[str, Any]) -> Traffic:
    """Each tile of the result reads all rows of its expert on both sides."""
    num_assignments = args["assignments"].numel()
    left, right, written = args["left"], args["right"], _bytes(args["out"])
    read_left = num_assignments * args["width_left"] * left.element_size() * args["tiles_right"]
    read_right = num_assignments * args["width_right"] * right.element_size() * args["tiles_left"]
    return Traffic(read_left + read_right + written, _bytes(left) + _bytes(right) + written)
