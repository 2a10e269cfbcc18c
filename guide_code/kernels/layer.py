"""The kernels in the order in which a layer needs them: forward, backward, and what is kept in between.

What a token keeps for the backward pass, in values of the compute dtype: its D inputs, which its producer holds
anyway, and K * J that went into the activation (J = 2I gated, I not), plus K int32 of order and K combine weights.
An implementation that stores everything keeps the gathered copy (K * D), K * J, the activation (K * I), the weighted
one (K * I) and the K unweighted results (K * D). At D = 2048, I = 1024, K = 8 that is 2,048 + 16,384 = 18,432 values
against 2,048 + 65,536 = 67,584. To keep the K * J as well is what saves a second run of the GEMM up; a caller who
wants them gone too wraps the layer in activation checkpointing. The set is that of SonicMoE, Guo et al. 2025
(arXiv:2512.14080); :func:`saved_values` computes it.
Copy alone: needs torch and triton only (with the folder's other files).

T tokens, D hidden size, I expert intermediate size, J rows of the weight up (2I or I), K choices, N = T*K
assignments, E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .configs import Config
from .down import combine, rows_to_assignments
from .hidden_gradient import combine_weight_gradient, hidden_gradient
from .launch import Launcher, run
from .order import Order, order_by_expert
from .up import up
from .weight_gradient import bias_gradient, weight_gradient


class Saved(NamedTuple):
    """What :func:`backward` needs beside the inputs."""

    pre_NJ: Tensor
    order: Order


class Gradients(NamedTuple):
    """Of each input; None where it was not asked for."""

    x_TD: Tensor | None
    weights_TK: Tensor | None
    up_weight: Tensor | None
    down_weight: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


def saved_values(hidden_size: int, intermediate_size: int, top_k: int, *, gated: bool = True) -> dict[str, int]:
    """Values of the compute dtype that one token keeps for the backward pass: "ours" and "everything".

    Args:
        hidden_size: D.
        intermediate_size: I.
        top_k: K.
        gated: whether J is 2I or I.
    """
    pre = intermediate_size * (2 if gated else 1)
    everything = hidden_size + top_k * (hidden_size + pre + 2 * intermediate_size + hidden_size)
    return {"ours": hidden_size + top_k * pre, "everything": everything}


def forward(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    config: Config,
    dtype: torch.dtype,
    *,
    activation: str,
    gated: bool,
    save: bool,
    launch: Launcher = run,
) -> tuple[Tensor, Saved]:
    """(out (T, D) in ``dtype``, what the backward pass needs); arguments as :func:`.up.up` and :func:`.down.combine`.

    Args:
        x_TD: at least one token; columns adjacent in memory.
        ids_TK: contiguous.
        weights_TK: contiguous.
        up_weight: (E, J, D).
        down_weight: (E, D, I).
        up_bias: (E, J), contiguous.
        down_bias: (E, D), contiguous.
        config: tiles.
        dtype: of the result.
        activation: as in :func:`guide_code.experts.grouped.grouped_experts`.
        gated: likewise.
        save: whether a backward pass follows.
        launch: starts or records the kernels.
    """
    assert ids_TK.numel() < 2**31 - 128, "sorted rows are int32"
    num_experts = len(down_weight)
    order = order_by_expert(ids_TK, num_experts, config.rows, launch=launch)
    options = {"activation": activation, "gated": gated, "save": save, "launch": launch}
    hidden_NI, pre_NJ = up(x_TD, up_weight, up_bias, weights_TK, order, config.up, **options)
    rows_ND = rows_to_assignments(
        hidden_NI, down_weight, order, config.down, bias=down_bias, weights_TK=weights_TK, launch=launch
    )
    return combine(rows_ND, ids_TK, num_experts, dtype, launch=launch), Saved(pre_NJ, order)


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    saved: Saved,
    config: Config,
    *,
    activation: str,
    gated: bool,
    needs: tuple[bool, ...] = (True,) * 6,
    launch: Launcher = run,
) -> Gradients:
    """Gradients of every input that ``needs`` names, in the order and dtypes of :class:`Gradients`' inputs.

    Args:
        grad_TD: of the output, in the dtype of ``x_TD``; columns adjacent in memory.
        x_TD: as in the forward pass, like the next six.
        ids_TK: likewise.
        weights_TK: likewise.
        up_weight: likewise.
        down_weight: likewise.
        up_bias: likewise.
        down_bias: likewise.
        saved: from :func:`forward` with ``save=True``.
        config: the same as in the forward pass.
        activation: likewise.
        gated: likewise.
        needs: for tokens, combine weights, weight up, weight down, bias up, bias down.
        launch: starts or records the kernels.
    """
    order, top_k, num_experts = saved.order, ids_TK.shape[1], len(down_weight)
    need_x, need_weights, need_up, need_down, need_up_bias, need_down_bias = needs
    options = {"activation": activation, "gated": gated, "launch": launch}
    through = hidden_gradient(grad_TD, down_weight, weights_TK, saved.pre_NJ, order, config.hidden_gradient, **options)
    grad_x = grad_weights = grad_up = grad_down = grad_up_bias = grad_down_bias = None
    if need_weights:
        grad_weights = combine_weight_gradient(
            through.parts_CN, ids_TK, grad_TD, down_bias, num_experts, weights_TK.dtype, launch=launch
        )
    if need_down:
        grad_down = weight_gradient(
            grad_TD, through.hidden_NI, order, top_k, config.weight_gradient, down_weight.dtype,
            gather_left=True, launch=launch,
        )  # fmt: skip
    if need_up:
        grad_up = weight_gradient(
            through.pre_NJ, x_TD, order, top_k, config.weight_gradient, up_weight.dtype,
            gather_right=True, launch=launch,
        )  # fmt: skip
    if need_up_bias and up_bias is not None:
        grad_up_bias = bias_gradient(through.pre_NJ, order, top_k, up_bias.dtype, launch=launch)
    if need_down_bias and down_bias is not None:
        grad_down_bias = bias_gradient(grad_TD, order, top_k, down_bias.dtype, weights_TK=weights_TK, launch=launch)
    if need_x:
        rows_ND = rows_to_assignments(through.pre_NJ, up_weight.mT, order, config.down, launch=launch)
        grad_x = combine(rows_ND, ids_TK, num_experts, x_TD.dtype, launch=launch)
    return Gradients(grad_x, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias)
