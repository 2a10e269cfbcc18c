"""The layer as operators of PyTorch: autograd, fake tensors for ``torch.compile(fullgraph=True)``, CUDA graphs.

The host code reads shapes and never values, so nothing waits for the device and a graph captures the launches.
The gradient is the operators' own: the forward operator keeps the least (see ``layer.py``).
Copy alone: needs torch and triton only (with the folder's other files). SonicMoE, Guo et al. 2025 (arXiv:2512.14080).

T tokens, D hidden size, I expert intermediate size, J rows of the weight up (2I or I), K choices, N = T*K
assignments, E experts, M row tiles.
"""

from functools import partial

import torch
from torch import Tensor

from .configs import Config, architecture_of, choose_config, choose_decode_tile
from .decode import decode
from .layer import Saved, backward, forward
from .order import Order, num_row_tiles


@torch.library.custom_op("moe_guide::experts", mutates_args=())
def experts_op(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
    dtype: torch.dtype,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out (T, D), pre (N, J), assignments (N,), offsets (E + 1,), tiles (2, M)); empty but the first unless ``save``.

    Args:
        x_TD: in the dtype of the weights: float32, float16 or bfloat16.
        ids_TK: any integer type; ids outside [0, E) contribute nothing.
        weights_TK: combine weights.
        up_weight: (E, J, D).
        down_weight: (E, D, I).
        up_bias: (E, J).
        down_bias: (E, D).
        activation: as in :func:`guide_code.experts.grouped.grouped_experts`.
        gated: likewise.
        dtype: of the output.
        save: whether a backward pass follows.
    """
    config = _config(x_TD, ids_TK, down_weight, activation)
    if not ids_TK.numel():
        return x_TD.new_zeros(x_TD.shape, dtype=dtype), *_saved(x_TD, ids_TK, up_weight, config, save)
    x_TD, ids_TK, weights_TK, up_bias, down_bias = _dense(x_TD, ids_TK, weights_TK, up_bias, down_bias)
    out_TD, saved = forward(
        x_TD, ids_TK, weights_TK, up_weight, down_weight, up_bias, down_bias, config, dtype,
        activation=activation, gated=gated, save=save,
    )  # fmt: skip
    if not save:
        return out_TD, *_saved(x_TD, ids_TK, up_weight, config, save)
    return out_TD, saved.pre_NJ, saved.order.assignments, saved.order.offsets, saved.order.tiles


@torch.library.custom_op("moe_guide::experts_backward", mutates_args=())
def experts_backward_op(
    grad_TD: Tensor,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    pre_NJ: Tensor,
    assignments: Tensor,
    offsets: Tensor,
    tiles: Tensor,
    activation: str,
    gated: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of tokens, combine weights, weight up, weight down, bias up, bias down; empty where ``needs`` is False.

    Args:
        grad_TD: of the output.
        x_TD: inputs of the forward operator, like the next six.
        ids_TK: likewise.
        weights_TK: likewise.
        up_weight: likewise.
        down_weight: likewise.
        up_bias: likewise.
        down_bias: likewise.
        pre_NJ: outputs of the forward operator, like the next three.
        assignments: likewise.
        offsets: likewise.
        tiles: likewise.
        activation: as in the forward operator.
        gated: likewise.
        needs: which of the six.
    """
    wanted = (x_TD, weights_TK, up_weight, down_weight, up_bias, down_bias)
    if not ids_TK.numel():
        return _empty_gradients(wanted, needs, torch.zeros)
    grad_TD, ids_TK, weights_TK, up_bias, down_bias = _dense(
        grad_TD.to(x_TD.dtype), ids_TK, weights_TK, up_bias, down_bias
    )
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    gradients = backward(
        grad_TD, x_TD, ids_TK, weights_TK, up_weight, down_weight, up_bias, down_bias,
        Saved(pre_NJ, Order(assignments, offsets, tiles)), _config(x_TD, ids_TK, down_weight, activation),
        activation=activation, gated=gated, needs=tuple(needs),
    )  # fmt: skip
    return tuple(x_TD.new_empty(0) if g is None else g for g in gradients)  # type: ignore[return-value]


@torch.library.custom_op("moe_guide::decode_experts", mutates_args=())
def decode_op(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The same output for few tokens; arguments as :func:`experts_op`. No gradient."""
    x_TD, ids_TK, weights_TK, up_bias, down_bias = _dense(x_TD, ids_TK, weights_TK, up_bias, down_bias)
    if not ids_TK.numel():
        return x_TD.new_zeros(x_TD.shape, dtype=dtype)
    tile = choose_decode_tile(architecture_of(x_TD.device), x_TD.dtype)
    return decode(
        x_TD, ids_TK, weights_TK, up_weight, down_weight, up_bias, down_bias, tile, dtype,
        activation=activation, gated=gated,
    )  # fmt: skip


@experts_op.register_fake
def _experts_fake(x_TD, ids_TK, weights_TK, up_weight, down_weight, up_bias, down_bias, activation, gated, dtype, save):
    config = _config(x_TD, ids_TK, down_weight, activation)
    return x_TD.new_empty(x_TD.shape, dtype=dtype), *_saved(x_TD, ids_TK, up_weight, config, save)


@experts_backward_op.register_fake
def _experts_backward_fake(
    grad_TD, x_TD, ids_TK, weights_TK, up_weight, down_weight, up_bias, down_bias, pre_NJ, assignments, offsets, tiles,
    activation, gated, needs,
):  # fmt: skip
    return _empty_gradients((x_TD, weights_TK, up_weight, down_weight, up_bias, down_bias), needs, torch.empty)


@decode_op.register_fake
def _decode_fake(x_TD, ids_TK, weights_TK, up_weight, down_weight, up_bias, down_bias, activation, gated, dtype):
    return x_TD.new_empty(x_TD.shape, dtype=dtype)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.activation, ctx.gated, _, save = inputs
    assert save or not any(ctx.needs_input_grad), "a gradient needs save=True"
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


@partial(experts_op.register_autograd, setup_context=_setup_context)
def _experts_gradient(ctx, grad_TD, *_):
    of_x, _, *of_rest = ctx.needs_input_grad[:7]
    needs = [bool(need) for need in (of_x, *of_rest)]
    grads = experts_backward_op(grad_TD, *ctx.saved_tensors, ctx.activation, ctx.gated, needs)
    of_x, *of_rest = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return (of_x, None, *of_rest, None, None, None, None)


def _dense(x_TD, ids_TK, weights_TK, up_bias, down_bias):
    """Copies where a kernel asks for adjacent values and they are not; a plain sum's gradient has strides of 0."""
    biases = [None if bias is None else bias.contiguous() for bias in (up_bias, down_bias)]
    return x_TD if x_TD.stride(1) == 1 else x_TD.contiguous(), ids_TK.contiguous(), weights_TK.contiguous(), *biases


def _config(x_TD: Tensor, ids_TK: Tensor, down_weight: Tensor, activation: str) -> Config:
    return choose_config(architecture_of(x_TD.device), x_TD.dtype, ids_TK.numel(), down_weight.shape, activation)


def _saved(
    x_TD: Tensor, ids_TK: Tensor, up_weight: Tensor, config: Config, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised tensors of the shapes that the forward operator saves; empty unless ``save``."""
    integers = partial(x_TD.new_empty, dtype=torch.int32)
    if not save:
        return x_TD.new_empty(0), integers(0), integers(0), integers(0)
    num_assignments, num_experts = ids_TK.numel(), len(up_weight)
    tiles_2M = integers(2, num_row_tiles(num_assignments, num_experts, config.rows))
    pre_NJ = x_TD.new_empty(num_assignments, up_weight.shape[1])
    return pre_NJ, integers(num_assignments), integers(num_experts + 1), tiles_2M


def _empty_gradients(inputs, needs, make) -> tuple:
    """A contiguous tensor for each input that needs a gradient, an empty one for the others."""
    like = inputs[0]
    shapes = [tuple(t.shape) if need and t is not None else (0,) for t, need in zip(inputs, needs, strict=True)]
    dtypes = [like.dtype if t is None or not need else t.dtype for t, need in zip(inputs, needs, strict=True)]
    return tuple(make(s, dtype=d, device=like.device) for s, d in zip(shapes, dtypes, strict=True))
