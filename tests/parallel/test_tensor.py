"""Tensor and sequence parallel training steps on two ranks against one process with the same tokens."""

import pytest
import torch
import torch.nn.functional as F
from counting import relative_rms
from ranks import run_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from training import moe_layers

from guide_code.build import build_model
from guide_code.config import ModelConfig, MoEConfig
from guide_code.parallel.data import gradient_norm
from guide_code.parallel.tensor import tensor_parallel

RANKS, STEPS, LENGTH = 2, 2, 12
CASES = {
    "tp": (False, {"qk_norm": "head", "attention_bias": True}),
    "sp": (True, {"qk_norm": "head", "attention_out_bias": True, "head_bias": True}),
    "tp tied": (False, {"tie_embeddings": True}),
    "sp tied": (True, {"tie_embeddings": True}),
}
DTYPES = {torch.float32: 2e-5, torch.float64: 1e-12}


def build(dtype=torch.float32, **options):
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
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4}
    sizes |= {"num_kv_heads": 2, "head_size": 8, "max_length": 32, "first_k_dense": 1}
    model = build_model(ModelConfig(**sizes | {"moe": moe} | options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.to(dtype).train()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 32, (3, LENGTH + 1), generator=generator)
    places = torch.arange(LENGTH)
    mask = torch.stack([places >= 3, places < 11, places >= 0])
    assert mask.sum() == 32  # of which 15 and 17 are exact shares: the balancer takes them in float32
    return tokens, mask


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def train(model, steps=STEPS):
    """Losses, gradients, norms, logits, balancing and counts of some steps of SGD."""
    found = {"loss": [], "norm": [], "balancing": [], "bias": []}
    optimizer, layers = torch.optim.SGD(model.parameters(), lr=0.3), moe_layers(model)
    for step in range(steps):
        tokens, mask = batch(step)
        logits = model(tokens[:, :-1], mask_BS=mask).logits
        loss = F.cross_entropy(logits[mask], tokens[:, 1:][mask])
        loss.backward()
        found["loss"].append(loss.detach())
        found["norm"].append(gradient_norm(model.parameters()))
        grads = {name.replace(".layer.", "."): whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        for layer in layers:
            found["balancing"] += layer.balancer.losses().values()
            layer.balancer.step(layer.router)
            found["bias"].append(layer.router.expert_bias.clone())
    return {name: torch.stack([v.double().squeeze() for v in values]) for name, values in found.items()} | grads


def on_ranks(rank):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    found = {}
    for case, (sequence, options) in CASES.items():
        for dtype in DTYPES:
            found[case, dtype] = train(tensor_parallel(build(dtype, **options), mesh, sequence=sequence))
    model = tensor_parallel(build(), mesh, sequence=True)
    with pytest.raises(ValueError, match="tp=2 must divide the sequence of 11 tokens: pad to 12"):
        model(torch.zeros(1, 11, dtype=torch.int64))
    found["elements"] = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.blocks[0].parameters()
    )
    with pytest.raises(ValueError, match=r"tp must divide num_heads: tp=2 does not divide 3. Possible: \[1, 3\]"):
        tensor_parallel(build(num_heads=3, num_kv_heads=3), mesh)
    with pytest.raises(ValueError, match="attention of block 0 cannot be split by heads"):
        tensor_parallel(build(qk_norm="full"), mesh)
    return found


@pytest.fixture(scope="module")
def results():
    return run_on_ranks(RANKS, on_ranks, time_limit=60)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equal_to_one_process(results, case, dtype):
    wanted = train(build(dtype, **CASES[case][1]))
    for result in results:
        found = dict(result[case, dtype])
        for name in [name for name in found if ".gate." in name]:
            other = name.replace(".gate.", ".up.")
            found[name.replace(".gate.", ".")] = torch.cat([found.pop(name), found.pop(other)])
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert value.any() and relative_rms(found[name], value) <= DTYPES[dtype], name


def test_a_dense_block_is_halved_but_for_its_norms(results):
    norms = 2 * 16
    total = sum(p.numel() for p in build().blocks[0].parameters())
    assert all(result["elements"] == norms + (total - norms) // 2 for result in results)
