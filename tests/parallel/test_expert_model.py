"""Failures seen in other systems: recompute that routes anew, ranks without a batch, one token, a step apart."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import relative_rms
from ranks import run_on_ranks
from torch.utils.checkpoint import checkpoint
from training import build, full, loss_of, moe_layers

from guide_code.parallel.expert import ExpertParallel
from guide_code.parallel.expert_variants import (
    DeduplicatedExpertParallel,
    PaddedExpertParallel,
    ReplicatedExpertParallel,
)
from guide_code.parallel.mesh import ParallelSizes, build_meshes
from guide_code.parallel.parallelize import parallelize, split_experts

RANKS = 2
VARIANTS = (ExpertParallel, PaddedExpertParallel, DeduplicatedExpertParallel)


def tied(**how):
    """A model whose routers score experts 4 to 7 as 0 to 3, and have no gradient but that of the task."""
    model = build(**how)
    with torch.no_grad():
        for layer in moe_layers(model):
            layer.balancer.coefs = dict.fromkeys(layer.balancer.coefs, 0.0)
            layer.router.weight[4:] = layer.router.weight[:4]
    return model


def spread(model, **how):
    sizes = ParallelSizes(dp=RANKS, ep=RANKS)
    return parallelize(model, sizes, build_meshes(sizes, "cpu"), **how)


def recomputed(model):
    for block in model.blocks:
        call = block.forward
        block.forward = lambda *args, call=call: checkpoint(call, *args, use_reentrant=False)
    return model


def step(model, rank):
    loss_of(model, 0, 0, rank).backward()
    return full(model, lambda p: p.grad), [layer.balancer.counts.clone() for layer in moe_layers(model)]


def empty_batch(model, rank):
    """Forward and backward where the second rank has no sequence at all."""
    tokens = torch.arange(26).view(2, 13)[: 2 if rank == 0 else 0]
    logits = model(tokens[:, :-1]).logits
    (F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / 26).backward()
    return full(model, lambda p: p.grad)


@torch.no_grad()
def evaluate(model, rank):
    """Three batches on the first rank and two on the second, which sends an empty one along."""
    batches = [torch.arange(8).view(1, 8) + i for i in range(3 if rank == 0 else 2)]
    batches += [torch.zeros(0, 8, dtype=torch.int64)] * (3 - len(batches))
    return [model.eval()(tokens).logits for tokens in batches]


@torch.no_grad()
def one_token(mesh):
    """Fewer tokens than ranks, replicated as in decoding."""
    model = build().eval()
    for layer in moe_layers(model):
        layer.experts = split_experts(layer.experts, mesh, ReplicatedExpertParallel)
    return [model(torch.arange(n)[None]).logits for n in (1, 2, 3, 5)]


def apart():
    """The three steps one by one with other work between them, and in one call."""
    layer = moe_layers(build())[0]
    layer.experts = split_experts(layer.experts, build_meshes(ParallelSizes(dp=2, ep=2), "cpu")[1], ExpertParallel)
    x = torch.randn(9, 16)
    routing = layer.router(x)
    sent = layer.experts.dispatch(x, routing.ids, routing.weights)
    shared = layer.shared(x)
    out = layer.experts.combine(layer.experts.compute(sent), sent)
    return torch.equal(out + shared, layer.experts(x, routing.ids, routing.weights) + shared) and bool(out.any())


def on_ranks(rank):
    _, experts = build_meshes(ParallelSizes(dp=RANKS, ep=RANKS), "cpu")
    found = {"plain": step(spread(tied()), rank), "recomputed": step(recomputed(spread(tied(router_jitter=0.1))), rank)}
    found["noisy"] = step(spread(tied(router_jitter=0.1)), rank)
    found["empty"] = {kind.__name__: empty_batch(spread(build(), variant=kind), rank) for kind in VARIANTS[::2]}
    found["evaluated"] = evaluate(spread(build()), rank)
    found["one token"], found["apart"] = one_token(experts), apart()
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def results():
    return run_on_ranks(RANKS, on_ranks, time_limit=60)


def test_ties_route_alike_on_ranks_and_the_router_gets_the_gradient_of_the_task(results):
    model = tied()
    for rank in range(RANKS):
        (loss_of(model, 0, 0, rank) / RANKS).backward()
    for result in results:
        grads, _ = result["plain"]
        for name, parameter in model.named_parameters():
            assert relative_rms(grads[name], parameter.grad) <= 2e-5 and parameter.grad.any(), name


def test_recompute_routes_as_before_and_counts_once(results):
    """With jitter on, so that a second draw of the noise would choose other experts."""
    for result in results:
        (grads, counts), (wanted, wanted_counts) = result["recomputed"], result["noisy"]
        assert all(torch.equal(a, b) and a.sum() > 0 for a, b in zip(counts, wanted_counts, strict=True))
        assert all(relative_rms(grads[name], wanted[name]) <= 2e-6 for name in wanted)
    assert any(relative_rms(results[0]["noisy"][0][n], results[0]["plain"][0][n]) > 1e-3 for n in wanted)


@pytest.mark.parametrize("kind", [kind.__name__ for kind in VARIANTS[::2]])
def test_a_rank_without_a_batch_keeps_the_others_going(results, kind):
    model = build()
    tokens = torch.arange(26).view(2, 13)
    logits = model(tokens[:, :-1]).logits
    (F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / 26).backward()
    for result in results:
        for name, parameter in model.named_parameters():
            assert relative_rms(result["empty"][kind][name] * RANKS, parameter.grad) <= 2e-5, name


def test_evaluation_of_unequal_numbers_of_batches_ends(results):
    model = build().eval()
    for rank, result in enumerate(results):
        assert len(result["evaluated"]) == 3
        for i, logits in enumerate(result["evaluated"][: 3 - rank]):
            assert relative_rms(logits, model(torch.arange(8)[None] + i).logits.detach()) <= 2e-5
    assert results[1]["evaluated"][2].shape == (0, 8, 32)


def test_fewer_tokens_than_ranks(results):
    model = build().eval()
    for result in results:
        for n, logits in zip((1, 2, 3, 5), result["one token"], strict=True):
            assert relative_rms(logits, model(torch.arange(n)[None]).logits.detach()) <= 2e-5


def test_the_three_steps_can_be_taken_one_by_one(results):
    assert all(result["apart"] for result in results)
