"""Experts alone, the router left out: our backends against those of transformers and against the floors.

Before anything is timed, outputs and gradients are compared with the same layer in float64. What disagrees gets no time
and no part in a ratio.

T tokens, D hidden size, K choices per token.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guide_code.benchmarks.candidates import Candidate, Part, Weights, layers, parts
from guide_code.benchmarks.shapes import Shape, choices
from guide_code.benchmarks.timing import available_bytes, peak_extra_bytes, take_turns
from guide_code.experts.auto import choose
from guide_code.experts.loop import loop_experts

MODES = ("forward", "step")
"""A step is forward and backward: gradients of tokens, combine weights and all parameters."""

TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest relative root mean square of the difference from float64 that counts as agreement."""

VARIANTS = 4
"""Inputs that take turns, each with a routing of its own."""


class Call(NamedTuple):
    """The arguments of a layer and the gradient that comes back to it."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    cotangent_TD: Tensor


class Settings(NamedTuple):
    """How long and where."""

    repeats: int = 40
    seconds: float = 10.0
    """Of one candidate in one case; what is slower takes fewer turns than ``repeats``."""
    device: str = "cpu"
    memory: bool = True
    """Measure the peak extra memory too."""
    only: tuple[str, ...] = ()
    """Names of candidates; none: all of them."""


def measure(
    shapes: list[Shape],
    tokens: list[int],
    dtypes: list[torch.dtype],
    modes: list[str],
    routings: list[str],
    settings: Settings,
) -> Iterator[dict[str, Any]]:
    """One case after the other, the shapes outermost.

    Raises:
        ValueError: a number of tokens is below 1, a mode or a routing not known.
    """
    if bad := [count for count in tokens if count < 1]:
        raise ValueError(f"tokens={bad} must be at least 1")
    if bad := [mode for mode in modes if mode not in MODES]:
        raise ValueError(f"mode must be one of {list(MODES)}, got {bad}")
    for shape, dtype in itertools.product(shapes, dtypes):
        weights = Weights.random(shape, dtype, torch.device(settings.device))
        for mode, routing, count in itertools.product(modes, routings, tokens):
            yield measure_case(weights, shape, count, routing, mode, settings)


def measure_case(
    weights: Weights, shape: Shape, num_tokens: int, routing: str, mode: str, settings: Settings
) -> dict[str, Any]:
    """Check and time every candidate on the same inputs; what the JSON file holds of one case."""
    dtype, device = weights.down_proj.dtype, torch.device(settings.device)
    calls = [_call(shape, num_tokens, routing, seed, weights) for seed in range(VARIANTS)]
    room = available_bytes() // 3
    found = layers(weights, shape, num_tokens, room)
    if settings.only:
        found = {name: candidate for name, candidate in found.items() if name in settings.only}
    rows: dict[str, dict[str, Any]] = {}
    timed: dict[str, Callable[[int], object]] = {}
    reference = _reference(weights, calls[0], mode)
    for name, candidate in found.items():
        rows[name] = {"kind": candidate.kind, "skipped": candidate.obstacle}
        if candidate.run is None:
            continue
        error = _error(candidate, weights, calls[0], mode, reference)
        rows[name] |= {"error": error, "agrees": error <= TOLERANCE[dtype]}
        if rows[name]["agrees"]:
            timed[name] = _timed(candidate, weights, calls, mode)
    del reference
    for name, part in parts(weights, shape, calls[0].ids_TK).items():
        rows[name] = {"kind": part.kind, "skipped": ""}
        timed[name] = _part(part, mode)
        timed[name](0)
    limits = {"repeats": settings.repeats, "seconds": settings.seconds, "device": device}
    for name, timing in take_turns(timed, **limits).items():
        rows[name] |= timing._asdict()
        if settings.memory and rows[name]["kind"] in ("ours", "peer"):
            rows[name]["peak_bytes"] = peak_extra_bytes(lambda run=timed[name]: run(0), device)
    chosen = choose(num_tokens, shape.top_k, shape.num_experts, dtype=dtype, device=device, training=mode == "step")
    case = {
        "shape": shape._asdict(),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": num_tokens,
        "routing": routing,
        "mode": mode,
        "active_experts": len(calls[0].ids_TK.unique()),
        "auto": chosen._asdict(),
    }
    return case | compare(rows) | {"rows": rows}


def compare(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Add the ratios to each row; returns floor and best peer of a case.

    Only what was timed takes part, and only what agreed was timed.
    """

    def fastest(names: list[str]) -> str | None:
        return min((n for n in names if "median_ms" in rows[n]), key=lambda n: rows[n]["median_ms"], default=None)

    dense, stream = fastest([n for n in rows if n.startswith("dense")]), fastest([n for n in rows if n == "stream"])
    floors = [name for name in (dense, stream) if name]
    floor = max(floors, key=lambda n: rows[n]["median_ms"], default=None)
    peer = fastest([n for n, row in rows.items() if row["kind"] == "peer"])
    for row in rows.values():
        if "median_ms" in row:
            row["to_floor"] = row["median_ms"] / rows[floor]["median_ms"] if floor else None
            row["to_best_peer"] = row["median_ms"] / rows[peer]["median_ms"] if peer else None
    return {"floor": floor, "best_peer": peer}


def disagreements(case: dict[str, Any]) -> list[str]:
    """What is to be told of candidates that do not compute the same."""
    size = f"{case['shape']['name']}, {case['dtype']}, {case['tokens']} tokens, {case['routing']}, {case['mode']}"
    return [
        f"{size}: {name} differs from float64 by {row['error']:.1e} (relative RMS), so no speed is given for it"
        for name, row in case["rows"].items()
        if not row.get("agrees", True)
    ]


def _call(shape: Shape, num_tokens: int, routing: str, seed: int, weights: Weights) -> Call:
    generator = torch.Generator().manual_seed(1000 + seed)
    dtype, device = weights.down_proj.dtype, weights.down_proj.device

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device=device, dtype=dtype)

    ids_TK = choices(num_tokens, shape, routing, generator).to(device)
    weights_TK = torch.rand(ids_TK.shape, generator=generator).add_(0.1)
    weights_TK = (weights_TK / weights_TK.sum(dim=1, keepdim=True)).to(device=device, dtype=dtype)
    x_TD, cotangent_TD = random(num_tokens, shape.hidden_size), random(num_tokens, shape.hidden_size)
    return Call(x_TD.requires_grad_(), ids_TK, weights_TK.requires_grad_(), cotangent_TD)


def _run(candidate: Candidate, weights: Weights, call: Call, mode: str) -> tuple[Tensor, ...]:
    """The output, and in a step the gradients of tokens, combine weights, gate_up_proj and down_proj."""
    assert candidate.run is not None
    with torch.set_grad_enabled(mode == "step"):
        out_TD = candidate.run(call.x_TD, call.ids_TK, call.weights_TK)
        if mode == "forward":
            return (out_TD,)
        return out_TD, *torch.autograd.grad(out_TD, [call.x_TD, call.weights_TK, *weights], call.cotangent_TD)


def _timed(candidate: Candidate, weights: Weights, calls: list[Call], mode: str) -> Callable[[int], object]:
    return lambda turn: _run(candidate, weights, calls[turn % len(calls)], mode)


def _part(part: Part, mode: str) -> Callable[[int], object]:
    leaf = part.leaves[0]
    with torch.no_grad():
        cotangents = [torch.randn_like(out) for out in part.run()]

    def run(turn: int) -> object:
        with torch.set_grad_enabled(mode == "step"):
            outputs = part.run()
        if mode == "forward":
            return outputs
        grads = torch.autograd.grad(outputs, part.leaves, cotangents)
        return grads, torch.empty(part.written, dtype=leaf.dtype, device=leaf.device).fill_(0.0)

    return run


def _reference(weights: Weights, call: Call, mode: str) -> tuple[Tensor, ...]:
    wide = Weights(*(torch.nn.Parameter(w.detach().double()) for w in weights))
    x_TD, weights_TK = (t.detach().double().requires_grad_() for t in (call.x_TD, call.weights_TK))
    same = Call(x_TD, call.ids_TK, weights_TK, call.cotangent_TD.double())
    loop = Candidate("ours", lambda x, ids, w: loop_experts(x, ids, w, *wide))
    return _run(loop, wide, same, mode)


def _error(candidate: Candidate, weights: Weights, call: Call, mode: str, reference: tuple[Tensor, ...]) -> float:
    """The largest relative root mean square over the output and the gradients; infinite for what is not finite."""
    errors = []
    for got, wanted in zip(_run(candidate, weights, call, mode), reference, strict=True):
        error = (got.detach().double() - wanted.detach()).norm() / wanted.detach().norm().clamp(min=1e-30)
        errors.append(float(error) if torch.isfinite(error) else float("inf"))
    return max(errors)
