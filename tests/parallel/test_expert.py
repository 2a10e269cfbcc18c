"""Experts over ranks against the same experts in one process: outputs, every gradient, traffic, edges."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from counting import Traffic, relative_rms
from ranks import run_on_ranks

from guide_code.experts.grouped import GroupedExperts
from guide_code.parallel.expert import ExpertParallel, all_to_all_bytes
from guide_code.parallel.expert_variants import (
    DeduplicatedExpertParallel,
    PaddedExpertParallel,
    ReplicatedExpertParallel,
    deduplicated_bytes,
)

E, D, WIDTH, K = 8, 16, 12, 3
CASES = {
    "uneven": dict(tokens=(5, 9, 2, 4)),
    "one rank has no token": dict(tokens=(4, 0, 3, 5)),
    "all to one rank": dict(tokens=(3, 6, 4, 1), experts=range(2)),
    "to the last expert": dict(tokens=(3, 2, 4, 1), experts=[7]),
    "no expert at all": dict(tokens=(3, 2, 4, 1), experts=[8, -1, 9]),
    "sentinels": dict(tokens=(6, 5, 4, 8), experts=[0, 1, 8, 3, -1, 5, 8]),
    "float64": dict(tokens=(5, 9, 2, 4), dtype=torch.float64),
    "bfloat16": dict(tokens=(5, 9, 2, 4), dtype=torch.bfloat16),
    "float32 weights": dict(tokens=(5, 9, 2, 4), dtype=torch.bfloat16, weights_dtype=torch.float32),
}
TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
VARIANTS = {
    "all-to-all": ExpertParallel,
    "padded": lambda experts, group: PaddedExpertParallel(experts, group, capacity=9),
    "deduplicated": DeduplicatedExpertParallel,
}


def build_experts(dtype=torch.float32):
    torch.manual_seed(1)
    experts = GroupedExperts(E, D, WIDTH, bias=True).to(dtype)
    with torch.no_grad():
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            experts.get_parameter(name).normal_()
    return experts


def local_part(experts, rank, ranks):
    part = GroupedExperts(E // ranks, D, WIDTH, bias=True).to(experts.down_proj.dtype)
    for name, parameter in part.named_parameters():
        parameter.data = experts.get_parameter(name).detach().chunk(ranks)[rank].clone()
    return part


def inputs(rank, case):
    """Tokens, ids, weights and the gradient of the output, of one rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    count, dtype = case["tokens"][rank], case.get("dtype", torch.float32)
    pool = torch.tensor(list(case.get("experts", range(E))))
    columns = torch.rand(count, len(pool), generator=generator).argsort(dim=1)[:, :K]
    ids = torch.full((count, K), E)
    ids[:, : columns.shape[1]] = pool[columns]
    x, grad = (torch.randn(count, D, generator=generator).to(dtype) for _ in range(2))
    weights = torch.rand(count, K, generator=generator).to(case.get("weights_dtype", dtype))
    return x.requires_grad_(), ids, weights.requires_grad_(), grad


def run(layer, parameters, x, ids, weights, grad):
    out = layer(x, ids, weights)
    grads = torch.autograd.grad(out, [x, weights, *parameters], grad)
    return [out.detach(), *grads]


def on_ranks(rank, ranks):
    results = {}
    for name, case in CASES.items():
        experts = build_experts(case.get("dtype", torch.float32))
        for kind, wrap in VARIANTS.items():
            part = local_part(experts, rank, ranks)
            layer = wrap(part, dist.group.WORLD)
            results[kind, name] = run(layer, part.parameters(), *inputs(rank, case))
        part = local_part(experts, rank, ranks)
        same = [torch.cat(t).detach() for t in zip(*[inputs(r, case) for r in range(ranks)], strict=True)]
        same[0].requires_grad_(), same[2].requires_grad_()
        layer = ReplicatedExpertParallel(part, dist.group.WORLD)
        results["replicated", name] = run(layer, part.parameters(), *same)
    results["traffic"] = traffic(rank, ranks)
    results["again"] = [run_again(rank, ranks) for _ in range(2)]
    results["alone"] = alone(rank, ranks)
    results["dropped"] = dropped(rank, ranks)
    return results


def traffic(rank, ranks):
    """Counted and computed bytes, forward and backward, and the times that the host waited."""
    found, case = {}, CASES["sentinels"]
    for kind in ("all-to-all", "deduplicated"):
        part = local_part(build_experts(), rank, ranks)
        layer = VARIANTS[kind](part, dist.group.WORLD)
        x, ids, weights, grad = inputs(rank, case)
        tolist = mock.Mock(side_effect=torch.Tensor.tolist)
        with mock.patch.object(torch.Tensor, "tolist", lambda tensor, read=tolist: read(tensor)):
            with Traffic() as forward:
                out = layer(x, ids, weights)
        with Traffic() as backward:
            out.backward(grad)
        found[kind] = forward.bytes["all_to_all"], backward.bytes["all_to_all"], tolist.call_count
    return found


def run_again(rank, ranks):
    part = local_part(build_experts(), rank, ranks)
    return run(ExpertParallel(part, dist.group.WORLD), part.parameters(), *inputs(rank, CASES["uneven"]))


def alone(rank, ranks):
    """Operators that a group of one adds to the bare experts."""
    group = [dist.new_group([r]) for r in range(ranks)][rank]
    experts, args = build_experts(), inputs(rank, CASES["uneven"])
    counted = []
    layers = (ExpertParallel, PaddedExpertParallel, ReplicatedExpertParallel, DeduplicatedExpertParallel)
    for layer in (experts, *(kind(experts, group) for kind in layers)):
        with Traffic() as traffic:
            run(layer, experts.parameters(), *args)
        counted.append(traffic.calls)
    return all(calls == counted[0] for calls in counted[1:]), sum(counted[0].values())


def dropped(rank, ranks):
    part = local_part(build_experts(), rank, ranks)
    layer = PaddedExpertParallel(part, dist.group.WORLD, capacity=2)
    x, ids, weights, _ = inputs(rank, CASES["to the last expert"])
    return layer(x, ids, weights).detach(), int(layer.dropped)


RANKS = 4


@pytest.fixture(scope="module")
def results():
    return run_on_ranks(RANKS, on_ranks, RANKS, time_limit=90)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [*VARIANTS, "replicated"])
def test_equal_to_one_process(results, kind, name):
    case = CASES[name]
    experts = build_experts(case.get("dtype", torch.float32))
    x, ids, weights, grad = (torch.cat(t).detach() for t in zip(*[inputs(r, case) for r in range(RANKS)], strict=True))
    out, grad_x, grad_weights, *wanted = run(
        experts, experts.parameters(), x.requires_grad_(), ids, weights.requires_grad_(), grad
    )
    tolerance = TOLERANCES[case.get("dtype", torch.float32)]
    found = [ranks_result[kind, name] for ranks_result in results]
    tokens = [torch.cat(parts) for parts in list(zip(*found, strict=True))[:3]]
    if kind == "replicated":
        assert all(relative_rms(f[i], found[0][i]) == 0 for f in found for i in range(3)), "the ranks disagree"
        tokens = found[0][:3]
    assert tokens[0].dtype == out.dtype
    for actual, expected in zip(tokens, (out, grad_x, grad_weights), strict=True):
        assert relative_rms(actual, expected) <= tolerance
    for actual, expected in zip(list(zip(*found, strict=True))[3:], wanted, strict=True):
        assert relative_rms(torch.cat(actual), expected) <= tolerance
    if name == "no expert at all":
        assert not out.any() and not any(w.any() for w in wanted)
    else:
        assert all(t.any() for t in (out, grad_x, grad_weights, *wanted)), "the comparison is of zeros"


def test_all_to_all_bytes_are_the_formula_and_the_host_waits_once(results):
    ids = [inputs(rank, CASES["sentinels"])[1] for rank in range(RANKS)]
    owners = [torch.where((i >= 0) & (i < E), i // (E // RANKS), RANKS) for i in ids]
    rows = torch.tensor([[int((o == p).sum()) for p in range(RANKS)] for o in owners])
    once = torch.tensor([[int((o == p).any(dim=1).sum()) for p in range(RANKS)] for o in owners])
    for rank, result in enumerate(results):
        sent, received = int(rows[rank].sum()), int(rows[:, rank].sum())
        wanted = all_to_all_bytes(sent, received, D, E, element_size=4)
        backward = (sent + received) * D * 4 + received * 4
        assert result["traffic"]["all-to-all"] == (wanted, backward, 1)
        sent, received = int(once[rank].sum()), int(once[:, rank].sum())
        wanted = deduplicated_bytes(sent, received, D, K, RANKS, element_size=4)
        assert result["traffic"]["deduplicated"] == (wanted, (sent + received) * D * 4 + received * K * 4, 1)
    assert once.sum() < rows.sum()


def test_two_runs_give_the_same_bits(results):
    for result in results:
        first, second = result["again"]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_group_of_one_adds_no_operator(results):
    for result in results:
        same, operators = result["alone"]
        assert same and operators > 10


def test_padding_drops_the_last_beyond_its_capacity_and_counts_them(results):
    case = CASES["to the last expert"]
    for rank, result in enumerate(results):
        out, dropped = result["dropped"]
        x, ids, weights, _ = inputs(rank, case)
        kept = torch.arange(len(x)) < 2
        wanted = build_experts()(x, torch.where(kept[:, None], ids, E), weights).detach()
        assert relative_rms(out, wanted) <= 2e-6 and dropped == max(0, len(x) - 2)


def test_a_capacity_below_one_is_refused():
    with pytest.raises(ValueError, match="capacity must be at least 1 row per rank and expert, got 0"):
        run_alone(lambda group: PaddedExpertParallel(build_experts(), group, capacity=0))


def run_alone(function):
    """``function(group)`` in this process, in a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return function(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
