"""The launches of one layer call, recorded from tensors without memory: no GPU, no values, the same host code.

The default problem is OLMoE's layer (Muennighoff et al. 2024, arXiv:2409.02060) at 4,096 tokens.
Copy alone: needs torch and triton only (with the folder's other files).

T tokens, D hidden size, I expert intermediate size, J rows of the weight up (2I or I), E experts, K choices.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .configs import DECODE_TOKENS, choose_config, choose_decode_tile
from .decode import decode
from .launch import Launch
from .layer import backward, forward


@dataclass(frozen=True)
class Problem:
    """Sizes and options of one layer call."""

    num_tokens: int = 4096
    num_experts: int = 64
    top_k: int = 8
    hidden_size: int = 2048
    intermediate_size: int = 1024
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16


def record(architecture: int, problem: Problem) -> list[Launch]:
    """Every launch of a forward, a backward and a decode call of ``DECODE_TOKENS`` tokens, in this order.

    Args:
        architecture: 80, 90 or 100; 0 is the interpreter.
        problem: sizes.
    """
    launches: list[Launch] = []
    experts, hidden_size, width = problem.num_experts, problem.hidden_size, problem.intermediate_size
    rows = 2 * width if problem.gated else width
    new = lambda *shape, dtype=problem.dtype: torch.empty(shape, dtype=dtype, device="meta")
    up_bias, down_bias = (new(experts, rows), new(experts, hidden_size)) if problem.bias else (None, None)
    parameters: dict[str, Any] = {
        **{"up_weight": new(experts, rows, hidden_size), "down_weight": new(experts, hidden_size, width)},
        **{"up_bias": up_bias, "down_bias": down_bias},
        **{"activation": problem.activation, "gated": problem.gated, "launch": launches.append},
    }

    def inputs(num_tokens: int) -> dict[str, Any]:
        ids_TK = new(num_tokens, problem.top_k, dtype=torch.int64)
        weights_TK = new(num_tokens, problem.top_k, dtype=torch.float32)
        return {"x_TD": new(num_tokens, hidden_size), "ids_TK": ids_TK, "weights_TK": weights_TK}

    num_assignments = problem.num_tokens * problem.top_k
    config = choose_config(architecture, problem.dtype, num_assignments, experts, problem.activation)
    args = inputs(problem.num_tokens) | parameters
    out_TD, saved = forward(**args, config=config, dtype=problem.dtype, save=True)
    backward(torch.empty_like(out_TD), **args, saved=saved, config=config)
    tile = choose_decode_tile(architecture, problem.dtype)
    decode(**inputs(DECODE_TOKENS), **parameters, tile=tile, dtype=problem.dtype)
    return launches
