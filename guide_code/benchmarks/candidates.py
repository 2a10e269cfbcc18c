"""What is compared: our backends, those of transformers on the same parameters, and the parts that no layer can avoid.

T tokens, D hidden size, I expert intermediate size, E experts, K choices per token, N = T x K assignments.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guide_code.backends import available_backends, experts_class
from guide_code.benchmarks.shapes import Shape

OURS = ("auto", "blocked", "grouped", "padded", "gathered", "loop", "fused")
PEERS = ("eager", "grouped_mm", "batched_mm")

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


class Candidate(NamedTuple):
    """A way to compute the experts."""

    kind: str
    """"ours" or "peer" (transformers)."""
    run: Experts | None
    obstacle: str = ""
    """Why it cannot run here."""


class Part(NamedTuple):
    """Work that a layer of experts contains."""

    kind: str
    """"part" (a step of a layer) or "floor" (what none can do without)."""
    run: Callable[[], tuple[Tensor, ...]]
    leaves: tuple[Tensor, ...]
    """What a training step differentiates."""
    written: int
    """Numbers of the gradient that a training step writes besides those of the leaves."""


class Weights(NamedTuple):
    """Of a layer, shared by all candidates."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> "Weights":
        """Normal, scaled so that outputs have the size of inputs."""
        generator = torch.Generator(device).manual_seed(seed)
        experts, _, width, inner = shape[1:]

        def make(*size: int) -> nn.Parameter:
            values = torch.empty(size, dtype=dtype, device=device)
            return nn.Parameter(values.normal_(std=size[-1] ** -0.5, generator=generator))

        return cls(make(experts, 2 * inner, width), make(experts, width, inner))


def layers(weights: Weights, shape: Shape, num_tokens: int, room: int) -> dict[str, Candidate]:
    """Our backends and transformers' implementations, by name.

    Args:
        weights: of the layer; every candidate computes with these very tensors.
        shape: of the layer.
        num_tokens: T, to refuse what would fetch N copies of weights into too little memory.
        room: bytes that a candidate may take.
    """
    device, size = weights.down_proj.device, weights.down_proj.element_size()
    copies = num_tokens * shape.top_k * 3 * shape.hidden_size * shape.intermediate_size * size
    too_large = f"copies of the weights: {copies / 1e9:.0f} GB" if 2 * copies > room else ""
    reasons = available_backends(device)
    found = {}
    for name in OURS:
        if reason := reasons.get(name, "") or (too_large if name == "gathered" else ""):
            found[name] = Candidate("ours", None, reason)
        else:
            found[name] = Candidate("ours", _ours(name, weights, shape))
    for name in PEERS:
        module, reason = _transformers(name, weights, shape)
        reason = reason or (too_large if name == "batched_mm" else "")
        found[name] = Candidate("peer", None if reason else module, reason)
    return found


def parts(weights: Weights, shape: Shape, ids_TK: Tensor) -> dict[str, Part]:
    """``F.grouped_mm`` alone, on rows that lie in expert order already, and the floors.

    "dense": the multiplications of the layer as two dense matmuls of N rows. "stream": one linear layer over one token
    with as many bytes as the experts that were chosen. No layer of experts can do without either, so the larger is the
    floor; of a training step writing every expert's gradient once is part of both. Where a CPU has no instructions for
    a narrow type, "dense" is run in float32 as well and the faster one counts.
    """
    counts_E = torch.bincount(ids_TK.flatten(), minlength=shape.num_experts)
    ends_E = counts_E.cumsum(0).to(device=weights.down_proj.device, dtype=torch.int32)
    rows, active = ids_TK.numel(), int((counts_E > 0).sum())
    width, inner = shape.hidden_size, shape.intermediate_size

    def random(*size: int) -> Tensor:
        return torch.randn(size, dtype=weights.down_proj.dtype, device=weights.down_proj.device).requires_grad_()

    x_ND, hidden_NI = random(rows, width), random(rows, inner)
    up_JD, down_DI = random(2 * inner, width), random(width, inner)
    streamed_OD, x_1D = random(active * 3 * inner, width), random(1, width)

    def grouped() -> tuple[Tensor, ...]:
        up_NJ = F.grouped_mm(x_ND, weights.gate_up_proj.mT, offs=ends_E)
        return up_NJ, F.grouped_mm(hidden_NI, weights.down_proj.mT, offs=ends_E)

    def dense() -> tuple[Tensor, ...]:
        return F.linear(x_ND, up_JD), F.linear(hidden_NI, down_DI)

    def dense_in_float32() -> tuple[Tensor, ...]:
        return F.linear(x_ND.float(), up_JD.float()), F.linear(hidden_NI.float(), down_DI.float())

    def stream() -> tuple[Tensor, ...]:
        return (F.linear(x_1D, streamed_OD),)

    dense_leaves = x_ND, hidden_NI, up_JD, down_DI
    found = {
        "F.grouped_mm": Part("part", grouped, (x_ND, hidden_NI, *weights), 0),
        "stream": Part("floor", stream, (x_1D, streamed_OD), shape.numbers - streamed_OD.numel()),
        "dense": Part("floor", dense, dense_leaves, shape.numbers),
    }
    if x_ND.device.type == "cpu" and x_ND.dtype != torch.float32:
        found["dense, float32"] = Part("floor", dense_in_float32, dense_leaves, shape.numbers)
    return found


def _ours(name: str, weights: Weights, shape: Shape) -> Experts:
    with torch.device("meta"):
        module = experts_class(name)(shape.num_experts, shape.hidden_size, shape.intermediate_size)
    module.gate_up_proj, module.down_proj = weights
    return module


def _transformers(name: str, weights: Weights, shape: Shape) -> tuple[Experts | None, str]:
    try:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError as error:
        return None, f"transformers 5 is not installed ({error})"
    config = SimpleNamespace(
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.intermediate_size,
        hidden_act="silu",
        _experts_implementation=name,
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj, module.down_proj = weights
    return module, ""
