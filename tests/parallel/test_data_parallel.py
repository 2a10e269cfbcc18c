"""What two ranks show: checkpoints across layouts, a NaN that stops all, mixed precision, losses over shared tokens."""

import functools

import pytest
import torch
import torch.distributed as dist
from counting import relative_rms
from ranks import run_on_ranks
from training import build, loss_of, moe_layers, train_alone, train_on_ranks

from guide_code.balance import load_balancing_loss, z_loss
from guide_code.balancer import Balancer
from guide_code.parallel.data import clip_gradients_, gradient_norm, shard
from guide_code.parallel.mesh import ParallelSizes, build_meshes
from guide_code.parallel.parallelize import parallelize
from guide_code.routers import TopKRouter

RANKS = 2
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
LAYOUTS = {"dp": dict(layout=dict(dp=2), zero=3), "ep": dict(layout=dict(dp=2, ep=2), zero=1)}
CONVENTIONS = ("megatron", "megatron_global", "hf", "switch")


def on_ranks(rank, folder):
    found = {"saved": {}, "resumed": {}}
    for name, how in LAYOUTS.items():
        run = functools.partial(train_on_ranks, rank, optimizer=MOMENTUM)
        found["saved"][name] = run(**how, steps=range(2), save=f"{folder}/{name}")
    for name, how in LAYOUTS.items():
        for source in LAYOUTS:
            found["resumed"][source, name] = run(**how, steps=range(2, 4), load=f"{folder}/{source}")
    found["norms"] = poison(rank)
    found["narrow"] = narrow(rank)
    found["shared"] = {convention: over_tokens(rank, convention) for convention in CONVENTIONS}
    return found


def make(**how):
    sizes = ParallelSizes(dp=RANKS, ep=RANKS)
    return parallelize(build(), sizes, build_meshes(sizes, "cpu"), **how)


def poison(rank):
    """Norms as they are, clipped, with a NaN in one expert of rank 1, with an infinity in one dense shard of rank 0."""
    model = make()
    loss_of(model, 0, 0, rank).backward()
    experts = next(p for n, p in model.named_parameters() if "experts.down" in n).grad.to_local()
    head = model.head.weight.grad.to_local()
    norms = [gradient_norm(model.parameters())]
    clip_gradients_(model.parameters(), float(norms[0]) / 4, norms[0])
    norms.append(gradient_norm(model.parameters()))
    if rank == 1:
        experts[0, 0, 0] = torch.nan
    norms.append(gradient_norm(model.parameters()))
    if rank == 1:
        experts[0, 0, 0] = 0
    if rank == 0:
        head[0, 0] = torch.inf
    norms.append(gradient_norm(model.parameters()))
    return [float(norm) for norm in norms]


def narrow(rank):
    """Data types on the way through a model that computes in bfloat16, and its loss beside that of float32."""
    losses, seen = [], {}
    for dtype in (torch.float32, torch.bfloat16):
        model = make(param_dtype=dtype)
        layer = moe_layers(model)[0]
        wrapped = layer.experts.experts
        call = layer.experts.call_experts

        def watch(x, ids, weights, call=call, experts=wrapped, seen=seen):
            seen.update(weights=weights.dtype, tokens=x.dtype, experts=experts.get_parameter("gate_up_proj").dtype)
            return call(x, ids, weights)

        layer.experts.call_experts = watch
        loss = loss_of(model, 0, 0, rank)
        loss.backward()
        stored = wrapped.get_parameter("gate_up_proj")
        seen.update(stored=stored.dtype, gradient=stored.grad.dtype, router=layer.router.weight.dtype)
        losses.append(float(loss))
    return losses, seen


def shared_tokens():
    """Tokens of two sequences that two ranks hold half of each, with more real ones on one rank."""
    torch.manual_seed(5)
    return torch.randn(24, 16), torch.arange(24) < 17, TopKRouter(16, 8, 2, use_expert_bias=True).train()


def over_tokens(rank, convention):
    """The router's gradient and the losses, averaged over ranks that share the tokens of a micro-batch."""
    x, mask, router = shared_tokens()
    coefs = {"load_balancing": 0.3, "z_loss": 0.1}
    balancer = Balancer(8, coefs=coefs, convention=convention, num_layers=1, expert_bias_rate=0.1)
    balancer.set_groups(token_group=dist.group.WORLD)
    part = slice(12 * rank, 12 * rank + 12)
    balancer(x[part].clone().requires_grad_(), router(x[part], mask[part]), mask[part]).sum().backward()
    grad = router.weight.grad / RANKS
    dist.all_reduce(grad)
    losses = {name: float(value) for name, value in balancer.losses().items()}
    balancer.step(router)
    return grad, losses, router.expert_bias


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_on_ranks(RANKS, on_ranks, str(tmp_path_factory.mktemp("checkpoints")), time_limit=150)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_a_checkpoint_goes_on_under_another_layout(results, source, target):
    wanted = train_alone(RANKS, steps=range(4), optimizer=MOMENTUM)
    found = results[0]["resumed"][source, target]
    losses = results[0]["saved"][source]["losses"] + found["losses"]
    assert relative_rms(torch.tensor(losses), torch.tensor(wanted["losses"])) <= 2e-5
    for name, value in wanted["parameters"].items():
        assert relative_rms(found["parameters"][name], value) <= 2e-5, name
    assert all(torch.equal(a, b) for a, b in zip(found["bias"], wanted["bias"], strict=True))


def test_the_norm_is_one_number_and_what_is_not_finite_on_one_rank_reaches_all(results):
    for whole, clipped, with_nan, with_inf in (result["norms"] for result in results):
        assert (whole, clipped) == (results[0]["norms"][0], pytest.approx(whole / 4, rel=1e-4))
        assert with_nan != with_nan and with_inf == float("inf")


def test_mixed_precision_narrows_the_experts_but_not_the_combine_weights(results):
    for result in results:
        (wide, low), seen = result["narrow"]
        assert low == pytest.approx(wide, rel=2e-2) and low != wide
        assert seen == {
            "weights": torch.float32,
            "tokens": torch.bfloat16,
            "experts": torch.bfloat16,
            "stored": torch.float32,
            "gradient": torch.float32,
            "router": torch.float32,
        }


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_losses_over_tokens_that_ranks_share(results, convention):
    x, mask, router = shared_tokens()
    routing = router(x, mask)
    counts = torch.bincount(routing.ids[mask].flatten(), minlength=8)[:8]
    given = {"counts_E": counts} if convention == "megatron_global" else {}
    losses = {
        "load_balancing": load_balancing_loss(
            routing.scores, routing.ids, convention=convention, mask_T=mask, num_layers=1, **given
        ),
        "z_loss": z_loss(routing.logits, mask),
    }
    (0.3 * losses["load_balancing"] + 0.1 * losses["z_loss"]).backward()
    bias = 0.1 * torch.sign(counts.float().mean() - counts)
    for grad, values, moved in (result["shared"][convention] for result in results):
        assert relative_rms(grad, router.weight.grad) <= 2e-6 and router.weight.grad.any()
        assert values == pytest.approx({name: float(loss.detach()) for name, loss in losses.items()}, rel=2e-6)
        assert torch.equal(moved, bias)


@pytest.mark.parametrize(("coefs", "convention"), [({"sequence_load_balancing": 1.0}, "megatron"), (None, "tutel")])
def test_a_loss_that_cannot_be_shared_is_refused(coefs, convention):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        balancer = Balancer(8, coefs=coefs or {"load_balancing": 1.0}, convention=convention)
        with pytest.MonkeyPatch.context() as patch:
            balancer.set_groups(token_group=dist.group.WORLD)  # one rank shares nothing
            patch.setattr(dist, "get_world_size", lambda group: 2)
            with pytest.raises(ValueError, match="cannot be taken over a token_group of several ranks"):
                balancer.set_groups(token_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match=r"zero must be one of .* got 4"):
        shard([], None, zero=4)
    with pytest.raises(ValueError, match=r"parallelize splits over dp and ep only, got tp=2"):
        parallelize(build(), ParallelSizes(tp=2), (None, None))
    with pytest.raises(ValueError, match=r"ep=3 does not divide num_experts=8. Nearest possible: ep=2, ep=4"):
        parallelize(build(), ParallelSizes(dp=3, ep=3), (None, None))
