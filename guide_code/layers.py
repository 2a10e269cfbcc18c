"""The dense parts that every block shares: normalisation, feed-forward, rotary positions.

RMSNorm: Zhang and Sennrich 2019 (arXiv:1910.07467), eq. 4; gated feed-forward: Shazeer 2020 (arXiv:2002.05202), eq. 6;
rotary embedding: Su et al. 2021 (arXiv:2104.09864), eq. 34.
Copy alone: needs torch only.

B batch, S sequence, D hidden size, I intermediate size, A head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 or wider and returned in the dtype of x."""

    def __init__(self, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


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


class RotaryEmbedding(nn.Module):
    """Cosines and sines by which attention turns queries and keys: pair i of a head turns at theta^(-2i/A).

    Args:
        head_size: width A of a head, even.
        theta: base of the wavelengths.

    Raises:
        ValueError: the head size is odd.
    """

    def __init__(self, head_size: int, theta: float = 10000.0):
        super().__init__()
        if head_size % 2:
            raise ValueError(f"head_size must be even to turn pairs, got {head_size}")
        self.head_size, self.theta = head_size, theta

    def forward(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Two (B, S, A) tables in float32; the second half of A repeats the first."""
        exponents = torch.arange(0, self.head_size, 2, device=positions_BS.device, dtype=torch.float32)
        speeds = self.theta ** -(exponents / self.head_size)
        angles = positions_BS[..., None].to(torch.float32) * speeds
        angles_BSA = torch.cat([angles, angles], dim=-1)
        return angles_BSA.cos(), angles_BSA.sin()
