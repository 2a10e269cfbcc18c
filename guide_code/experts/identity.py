"""Identity experts: choices that cost nothing, so that easy tokens use fewer real experts.

LongCat-Flash "zero-computation experts", Meituan 2025 (arXiv:2509.01322), section 2.1; MoE++, Jin et al. 2024
(arXiv:2410.07348), "copy experts". The router scores E + Z experts; the last Z give back weight x token.
Copy alone: needs torch only.

T tokens, D hidden size, E real experts, Z identity experts, K choices per token.
"""

import torch
from torch import Tensor, nn


def identity_experts(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, num_identity: int) -> Tensor:
    """Each token times the sum of its weights on identity experts, (T, D) in the weights' precision or wider.

    Args:
        x_TD: tokens.
        ids_TK: choices; those in [num_experts, num_experts + num_identity) are identity experts, others give 0.
        weights_TK: combine weights.
        num_experts: number E of real experts.
        num_identity: number Z of identity experts.
    """
    identity_TK = (ids_TK >= num_experts) & (ids_TK < num_experts + num_identity)
    weight_T1 = torch.where(identity_TK, weights_TK, 0.0).sum(dim=-1, keepdim=True)
    # A token that chose none may hold anything: 0 x NaN must not reach the output.
    return torch.where(identity_TK.any(dim=-1, keepdim=True), x_TD, 0.0) * weight_T1


class IdentityExperts(nn.Module):
    """Real experts and :func:`identity_experts` after them. The router in front has E + Z experts.

    Real experts and identity experts need separate numbers: of counts (E + Z,), the first E are work for the device
    and the rest are not. Capacity concerns real experts only, see ``num_identity`` of ``apply_capacity``.

    Args:
        experts: real experts; ids outside [0, E) contribute 0 there.
        num_identity: number Z of identity experts.

    Raises:
        ValueError: ``num_identity`` is negative.
    """

    def __init__(self, experts: nn.Module, num_identity: int):
        super().__init__()
        if num_identity < 0:
            raise ValueError(f"num_identity must be at least 0, got {num_identity}")
        self.experts = experts
        self.num_experts, self.num_identity = int(experts.num_experts), num_identity  # pyright: ignore

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D) in the dtype of ``x_TD``."""
        out_TD = self.experts(x_TD, ids_TK, weights_TK)
        return (out_TD + identity_experts(x_TD, ids_TK, weights_TK, self.num_experts, self.num_identity)).to(x_TD.dtype)

    def extra_repr(self) -> str:
        return f"num_identity={self.num_identity}"
