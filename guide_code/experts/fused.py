"""The Triton path: gathered, multiplied, activated and weighted in kernels that make no permuted copy.

The kernels are in ``guide_code/kernels``: ``layer.py`` calls them in order. Gathering on load: ScatterMoE, Tan et al.
2024 (arXiv:2403.08245); the least saved for the backward pass: SonicMoE, Guo et al. 2025 (arXiv:2512.14080).
Not measured on a GPU. Values are tested in Triton's interpreter, instructions by compiling for GPUs that are not here.

T tokens, D hidden size, I expert intermediate size, E experts, K choices per token.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from guide_code.experts.grouped import GroupedExperts


def fused_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """As :func:`guide_code.experts.grouped.grouped_experts`, (T, D) in the dtype of ``x_TD``; needs a GPU.

    Float32 products are exact ("ieee"), not TensorFloat-32, whose 10 bits of mantissa would miss the tolerance of
    2e-6. At most 16 tokens without a gradient take the decode path, which reads each chosen weight once.

    Args:
        x_TD: tokens.
        ids_TK: experts of each token. An id outside [0, E) contributes exactly 0, forward
            and backward, whatever its token holds.
        weights_TK: combine weights, kept in their own precision; the kernels multiply in float32.
        gate_up_proj: (E, 2I, D), or (E, I, D) when not gated; any strides.
        down_proj: (E, D, I); any strides.
        gate_up_proj_bias: (E, 2I) or, when not gated, (E, I).
        down_proj_bias: (E, D).
        activation: "silu", "gelu", "relu" or "swigluoai".
        gated: activation(gate) * up or activation(up).

    Raises:
        ValueError: the device or the dtype is not one that the kernels run on.
    """
    device = "cpu" if x_TD.is_meta else x_TD.device.type  # autocast knows no meta device
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else gate_up_proj.dtype
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"gate_up_proj.dtype={dtype}: the kernels take float32, float16, bfloat16; use grouped_experts"
        )
    if not x_TD.is_meta and (obstacle := fused_obstacle(x_TD.device)):
        raise ValueError(f"x_TD.device={str(x_TD.device)!r}: {obstacle}; use grouped_experts")
    from guide_code.kernels.configs import DECODE_TOKENS
    from guide_code.kernels.ops import decode_op, experts_op

    parameters = (gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
    tensors = [t if t is None else t.to(dtype) for t in parameters]
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x_TD, weights_TK, *parameters)
    )
    args = (x_TD.to(dtype), ids_TK, weights_TK, *tensors, activation, gated, x_TD.dtype)
    if len(x_TD) <= DECODE_TOKENS and not needs_grad:
        return decode_op(*args)
    return experts_op(*args, needs_grad)[0]


def fused_obstacle(device: torch.device | str) -> str:
    """Why :func:`fused_experts` cannot run on a device; "" when it can.

    A CPU runs it in Triton's interpreter only, which must be asked for before Triton is first imported.
    """
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton (Linux)"
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "PyTorch sees no CUDA device"
        major, minor = torch.cuda.get_device_capability(device)
        return "" if major >= 8 else f"compute capability {major}.{minor}: the kernels are compiled for 8.0 and later"
    if device.type != "cpu":
        return f"the kernels are compiled for CUDA devices, not {device.type}"
    from guide_code.kernels.up import up_kernel

    interpreted = type(up_kernel).__name__ == "InterpretedFunction"
    return "" if interpreted else "on a CPU it needs Triton's interpreter: start Python with TRITON_INTERPRET=1"


class FusedExperts(GroupedExperts):
    """The parameters of :class:`GroupedExperts`, computed by :func:`fused_experts`; needs a GPU."""

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D) in the dtype of ``x_TD``; ids outside [0, E) contribute exactly 0."""
        name = "gate_up_proj" if self.gated else "up_proj"
        return fused_experts(
            x_TD,
            ids_TK,
            weights_TK,
            getattr(self, name),
            self.down_proj,
            gate_up_proj_bias=getattr(self, f"{name}_bias"),
            down_proj_bias=self.down_proj_bias,
            activation=self.activation,
            gated=self.gated,
        )
