"""Importance and load: the balancing losses of the first large MoE, squared coefficients of variation.

Shazeer et al. 2017 (arXiv:1701.06538), eq. 6-7 (importance) and appendix A, eq. 8-11 (load).
Copy alone: needs torch only.

T tokens, E experts, K choices per token.
"""

import torch
from torch import Tensor


def squared_variation(values_E: Tensor) -> Tensor:
    """Variance over the square of the mean: 0 when all are equal, E/K - 1 when K of E share everything.

    The variance is that of the whole population (Tutel divides by E - 1). 0, with zero gradient, when the mean is 0.
    """
    mean = values_E.mean()
    usable = mean > 0
    variance = (values_E - mean).square().mean()
    return torch.where(usable, variance / torch.where(usable, mean, 1.0).square(), 0.0)


def importance_loss(weights_TK: Tensor, ids_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """Squared variation of the sum of combine weights per expert (eq. 6-7): a scalar, 0 when even.

    It evens out weights, not counts: one expert may get few tokens of large weight and another many of small weight.

    Args:
        weights_TK: combine weights, from which the gradient flows.
        ids_TK: the choices before any drop; ids outside [0, E) do not count.
        num_experts: number of experts.
        mask_T: 1 or True where the token counts.
    """
    inside_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    if mask_T is not None:
        inside_TK &= mask_T.bool()[:, None]
    weights_N = torch.where(inside_TK, weights_TK, 0.0).flatten()
    slots_N = torch.where(inside_TK, ids_TK, num_experts).flatten()
    return squared_variation(weights_N.new_zeros(num_experts + 1).index_add(0, slots_N, weights_N)[:num_experts])


def smooth_load(
    logits_TE: Tensor,
    noisy_TE: Tensor,
    noise_std: Tensor | float,
    top_k: int,
    mask_T: Tensor | None = None,
) -> Tensor:
    """Tokens that each expert can expect if the noise of its own logit were drawn again (eq. 8-10), (E,).

    A count has no slope; this estimate of it has. It sums to about T * K.

    Args:
        logits_TE: logits without noise.
        noisy_TE: the logits that the choice was made from: ``logits_TE`` plus normal noise.
        noise_std: standard deviation of that noise, above 0: one number, or (T, E).
        top_k: choices per token, less than E.
        mask_T: 1 or True where the token counts. Rows with a logit that is not finite never count.

    Raises:
        ValueError: every expert is chosen, or the noise is not above 0.
    """
    if not 1 <= top_k < logits_TE.shape[1]:
        raise ValueError(f"top_k must be in [1, num_experts={logits_TE.shape[1]}) to have a load, got {top_k}")
    if not isinstance(noise_std, Tensor) and noise_std <= 0:
        raise ValueError(f"noise_std must be above 0, got {noise_std}")
    valid_T = (logits_TE.detach().isfinite() & noisy_TE.detach().isfinite()).all(dim=-1)
    if mask_T is not None:
        valid_T = valid_T & mask_T.bool()
    logits_TE = torch.where(valid_T[:, None], logits_TE, 0.0)
    noisy_TE = torch.where(valid_T[:, None], noisy_TE, 0.0)
    if isinstance(noise_std, Tensor) and noise_std.ndim == 2:
        noise_std = torch.where(valid_T[:, None], noise_std, 1.0)
    best_TM = noisy_TE.topk(top_k + 1, dim=-1).values  # M = K + 1
    # What an expert must beat: the K-th best of the others, which is the (K+1)-th of all for one that is chosen.
    chosen_TE = noisy_TE > best_TM[:, -1:]
    threshold_TE = torch.where(chosen_TE, best_TM[:, -1:], best_TM[:, -2:-1])
    probability_TE = torch.special.ndtr((logits_TE - threshold_TE) / noise_std)
    return torch.where(valid_T[:, None], probability_TE, 0.0).sum(dim=0)


def load_loss(
    logits_TE: Tensor,
    noisy_TE: Tensor,
    noise_std: Tensor | float,
    top_k: int,
    mask_T: Tensor | None = None,
) -> Tensor:
    """Squared variation of :func:`smooth_load`, with its arguments (eq. 11): a scalar, 0 when even."""
    return squared_variation(smooth_load(logits_TE, noisy_TE, noise_std, top_k, mask_T))
