"""Load balancing: the losses that spread tokens over experts, under every published convention, and the bias update.

Switch, Fedus et al. 2021 (arXiv:2101.03961), eq. 4-6; z-loss: ST-MoE, Zoph et al. 2022 (arXiv:2202.08906),
eq. 5; per sequence: DeepSeek-V3 (arXiv:2412.19437), eq. 17-20; bias update: Wang et al. 2024 (arXiv:2408.15664),
algorithm 1. Pure functions; coefficients are the caller's.
Copy alone: needs torch only.

T tokens, E experts, K choices per token, G groups of S tokens, L layers. With c the assignments per expert,
f = c / sum(c) and P the mean score of each expert over the valid tokens, the losses are multiples of E f.P.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Convention:
    """What sets one load-balancing loss apart from another; one formula evaluates them all."""

    source: str
    """The system and the function, or the paper and the equations."""
    counts: str = "all"
    """The choices behind f: "all", "first" (of each token), or "kept" (the first one, where capacity kept it)."""
    per: str = "choice"
    """"choice": f sums to 1, and the loss is 1 when balanced. "token": f sums to K, and the loss is K."""
    over: str = "batch"
    """Tokens that share f and P: the "batch"; a "group", whose size may be given; a "sequence", whose length must be;
    "global": P of the batch, f of a larger one, whose counts must be given."""
    layers: str = "sum"
    """Over layers: "sum", "mean" over MoE layers, "mean of all" (dense ones too), or "pooled": f and P are taken over
    all layers before the product."""


CONVENTIONS = {
    "switch": Convention("Flaxformer routing._load_balancing_loss, T5X", per="token", over="group", layers="mean"),
    "hf": Convention("transformers, Mixtral and relatives: load_balancing_loss_func", per="token", layers="pooled"),
    "hf_switch": Convention("transformers, Switch", counts="first", over="sequence", layers="pooled"),
    "megatron": Convention("Megatron-LM moe_utils.switch_load_balancing_loss_func"),
    "megatron_global": Convention(
        "Megatron-LM router, global_aux_loss (Qiu et al. 2025, arXiv:2501.11873)", over="global"
    ),
    "megablocks": Convention("MegaBlocks moe.batched_load_balancing_loss", layers="mean of all"),
    "swiss_nanotron": Convention("swiss-ai nanotron, load_balancing_loss", layers="mean of all"),
    "deepspeed_top1": Convention("DeepSpeed sharded_moe.top1gating", counts="first"),
    "deepspeed_top2": Convention("DeepSpeed sharded_moe.top2gating", counts="first"),
    "deepspeed_topk": Convention("DeepSpeed sharded_moe.topkgating"),
    "tutel": Convention("Tutel losses.gshard_loss", counts="first"),
    "gshard": Convention(
        "Lepikhin et al. 2020 (arXiv:2006.16668), algorithm 1, times E^2 as in the code", counts="first", over="group"
    ),
    "fastmoe": Convention("FastMoE GShardGate on one rank", counts="first"),
    "fastmoe_switch": Convention("FastMoE SwitchGate", counts="kept"),
    "st_moe": Convention("st-moe-pytorch TopNGating", counts="first", over="sequence"),
    "sequence": Convention("DeepSeek-V3, eq. 17-20; Megatron-LM seq_aux_loss", over="sequence"),
}
"""Every named convention. FastMoE's GShardGate multiplies by the experts of one rank, squared: on P ranks its value is
P^2 times smaller. Tutel counts with noisy scores; pass those. Padding counts nowhere here; in some systems it does."""

Z_CONVENTIONS = {
    "st_moe": "sum",
    "megatron": "sum",
    "megablocks": "sum",
    "hf_switch": "mean",
    "swiss_nanotron": "mean of all",
}
"""z-losses, and how each joins layers, in the words of :class:`Convention`. MegaBlocks returns one value per layer and
leaves the sum to its user; swiss-ai nanotron divides by E as well, so its coefficient weighs E times less."""


def required_arguments(convention: str) -> tuple[str, ...]:
    """What :func:`load_balancing_loss` must be given under a convention besides scores and ids.

    Raises:
        ValueError: the convention is not known.
    """
    check_convention(convention)
    rule = CONVENTIONS[convention]
    needs = (
        ("num_layers", rule.layers.startswith("mean")),
        ("group_size", rule.over == "sequence"),
        ("counts_E", rule.over == "global"),
    )
    return tuple(name for name, needed in needs if needed)


def check_convention(convention: str) -> None:
    """Raise a ValueError unless the convention is one of :data:`CONVENTIONS`."""
    if convention not in CONVENTIONS:
        raise ValueError(f"convention must be one of {tuple(CONVENTIONS)}, got {convention!r}")


def expert_counts(ids_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """Assignments per expert, (E,) int64. Ids outside [0, E) and masked tokens are not counted."""
    valid_T = torch.ones_like(ids_TK[:, 0], dtype=torch.bool) if mask_T is None else mask_T.bool()
    return _group_counts(ids_TK[None], num_experts, valid_T[None])[0]


def load_balancing_loss(
    scores_TE: Tensor,
    ids_TK: Tensor,
    *,
    convention: str = "megatron",
    mask_T: Tensor | None = None,
    num_layers: int | None = None,
    group_size: int | None = None,
    counts_E: Tensor | None = None,
) -> Tensor:
    """Load-balancing loss of one layer, without coefficient: a scalar in the dtype of the scores.

    Only P carries a gradient: it pushes down the scores of experts in proportion to how many tokens they hold.

    Args:
        scores_TE: scores over all experts. Rows are normalised to sum to one first (sigmoid scores do not).
        ids_TK: the choices *before* any drop: counts taken after it hide the imbalance. "fastmoe_switch" alone wants
            them after it.
        convention: a name of :data:`CONVENTIONS`. "megatron" is E f.P: 1 when balanced, E/K when all tokens take the
            same K experts. One that pools layers gives the value of this layer on its own.
        mask_T: 1 or True where the token counts. Rows with a non-finite score never count.
        num_layers: what a mean over layers divides by; the losses of the layers are then to be added.
        group_size: consecutive tokens that form a group or a sequence. Every group with a valid token weighs the same.
        counts_E: assignments to use for f in place of those of ``ids_TK`` (a larger batch of tokens).

    Returns:
        The loss; 0, with zero gradient, when no token counts.

    Raises:
        ValueError: the convention is not known, needs an argument that is missing, or cannot use one that is given.
    """
    given = {"num_layers": num_layers, "group_size": group_size, "counts_E": counts_E}
    for name in required_arguments(convention):
        if given[name] is None:
            raise ValueError(f"convention={convention!r} needs {name}")
    rule = CONVENTIONS[convention]
    if counts_E is not None and (rule.over == "sequence" or (rule.over == "group" and group_size is not None)):
        raise ValueError(f"convention={convention!r} counts within each group of {group_size}: it cannot use counts_E")
    loss = _loss(rule, *_in_groups(rule, scores_TE, ids_TK, mask_T, group_size), counts_E)
    return loss / num_layers if num_layers is not None and rule.layers.startswith("mean") else loss


def model_load_balancing_loss(
    routings: Sequence,
    *,
    convention: str = "megatron",
    mask_T: Tensor | None = None,
    group_size: int | None = None,
    counts_LE: Sequence[Tensor] | Tensor | None = None,
) -> Tensor:
    """Load-balancing loss of a model, over its layers as the convention does it, without coefficient.

    Args:
        routings: one ``Routing`` per layer; None for a dense layer.
        convention: a name of :data:`CONVENTIONS`. "megatron": the sum of the layers' losses. "hf": f and P are pooled
            over layers *before* the product, so layers that collapse onto different experts look balanced.
        mask_T: as in :func:`load_balancing_loss`, the same for every layer.
        group_size: as in :func:`load_balancing_loss`.
        counts_LE: ``counts_E`` of every MoE layer.

    Returns:
        The loss; exactly 0 when no layer is sparse.

    Raises:
        ValueError: as in :func:`load_balancing_loss`.
    """
    required = required_arguments(convention)
    if counts_LE is None and "counts_E" in required:
        raise ValueError(f"convention={convention!r} needs counts_LE")
    sparse = [routing for routing in routings if routing is not None]
    if not sparse:
        return torch.zeros(())
    rule = CONVENTIONS[convention]
    if rule.layers == "pooled":
        if group_size is None and "group_size" in required:
            raise ValueError(f"convention={convention!r} needs group_size")
        if counts_LE is not None:
            raise ValueError(f"convention={convention!r} pools layers: it cannot use counts_LE")
        layers = [_in_groups(rule, routing.scores, routing.ids, mask_T, group_size) for routing in sparse]
        return _loss(rule, *(torch.cat(parts, dim=1) for parts in zip(*layers, strict=True)))
    num_layers = len(routings) if rule.layers == "mean of all" else len(sparse)
    options = {"convention": convention, "mask_T": mask_T, "num_layers": num_layers, "group_size": group_size}
    counts = [None] * len(sparse) if counts_LE is None else list(counts_LE)
    return torch.stack(
        [load_balancing_loss(r.scores, r.ids, counts_E=c, **options) for r, c in zip(sparse, counts, strict=True)]
    ).sum()


def sequence_load_balancing_loss(scores_BSE: Tensor, ids_BSK: Tensor, *, mask_BS: Tensor | None = None) -> Tensor:
    """Mean over sequences of the loss of each: 1 when every sequence is balanced (DeepSeek-V3, eq. 17-20).

    B sequences. A batch can be balanced while each of its sequences uses few experts; this loss sees it.
    """
    mask_T = None if mask_BS is None else mask_BS.flatten()
    scores_TE, ids_TK = scores_BSE.flatten(0, 1), ids_BSK.flatten(0, 1)
    return load_balancing_loss(
        scores_TE, ids_TK, convention="sequence", mask_T=mask_T, group_size=max(scores_BSE.shape[1], 1)
    )


def equivalent_coefficient(coef: float, *, source: str, target: str, top_k: int, num_layers: int) -> float:
    """The coefficient that gives ``target`` the gradient which ``coef`` gives ``source`` on every router.

    Exact where layers route alike; a pooled loss pushes each layer by the counts of all.

    Args:
        coef: coefficient under ``source``.
        source: convention it was chosen for.
        target: convention of the code that it is for.
        top_k: choices K per token.
        num_layers: layers L, all of them MoE layers.

    Raises:
        ValueError: a convention is not known, or its gradient is no multiple of that of others: it counts first
            choices only, per sequence, or over other tokens.
    """
    strengths = []
    for convention in (source, target):
        check_convention(convention)
        rule = CONVENTIONS[convention]
        if rule.counts == "first" and top_k > 1:
            reason = f"it counts only the first of top_k={top_k} choices"
        elif rule.counts == "kept":
            reason = "it counts what capacity kept"
        elif rule.over in ("sequence", "global"):
            reason = "it counts over each sequence" if rule.over == "sequence" else "it counts over a larger batch"
        else:
            strengths.append((top_k if rule.per == "token" else 1) / (1 if rule.layers == "sum" else num_layers))
            continue
        raise ValueError(f"no coefficient makes {source!r} and {target!r} equal: {convention!r} differs, {reason}")
    return coef * strengths[0] / strengths[1]


def z_loss(
    logits_TE: Tensor, mask_T: Tensor | None = None, *, convention: str = "st_moe", num_layers: int | None = None
) -> Tensor:
    """Mean over valid tokens of logsumexp(logits) squared: keeps logits small (ST-MoE, eq. 5).

    Logits of 0 give (ln E)^2, not 0: 4.32 for E = 8. Rows whose logsumexp is not finite never count.

    Args:
        logits_TE: router outputs.
        mask_T: 1 or True where the token counts.
        convention: a name of :data:`Z_CONVENTIONS`. "swiss_nanotron" divides by E.
        num_layers: what "hf_switch" and "swiss_nanotron", means over layers, divide by.

    Raises:
        ValueError: the convention is not known or needs ``num_layers``.
    """
    if convention not in Z_CONVENTIONS:
        raise ValueError(f"z-loss convention must be one of {tuple(Z_CONVENTIONS)}, got {convention!r}")
    if Z_CONVENTIONS[convention] == "sum":
        num_layers = 1
    elif num_layers is None:
        raise ValueError(f"z-loss convention={convention!r} needs num_layers")
    divisor = num_layers * (logits_TE.shape[1] if convention == "swiss_nanotron" else 1)
    finite_T = logits_TE.detach().logsumexp(dim=-1).isfinite()
    valid_T = finite_T if mask_T is None else finite_T & mask_T.bool()
    squares_T = torch.where(valid_T[:, None], logits_TE, 0.0).logsumexp(dim=-1).square()
    return torch.where(valid_T, squares_T, 0.0).sum() / (valid_T.sum().clamp_min(1) * divisor)


def model_z_loss(routings: Sequence, *, convention: str = "st_moe", mask_T: Tensor | None = None) -> Tensor:
    """z-loss of a model over its layers, as the convention does it; arguments as in :func:`z_loss`.

    ``routings`` holds one ``Routing`` per layer; None for a dense layer. Exactly 0 when no layer is sparse.
    """
    sparse = [routing for routing in routings if routing is not None]
    if not sparse:
        return torch.zeros(())
    num_layers = len(routings) if Z_CONVENTIONS.get(convention) == "mean of all" else len(sparse)
    losses = [z_loss(r.logits, mask_T, convention=convention, num_layers=num_layers) for r in sparse]
    return torch.stack(losses).sum()


def update_expert_bias_(bias_E: Tensor, counts_E: Tensor, rate: float, *, centred: bool = False) -> None:
    """Raise the bias of experts below the mean load by ``rate`` and lower it above, in place.

    ``centred`` subtracts the mean of the update first, as torchtitan does: the biases keep their sum. The choice of
    experts is the same either way as long as no router compares biased scores with anything but each other.
    """
    counts_E = counts_E.to(bias_E.dtype)
    update_E = torch.sign(counts_E.mean() - counts_E)
    bias_E.add_(update_E - update_E.mean() if centred else update_E, alpha=rate)


def max_violation(counts_E: Tensor) -> Tensor:
    """How far the busiest expert is above its fair share: max(c) / mean(c) - 1, from 0 to E - 1.

    0 when there is no assignment. Wang et al. 2024 (arXiv:2408.15664), section 3, "MaxVio".
    """
    counts_E = counts_E.to(torch.float32)
    return torch.where(counts_E.sum() > 0, counts_E.max() / counts_E.mean().clamp_min(1e-9) - 1, 0.0)


def _loss(
    rule: Convention, scores_GSE: Tensor, ids_GSK: Tensor, valid_GS: Tensor, counts_E: Tensor | None = None
) -> Tensor:
    """The one formula: E times f.P of every group, and the mean over groups that hold a valid token."""
    num_experts = scores_GSE.shape[-1]
    choices = 1 if rule.counts in ("first", "kept") else ids_GSK.shape[-1]
    counts_GE = _group_counts(ids_GSK[..., :choices], num_experts, valid_GS).to(scores_GSE.dtype)
    tokens_G1 = (counts_GE if rule.counts == "kept" else valid_GS).sum(dim=1, keepdim=True)
    fraction_GE = counts_GE / tokens_G1.clamp_min(1)  # per token: sums to the number of choices
    if counts_E is not None:
        counts_E = counts_E.to(scores_GSE.dtype)
        fraction_GE = (choices * counts_E / counts_E.sum().clamp_min(1)).expand_as(counts_GE)
    mean_score_GE = scores_GSE.sum(dim=1) / tokens_G1.clamp_min(1)
    loss = num_experts * (fraction_GE * mean_score_GE).sum() / (tokens_G1 > 0).sum().clamp_min(1)
    return loss if rule.per == "token" else loss / choices


def _in_groups(rule: Convention, scores_TE, ids_TK, mask_T, group_size) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (G, S, E), ids (G, S, K) and which tokens count (G, S); one group where the rule has none."""
    scores_TE, valid_T = _valid_scores(scores_TE, mask_T)
    num_tokens = valid_T.shape[0]
    size = group_size if group_size is not None and rule.over in ("group", "sequence") else max(num_tokens, 1)
    if size < 1 or num_tokens % size:
        raise ValueError(f"group_size={size} must divide the {num_tokens} tokens")
    shape = (num_tokens // size, size)
    return scores_TE.reshape(*shape, scores_TE.shape[1]), ids_TK.reshape(*shape, ids_TK.shape[1]), valid_T.view(shape)


def _group_counts(ids_GSK: Tensor, num_experts: int, valid_GS: Tensor) -> Tensor:
    inside_GSK = (ids_GSK >= 0) & (ids_GSK < num_experts) & valid_GS[..., None]
    slots_GN = torch.where(inside_GSK, ids_GSK, num_experts).flatten(1)
    counts = torch.zeros(len(slots_GN), num_experts + 1, dtype=torch.int64, device=ids_GSK.device)
    # bincount would synchronise
    return counts.scatter_add_(1, slots_GN, torch.ones_like(slots_GN))[:, :num_experts]


def _valid_scores(scores_TE: Tensor, mask_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows that sum to one, or are all zero where they must not count; and which do count."""
    valid_T = scores_TE.detach().isfinite().all(dim=-1)
    if mask_T is not None:
        valid_T = valid_T & mask_T.bool()
    scores_TE = torch.where(valid_T[:, None], scores_TE, 0.0)
    total_T1 = scores_TE.sum(dim=-1, keepdim=True)
    # Adding an epsilon instead would let a router shrink all its scores and so its loss.
    tiny = torch.finfo(scores_TE.dtype).tiny
    usable_T1 = total_T1 >= tiny
    shares_TE = torch.where(usable_T1, scores_TE / torch.where(usable_T1, total_T1, 1.0), 1 / scores_TE.shape[1])
    return torch.where(valid_T[:, None], shares_TE, 0.0), valid_T
