"""From a configuration to modules: the one place that knows which parts go together."""

import functools

import torch
from torch import nn

from guide_code.attention import GroupedQueryAttention
from guide_code.backends import available_backends as available_backends  # users import it from here
from guide_code.backends import experts_class
from guide_code.balance import CONVENTIONS
from guide_code.balancer import Balancer
from guide_code.capacity import apply_capacity, expert_capacity
from guide_code.config import ModelConfig, MoEConfig
from guide_code.experts.identity import IdentityExperts
from guide_code.layers import FeedForward, RMSNorm, RotaryEmbedding
from guide_code.moe import DenseFeedForward, MoE
from guide_code.routers import (
    ExpertChoiceRouter,
    HashRouter,
    QuantileRouter,
    Routing,
    SinkhornRouter,
    TopKRouter,
    hash_table,
)
from guide_code.transformer import Block, Transformer


def build_moe(config: MoEConfig, *, num_layers: int | None = None) -> nn.Module:
    """An ``MoE`` layer, or with ``num_experts=1`` a dense feed-forward layer with the same interface.

    Args:
        config: the layer.
        num_layers: layers of the model that it is for, over which some load-balancing conventions take the mean.

    Raises:
        ValueError: the backend cannot run here, or the load-balancing convention lacks ``num_layers`` or cannot be
            computed one layer at a time; the message says why.
    """
    style = {"activation": config.activation, "gated": config.gated, "bias": config.expert_biases}
    if config.num_experts == 1:
        width = (1 + config.num_shared_experts) * config.moe_intermediate_size
        return DenseFeedForward(FeedForward(config.hidden_size, width, **style))
    shared = None
    if config.num_shared_experts:
        width = config.num_shared_experts * config.moe_intermediate_size
        shared = FeedForward(config.hidden_size, width, **style)
    experts = experts_class(config.backend)(
        config.num_experts, config.hidden_size, config.moe_intermediate_size, **style
    )
    if config.num_identity_experts:
        experts = IdentityExperts(experts, config.num_identity_experts)
    capacity = None
    if config.capacity_factor is not None:
        capacity = functools.partial(_drop_beyond, config=config)
    balancer = Balancer(
        config.num_experts + config.num_identity_experts,
        coefs={"load_balancing": config.load_balancing_coef, "z_loss": config.z_loss_coef},
        convention=config.load_balancing_convention,
        expert_bias_rate=config.expert_bias_rate,
        num_layers=num_layers,
    )
    return MoE(_build_router(config), experts, shared, capacity, balancer, config.weight_on_input)


def _build_router(config: MoEConfig) -> TopKRouter:
    sizes = config.hidden_size, config.num_experts + config.num_identity_experts
    options = {
        "bias": config.router_bias,
        "jitter": config.router_jitter,
        "score_fn": config.score_fn,
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
    }
    if config.router == "expert_choice":
        return ExpertChoiceRouter(*sizes, config.top_k, **options)
    if config.router == "hash":
        assert config.vocab_size is not None
        return HashRouter(*sizes, hash_table(config.vocab_size, config.num_experts, config.top_k), **options)
    if config.router == "sinkhorn":
        return SinkhornRouter(*sizes, config.top_k, **options)
    if config.router == "quantile":
        return QuantileRouter(*sizes, config.top_k, **options)
    return TopKRouter(
        *sizes,
        config.top_k,
        use_expert_bias=config.use_expert_bias or config.expert_bias_rate > 0,
        num_groups=config.num_groups,
        top_k_groups=config.top_k_groups,
        group_score=config.group_score,
        **options,
    )


def build_model(config: ModelConfig) -> Transformer:
    """A model with random weights: :func:`init_weights_` has them in one table.

    Raises:
        ValueError: as in :func:`build_moe`.
    """
    num_layers, blocks = config.num_layers, []
    if config.moe is not None and CONVENTIONS[config.moe.load_balancing_convention].layers != "mean of all":
        num_layers -= config.first_k_dense
    for layer in range(config.num_layers):
        attention = GroupedQueryAttention(config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size)
        if config.moe is None or layer < config.first_k_dense:
            ffn = DenseFeedForward(FeedForward(config.hidden_size, config.intermediate_size))
        else:
            ffn = build_moe(config.moe, num_layers=num_layers)
        norms = [RMSNorm(config.hidden_size, config.norm_eps) for _ in range(2)]
        blocks.append(Block(attention, ffn, *norms))
    embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    if config.tie_embeddings:
        head.weight = embedding.weight
    rotary = RotaryEmbedding(config.head_size, config.rope_theta)
    norm = RMSNorm(config.hidden_size, config.norm_eps)
    model = Transformer(embedding, blocks, norm, head, rotary, config.max_length)
    init_weights_(model, std=config.hidden_size**-0.5)
    return model


@torch.no_grad()
def init_weights_(model: nn.Module, std: float) -> None:
    """Set every weight of a model at random, in place.

    ``build_model`` takes ``std`` = 1 / sqrt(hidden_size): 0.022 at 2048, the 0.02 of most published models, and
    0.088 at 128, where 0.02 learns visibly slower.

    | parameter                           | value                                   |
    | ----------------------------------- | --------------------------------------- |
    | norms                               | 1                                       |
    | biases                              | 0                                       |
    | ``o_proj``, ``down_proj``           | normal, std / sqrt(2 x number of blocks) |
    | everything else, routers included   | normal, std                             |
    """
    blocks = max(1, sum(isinstance(module, Block) for module in model.modules()))
    for name, parameter in model.named_parameters():
        path = name.removesuffix(".weight").split(".")
        if path[-1].endswith("bias"):
            parameter.zero_()
        elif path[-1].endswith("norm"):
            parameter.fill_(1.0)
        elif path[-1] in ("o_proj", "down_proj"):
            parameter.normal_(0.0, std / (2 * blocks) ** 0.5)  # GPT-2: the residual stream keeps its size
        else:
            parameter.normal_(0.0, std)


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Total parameters, and those that one token uses: of E experts, only its K count."""
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = 0
    for module in model.modules():
        if isinstance(module, MoE) and isinstance(module.router, TopKRouter):
            size = sum(parameter.numel() for parameter in module.experts.parameters())
            idle += size - size * module.router.top_k // module.router.num_experts
    return total, total - idle


def _drop_beyond(routing: Routing, *, config: MoEConfig) -> Routing:
    num_tokens, top_k = routing.ids.shape
    assert config.capacity_factor is not None
    return apply_capacity(
        routing,
        expert_capacity(num_tokens, routing.scores.shape[1], top_k, config.capacity_factor),
        priority=config.capacity_priority,
        renormalize=config.capacity_renormalize,
        num_identity=config.num_identity_experts,
    )
