"""A few training steps, on ranks under a layout, and in one process that sees the same groups of tokens."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from guide_code.build import build_model
from guide_code.config import ModelConfig, MoEConfig
from guide_code.moe import MoE
from guide_code.parallel.checkpoint import load_distributed, plain_names, save_distributed
from guide_code.parallel.data import clip_gradients_, gradient_norm, mean_over, set_last_micro_batch
from guide_code.parallel.mesh import ParallelSizes, build_meshes
from guide_code.parallel.parallelize import parallelize

STEPS, MICRO_BATCHES, BATCH, LENGTH, CLIP = 5, 2, 2, 12, 0.5


def build(convention="megatron", dtype=torch.float32, backend="grouped", **options):
    torch.manual_seed(3)
    moe = MoEConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        num_experts=8,
        top_k=2,
        num_shared_experts=1,
        load_balancing_coef=0.1,
        z_loss_coef=0.01,
        load_balancing_convention=convention,
        expert_bias_rate=0.01,
        backend=backend,
        **options,
    )
    config = ModelConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_size=8,
        max_length=32,
        first_k_dense=0,
        moe=moe,
    )
    return build_model(config).to(dtype).train()


def batch(step, micro, rank):
    """Tokens (with the next one each) and mask; ranks have different numbers of real tokens."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    tokens = torch.randint(0, 32, (BATCH, LENGTH + 1), generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH - 2 - rank])[:, None]
    return tokens, mask


def loss_of(model, step, micro, rank):
    tokens, mask = batch(step, micro, rank)
    logits = model(tokens[:, :-1], mask_BS=mask).logits
    return F.cross_entropy(logits[mask], tokens[:, 1:][mask])


def moe_layers(model):
    return [module for module in model.modules() if isinstance(module, MoE)]


def balance(layers, result):
    result["balancing"].append([{k: float(v) for k, v in layer.balancer.losses().items()} for layer in layers])
    for layer in layers:
        layer.balancer.step(layer.router)


def finish(model, layers, result):
    result["bias"] = [layer.router.expert_bias.clone() for layer in layers]
    result["counts"] = [layer.balancer.last_counts.clone() for layer in layers]
    result["parameters"] = full(model, lambda p: p)
    return result


def full(model, pick):
    found, names = {}, plain_names(model)
    for name, parameter in model.named_parameters():
        value = pick(parameter).detach()
        for wrapped, plain in names.items():
            name = name.replace(wrapped, plain)
        found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return found


def empty_result():
    return {"losses": [], "norms": [], "balancing": [], "gradients": None}


def train_on_ranks(rank, layout, *, zero=3, steps=range(STEPS), save=None, load=None, optimizer=torch.optim.SGD, **how):
    """The result of :func:`train_alone`, from the ranks of this launch."""
    options = {name: how.pop(name) for name in ("variant", "param_dtype") if name in how}
    sizes = ParallelSizes(**layout)
    model = parallelize(build(**how), sizes, build_meshes(sizes, "cpu"), zero=zero, **options)
    optimizer = optimizer(model.parameters(), lr=0.3)
    if load is not None:
        assert load_distributed(load, model, optimizer) == steps[0]
    layers, result = moe_layers(model), empty_result()
    for step in steps:
        total = 0.0
        for micro in range(MICRO_BATCHES):
            set_last_micro_batch(model, zero, micro == MICRO_BATCHES - 1)
            for layer in layers:
                layer.balancer.set_scale(1 / MICRO_BATCHES)
            loss = loss_of(model, step, micro, rank) / MICRO_BATCHES
            loss.backward()
            total = total + loss.detach()
        result["losses"].append(float(mean_over(total, dist.group.WORLD)))
        norm = gradient_norm(model.parameters())
        result["norms"].append(float(norm))
        clip_gradients_(model.parameters(), CLIP, norm)
        result["gradients"] = result["gradients"] or full(model, lambda p: p.grad)
        optimizer.step()
        optimizer.zero_grad()
        balance(layers, result)
    if save is not None:
        save_distributed(save, steps[-1] + 1, model, optimizer)
    return finish(model, layers, result)


def train_alone(ranks, *, steps=range(STEPS), optimizer=torch.optim.SGD, **how):
    """One process in place of ``ranks``: the same groups of tokens one after another, the same averages."""
    model = build(**how)
    optimizer = optimizer(model.parameters(), lr=0.3)
    layers, result = moe_layers(model), empty_result()
    pieces = ranks * MICRO_BATCHES
    for step in steps:
        total = 0.0
        for micro in range(MICRO_BATCHES):
            count_all(model, layers, step, micro, ranks)  # a global convention sees the tokens of every rank
            for rank in range(ranks):
                for layer in layers:
                    layer.balancer.set_scale(1 / pieces)
                    layer.balancer._count = lambda *_, balancer=layer.balancer: forwarded(balancer)
                loss = loss_of(model, step, micro, rank) / pieces
                loss.backward()
                total = total + loss.detach()
            for layer in layers:
                del layer.balancer._count
        result["losses"].append(float(total))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        result["norms"].append(float(norm))
        result["gradients"] = result["gradients"] or full(model, lambda p: p.grad)
        optimizer.step()
        optimizer.zero_grad()
        balance(layers, result)
    return finish(model, layers, result)


def forwarded(balancer):
    balancer._forwards += 1


@torch.no_grad()
def count_all(model, layers, step, micro, ranks):
    kept = [(dict(layer.balancer._sums), layer.balancer._forwards) for layer in layers]
    for rank in range(ranks):
        loss_of(model, step, micro, rank)
    for layer, (sums, forwards) in zip(layers, kept, strict=True):
        layer.balancer._sums, layer.balancer._forwards = sums, forwards
