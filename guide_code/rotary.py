"""Rotary positions: queries and keys are turned by angles that grow with their position, so that scores know distances.

Su et al. 2021 (arXiv:2104.09864), eq. 34. Longer contexts than trained on: YaRN, Peng et al. 2023 (arXiv:2309.00071),
section 3; Llama 3.1, Grattafiori et al. 2024 (arXiv:2407.21783), section 3.2; LongRoPE, Ding et al. 2024
(arXiv:2402.13753). Layers without positions: Kazemnejad et al. 2023 (arXiv:2305.19466).
Copy alone: needs torch only.

B batch, S sequence, H heads, U key-value heads, A head size, W turned width of a head, F = W/2 frequencies.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

SCALINGS = ("linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How frequencies are stretched for contexts longer than those of pretraining, in the words of ``config.json``.

    Raises:
        ValueError: the type is not known, or lacks a field.
    """

    type: str
    """"linear" divides every frequency by ``factor``; "llama3" the slow ones only; "yarn" blends both by how often a
    pair turns; "longrope" divides each by a factor of its own."""
    factor: float = 1.0
    """How many times longer the context becomes."""
    original_max_position_embeddings: int = 0
    """Context of pretraining, in tokens; not used by "linear"."""
    low_freq_factor: float = 1.0
    """"llama3": pairs that turn less often than this within the original context are slowed by the full factor."""
    high_freq_factor: float = 4.0
    """"llama3": pairs that turn more often than this are left alone."""
    beta_fast: float = 32.0
    """"yarn": pairs that turn more often than this within the original context are left alone."""
    beta_slow: float = 1.0
    """"yarn": pairs that turn less often than this are slowed by the full factor."""
    truncate: bool = True
    """"yarn": round the bounds of the blend to whole pairs (gpt-oss does not)."""
    mscale: float = 0.0
    """"yarn": with ``mscale_all_dim``, tables grow by the ratio of the two temperatures (DeepSeek)."""
    mscale_all_dim: float = 0.0
    """"yarn": scores of latent attention grow by the square of this temperature (DeepSeek)."""
    attention_factor: float | None = None
    """"yarn" and "longrope": what the tables are multiplied by; None: what the papers say."""
    short_factor: tuple[float, ...] = ()
    """"longrope": a divisor per pair, within the original context."""
    long_factor: tuple[float, ...] = ()
    """"longrope": the same beyond it."""
    short_mscale: float | None = None
    """"longrope": in place of ``attention_factor`` within the original context (Phi-3.5-MoE)."""
    long_mscale: float | None = None
    """"longrope": the same beyond it."""

    def __post_init__(self):
        if self.type not in SCALINGS:
            raise ValueError(f"rope_scaling.type={self.type!r} must be one of {', '.join(SCALINGS)}")
        if self.factor < 1:
            raise ValueError(f"rope_scaling.factor={self.factor} must be at least 1: contexts get longer")
        if self.type != "linear" and self.original_max_position_embeddings < 1:
            raise ValueError(
                f"rope_scaling.original_max_position_embeddings={self.original_max_position_embeddings} must be at "
                f"least 1 with rope_scaling.type={self.type!r}"
            )
        if self.type == "llama3" and self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.low_freq_factor={self.low_freq_factor} must not exceed "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if self.type == "longrope" and not len(self.short_factor) == len(self.long_factor) > 0:
            raise ValueError(
                f"rope_scaling.short_factor has {len(self.short_factor)} values and long_factor "
                f"{len(self.long_factor)}; 'longrope' needs one per pair in each"
            )

    def temperature(self, mscale: float = 1.0) -> float:
        """1 + 0.1 mscale ln(factor): YaRN, section 3.4."""
        return 0.1 * mscale * math.log(self.factor) + 1.0


class Rotary(NamedTuple):
    """What attention needs to know of the positions of its new tokens."""

    cos: Tensor
    """(B, S, W); the second half of W repeats the first."""
    sin: Tensor
    """(B, S, W)."""
    positions: Tensor
    """(B, S)."""


class RotaryEmbedding(nn.Module):
    """Cosines and sines by which queries and keys are turned: pair i of W/2 turns at theta^(-2i/W) per position.

    Args:
        width: channels W of a head that are turned, even; the head size, or less when only a part turns.
        theta: base of the wavelengths.
        scaling: for contexts beyond pretraining; None: as trained.

    Raises:
        ValueError: the width is odd, or "longrope" has another number of factors than W/2.
    """

    def __init__(self, width: int, theta: float = 10000.0, scaling: RopeScaling | None = None):
        super().__init__()
        if width % 2:
            raise ValueError(f"head_size must be even to turn pairs, got {width}")
        if scaling is not None and scaling.type == "longrope" and len(scaling.short_factor) != width // 2:
            raise ValueError(
                f"'longrope' needs {width // 2} factors for {width} channels, got {len(scaling.short_factor)}"
            )
        self.width, self.theta, self.scaling = width, theta, scaling

    def forward(self, positions_BS: Tensor) -> Rotary:
        """Tables in float32."""
        exponents_F = torch.arange(0, self.width, 2, device=positions_BS.device, dtype=torch.float32) / self.width
        speeds_F, factor = 1.0 / self.theta**exponents_F, 1.0
        if self.scaling is not None:
            speeds_F, factor = _SCALE[self.scaling.type](speeds_F, self.scaling, self.theta, positions_BS)
        angles_BSF = positions_BS[..., None].to(torch.float32) * speeds_F
        angles_BSW = torch.cat([angles_BSF, angles_BSF], dim=-1)
        return Rotary(angles_BSW.cos() * factor, angles_BSW.sin() * factor, positions_BS)


def apply_rotary(x_BHSA: Tensor, cos_BSW: Tensor, sin_BSW: Tensor) -> Tensor:
    """Turn the pairs (i, i + W/2) of the first W channels of every head, in float32 or wider; the dtype of x stays."""
    x_BHSW, rest = x_BHSA.split([cos_BSW.shape[-1], x_BHSA.shape[-1] - cos_BSW.shape[-1]], dim=-1)
    low, high = x_BHSW.chunk(2, dim=-1)
    turned_BHSW = x_BHSW * cos_BSW[:, None] + torch.cat([-high, low], dim=-1) * sin_BSW[:, None]
    return torch.cat([turned_BHSW.to(x_BHSA.dtype), rest], dim=-1)


def apply_rotary_interleaved(x_BHSA: Tensor, cos_BSW: Tensor, sin_BSW: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) instead, as DeepSeek and Llama-4 hold them.

    The pairs come out as halves. Queries and keys are permuted alike, which changes no product of theirs.
    """
    width = cos_BSW.shape[-1]
    halves = x_BHSA[..., :width].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return apply_rotary(torch.cat([halves, x_BHSA[..., width:]], dim=-1), cos_BSW, sin_BSW)


def rotate(q_BHSA: Tensor, k_BUSA: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Queries and keys, turned in pairs (i, i + W/2): what most models do, and the default of attention."""
    return apply_rotary(q_BHSA, *rotary[:2]), apply_rotary(k_BUSA, *rotary[:2])


def rotate_interleaved(q_BHSA: Tensor, k_BUSA: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Queries and keys, turned in pairs (2i, 2i + 1)."""
    return apply_rotary_interleaved(q_BHSA, *rotary[:2]), apply_rotary_interleaved(k_BUSA, *rotary[:2])


class NoRotation:
    """Leave queries and keys as they are: a layer without positions.

    Such a layer looks evenly at ever more tokens as the text grows. Llama-4 sharpens it again: queries are multiplied
    by 1 + scale x ln(1 + floor((position + 1) / floor_scale)) (Nakanishi 2025, arXiv:2501.19399).

    Args:
        scale: ``attn_scale`` of Llama-4; 0 sharpens nothing.
        floor_scale: tokens for each step of it.
    """

    def __init__(self, scale: float = 0.0, floor_scale: float = 8192.0):
        self.scale, self.floor_scale = scale, floor_scale

    def __call__(self, q_BHSA: Tensor, k_BUSA: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The same shapes and dtypes."""
        if not self.scale:
            return q_BHSA, k_BUSA
        steps_BS = torch.floor((rotary.positions.to(torch.float32) + 1.0) / self.floor_scale)
        sharper_BS = torch.log1p(steps_BS) * self.scale + 1.0
        return (q_BHSA * sharper_BS[:, None, :, None]).to(q_BHSA.dtype), k_BUSA


def _linear(speeds_F: Tensor, scaling: RopeScaling, theta: float, positions_BS: Tensor) -> tuple[Tensor, float]:
    return speeds_F / scaling.factor, 1.0


def _llama3(speeds_F: Tensor, scaling: RopeScaling, theta: float, positions_BS: Tensor) -> tuple[Tensor, float]:
    turns_F = scaling.original_max_position_embeddings * speeds_F / (2 * math.pi)
    blend = max(scaling.high_freq_factor - scaling.low_freq_factor, 1e-9)  # Llama 4 has none
    kept_F = ((turns_F - scaling.low_freq_factor) / blend).clamp(0.0, 1.0)
    return (1 - kept_F) * speeds_F / scaling.factor + kept_F * speeds_F, 1.0


def _yarn(speeds_F: Tensor, scaling: RopeScaling, theta: float, positions_BS: Tensor) -> tuple[Tensor, float]:
    pairs = len(speeds_F)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    slowed_F = (torch.arange(pairs, device=speeds_F.device, dtype=torch.float32) - first) / max(last - first, 0.001)
    slowed_F = slowed_F.clamp(0.0, 1.0)
    factor = scaling.attention_factor
    if factor is None and scaling.mscale and scaling.mscale_all_dim:
        factor = scaling.temperature(scaling.mscale) / scaling.temperature(scaling.mscale_all_dim)
    speeds_F = slowed_F * speeds_F / scaling.factor + (1 - slowed_F) * speeds_F
    return speeds_F, scaling.temperature() if factor is None else factor


def _longrope(speeds_F: Tensor, scaling: RopeScaling, theta: float, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
    original = scaling.original_max_position_embeddings
    factor = scaling.attention_factor
    if factor is None:
        factor = math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    short, long = ((factor if m is None else m) for m in (scaling.short_mscale, scaling.long_mscale))
    # Which set holds depends on the longest sequence of the call: a cache filled before the switch keeps its angles.
    is_long = (positions_BS.max() >= original) if positions_BS.numel() else positions_BS.new_tensor(False)
    short_F, long_F = (speeds_F.new_tensor(values) for values in (scaling.short_factor, scaling.long_factor))
    return speeds_F / torch.where(is_long, long_F, short_F), torch.where(is_long, long, short)


_SCALE = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
