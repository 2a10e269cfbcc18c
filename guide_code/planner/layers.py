"""What every layer of a model costs: parameters, operations, and bytes that wait for the backward.

Parameters are counted on the model itself, built without memory. Bytes are those of the tensors that autograd keeps
for ``guide_code``'s own modules (a test compares, except for latent attention and sinks). Korthikanti et al. 2022
(arXiv:2205.05198), section 4, make such a list for a dense GPT layer, and section 5 the one for full recomputation:
the input of every layer, and one layer.

e bytes of a number, D hidden size, I intermediate size, E experts, K choices per token, H heads, U key-value heads, A
head size, V vocabulary.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from guide_code.build import build_model
from guide_code.config import ModelConfig
from guide_code.moe import MoE
from guide_code.routers import TopKRouter

SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj", "q_b_proj", "kv_b_proj", "gate_up_proj", "up_proj", "down_proj")
"""Projections that tensor parallelism cuts, as it cuts the embedding and the head; every rank has the rest."""


@dataclass(frozen=True)
class Layer:
    """A block, or the embedding, or the last norm with the head."""

    split: int
    """Parameters that tp divides."""
    copied: int
    """Parameters that every rank along tp has."""
    experts: int
    """Parameters of routed experts."""
    flops: float
    """Forward, per token, without routed experts; the mean over a sequence."""
    expert_flops: float
    """Forward, per token, of the K experts of a token."""
    saved: float
    """Bytes per token kept for the backward, without those of routed experts."""
    saved_rows: float
    """Bytes per token of the inputs of its K experts."""
    saved_inner: float
    """Bytes per token inside its K experts."""
    sums: int = 0
    """Times that the forward gathers tokens and scatters sums along tp."""
    exchanged: int = 0
    """Channels of keys and values, which go round along cp."""


@functools.lru_cache(maxsize=16)  # a search asks for the same model hundreds of times
def layers_of(config: ModelConfig, sequence: int, element_size: int = 2) -> tuple[Layer, tuple[Layer, ...], Layer]:
    """The embedding, the blocks, and the norm with the head.

    Args:
        config: the model.
        sequence: tokens of a sequence.
        element_size: bytes of an activation: 2 or 4.
    """
    with torch.device("meta"):
        model = build_model(config)
    width, e = config.hidden_size, element_size
    table = model.embedding.get_parameter("weight").numel()
    embedding = Layer(table, 0, 0, 0, 0, 8 + 8 * config.rotary_width, 0, 0, sums=1)
    blocks = tuple(_block(block, config, sequence, e) for block in model.blocks)
    norm = sum(p.numel() for p in model.norm.parameters())
    head = 0 if config.tie_embeddings else sum(p.numel() for p in model.head.parameters())
    flops = 2 * width * config.vocab_size
    last = Layer(head, norm, 0, flops, 0, _norm(width) + e * width + 4 * config.vocab_size + 8, 0, 0, sums=1)
    return embedding, blocks, last


def _block(block: Any, config: ModelConfig, sequence: int, e: int) -> Layer:
    split = copied = experts = 0
    for name, parameter in block.named_parameters():
        path = name.split(".")
        cut = path[-2] in SPLIT and not (path[-1] == "bias" and path[-2] in ("o_proj", "down_proj"))
        if name.startswith("ffn.experts."):
            experts += parameter.numel()
        elif cut or path[-1] == "sinks":
            split += parameter.numel()
        else:
            copied += parameter.numel()
    weights = sum(m.weight.numel() for m in block.modules() if isinstance(m, nn.Linear))
    attended = config.num_heads * (config.head_size + (config.v_head_dim or config.head_size))
    flops = 2 * (weights + attended * _mean_context(sequence, *block.reach))
    attention, exchanged = _attention_bytes(config, e)
    saved = 2 * _norm(config.hidden_size) + attention
    if not isinstance(block.ffn, MoE):
        inner = block.ffn.feed_forward.down_proj.weight.shape[1]
        saved += e * (config.hidden_size + 4 * inner)
        return Layer(split, copied, experts, flops, 0, saved, 0, 0, sums=2, exchanged=exchanged)
    router: Any = block.ffn.router
    assert isinstance(router, TopKRouter) and config.moe is not None
    matrices = sum(p.numel() for p in block.ffn.experts.parameters() if p.ndim == 3)
    expert_flops = 2 * matrices * router.top_k / router.num_experts
    flops += 2 * router.weight.numel()
    saved += (e + 4) * config.hidden_size + 12 * router.num_experts + 34 * router.top_k + 22
    if config.moe.num_shared_experts:
        saved += e * (config.hidden_size + 4 * config.moe.shared_width)
        saved += e * (config.hidden_size + 1) * config.moe.shared_gate
    inner = (4 * (4 if config.moe.gated else 2) + e) * config.moe.moe_intermediate_size
    rows = e * config.hidden_size
    sums = 1 + (config.moe.num_shared_experts > 0)
    return Layer(
        split, copied, experts, flops, expert_flops, saved, router.top_k * rows, router.top_k * inner, sums, exchanged
    )  # fmt: skip


def _norm(width: int) -> int:
    """Input and normalised input in float32, and one scale; a fused kernel keeps one of the two."""
    return 8 * width + 4


def _attention_bytes(config: ModelConfig, e: int) -> tuple[int, int]:
    """Bytes per token that attention keeps, and its channels of keys and values.

    Input, queries, keys, values, and the output twice (as attention left it and as the projection reads it); float32
    sums of the softmax; latents and norms, where there are any.
    """
    heads, size = config.num_heads, config.head_size
    if config.kv_lora_rank is not None:
        assert config.v_head_dim and config.qk_nope_head_dim
        kept = e * heads * (2 * size + config.qk_nope_head_dim + 3 * config.v_head_dim)
        for latent in (config.q_lora_rank, config.kv_lora_rank):
            kept += 0 if latent is None else _norm(latent) + e * latent
        return kept + e * config.hidden_size + 4 * heads, heads * (size + config.v_head_dim)
    both = heads + config.num_kv_heads
    kept = e * size * (3 * heads + 2 * config.num_kv_heads) + e * config.hidden_size + 4 * heads
    norms = {"none": 0, "head": 8 * both * size + 4 * both, "l2": 8 * both * size + 4 * both}
    return kept + norms.get(config.qk_norm, 8 * both * size + 8), 2 * config.num_kv_heads * size


def _mean_context(sequence: int, window: int | None, chunked: bool) -> float:
    """Tokens that a token looks at, itself included, on average over a sequence."""
    reach = min(window or sequence, sequence)
    if chunked:
        whole, rest = divmod(sequence, reach)
        return (whole * reach * (reach + 1) + rest * (rest + 1)) / 2 / sequence
    return (reach * (reach + 1) / 2 + (sequence - reach) * reach) / sequence
