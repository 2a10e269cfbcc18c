"""The balancer of one MoE layer: adds the gradients of the balancing losses, keeps statistics, moves the bias.

The losses need no way out of the model: their gradients join the backward pass where the layer's output is made,
as Megatron-LM's auxiliary-loss scaler does, so a pipeline stage passes hidden states and nothing else. Bias update:
Wang et al. 2024 (arXiv:2408.15664), algorithm 1.
Copy with balance.py into one package: needs torch only.

T tokens, D hidden size, E experts, K choices per token.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .balance import check_convention, expert_counts, load_balancing_loss, update_expert_bias_, z_loss


class Balancer(nn.Module):
    """Losses by name, their gradients injected, their values and the load kept until the next step.

    Only training-mode forwards count. A forward inside a backward pass is a recompute (activation checkpointing)
    and is never counted a second time, while its gradients stay right.

    Args:
        num_experts: number E of experts.
        coefs: coefficient by loss name. "load_balancing" and "z_loss" are known; a name with coefficient 0 is
            measured without a gradient.
        convention: of the load-balancing loss, see ``balance.load_balancing_loss``.
        expert_bias_rate: how far :meth:`step` moves the router's ``expert_bias``; 0 leaves it alone.
        extra_losses: more losses by name, each from (routing, mask_T) to a scalar; ``coefs`` must name them.

    Raises:
        ValueError: a coefficient has no loss or is negative, or the rate is negative.
    """

    counts: Tensor
    last_counts: Tensor

    def __init__(
        self,
        num_experts: int,
        *,
        coefs: dict[str, float],
        convention: str = "megatron",
        expert_bias_rate: float = 0.0,
        extra_losses: dict[str, Callable] | None = None,
    ):
        super().__init__()
        self.functions = {
            "load_balancing": lambda routing, mask_T: load_balancing_loss(
                routing.scores, routing.ids, convention=convention, mask_T=mask_T
            ),
            "z_loss": lambda routing, mask_T: z_loss(routing.logits, mask_T),
            **(extra_losses or {}),
        }
        for name, coef in coefs.items():
            if name not in self.functions:
                raise ValueError(f"coefs names {name!r}, but the losses are {sorted(self.functions)}")
            if coef < 0:
                raise ValueError(f"coefs[{name!r}] must be at least 0, got {coef}")
        if expert_bias_rate < 0:
            raise ValueError(f"expert_bias_rate must be at least 0, got {expert_bias_rate}")
        check_convention(convention)
        self.num_experts, self.coefs, self.convention = num_experts, dict(coefs), convention
        self.expert_bias_rate, self.scale = expert_bias_rate, 1.0
        self.register_buffer("counts", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("last_counts", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.reset()

    def forward(self, out_TD: Tensor, routing, mask_T: Tensor | None = None) -> Tensor:
        """The same values as ``out_TD``; on the way back, the losses' weighted gradients reach the router.

        Call it on the layer's output before the residual is added.
        """
        if not self.training:
            return out_TD
        recompute = _in_backward()
        if not recompute:
            self.counts += expert_counts(routing.ids, self.num_experts, mask_T)
            self._forwards += 1
        for name, coef in self.coefs.items():
            loss = self.functions[name](routing, mask_T)
            if not recompute:
                self._sums[name] = self._sums.get(name, 0.0) + loss.detach()
            if coef and loss.requires_grad:
                out_TD = _Inject.apply(out_TD, loss, coef * self.scale)
        return out_TD

    def losses(self) -> dict[str, Tensor]:
        """Each loss by name: detached, without coefficient, the mean over the forwards since the last step."""
        return {name: total / self._forwards for name, total in self._sums.items()}

    def set_scale(self, scale: float) -> None:
        """What the language-model loss is multiplied by: 1 / micro-batches, times a loss scale if there is one."""
        self.scale = scale

    def step(self, router: nn.Module) -> None:
        """Call once after each optimizer step: moves ``router.expert_bias``, then clears the statistics.

        The counts of the finished step stay readable as ``last_counts`` (E,).
        """
        if self.expert_bias_rate:
            update_expert_bias_(router.get_buffer("expert_bias"), self.counts, self.expert_bias_rate)
        self.last_counts = self.counts.clone()
        self.reset()

    def reset(self) -> None:
        """Forget the losses and counts gathered since the last step."""
        self.counts.zero_()
        self._sums: dict[str, Tensor] = {}
        self._forwards = 0

    def extra_repr(self) -> str:
        return f"{self.coefs}, convention={self.convention!r}, expert_bias_rate={self.expert_bias_rate}"


class _Inject(torch.autograd.Function):
    """Passes a tensor through and starts the backward pass of a loss with the gradient ``scale``."""

    @staticmethod
    def forward(ctx, out_TD, loss, scale):
        ctx.scale, ctx.options = scale, {"dtype": loss.dtype, "device": loss.device}
        return out_TD.view_as(out_TD)

    @staticmethod
    def backward(ctx, grad_TD):
        return grad_TD, torch.full((), ctx.scale, **ctx.options), None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks it; there is no public way
