"""What an MoE layer is made of: a frozen dataclass in the words of published ``config.json`` files.

A combination that cannot work is refused here, when the object is made, with every field and value concerned.
"""

from dataclasses import dataclass

from guide_code.backends import BACKENDS
from guide_code.balance import CONVENTIONS
from guide_code.capacity import PRIORITIES
from guide_code.config.checks import at_least, one_of
from guide_code.routers import GROUP_SCORES, SCORE_FNS

ACTIVATIONS = ("gelu", "relu", "silu", "swigluoai")
ROUTERS = ("top_k", "expert_choice", "hash", "sinkhorn", "quantile", "sparse_mixer")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer.

    Raises:
        ValueError: a field is out of range, or fields contradict each other.
    """

    hidden_size: int
    """Width D of a token."""
    moe_intermediate_size: int
    """Width I inside one expert."""
    num_experts: int
    """Number E of routed experts; 1 means a plain dense feed-forward layer."""
    top_k: int
    """Experts per token; on average when ``router="expert_choice"``."""
    router: str = "top_k"
    """How experts are chosen: one of ``ROUTERS``, see ``guide_code.routers``. Zhou et al. take "expert_choice", and
    Megatron-LM "sinkhorn", with ``norm_topk_prob=False``."""
    score_fn: str = "softmax"
    norm_topk_prob: bool = True
    """Whether the weights of a token sum to 1 (before scaling)."""
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    """``n_group`` of DeepSeek."""
    top_k_groups: int = 1
    """``topk_group`` of DeepSeek."""
    group_score: str = "top2_sum"
    router_bias: bool = False
    router_jitter: float = 0.0
    """Noise on what the router sees in training; with ``router="sparse_mixer"`` half the margin within which experts
    are rivals (Phi-3.5-MoE: 0.01)."""
    use_expert_bias: bool = False
    """Keep a bias that moves the choice; on by itself when ``expert_bias_rate`` is above 0."""
    expert_bias_rate: float = 0.0
    """Step of that bias per optimizer step (DeepSeek-V3: 0.001)."""
    num_shared_experts: int = 0
    """Shared experts of width I each, computed as one feed-forward layer."""
    shared_intermediate_size: int | None = None
    """Width of that layer where it is not ``num_shared_experts`` x I (Qwen2-MoE)."""
    shared_gate: bool = False
    """Multiply what shared experts give by a sigmoid of the token (Qwen2-MoE)."""
    num_identity_experts: int = 0
    """Choices beyond the E experts that give the token back (``zero_expert_num`` of LongCat-Flash)."""
    weight_on_input: bool = False
    """Multiply the inputs of experts by the weights, not their outputs (Llama-4)."""
    vocab_size: int | None = None
    """Token ids that a hash router has a row for; needed there only."""
    capacity_factor: float | None = None
    """Slack over an even load in training; None drops nothing."""
    capacity_priority: str = "arrival"
    """Who is dropped last: one of ``PRIORITIES``, see ``guide_code.capacity``."""
    capacity_renormalize: bool = False
    """Whether the weights that survive a drop are divided by their sum."""
    load_balancing_coef: float = 0.0
    load_balancing_convention: str = "megatron"
    z_loss_coef: float = 0.0
    activation: str = "silu"
    gated: bool = True
    expert_biases: bool = False
    backend: str = "auto"
    """How experts are computed: "auto" or one of ``BACKENDS``; the numbers are the same."""

    @property
    def shared_width(self) -> int:
        """Width of the feed-forward layer that the shared experts are; 0: none."""
        if self.shared_intermediate_size is not None:
            return self.shared_intermediate_size
        return self.num_shared_experts * self.moe_intermediate_size

    def __post_init__(self):
        at_least(self, 1, "hidden_size", "moe_intermediate_size", "num_experts", "top_k", "num_groups")
        at_least(self, 0, "num_shared_experts", "num_identity_experts")
        at_least(self, 1, "shared_intermediate_size")
        at_least(self, 0, "expert_bias_rate", "load_balancing_coef", "z_loss_coef")
        one_of(self, "score_fn", SCORE_FNS)
        one_of(self, "group_score", GROUP_SCORES)
        one_of(self, "load_balancing_convention", CONVENTIONS)
        one_of(self, "activation", ACTIVATIONS)
        one_of(self, "backend", ("auto", *BACKENDS))
        if self.activation == "swigluoai" and (not self.gated or self.num_shared_experts or self.num_experts == 1):
            raise ValueError(
                f"activation='swigluoai' is the gate of routed experts: it needs gated=True, num_shared_experts=0 and "
                f"several experts, got gated={self.gated}, num_shared_experts={self.num_shared_experts}, "
                f"num_experts={self.num_experts}"
            )
        if not self.num_shared_experts and (self.shared_gate or self.shared_intermediate_size is not None):
            raise ValueError(
                f"shared_gate={self.shared_gate} and shared_intermediate_size={self.shared_intermediate_size} need "
                f"shared experts, got num_shared_experts={self.num_shared_experts}"
            )
        if self.num_experts == 1 and self.shared_gate:
            raise ValueError(f"shared_gate={self.shared_gate} needs several experts, got num_experts=1: a dense layer")
        one_of(self, "capacity_priority", PRIORITIES)
        one_of(self, "router", ROUTERS)
        self._check_router()
        if self.top_k > self.num_experts + self.num_identity_experts:
            with_identity = f" + num_identity_experts={self.num_identity_experts}" * (self.num_identity_experts > 0)
            raise ValueError(f"top_k={self.top_k} exceeds num_experts={self.num_experts}{with_identity}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide num_experts={self.num_experts}")
        if not 1 <= self.top_k_groups <= self.num_groups:
            raise ValueError(f"top_k_groups={self.top_k_groups} must be in [1, num_groups={self.num_groups}]")
        if self.top_k > self.top_k_groups * self.num_experts // self.num_groups:
            raise ValueError(
                f"top_k={self.top_k} experts cannot come from top_k_groups={self.top_k_groups} groups of "
                f"num_experts={self.num_experts} / num_groups={self.num_groups}"
            )
        if not 0 <= self.router_jitter < 1:
            raise ValueError(f"router_jitter={self.router_jitter} must be in [0, 1)")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"capacity_factor={self.capacity_factor} must be above 0, or None to drop nothing")

    def _check_router(self):
        """Refuse what would have no effect with this router, or an effect that nobody means."""
        router = f"router={self.router!r}"
        if self.router == "top_k" and self.num_identity_experts == 0:
            return
        if self.num_identity_experts and (self.router != "top_k" or self.num_groups > 1 or self.num_experts == 1):
            raise ValueError(
                f"num_identity_experts={self.num_identity_experts} needs router='top_k', num_groups=1 and several "
                f"experts, got {router}, num_groups={self.num_groups}, num_experts={self.num_experts}"
            )
        if self.num_groups > 1:
            raise ValueError(f"num_groups={self.num_groups} needs router='top_k', got {router}: it knows no groups")
        if self.router != "top_k" and (self.use_expert_bias or self.expert_bias_rate):
            raise ValueError(
                f"use_expert_bias={self.use_expert_bias} and expert_bias_rate={self.expert_bias_rate} need "
                f"router='top_k', got {router}: it has no bias, or moves its own"
            )
        if self.router in ("expert_choice", "hash") and self.load_balancing_coef:
            raise ValueError(f"load_balancing_coef={self.load_balancing_coef} cannot change the load of {router}")
        if self.router == "expert_choice" and self.capacity_factor is not None:
            raise ValueError(f"capacity_factor={self.capacity_factor}: {router} never overfills an expert")
        if self.router == "hash" and self.vocab_size is None:
            raise ValueError(f"vocab_size=None: {router} needs the number of token ids")
        if self.router == "sparse_mixer" and self.score_fn != "softmax":
            raise ValueError(f"score_fn={self.score_fn!r} must be 'softmax' with {router}")
        if self.router == "quantile" and self.top_k >= self.num_experts > 1:
            raise ValueError(f"top_k={self.top_k} must be below num_experts={self.num_experts} with {router}")
