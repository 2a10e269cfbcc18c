"""Sliced experts, alone and inside expert parallelism, against whole ones in one process."""

import pytest
import torch
import torch.distributed as dist
from counting import relative_rms
from ranks import run_on_ranks

from guide_code.experts.grouped import GroupedExperts
from guide_code.parallel.expert import ExpertParallel
from guide_code.parallel.expert_tensor import ExpertTensorParallel, slice_experts_
from guide_code.parallel.mesh import ParallelSizes, build_meshes

E, D, WIDTH, RANKS = 4, 16, 12, 4
STYLES = {
    "gated": {},
    "alternating": {"activation": "swigluoai"},
    "plain": {"gated": False, "activation": "gelu"},
}
LAYOUTS = {"etp 4": ParallelSizes(dp=4, etp=4), "ep 2 x etp 2": ParallelSizes(dp=4, ep=2, etp=2)}
TOKENS = (5, 0, 3, 7)


def build(style, dtype):
    torch.manual_seed(1)
    experts = GroupedExperts(E, D, WIDTH, bias=True, **style).to(dtype)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return experts


def inputs(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    x, grad = (torch.randn(TOKENS[rank], D, generator=generator, dtype=dtype) for _ in range(2))
    ids = torch.rand(TOKENS[rank], E + 1, generator=generator).argsort(dim=1)[:, :2]  # E is no expert
    weights = torch.rand(TOKENS[rank], 2, generator=generator, dtype=dtype)
    return x.requires_grad_(), ids, weights.requires_grad_(), grad


def part_of(experts, sizes, ep_rank, etp_rank):
    """The whole experts of one place along ep, then their slice."""
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, torch.nn.Parameter(parameter.detach().chunk(sizes.ep)[ep_rank].clone()))
    experts.num_experts = E // sizes.ep
    return slice_experts_(experts, etp_rank, sizes.etp)


def on_ranks(rank):
    found = {}
    for layout, sizes in LAYOUTS.items():
        _, mesh = build_meshes(sizes, "cpu")
        for style, options in STYLES.items():
            for dtype in (torch.float32, torch.float64):
                ep, etp = mesh["ep"], mesh["etp"]
                part = part_of(build(options, dtype), sizes, ep.get_local_rank(), etp.get_local_rank())
                layer = ExpertParallel(ExpertTensorParallel(part, etp.get_group()), ep.get_group())
                x, ids, weights, grad = inputs(rank, dtype)
                out = layer(x, ids, weights)
                grads = torch.autograd.grad(out, [x, weights, *part.parameters()], grad)
                names = ["x", "weights", *dict(part.named_parameters())]
                found[layout, style, dtype] = (out.detach(), dict(zip(names, grads, strict=True)))
    group = [dist.new_group([r]) for r in range(RANKS)][rank]
    whole, (x, ids, weights, _) = build({}, torch.float32), inputs(0, torch.float32)
    found["alone"] = torch.equal(ExpertTensorParallel(whole, group)(x, ids, weights), whole(x, ids, weights))
    return found


@pytest.fixture(scope="module")
def results():
    return run_on_ranks(RANKS, on_ranks, time_limit=60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_one_process(results, layout, style, dtype):
    experts, sizes = build(STYLES[style], dtype), LAYOUTS[layout]
    parts = list(zip(*[inputs(rank, dtype) for rank in range(RANKS)], strict=True))
    x, ids, weights, grad = (torch.cat(part).detach() for part in parts)
    x.requires_grad_(), weights.requires_grad_()
    out = experts(x, ids, weights)
    out.backward(grad)
    tolerance = 1e-14 if dtype == torch.float64 else 2e-6
    found = [result[layout, style, dtype] for result in results]
    assert relative_rms(torch.cat([f[0] for f in found]), out.detach()) <= tolerance
    for name, wanted in (("x", x.grad), ("weights", weights.grad)):
        assert relative_rms(torch.cat([f[1][name] for f in found]), wanted) <= tolerance, name
    for place, (_, grads) in enumerate(found):
        ep_rank, etp_rank = divmod(place, sizes.etp)
        wanted = build(STYLES[style], dtype)
        with torch.no_grad():
            for name, parameter in wanted.named_parameters():
                parameter.copy_(experts.get_parameter(name).grad)
        part = dict(part_of(wanted, sizes, ep_rank, etp_rank).named_parameters())
        assert part.keys() == grads.keys() - {"x", "weights"}
        for name, value in part.items():
            assert value.any() and relative_rms(grads[name], value.detach()) <= tolerance, (place, name)


def test_a_group_of_one_calls_the_experts(results):
    assert all(result["alone"] for result in results)


def test_gate_and_up_are_cut_apart():
    experts = GroupedExperts(1, 1, 4)
    experts.gate_up_proj.data = torch.arange(8.0)[None, :, None]
    assert slice_experts_(experts, 1, 2).gate_up_proj.flatten().tolist() == [2, 3, 6, 7]


def test_a_width_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"etp=5 does not divide 12. Possible: \[1, 2, 3, 4, 6, 12\]"):
        slice_experts_(GroupedExperts(E, D, WIDTH), 0, 5)
