"""A mixture of experts from a dense model, with the same logits at the start.

Copies of the feed-forward layer as experts: Komatsuzaki et al. 2023 (arXiv:2212.05055). Finer experts, each a slice of
a copy, with a router that picks all the slices of a copy or none ("virtual groups"): He et al. 2024
(arXiv:2410.07524), sections 3.2 and 3.3.

E copies, G slices of a copy, I intermediate size of the dense layer, D hidden size.
"""

import dataclasses

import torch
from torch import Tensor

from guide_code.config import ModelConfig, MoEConfig
from guide_code.conversion.loading import Origin, empty_model, own_tensors
from guide_code.transformer import Transformer


def upcycle(
    model: Transformer,
    *,
    num_experts: int,
    top_k: int,
    granularity: int = 1,
    first_k_dense: int = 0,
    config: ModelConfig | None = None,
    generator: torch.Generator | None = None,
    **moe_fields,
) -> Transformer:
    """A new model whose feed-forward layers are mixtures made of the dense ones; the logits are the same.

    The weights of the chosen experts sum to 1, and every copy of the dense layer gives the same output, so the
    mixture does too, whatever the router says. With ``granularity`` G every copy is cut into G experts of width I/G.
    The router starts with G equal rows per copy: all slices of a copy are chosen together, each with a G-th of its
    weight, which multiplying the last projection by G undoes.

    Copies differ once they see different tokens. With ``top_k`` 1 and ``granularity`` 1 the only weight is always 1,
    so the router learns from its balancing loss alone.

    Args:
        model: dense; it stays as it is, and the new one shares no memory with it.
        num_experts: copies E; the result has E x G experts.
        top_k: copies per token; the result chooses ``top_k`` x G experts.
        granularity: slices G per copy; it must divide I.
        first_k_dense: layers at the bottom that stay dense.
        config: what the model was built from; not needed for a model from ``load_hf``.
        generator: of the router's weights.
        **moe_fields: further fields of :class:`MoEConfig`, such as ``load_balancing_coef``.

    Returns:
        The model in evaluation mode, with its configuration at ``model.origin.config``.

    Raises:
        ValueError: the model is not dense, G does not divide I, or a field would change the logits.
    """
    origin: Origin | None = model.__dict__.get("origin")
    config = config or (origin.config if origin else None)
    if config is None:
        raise ValueError("config=None: give the ModelConfig that the model was built from")
    if config.moe is not None:
        raise ValueError("the model is a mixture of experts already; give a dense one (moe=None)")
    if granularity < 1 or config.intermediate_size % granularity:
        raise ValueError(f"granularity={granularity} must divide intermediate_size={config.intermediate_size}")
    for name, neutral in _NEUTRAL.items():
        if moe_fields.get(name, neutral) != neutral:
            raise ValueError(f"{name}={moe_fields[name]!r} would change the logits; upcycling needs {neutral!r}")
    moe = MoEConfig(
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.intermediate_size // granularity,
        num_experts=num_experts * granularity,
        top_k=top_k * granularity,
        **moe_fields,
    )
    sparse = dataclasses.replace(config, moe=moe, first_k_dense=first_k_dense)
    result = empty_model(sparse)
    dense_tensors = own_tensors(model)
    new = {
        name: _tensor(name, like, dense_tensors, granularity, generator) for name, like in own_tensors(result).items()
    }
    result.load_state_dict(new, strict=False, assign=True)
    if config.tie_embeddings:
        result.head.weight = result.embedding.weight
    left = [name for name, tensor in own_tensors(result).items() if tensor.is_meta]
    assert not left, f"still without memory: {left}"
    result.__dict__["origin"] = Origin(sparse)
    return result.eval()


_NEUTRAL = {
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_shared_experts": 0,
    "num_identity_experts": 0,
    "router": "top_k",
    "num_groups": 1,
    "weight_on_input": False,
    "activation": "silu",
    "gated": True,
    "expert_biases": False,
}


def _tensor(
    name: str, like: Tensor, dense: dict[str, Tensor], slices: int, generator: torch.Generator | None
) -> Tensor:
    """One tensor of the mixture."""
    if name in dense:
        return dense[name].detach().clone()
    block, _, rest = name.partition(".ffn.")
    norm = dense[f"{block}.ffn_norm.weight"]
    if rest == "router.weight":
        rows = torch.empty(len(like) // slices, like.shape[1]).normal_(0, like.shape[1] ** -0.5, generator=generator)
        return rows.repeat_interleave(slices, dim=0).to(norm)
    if rest.startswith("router."):  # biases
        return torch.zeros(like.shape, dtype=like.dtype, device=norm.device)
    copies = like.shape[0] // slices
    if rest == "experts.gate_up_proj":
        whole = dense[f"{block}.ffn.feed_forward.gate_up_proj.weight"].detach()
        halves = whole.unflatten(0, (2, slices, -1))  # (2, G, I/G, D): gate and up of every slice
        return halves.transpose(0, 1).flatten(1, 2).repeat(copies, 1, 1)
    assert rest == "experts.down_proj", name
    whole = dense[f"{block}.ffn.feed_forward.down_proj.weight"].detach()
    return whole.unflatten(1, (slices, -1)).transpose(0, 1).mul(slices).repeat(copies, 1, 1)
