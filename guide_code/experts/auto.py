"""One set of parameters, and for each call the function that is fastest for it.

T tokens, D hidden size, I expert intermediate size, E experts, K choices per token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from guide_code.experts.blocked import blocked_experts
from guide_code.experts.fused import fused_experts, fused_obstacle
from guide_code.experts.gathered import gathered_experts
from guide_code.experts.grouped import GroupedExperts, grouped_experts

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "blocked": blocked_experts,
    "fused": fused_experts,
    "gathered": gathered_experts,
    "grouped": grouped_experts,
}

FEW_ASSIGNMENTS = 16
"""On a CPU, without gradients, "gathered" is fastest for up to so many assignments T x K, however many experts."""

ROWS_PER_EXPERT = {
    ("AVX2", "float32", "inference"): 3,
    ("AVX2", "float32", "training"): 3,
    ("AVX2", "narrow", "inference"): 3,
    ("AVX2", "narrow", "training"): 0,
    ("other", "float32", "inference"): 12,
    ("other", "float32", "training"): 96,
    ("other", "narrow", "inference"): 0,
    ("other", "narrow", "training"): 12,
}
"""On a CPU, rows per expert (T x K / E) from which "blocked" is faster than "grouped", by its instructions and the
dtype. "narrow": bfloat16, float16. Measured by ``moe-guide bench experts`` with torch 2.13.0, E = 64, D = 1024, I = 384
and E = 8, I = 3584, on two cores: of an EPYC with AVX2 (cold caches), of a Xeon with AMX for "other"."""


class Choice(NamedTuple):
    """A backend, and why it was taken."""

    backend: str
    reason: str


def choose(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    training: bool = False,
) -> Choice:
    """What :func:`auto_experts` takes for a call of this size.

    Args:
        num_tokens: T.
        top_k: K.
        num_experts: E.
        dtype: that the experts are computed in: the autocast dtype, or that of the parameters.
        device: where.
        training: whether a gradient is wanted.
    """
    device = torch.device(device)
    if device.type == "cuda":
        obstacle = fused_obstacle(device) or _dtype_obstacle(dtype)
        if not obstacle:
            return Choice("fused", "a GPU that the Triton kernels are compiled for")
        return Choice("grouped", f"the Triton kernels cannot run: {obstacle}")
    if torch.compiler.is_compiling():
        return Choice("grouped", "it compiles into one graph; the others read sizes on the host")
    if device.type != "cpu":
        return Choice("grouped", f"nothing else is made for {device.type}")
    kind = "narrow" if dtype in (torch.bfloat16, torch.float16) else "float32"
    use = "training" if training else "inference"
    if not training and num_tokens * top_k <= FEW_ASSIGNMENTS:
        return Choice(
            "gathered", f"{num_tokens * top_k} assignments are at most the {FEW_ASSIGNMENTS} that need no sort"
        )
    instructions = "AVX2" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "other"
    rows, least = num_tokens * top_k / num_experts, ROWS_PER_EXPERT[instructions, kind, use]
    backend, relation = ("blocked", "at least") if rows >= least else ("grouped", "fewer than")
    return Choice(
        backend,
        f"{rows:.3g} rows per expert are {relation} the {least} from which blocks are faster ({kind}, {use}, "
        f"{instructions} instructions)",
    )


def auto_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """As :func:`guide_code.experts.grouped.grouped_experts`, computed by what :func:`choose` takes.

    Functions add up in different orders, so the same token in a call of another size can differ in its last bits.

    Args:
        x_TD: tokens.
        ids_TK: experts of each token, distinct within a row. An id outside [0, E) contributes exactly 0.
        weights_TK: combine weights, kept in their own precision.
        gate_up_proj: (E, 2I, D), or (E, I, D) when not gated.
        down_proj: (E, D, I).
        gate_up_proj_bias: (E, 2I) or, when not gated, (E, I).
        down_proj_bias: (E, D).
        activation: "silu", "gelu", "relu" or "swigluoai".
        gated: activation(gate) * up or activation(up).
    """
    device = "cpu" if x_TD.is_meta else x_TD.device.type  # autocast knows no meta device
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else gate_up_proj.dtype
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, weights_TK, gate_up_proj, down_proj))
    num_tokens, top_k = ids_TK.shape
    choice = choose(num_tokens, top_k, len(down_proj), dtype=dtype, device=x_TD.device, training=training)
    return FUNCTIONS[choice.backend](
        x_TD,
        ids_TK,
        weights_TK,
        gate_up_proj,
        down_proj,
        gate_up_proj_bias=gate_up_proj_bias,
        down_proj_bias=down_proj_bias,
        activation=activation,
        gated=gated,
    )


class AutoExperts(GroupedExperts):
    """The parameters of :class:`~guide_code.experts.grouped.GroupedExperts`, computed by :func:`auto_experts`."""

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D) in the dtype of ``x_TD``; ids outside [0, E) contribute exactly 0."""
        name = "gate_up_proj" if self.gated else "up_proj"
        return auto_experts(
            x_TD,
            ids_TK,
            weights_TK,
            getattr(self, name),
            self.down_proj,
            gate_up_proj_bias=getattr(self, f"{name}_bias"),
            down_proj_bias=self.down_proj_bias,
            activation=self.activation,
            gated=self.gated,
        )

    def choice(self, num_tokens: int, top_k: int) -> Choice:
        """What a call of this size would take with these parameters, outside autocast."""
        weight = self.down_proj
        training = torch.is_grad_enabled() and weight.requires_grad
        return choose(num_tokens, top_k, len(weight), dtype=weight.dtype, device=weight.device, training=training)


def _dtype_obstacle(dtype: torch.dtype) -> str:
    return "" if dtype in (torch.float32, torch.float16, torch.bfloat16) else f"they do not take {dtype}"
