"""The contract of experts, as checks that any backend can be put through: values and every gradient.

for case in CASES:
    check_experts(MyExperts, case, torch.float32)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from guide_code.testing.oracle import oracle_experts

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest relative RMS error by dtype; measured errors are three to ten times smaller."""


@dataclass(frozen=True)
class Case:
    """Sizes and options of one check, with the reason why it is there."""

    reason: str
    num_tokens: int = 33
    hidden_size: int = 16
    intermediate_size: int = 8
    num_experts: int = 6
    top_k: int = 2
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    routing: str = "random"
    """"random", "one" (all tokens on the same experts), "none" (every id a sentinel), "holes" (some are)."""
    scale: float = 1.0
    """Standard deviation of the tokens."""


CASES = (
    Case("the plain case"),
    Case("biases", bias=True),
    Case("no gate, as in Switch", gated=False, activation="relu"),
    Case("gelu, no gate, biases", gated=False, activation="gelu", bias=True),
    Case("gated gelu", activation="gelu"),
    Case("gpt-oss: gate and up alternate", activation="swigluoai", bias=True),
    Case("no token", num_tokens=0),
    Case("one token", num_tokens=1),
    Case("one choice", top_k=1),
    Case("every expert chosen", top_k=6),
    Case("one expert", num_experts=1, top_k=1),
    Case("prime sizes: no stride is a multiple of 16 bytes", 17, 7, 5, 5, 3, bias=True),
    Case("width 1", 9, 1, 1, 3, 2),
    Case("most experts idle", 3, num_experts=60),
    Case("all tokens on the same experts", routing="one"),
    Case("sentinels among the ids, on tokens that hold NaN", routing="holes"),
    Case("sentinels, biases and odd sizes", 17, 7, 5, 5, 3, bias=True, routing="holes"),
    Case("nothing but sentinels", routing="none", bias=True),
)

CLAMPED = Case("gpt-oss: a third of what goes in is clamped", activation="swigluoai", bias=True, scale=8.0)
"""For float32 and float64 only: narrower types round values across the clamp, where the gradient jumps."""


OFF_TILE_TOKENS = (0, 1, 2, 3, 7, 15, 16, 17, 33, 63, 65, 257)


def off_tile_cases(num_tokens: int) -> Iterator[Case]:
    """All combinations of sizes that are no multiples of a tile, for one of :data:`OFF_TILE_TOKENS`."""
    for hidden, inner, experts in product((1, 3, 17, 33, 129, 511), (5, 31, 96, 1025), (1, 3, 5, 6, 60)):
        for top_k in sorted({1, min(2, experts), experts}):
            sizes = num_tokens, hidden, inner, experts, top_k
            yield Case(f"tokens, hidden, intermediate, experts, k = {sizes}", *sizes, bias=True)


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of the error over RMS of the expected values; the plain RMS of the error when those are all zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    error, scale = (actual - expected).norm(), expected.norm()
    return float(error / scale) if scale > 0 else float(error)


def check_experts(
    experts_class: Callable[..., nn.Module], case: Case, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0
) -> None:
    """Compare a backend with the oracle: output and gradients of tokens, weights and every parameter.

    Args:
        experts_class: called with number of experts, hidden size, intermediate size; activation, gated, bias by name.
        case: one of :data:`CASES` or your own.
        dtype: of tokens and parameters; combine weights are float32 or wider.
        device: where the backend runs; the oracle runs on the CPU.
        seed: of all random numbers.

    Raises:
        AssertionError: something differs; the message names the tensor and the error.
    """
    generator = torch.Generator().manual_seed(seed)
    experts = experts_class(
        case.num_experts,
        case.hidden_size,
        case.intermediate_size,
        activation=case.activation,
        gated=case.gated,
        bias=case.bias,
    )
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
    experts = experts.to(device=device, dtype=dtype)
    x_TD, ids_TK, weights_TK = make_inputs(case, dtype, generator)
    cotangent_TD = torch.randn(x_TD.shape, generator=generator).to(dtype)

    x, weights = (t.to(device).clone().requires_grad_() for t in (x_TD, weights_TK))
    out_TD = experts(x, ids_TK.to(device), weights)
    assert out_TD.dtype == dtype and out_TD.shape == x_TD.shape, f"{case.reason}: {out_TD.dtype} {out_TD.shape}"
    out_TD.backward(cotangent_TD.to(device))
    with torch.no_grad():
        inferred_TD = experts(x, ids_TK.to(device), weights)

    parameters = {name: p.detach().cpu().double().requires_grad_() for name, p in experts.named_parameters()}
    up = "gate_up_proj" if case.gated else "up_proj"
    x64, weights64 = (t.double().requires_grad_() for t in (x_TD, weights_TK))
    expected_TD = oracle_experts(
        x64,
        ids_TK,
        weights64,
        parameters[up],
        parameters["down_proj"],
        gate_up_proj_bias=parameters.get(f"{up}_bias"),
        down_proj_bias=parameters.get("down_proj_bias"),
        activation=case.activation,
        gated=case.gated,
    )
    if expected_TD.requires_grad:
        expected_TD.backward(cotangent_TD.double())

    _close("output", out_TD, expected_TD, dtype, case)
    _close("output without gradients", inferred_TD, expected_TD, dtype, case)
    _close("gradient of tokens", x.grad, x64.grad, dtype, case)
    _close("gradient of combine weights", weights.grad, weights64.grad, dtype, case)
    for name, parameter in experts.named_parameters():
        _close(f"gradient of {name}", parameter.grad, parameters[name].grad, dtype, case)


def make_inputs(case: Case, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and combine weights for a case. Tokens whose ids are all sentinels hold NaN."""
    shape = (case.num_tokens, case.top_k)
    x_TD = (case.scale * torch.randn(case.num_tokens, case.hidden_size, generator=generator)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    weights_TK = torch.rand(shape, generator=generator).to(wide) + 0.1
    order = [torch.randperm(case.num_experts, generator=generator)[: case.top_k] for _ in range(case.num_tokens)]
    ids_TK = torch.stack(order) if order else torch.zeros(shape, dtype=torch.int64)
    if case.routing == "one":
        ids_TK = ids_TK[:1].expand(shape).clone()
    if case.routing == "none":
        ids_TK = torch.full(shape, case.num_experts)
    if case.routing == "holes":
        ids_TK[torch.rand(shape, generator=generator) < 0.3] = case.num_experts
        ids_TK[1], ids_TK[2, 0] = -1, case.num_experts + 5
    outside_T = ((ids_TK < 0) | (ids_TK >= case.num_experts)).all(dim=1)
    return torch.where(outside_T[:, None], torch.nan, x_TD), ids_TK, weights_TK


def _close(what: str, actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype, case: Case) -> None:
    assert actual is not None, f"{case.reason}: {what} is None, not zeros"
    expected = torch.zeros(actual.shape, dtype=torch.float64) if expected is None else expected.detach()
    actual = actual.detach().cpu()
    assert actual.isfinite().all(), f"{case.reason}: {what} is not finite"
    error = relative_rms(actual, expected)
    assert error <= TOLERANCES[dtype], f"{case.reason}: {what} is off by {error:.1e} relative RMS in {dtype}"
    if what == "output" and len(actual):  # an RMS over all tokens dilutes one that is lost
        rows_T = (actual.double() - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(expected.norm(dim=1).mean())
        worst = float(rows_T.nan_to_num().max())
        assert worst <= 10 * TOLERANCES[dtype], f"{case.reason}: one token's {what} is off by {worst:.1e} in {dtype}"
