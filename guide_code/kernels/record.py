"""The launches of one layer call, recorded from tensors without memory: no GPU, no values, the same host code.

The default problem is OLMoE's layer (Muennighoff et al. 2024, arXiv:2409.02060) at 4,096 tokens.
Copy alone: needs torch and triton only (with the folder's other files).

T tokens, D hidden size, I expert intermediate size, J rows of the weight up (2I or I), E experts, K choices.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .configs import DECODE_TOKENS, Config, choose_config, choose_decode_tile
from .decode import decode
from .launch import Launch, Launcher
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
    args = layer_arguments(problem, torch.device("meta"))
    num_assignments, shape = args["ids_TK"].numel(), args["down_weight"].shape
    config = choose_config(architecture, problem.dtype, num_assignments, shape, problem.activation)
    train(args, config, launches.append)
    few = {name: args[name].new_empty(DECODE_TOKENS, args[name].shape[1]) for name in ("x_TD", "ids_TK", "weights_TK")}
    tile = choose_decode_tile(architecture, problem.dtype)
    decode(**args | few, tile=tile, dtype=problem.dtype, launch=launches.append)
    return launches


def layer_arguments(problem: Problem, device: torch.device) -> dict[str, Any]:
    """What :func:`.layer.forward` takes, without tiles: zeros, and ids that give every expert as many tokens.

    Args:
        problem: sizes.
        device: where the tensors are; on "meta" they have no memory.
    """
    experts, hidden_size, width = problem.num_experts, problem.hidden_size, problem.intermediate_size
    rows = 2 * width if problem.gated else width
    new = lambda *shape, dtype=problem.dtype: torch.zeros(shape, dtype=dtype, device=device)
    up_bias, down_bias = (new(experts, rows), new(experts, hidden_size)) if problem.bias else (None, None)
    shape = problem.num_tokens, problem.top_k
    return {
        **{"x_TD": new(problem.num_tokens, hidden_size), "weights_TK": new(*shape, dtype=torch.float32)},
        **{"ids_TK": (torch.arange(shape[0] * shape[1], device=device) % experts).view(shape)},
        **{"up_weight": new(experts, rows, hidden_size), "down_weight": new(experts, hidden_size, width)},
        **{"up_bias": up_bias, "down_bias": down_bias},
        **{"activation": problem.activation, "gated": problem.gated},
    }


def train(args: dict[str, Any], config: Config, launch: Launcher) -> None:
    """One forward and one backward call.

    Args:
        args: from :func:`layer_arguments`.
        config: tiles.
        launch: starts, times or records the kernels.
    """
    out_TD, saved = forward(**args, config=config, dtype=args["x_TD"].dtype, save=True, launch=launch)
    backward(torch.zeros_like(out_TD), **args, saved=saved, config=config, launch=launch)
