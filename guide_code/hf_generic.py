"""Stacked experts with any function between their two projections and any norm behind them, given as callables.

For models whose gate :func:`guide_code.experts.grouped.grouped_experts` does not know. Sorted once; a grouped matmul
where torch has one for the sizes, else a matmul for each expert in use. The function and the norm see the rows in
the dtype of the weights, as in transformers' own implementations; the combine is in float32.

T tokens, D hidden size, I expert intermediate size, J rows of the up projection, E experts, K choices per token,
N assignments to an expert that exists, O width of an output.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from guide_code.experts.grouped import grouped_mm_obstacle


def generic_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    *,
    up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    activate: Callable[[Tensor], Tensor],
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Weighted sum of the chosen experts' outputs, (T, D) in the dtype of ``x_TD``. Deterministic.

    Args:
        x_TD: tokens.
        ids_TK: experts of each token. An id outside [0, E) contributes exactly 0, whatever its token holds.
        weights_TK: combine weights.
        up_proj: (E, J, D), gate included where there is one. A transposed view is used as it is, never copied.
        down_proj: (E, D, I), or a transposed view.
        up_proj_bias: (E, J).
        down_proj_bias: (E, D).
        activate: (N, J) to (N, I), gate included.
        norm: of an expert's output, before it is weighted.
    """
    device = "cpu" if x_TD.is_meta else x_TD.device.type  # autocast knows no meta device
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else up_proj.dtype
    (num_tokens, top_k), num_experts = ids_TK.shape, len(up_proj)
    ids_N = torch.where((ids_TK >= 0) & (ids_TK < num_experts), ids_TK, num_experts).flatten()
    counts = torch.bincount(ids_N, minlength=num_experts).tolist()[:num_experts]
    expert_N, order_N = (t[: sum(counts)] for t in ids_N.sort(stable=True))

    rows_ND = x_TD[order_N // top_k].to(dtype)
    hidden = _linear(rows_ND, up_proj.to(dtype), up_proj_bias, expert_N, counts)
    y_ND = _linear(activate(hidden).to(dtype), down_proj.to(dtype), down_proj_bias, expert_N, counts)
    if norm is not None:
        y_ND = norm(y_ND)
    y_ND = y_ND.to(torch.promote_types(dtype, torch.float32)) * weights_TK.flatten()[order_N, None]
    # Every assignment back to its own row, then a sum over K: no two rows are ever added through an index.
    out_TKD = y_ND.new_zeros(num_tokens * top_k, y_ND.shape[1]).index_copy(0, order_N, y_ND)
    return out_TKD.view(num_tokens, top_k, -1).sum(dim=1).to(x_TD.dtype)


def _linear(rows_NI: Tensor, weight: Tensor, bias: Tensor | None, expert_N: Tensor, counts: list[int]) -> Tensor:
    """Each row times the transpose of its expert's weight (E, O, I), plus its bias (E, O): (N, O)."""
    if not grouped_mm_obstacle(weight):
        ends_E = torch.tensor(counts, device=rows_NI.device).cumsum(0, dtype=torch.int32)
        y_NO = F.grouped_mm(rows_NI, weight.mT, offs=ends_E)
    else:
        # unbind: indexing a stacked parameter under autograd costs a gradient of its full size for each expert.
        used = [expert for expert, count in enumerate(counts) if count] or [0]
        weights, parts = weight.unbind(), rows_NI.split([counts[expert] for expert in used])
        y_NO = torch.cat([F.linear(part, weights[expert]) for expert, part in zip(used, parts, strict=True)])
    return y_NO if bias is None else y_NO + bias.to(y_NO.dtype)[expert_N]
