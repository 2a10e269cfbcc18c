"""Pipelines of MoE layers, with their balancing losses, against one process that takes the micro-batches in turn."""

from itertools import combinations, pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import relative_rms
from ranks import run_on_ranks
from training import moe_layers

from guide_code.build import build_model
from guide_code.config import ModelConfig, MoEConfig
from guide_code.parallel.pipeline import SCHEDULES, cut_layers, make_pipeline

RANKS, MICRO_BATCHES, STEPS, SHAPE = 2, 4, 2, (8, 10)


def build(**options):
    torch.manual_seed(3)
    moe = MoEConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        num_experts=4,
        top_k=2,
        num_shared_experts=1,
        load_balancing_coef=0.1,
        z_loss_coef=0.01,
        expert_bias_rate=0.01,
        backend="grouped",
    )
    config = ModelConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_layers=5,
        num_heads=2,
        num_kv_heads=2,
        head_size=8,
        max_length=32,
        first_k_dense=1,
        moe=moe,
        **options,
    )
    return build_model(config).train()


def loss_fn(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) / MICRO_BATCHES


def batch(step):
    tokens = torch.randint(0, 32, (SHAPE[0], SHAPE[1] + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def train(model, run):
    """What ``run(tokens, targets)`` leaves behind after some steps: losses, gradients, parameters, counts."""
    layers, losses = moe_layers(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(STEPS):
        for layer in layers:
            layer.balancer.set_scale(1 / MICRO_BATCHES)
        losses.append(run(*batch(step)))
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        for layer in layers:
            layer.balancer.step(layer.router)
    counts = [layer.balancer.last_counts for layer in layers]
    return losses, grads, {name: p.detach() for name, p in model.named_parameters()}, counts


def on_ranks(rank):
    found = {}
    for schedule in SCHEDULES:
        costs = [1, 2, 2, 2, 2]
        options = {"micro_batches": MICRO_BATCHES, "schedule": schedule, "costs": costs}
        pipeline = make_pipeline(build(), dist.group.WORLD, SHAPE, loss_fn, **options)

        def run(tokens, targets, pipeline=pipeline):
            losses = []
            given = {"target": targets, "losses": losses} if pipeline.last else {}
            pipeline.schedule.step(*[tokens] * pipeline.first, **given)
            return [float(loss.detach()) for loss in losses]

        found[schedule] = train(pipeline.modules, run)
    return found


@pytest.fixture(scope="module")
def results():
    return run_on_ranks(RANKS, on_ranks, time_limit=120)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_to_one_process(results, schedule):
    model = build()

    def run(tokens, targets):
        losses = []
        for part, target in zip(tokens.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
            losses.append(loss_fn(model(part).logits, target))
            losses[-1].backward()
        return [float(loss.detach()) for loss in losses]

    losses, grads, parameters, counts = train(model, run)
    last = next(result[schedule][0] for result in results if result[schedule][0][0])
    assert relative_rms(torch.tensor(last), torch.tensor(losses)) <= 2e-5
    seen = set()
    for result in results:
        for wanted, found in ((grads, result[schedule][1]), (parameters, result[schedule][2])):
            for name, value in found.items():
                name = name.split(".", 1)[1]  # without the number of the stage on its rank
                seen.add(name)
                assert relative_rms(value, wanted[name]) <= 2e-5 and value.any(), name
    assert seen == set(grads)
    found = [tuple(c.tolist()) for result in results for c in result[schedule][3]]
    assert sorted(found) == sorted(tuple(c.tolist()) for c in counts), "a micro-batch counted twice, or a dry run"


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_no_cut_is_better(stages):
    torch.manual_seed(stages)
    costs = torch.rand(6).tolist()

    def worst(bounds):
        return max(sum(costs[a:b]) for a, b in bounds)

    found = cut_layers(costs, stages)
    assert [a for a, _ in found] == [0, *[b for _, b in found[:-1]]] and found[-1][1] == 6 and len(found) == stages
    every = [[0, *cuts, 6] for cuts in combinations(range(1, 6), stages - 1)]
    assert worst(found) == pytest.approx(min(worst(list(pairwise(c))) for c in every))


def test_what_is_refused():
    with pytest.raises(ValueError, match="every stage needs a layer: 4 stages for 3 layers"):
        cut_layers([1, 1, 1], 4)
    with pytest.raises(ValueError, match=r"schedule must be one of .* got '2F2B'"):
        make_pipeline(build(), None, SHAPE, loss_fn, micro_batches=2, schedule="2F2B")
    with pytest.raises(ValueError, match="micro_batches=3 must divide the 8 sequences"):
        make_pipeline(build(), None, SHAPE, loss_fn, micro_batches=3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="tie_embeddings=True joins the first and the last stage"):
            make_pipeline(build(tie_embeddings=True), dist.group.WORLD, SHAPE, loss_fn, micro_batches=2)
        windows = {"layer_types": ("sliding_attention",) * 5, "sliding_window": 4}
        with pytest.raises(ValueError, match="sliding or chunked attention cannot be pipelined"):
            make_pipeline(build(**windows), dist.group.WORLD, SHAPE, loss_fn, micro_batches=2)
    finally:
        dist.destroy_process_group()
