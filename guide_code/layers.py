"""The dense parts that every block shares: normalisation and feed-forward.

RMSNorm: Zhang and Sennrich 2019 (arXiv:1910.07467), eq. 4; gated feed-forward: Shazeer 2020 (arXiv:2002.05202), eq. 6;
norms of queries and keys: Henry et al. 2020 (arXiv:2010.04245); gated shared expert: transformers
``models/qwen2_moe/modeling_qwen2_moe.py``, ``Qwen2MoeSparseMoeBlock``.
Copy alone: needs torch only.

B batch, S sequence, D hidden size, I intermediate size, A head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 or wider and returned in the dtype of x.

    Args:
        hidden_size: width D of what is normalised.
        eps: keeps zeros finite.
        affine: whether there is a weight.
    """

    weight: nn.Parameter | None

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, affine: bool = True):
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.ones(hidden_size)) if affine else None)
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = None if self.weight is None else self.weight.to(wide)
        return F.rms_norm(x.to(wide), (self.hidden_size,), weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, affine={self.weight is not None}"


class HeadNorm(RMSNorm):
    """RMSNorm of every head apart; the heads share one weight of the size of a head."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., H*A) to (..., H*A), for any number of heads H."""
        return super().forward(x.unflatten(-1, (-1, self.hidden_size))).flatten(-2)


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) when not gated.

    Args:
        hidden_size: width D of a token.
        intermediate_size: width I inside.
        activation: "silu", "gelu" or "relu".
        gated: gate and up in one projection ``gate_up_proj`` (2I rows, the gate's first), else ``up_proj``.
        bias: add biases to both projections.

    Raises:
        ValueError: the activation is not known.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}")
        self.activation, self.gated = activation, gated
        name, width = ("gate_up_proj", 2 * intermediate_size) if gated else ("up_proj", intermediate_size)
        self.add_module(name, nn.Linear(hidden_size, width, bias=bias))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        if not self.gated:
            return self.down_proj(ACTIVATIONS[self.activation](self.get_submodule("up_proj")(x)))
        gate, up = self.get_submodule("gate_up_proj")(x).chunk(2, dim=-1)
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up)


class GatedSharedExpert(FeedForward):
    """A feed-forward layer whose output each token scales by a sigmoid of its own: Qwen2-MoE's shared expert."""

    def __init__(self, hidden_size: int, intermediate_size: int, **options: Any):
        super().__init__(hidden_size, intermediate_size, **options)
        self.gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        return torch.sigmoid(self.gate(x)) * super().forward(x)
