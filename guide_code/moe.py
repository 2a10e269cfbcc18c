"""The MoE layer: a router, experts and, as wanted, a shared expert, a capacity and a balancer, each passed in.

Shazeer et al. 2017 (arXiv:1701.06538), eq. 1; shared experts: DeepSeekMoE, Dai et al. 2024 (arXiv:2401.06066), eq. 9;
weight on the input: transformers ``models/llama4/modeling_llama4.py``, ``Llama4TextMoe``.
Copy alone: needs torch only.

B batch, S sequence, T = B*S tokens, D hidden size, K choices per token, N = T*K assignments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class MoEOutput(NamedTuple):
    """What an MoE layer, or the dense layer in its place, returns."""

    out: Tensor
    """(B, S, D) in the dtype of the input; exactly 0 where the token is masked or was rejected."""
    routing: Any
    """The router's decision before any drop: losses and load are taken from it. None for a dense layer."""
    kept: Any
    """The decision after the drop, the same object when nothing can drop. None for a dense layer."""


class MoE(nn.Module):
    """A mixture of experts in place of a feed-forward layer.

    Args:
        router: ``router(x_TD, mask_T, tokens_T)`` gives a ``Routing`` with weights, ids, scores and logits.
        experts: ``experts(x_TD, ids_TK, weights_TK)`` gives (T, D).
        shared: a module that every token passes as well, (T, D) to (T, D).
        capacity: from a ``Routing`` to one in which some assignments are dropped. It is applied in training
            only: dropping depends on the other tokens of the call, so decoding would not equal prefill.
        balancer: ``balancer(out_BSD, routing, mask_T)`` injects the gradients of the balancing losses.
        weight_on_input: multiply what goes into an expert by its weight, not what comes out (Llama-4). Experts are
            not linear, so this is another function.
    """

    def __init__(
        self,
        router: nn.Module,
        experts: nn.Module,
        shared: nn.Module | None = None,
        capacity: Callable[[Any], Any] | None = None,
        balancer: nn.Module | None = None,
        weight_on_input: bool = False,
    ):
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.capacity = capacity
        self.balancer = balancer
        self.weight_on_input = weight_on_input

    def forward(self, x_BSD: Tensor, mask_BS: Tensor | None = None, tokens_BS: Tensor | None = None) -> MoEOutput:
        """Route every token, compute its experts, add them up.

        Args:
            x_BSD: hidden states.
            mask_BS: 1 or True where the token is real; bool, integer or float. Padding reaches no expert, no
                statistic and no gradient, whatever it holds.
            tokens_BS: token ids, for routers that hash them.

        Raises:
            ValueError: the mask has another shape than the tokens.
        """
        x_TD = x_BSD.flatten(0, 1)
        mask_T = None if mask_BS is None else _flat_mask(mask_BS, x_BSD)
        tokens_T = None if tokens_BS is None else tokens_BS.flatten()
        routing = self.router(x_TD, mask_T, tokens_T)
        kept = self.capacity(routing) if self.capacity is not None and self.training else routing

        valid_T = routing.scores.detach().isfinite().all(dim=-1)
        valid_T1 = (valid_T if mask_T is None else valid_T & mask_T)[:, None]
        x_TD = torch.where(valid_T1, x_TD, 0.0)
        out_TD = (self._weigh_inputs if self.weight_on_input else self.experts)(x_TD, kept.ids, kept.weights)
        if self.shared is not None:
            out_TD = out_TD + torch.where(valid_T1, self.shared(x_TD), 0.0).to(out_TD.dtype)
        out_BSD = out_TD.view_as(x_BSD)
        if self.balancer is not None:
            out_BSD = self.balancer(out_BSD, routing, mask_T)
        return MoEOutput(out_BSD, routing, kept)

    def _weigh_inputs(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """As many copies of a token as it has choices, each times its weight, each to one expert that counts fully."""
        x_ND = (x_TD[:, None] * weights_TK[..., None]).to(x_TD.dtype).flatten(0, 1)
        ids_N1 = ids_TK.flatten()[:, None]
        y_ND = self.experts(x_ND, ids_N1, torch.ones_like(ids_N1, dtype=weights_TK.dtype))
        return y_ND.unflatten(0, ids_TK.shape).sum(dim=1).to(x_TD.dtype)


class DenseFeedForward(nn.Module):
    """A plain feed-forward layer with the interface of :class:`MoE`: what one expert, or a dense layer, means."""

    def __init__(self, feed_forward: nn.Module):
        super().__init__()
        self.feed_forward = feed_forward

    def forward(self, x_BSD: Tensor, mask_BS: Tensor | None = None, tokens_BS: Tensor | None = None) -> MoEOutput:
        """As :meth:`MoE.forward`, with nothing to route."""
        if mask_BS is None:
            return MoEOutput(self.feed_forward(x_BSD).to(x_BSD.dtype), None, None)
        mask_BS1 = _flat_mask(mask_BS, x_BSD).view(x_BSD.shape[:2])[..., None]
        out_BSD = self.feed_forward(torch.where(mask_BS1, x_BSD, 0.0))
        return MoEOutput(torch.where(mask_BS1, out_BSD, 0.0).to(x_BSD.dtype), None, None)


def _flat_mask(mask_BS: Tensor, x_BSD: Tensor) -> Tensor:
    if mask_BS.shape != x_BSD.shape[:2]:
        raise ValueError(
            f"mask has shape {tuple(mask_BS.shape)} but the tokens have {tuple(x_BSD.shape[:2])}; give (batch, "
            "sequence), 1 where valid, for the tokens of this call only"
        )
    return mask_BS.flatten().bool()
