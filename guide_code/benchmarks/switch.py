"""One token through a Switch layer: latency against the number of experts.

Three ways over the same parameters: a loop that calls all experts and multiplies by a mask, which was common when
these models came out; transformers' present class; the class of this package that the plug-in puts in its place.
The router, whose cost grows with the number of experts for everyone, is left out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from guide_code.benchmarks.timing import available_bytes, take_turns

EXPERTS = (8, 16, 32, 64, 128, 256, 512)
TOLERANCE = 1e-6
"""Largest relative root mean square of the difference from the loop over all experts."""


def all_experts_loop(experts: Any, x_TD: Tensor, choice_T1E: Tensor, weights_T1: Tensor) -> Tensor:
    """(T, D): every expert computes every token, and a mask keeps what was chosen."""
    masks_TE = choice_T1E[:, 0] * weights_T1
    out_TD = torch.zeros_like(x_TD)
    for index, expert in enumerate(experts.values()):
        out_TD += expert(x_TD) * masks_TE[:, index, None]
    return out_TD


def measure_switch(
    experts: tuple[int, ...] = EXPERTS,
    *,
    hidden_size: int = 768,
    intermediate_size: int = 2048,
    repeats: int = 40,
    seconds: float = 10.0,
) -> list[dict[str, Any]]:
    """One row per number of experts and way, in float32 on the CPU; all numbers of experts take turns.

    "ours" is timed twice: the difference of the two is the noise of this run.

    Args:
        experts: numbers of experts.
        hidden_size: D; 768 is that of Switch-base.
        intermediate_size: of an expert; 2048 is that of Switch-base.
        repeats: turns.
        seconds: of one way with one number of experts.

    Raises:
        ValueError: a number of experts is below 1, or their weights need over three quarters of the memory at hand.
        ArithmeticError: the ways do not compute the same.
    """
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersExperts

    from guide_code.hf_switch import SortedSwitchExperts

    if bad := [count for count in experts if count < 1]:
        raise ValueError(f"experts={bad} must be at least 1")
    needed, room = 8 * sum(experts) * hidden_size * intermediate_size, available_bytes() * 3 // 4
    if needed > room:
        raise ValueError(
            f"experts={list(experts)} need {needed / 1e9:.1f} GB, {room / 1e9:.1f} GB may be used: ask fewer"
        )
    timed: dict[str, Callable[[int], object]] = {}
    rows: list[dict[str, Any]] = []
    for count in experts:
        config = SwitchTransformersConfig(
            num_experts=count, d_model=hidden_size, d_ff=intermediate_size, dropout_rate=0.0, dense_act_fn="relu"
        )
        theirs = SwitchTransformersExperts(config).eval()
        ours = _same_parameters(SortedSwitchExperts, config, theirs)
        generator = torch.Generator().manual_seed(count)
        x_TD = torch.randn(1, hidden_size, generator=generator)
        weights_T1 = torch.full((1, 1), 0.5)
        chosen = [int(torch.randint(count, (), generator=generator)) for _ in range(64)]
        masks = [torch.nn.functional.one_hot(torch.tensor([[c]]), count) for c in chosen]
        ways: dict[str, Callable[..., Tensor]] = {
            "all experts": lambda x, mask, w, experts=theirs: all_experts_loop(experts, x, mask, w),
            "transformers": theirs,
            "ours": ours,
            "ours again": ours,
        }
        with torch.no_grad():
            wanted = ways["all experts"](x_TD, masks[0], weights_T1)
            for name, way in ways.items():
                error = float((way(x_TD, masks[0], weights_T1) - wanted).norm() / wanted.norm())
                if not error <= TOLERANCE:
                    raise ArithmeticError(f"{name} with {count} experts differs by {error:.1e}, so nothing is timed")
                rows.append({"experts": count, "way": name, "error": error})
                timed[f"{count} {name}"] = _call(way, x_TD, masks, weights_T1)
    timings = take_turns(timed, repeats=repeats, seconds=seconds)
    return [row | timings[f"{row['experts']} {row['way']}"]._asdict() for row in rows]


def growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Latency of "ours" with most experts over that with fewest, and how far two runs of one size were apart.

    Args:
        rows: from :func:`measure_switch`.
    """
    median = {(row["experts"], row["way"]): row["median_ms"] for row in rows}
    sizes = sorted({row["experts"] for row in rows})
    noise = max(abs(median[n, "ours again"] / median[n, "ours"] - 1) for n in sizes)
    return {"growth": median[sizes[-1], "ours"] / median[sizes[0], "ours"] - 1, "noise": noise}


def _same_parameters(kind: Any, config: Any, theirs: torch.nn.Module) -> torch.nn.Module:
    with torch.device("meta"):
        module = kind(config)
    module.load_state_dict(theirs.state_dict(), assign=True)
    return module.eval()


def _call(way: Callable[..., Tensor], x_TD: Tensor, masks: list[Tensor], weights_T1: Tensor) -> Callable[[int], object]:
    def run(turn: int) -> object:
        with torch.no_grad():
            return way(x_TD, masks[turn % len(masks)], weights_T1)

    return run
