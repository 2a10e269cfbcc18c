"""Activations of experts and their derivatives, for the epilogues of the kernels, in float32.

SwiGLU: Shazeer 2020 (arXiv:2002.05202). Clamped SwiGLU: openai/gpt-oss, gpt_oss/torch/model.py, swiglu.
Copy alone: needs torch and triton only.
"""

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """activation(gate) * up, or activation(gate) when not gated; NaN stays NaN, as no comparison takes it away."""
    if ACTIVATION == "swigluoai":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        value = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        if ACTIVATION == "silu":
            value = gate * tl.sigmoid(gate)
        elif ACTIVATION == "gelu":
            value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
        else:
            value = tl.where(gate < 0.0, 0.0, gate)
        if GATED:
            value = value * up
    return value


@triton.jit
def activate_backward(gate, up, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """(value, derivative by gate, derivative by up); the last is meaningless when not gated."""
    if ACTIVATION == "swigluoai":
        inside = tl.where(gate > 7.0, 0.0, 1.0)
        gate = tl.where(gate > 7.0, 7.0, gate)
        by_up = tl.where((up > 7.0) | (up < -7.0), 0.0, 1.0)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        sigmoid = tl.sigmoid(1.702 * gate)
        value = gate * sigmoid
        by_gate = inside * sigmoid * (1.0 + 1.702 * gate * (1.0 - sigmoid)) * (up + 1.0)
        by_up = by_up * value
        value = value * (up + 1.0)
    else:
        if ACTIVATION == "silu":
            sigmoid = tl.sigmoid(gate)
            value = gate * sigmoid
            by_gate = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        elif ACTIVATION == "gelu":
            normal = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
            value = gate * normal
            by_gate = normal + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        else:
            value = tl.where(gate < 0.0, 0.0, gate)
            by_gate = tl.where(gate > 0.0, 1.0, 0.0)
        by_up = value
        if GATED:
            by_gate = by_gate * up
            value = value * up
    return value, by_gate, by_up
