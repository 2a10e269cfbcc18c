"""From a configuration to modules: the one place that knows which parts go together."""

import functools
from collections.abc import Callable

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
from guide_code.latent_attention import LatentAttention
from guide_code.layers import FeedForward, GatedSharedExpert, HeadNorm, RMSNorm
from guide_code.moe import DenseFeedForward, MoE
from guide_code.rotary import NoRotation, RotaryEmbedding, rotate, rotate_interleaved
from guide_code.routers import (
    ExpertChoiceRouter,
    HashRouter,
    QuantileRouter,
    Routing,
    SinkhornRouter,
    SparseMixerRouter,
    TopKRouter,
    hash_table,
)
from guide_code.transformer import Block, Transformer

LATENT_NORM_EPS = 1e-6
"""Of the norms inside latent attention: DeepSeek's code passes no eps there, so the class default holds."""


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
        kind = GatedSharedExpert if config.shared_gate else FeedForward
        shared = kind(config.hidden_size, config.shared_width, **style)
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
    if config.router == "sparse_mixer":
        return SparseMixerRouter(*sizes, config.top_k, **options)
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
        num_layers = len(config.sparse_layers)
    for layer in range(config.num_layers):
        if config.moe is not None and layer in config.sparse_layers:
            ffn = build_moe(config.moe, num_layers=num_layers)
        else:
            ffn = DenseFeedForward(FeedForward(config.hidden_size, config.intermediate_size))
        norms = [_build_norm(config) for _ in range(2)]
        blocks.append(Block(_build_attention(config, layer), ffn, *norms))
    embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
    if config.tie_embeddings:
        head.weight = embedding.weight
    rotary = RotaryEmbedding(config.rotary_width, config.rope_theta, config.rope_scaling)
    model = Transformer(embedding, blocks, _build_norm(config), head, rotary, config.max_length)
    init_weights_(model, std=config.hidden_size**-0.5)
    return model


def _build_norm(config: ModelConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.hidden_size, config.norm_eps)


def _build_attention(config: ModelConfig, layer: int) -> GroupedQueryAttention | LatentAttention:
    rotates = layer not in config.nope_layers
    position = rotate_interleaved if config.rope_interleaved else rotate
    if not rotates:
        position = NoRotation(config.attn_scale if config.attn_temperature_tuning else 0.0, config.floor_scale)
    if config.kv_lora_rank is not None:
        return _build_latent_attention(config, position)
    norms = [None, None]
    if config.qk_norm == "full":
        norms = [
            RMSNorm(heads * config.head_size, config.norm_eps) for heads in (config.num_heads, config.num_kv_heads)
        ]
    elif config.qk_norm == "head" or (config.qk_norm == "l2" and rotates):
        affine = config.qk_norm == "head"
        norms = [HeadNorm(config.head_size, config.norm_eps, affine=affine) for _ in range(2)]
    kind = config.layer_types[layer] if config.layer_types else "full_attention"
    return GroupedQueryAttention(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_size,
        bias=config.attention_bias,
        out_bias=config.attention_out_bias,
        q_norm=norms[0],
        k_norm=norms[1],
        position=position,
        sinks=config.attention_sinks,
        window={"sliding_attention": config.sliding_window, "chunked_attention": config.attention_chunk_size}.get(kind),
        chunked=kind == "chunked_attention",
    )


def _build_latent_attention(config: ModelConfig, position: Callable) -> LatentAttention:
    assert config.kv_lora_rank and config.qk_nope_head_dim and config.qk_rope_head_dim and config.v_head_dim
    scaling = config.rope_scaling
    temperature = scaling.temperature(scaling.mscale_all_dim) if scaling and scaling.mscale_all_dim else 1.0
    return LatentAttention(
        config.hidden_size,
        config.num_heads,
        kv_lora_rank=config.kv_lora_rank,
        nope_size=config.qk_nope_head_dim,
        rope_size=config.qk_rope_head_dim,
        value_size=config.v_head_dim,
        q_lora_rank=config.q_lora_rank,
        kv_norm=RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS),
        q_norm=None if config.q_lora_rank is None else RMSNorm(config.q_lora_rank, LATENT_NORM_EPS),
        position=position,
        temperature=temperature,
    )


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
