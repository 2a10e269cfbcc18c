"""The balancer of one MoE layer: adds the gradients of the balancing losses, keeps statistics, moves the bias.

The losses need no way out of the model: their gradients join the backward pass where the layer's output is made,
as Megatron-LM's auxiliary-loss scaler does, so a pipeline stage passes hidden states and nothing else. Bias update:
Wang et al. 2024 (arXiv:2408.15664), algorithm 1.
Copy with balance.py, importance.py and load_metrics.py into one package: needs torch only.

T tokens, D hidden size, E experts, K choices per token.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .balance import (
    CONVENTIONS,
    Z_CONVENTIONS,
    check_convention,
    expert_counts,
    load_balancing_loss,
    required_arguments,
    update_expert_bias_,
    z_loss,
)
from .importance import importance_loss, load_loss
from .load_metrics import rejected_rows

LOSSES = ("load_balancing", "sequence_load_balancing", "z_loss", "importance", "load")


class Balancer(nn.Module):
    """Losses by name, their gradients injected, their values and the load kept until the next step.

    Only training-mode forwards count. A forward inside a backward pass is a recompute (activation checkpointing)
    and is never counted a second time, while its gradients stay right.

    Args:
        num_experts: number E of experts.
        coefs: coefficient by loss name, one of ``LOSSES`` or of ``extra_losses``; a name with coefficient 0 is
            measured without a gradient.
        convention: of "load_balancing", see ``balance.CONVENTIONS``. One that pools layers works for a single layer
            only; "megatron_global" takes f from all tokens since the last step.
        expert_bias_rate: how far :meth:`step` moves the router's ``expert_bias``; 0 leaves it alone.
        extra_losses: more losses by name, each from (routing, mask_T) to a scalar; ``coefs`` must name them.
        z_loss_convention: of "z_loss", see ``balance.Z_CONVENTIONS``.
        num_layers: number of layers, for conventions that take the mean over layers.
        group_size: tokens per group, for conventions that count in groups; tokens per sequence, where
            :meth:`forward` is not given the sequences.
        noise_std: standard deviation of the noise on the logits that "load" supposes.
        centred_bias: subtract the mean from every update of the bias, as torchtitan does.

    Attributes:
        counts: (E,) assignments per expert since the last step; ``last_counts``: those of the step before.
        rejected: tokens with a score that is not finite since the last step; ``last_rejected``: of the step before.

    Raises:
        ValueError: a coefficient has no loss or is negative, the rate is negative, or a convention lacks an
            argument or cannot be computed one layer at a time.
    """

    counts: Tensor
    last_counts: Tensor
    rejected: Tensor
    last_rejected: Tensor

    def __init__(
        self,
        num_experts: int,
        *,
        coefs: dict[str, float],
        convention: str = "megatron",
        expert_bias_rate: float = 0.0,
        extra_losses: dict[str, Callable] | None = None,
        z_loss_convention: str = "st_moe",
        num_layers: int | None = None,
        group_size: int | None = None,
        noise_std: float | None = None,
        centred_bias: bool = False,
    ):
        super().__init__()
        self.num_experts, self.coefs, self.extra_losses = num_experts, dict(coefs), dict(extra_losses or {})
        self.convention, self.z_loss_convention = convention, z_loss_convention
        self.num_layers, self.group_size, self.noise_std = num_layers, group_size, noise_std
        self.expert_bias_rate, self.centred_bias, self.scale = expert_bias_rate, centred_bias, 1.0
        self._check()
        self._token_group, self._groups, self._ranks = None, [], 1
        for name in ("counts", "last_counts"):
            self.register_buffer(name, torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        for name in ("rejected", "last_rejected"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)
        self.reset()

    def forward(self, out: Tensor, routing, mask_T: Tensor | None = None) -> Tensor:
        """The same values as ``out``; on the way back, the losses' weighted gradients reach the router.

        Call it on the layer's output before the residual is added. ``out`` is (B, S, D), whose S is the length of a
        sequence for the losses that ask for it, or (T, D).
        """
        if not self.training:
            return out
        recompute = _in_backward()
        if not recompute:
            self._count(routing, mask_T)
        length = out.shape[1] if out.ndim == 3 else self.group_size
        for name, coef in self.coefs.items():
            loss = self._loss(name, routing, mask_T, length)
            if not recompute:
                self._sums[name] = self._sums.get(name, 0.0) + loss.detach()
            if coef and loss.requires_grad:
                out = _Inject.apply(out, loss, coef * self.scale)
        return out

    def losses(self) -> dict[str, Tensor]:
        """Each loss by name: detached, without coefficient, the mean over the forwards since the last step.

        Over those of all ranks, after :meth:`set_groups`: then every rank of the groups must ask.
        """
        if not self._sums:
            return {}
        means = self._over_ranks(torch.stack(list(self._sums.values()))) / (self._forwards * self._ranks)
        return dict(zip(self._sums, means, strict=True))

    def set_scale(self, scale: float) -> None:
        """What the language-model loss is multiplied by: 1 / micro-batches, times a loss scale if there is one."""
        self.scale = scale

    def set_groups(
        self, token_group: dist.ProcessGroup | None = None, data_group: dist.ProcessGroup | None = None
    ) -> None:
        """Share losses and counts with other ranks, whose gradients are to be averaged with those of this one.

        Micro-batch and sequence conventions see the tokens of one micro-batch, "megatron_global" those of all ranks
        since the last step. Values of losses are means over all ranks, the bias moves by the counts of all.

        Args:
            token_group: ranks that hold other tokens of the same sequences (context or sequence parallel).
            data_group: ranks that hold other micro-batches (data parallel).

        Raises:
            ValueError: a loss cannot be taken over the tokens of several ranks.
        """
        groups = (token_group, data_group)
        self._groups = [group for group in groups if group is not None and dist.get_world_size(group) > 1]
        self._ranks = 1
        for group in self._groups:
            self._ranks *= dist.get_world_size(group)
        self._token_group = token_group if token_group in self._groups else None
        rule = CONVENTIONS[self.convention]
        whole = rule.counts == "all" and rule.over != "sequence" and self.group_size is None
        for name in self.coefs if self._token_group is not None else ():
            if name != "z_loss" and not (name == "load_balancing" and whole):
                raise ValueError(
                    f"coefs[{name!r}] with convention={self.convention!r} and group_size={self.group_size} is not a "
                    "sum over tokens: it cannot be taken over a token_group of several ranks. Possible there: "
                    '"z_loss", and "load_balancing" under a convention that counts all choices of a whole batch'
                )

    def step(self, router: nn.Module) -> None:
        """Call once after each optimizer step: moves ``router.expert_bias``, then clears the statistics.

        A router that moves its own bias, by a method ``step``, is told to.
        The counts of the finished step stay readable as ``last_counts`` (E,), its rejected tokens as ``last_rejected``.
        """
        self.counts, self.rejected = self._over_ranks(self.counts), self._over_ranks(self.rejected)
        if self.expert_bias_rate:
            bias_E = router.get_buffer("expert_bias")
            update_expert_bias_(bias_E, self.counts, self.expert_bias_rate, centred=self.centred_bias)
        own_step = getattr(router, "step", None)
        if own_step is not None:
            own_step()
        self.last_counts, self.last_rejected = self.counts.clone(), self.rejected.clone()
        self.reset()

    def reset(self) -> None:
        """Forget the losses and counts gathered since the last step."""
        self.counts.zero_()
        self.rejected.zero_()
        self._sums: dict[str, Tensor] = {}
        self._forwards = 0

    def _over_ranks(self, value: Tensor) -> Tensor:
        for index, group in enumerate(self._groups):
            value = value.clone() if index == 0 else value
            dist.all_reduce(value, group=group)
        return value

    def _over_tokens(self, routing, mask_T: Tensor | None) -> tuple[Tensor | None, Tensor | float]:
        """Counts of the micro-batch, and by what a mean over this rank's tokens counts in the mean over ranks."""
        if self._token_group is None:
            return None, 1.0
        counts_E = expert_counts(routing.ids, self.num_experts, mask_T)
        tokens = (torch.ones_like(routing.ids[:, 0]) if mask_T is None else mask_T.bool()).sum()
        tokens = tokens - rejected_rows(routing.scores, mask_T)
        totals = torch.cat([counts_E, tokens[None]])
        dist.all_reduce(totals, group=self._token_group)
        return totals[:-1], dist.get_world_size(self._token_group) * tokens / totals[-1].clamp_min(1)

    def _count(self, routing, mask_T: Tensor | None) -> None:
        self.counts += expert_counts(routing.ids, self.num_experts, mask_T)
        self.rejected += rejected_rows(routing.scores, mask_T)
        self._forwards += 1

    def _loss(self, name: str, routing, mask_T: Tensor | None, length: int | None) -> Tensor:
        if name in self.extra_losses:
            return self.extra_losses[name](routing, mask_T)
        counts_E, share = self._over_tokens(routing, mask_T)
        if name == "z_loss":
            options = {"convention": self.z_loss_convention, "num_layers": self.num_layers}
            return share * z_loss(routing.logits, mask_T, **options)
        if name == "importance":
            return importance_loss(routing.weights, routing.ids, self.num_experts, mask_T)
        if name == "load":
            return load_loss(routing.logits, routing.logits, self.noise_std or 0.0, routing.ids.shape[1], mask_T)
        convention = self.convention if name == "load_balancing" else "sequence"
        required = required_arguments(convention)
        if "counts_E" in required:
            counts_E = self._over_ranks(self.counts)
        return share * load_balancing_loss(
            routing.scores,
            routing.ids,
            convention=convention,
            mask_T=mask_T,
            num_layers=self.num_layers,
            group_size=length if "group_size" in required else self.group_size,
            counts_E=counts_E,
        )

    def _check(self) -> None:
        names = sorted({*LOSSES, *self.extra_losses})
        for name, coef in self.coefs.items():
            if name not in names:
                raise ValueError(f"coefs names {name!r}, but the losses are {names}")
            if coef < 0:
                raise ValueError(f"coefs[{name!r}] must be at least 0, got {coef}")
        if self.expert_bias_rate < 0:
            raise ValueError(f"expert_bias_rate must be at least 0, got {self.expert_bias_rate}")
        check_convention(self.convention)
        rule = CONVENTIONS[self.convention]
        if self.coefs.get("load_balancing") and rule.layers == "pooled" and (self.num_layers or 1) > 1:
            raise ValueError(
                f"convention={self.convention!r} pools num_layers={self.num_layers} layers before the product, which a "
                "loss injected layer by layer cannot: add model_load_balancing_loss(routings) to the loss of the model "
                'instead, or use convention="megatron" with equivalent_coefficient(...)'
            )
        if "load_balancing" in self.coefs and rule.counts == "kept":
            raise ValueError(
                f"convention={self.convention!r} counts what capacity kept, but a balancer sees what was chosen"
            )
        if "load_balancing" in self.coefs and rule.layers.startswith("mean") and self.num_layers is None:
            raise ValueError(f"convention={self.convention!r} needs num_layers")
        if self.z_loss_convention not in Z_CONVENTIONS:
            raise ValueError(f"z_loss_convention must be one of {tuple(Z_CONVENTIONS)}, got {self.z_loss_convention!r}")
        if "z_loss" in self.coefs and Z_CONVENTIONS[self.z_loss_convention] != "sum" and self.num_layers is None:
            raise ValueError(f"z_loss_convention={self.z_loss_convention!r} needs num_layers")
        if "load" in self.coefs and not (self.noise_std and self.noise_std > 0):
            raise ValueError(f'coefs names "load", which needs noise_std above 0, got {self.noise_std}')

    def extra_repr(self) -> str:
        return f"{self.coefs}, convention={self.convention!r}, expert_bias_rate={self.expert_bias_rate}"


class _Inject(torch.autograd.Function):
    """Passes a tensor through and starts the backward pass of a loss with the gradient ``scale``."""

    @staticmethod
    def forward(ctx, out, loss, scale):
        ctx.scale, ctx.options = scale, {"dtype": loss.dtype, "device": loss.device}
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.full((), ctx.scale, **ctx.options), None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks it; there is no public way
