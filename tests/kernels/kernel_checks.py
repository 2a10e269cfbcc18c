"""Checks of the fused experts that run on any device: in Triton's interpreter on a CPU, as they are on a GPU."""

from itertools import combinations, product

import torch

from guide_code.experts.fused import FusedExperts, fused_experts
from guide_code.testing.contract import TOLERANCES, Case, make_inputs, relative_rms
from guide_code.testing.oracle import oracle_experts

SIZES = {
    "num_tokens": (1, 7, 33),
    "hidden_size": (1, 17, 33),
    "intermediate_size": (5, 16, 31),
    "num_experts": (1, 3, 5),
    "top_k": (1, 2),
}


def pairwise_cases(sizes: dict[str, tuple[int, ...]], **options) -> list[Case]:
    """Few cases in which every two values of different fields meet: greedy, the first of the best each time."""
    names = list(sizes)
    rows = [row for row in product(*sizes.values()) if row[names.index("top_k")] <= row[names.index("num_experts")]]
    pairs_of = lambda row: set(combinations(enumerate(row), 2))
    left, cases = set().union(*map(pairs_of, rows)), []
    while left:
        best = max(rows, key=lambda row: len(pairs_of(row) & left))
        left -= pairs_of(best)
        cases.append(Case(" ".join(f"{n}={v}" for n, v in zip(names, best, strict=True)), *best, **options))
    return cases


def surrounded(tensor: torch.Tensor, filling: float) -> torch.Tensor:
    """The same values as a contiguous view into a buffer that holds ``filling`` before and after them."""
    buffer = tensor.new_full((tensor.numel() + 256,), filling)
    buffer[128:-128] = tensor.flatten()
    return buffer[128:-128].view(tensor.shape)


def framed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view into a tensor that has NaN at both ends of each of its last two dimensions."""
    shape = [*tensor.shape[:-2], tensor.shape[-2] + 2, tensor.shape[-1] + 3]
    buffer = tensor.new_full(shape, torch.nan)
    buffer[..., 1:-1, 2:-1] = tensor
    return buffer[..., 1:-1, 2:-1]


def check_neighbours(case: Case, dtype: torch.dtype, device: str) -> None:
    """What lies next to the arguments in memory changes no bit of the output or of any gradient."""
    generator = torch.Generator().manual_seed(0)
    x_TD, ids_TK, weights_TK = (t.to(device) for t in make_inputs(case, dtype, generator))
    experts = FusedExperts(
        case.num_experts, case.hidden_size, case.intermediate_size, activation=case.activation, bias=True
    ).to(device=device, dtype=dtype)
    parameters = [p.detach().normal_(generator=None) for p in experts.parameters()]
    cotangent_TD = torch.randn(x_TD.shape, generator=generator).to(device, dtype)
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    assert [name for name, _ in experts.named_parameters()] == list(names)

    def run(x, ids, weights, parameters, cotangent):
        leaves = [t.requires_grad_() for t in (x, weights, *parameters)]
        options = dict(zip(names, parameters, strict=True)) | {"activation": case.activation}
        out = fused_experts(x, ids, weights, **options)
        with torch.no_grad():
            few = fused_experts(x[:9], ids[:9], weights[:9], **options)
        return [out.detach(), few, *torch.autograd.grad(out, leaves, cotangent)]

    plain = run(x_TD.clone(), ids_TK, weights_TK.clone(), [p.clone() for p in parameters], cotangent_TD)
    stacked = [framed(p) if p.dim() == 3 else surrounded(p, torch.nan) for p in parameters]
    nested = run(framed(x_TD), surrounded(ids_TK, 0), surrounded(weights_TK, torch.nan), stacked, framed(cotangent_TD))
    for a, b in zip(plain, nested, strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


def check_decode(case: Case, dtype: torch.dtype, device: str) -> None:
    """Without a gradient few tokens take another path: the same output as the oracle's."""
    x_TD, ids_TK, weights_TK = make_inputs(case, dtype, torch.Generator().manual_seed(1))
    experts = FusedExperts(
        case.num_experts,
        case.hidden_size,
        case.intermediate_size,
        activation=case.activation,
        gated=case.gated,
        bias=case.bias,
    ).to(dtype)
    for parameter in experts.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    with torch.no_grad():
        up = "gate_up_proj" if case.gated else "up_proj"
        expected_TD = oracle_experts(
            x_TD,
            ids_TK,
            weights_TK,
            getattr(experts, up),
            experts.down_proj,
            gate_up_proj_bias=getattr(experts, f"{up}_bias"),
            down_proj_bias=experts.down_proj_bias,
            activation=case.activation,
            gated=case.gated,
        )
        out_TD = experts.to(device)(x_TD.to(device), ids_TK.to(device), weights_TK.to(device))
    assert out_TD.dtype == dtype and out_TD.isfinite().all()
    assert relative_rms(out_TD.cpu(), expected_TD) <= TOLERANCES[dtype], case.reason


def check_weighted_before_it_is_narrowed(device: str) -> None:
    """256 x 300 = 76,800 exceeds float16's 65,504; times 0.25 it does not: on both paths."""
    experts = FusedExperts(1, 8, 8, activation="relu", gated=False).to(device, torch.float16)
    with torch.no_grad():
        experts.up_proj.copy_(torch.eye(8))
        experts.down_proj.copy_(torch.eye(8) * 300)
    x_TD = torch.full((1, 8), 256.0, dtype=torch.float16, device=device)
    args = x_TD, torch.zeros(1, 1, dtype=torch.int64, device=device), torch.tensor([[0.25]], device=device)
    with torch.no_grad():
        decoded_TD = experts(*args)
    assert experts(*args).tolist() == decoded_TD.tolist() == [[19200.0] * 8]


def check_same_bits(device: str) -> None:
    """No atomic additions: two runs agree in every bit."""
    case = Case("33 tokens on 6 experts", bias=True)
    x_TD, ids_TK, weights_TK = (
        t.to(device) for t in make_inputs(case, torch.float32, torch.Generator().manual_seed(0))
    )
    experts, seen = FusedExperts(6, 16, 8, bias=True).to(device), set()
    cotangent_TD = torch.randn(33, 16).to(device)
    for _ in range(2):
        experts.zero_grad()
        x, weights = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        out_TD = experts(x, ids_TK, weights)
        out_TD.backward(cotangent_TD)
        tensors = [out_TD.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())]
        seen.add(b"".join(t.cpu().numpy().tobytes() for t in tensors))
    assert len(seen) == 1
