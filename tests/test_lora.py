import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from guide_code.adapter import load_adapter_, save_adapter
from guide_code.build import build_model
from guide_code.config import override
from guide_code.experts.grouped import GroupedExperts
from guide_code.lora import (
    LoRAConfig,
    apply_lora_,
    lora_config,
    merge_lora_,
    remove_lora_,
    trainable_parameters,
    unmerge_lora_,
)
from guide_code.presets import tiny
from guide_code.testing.contract import relative_rms

CONFIG = override(
    tiny(),
    {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_layers": 2,
        "max_length": 40,
        "num_experts": 6,
        "num_shared_experts": 1,
        "num_identity_experts": 1,
        "load_balancing_coef": 0.0,
        "z_loss_coef": 0.0,
        "backend": "grouped",  # the sums of other backends round otherwise than those of adapters
    },
)
ALL = LoRAConfig(rank=4, alpha=8.0, linears=("q_proj", "o_proj", "head"), router=True)
KINDS = {"experts": LoRAConfig(), "shared": LoRAConfig(shared=True), "all": ALL}

kinds = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


def make_model(seed=0):
    torch.manual_seed(seed)
    return build_model(override(CONFIG, {"tie_embeddings": False})).eval()


def tokens():
    return torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))


def adapters(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def trained(config, seed=0):
    model = make_model()
    apply_lora_(model, config)
    torch.manual_seed(seed)
    for parameter in adapters(model).values():
        nn.init.normal_(parameter, std=0.2)
    return model


@kinds
def test_a_fresh_adapter_changes_no_bit_and_training_moves_adapters_only(config):
    model, plain = make_model(), make_model()
    apply_lora_(model, config)
    assert torch.equal(model(tokens()).logits, plain(tokens()).logits)
    torch.manual_seed(0)
    auto = build_model(override(CONFIG, {"tie_embeddings": False, "backend": "auto"})).eval()
    assert relative_rms(model(tokens()).logits, auto(tokens()).logits) < 2e-6
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(12):
        logits = model.train()(tokens()).logits
        losses.append(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.05
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(adapters(model)) and all(name.endswith((".a", ".b")) for name in moved)
    assert any("router" in name for name in moved) == config.router


@kinds
def test_merge_unmerge_and_remove(config):
    model, plain = trained(config), make_model()
    names = dict(plain.named_parameters())
    out = model(tokens()).logits
    assert relative_rms(out, plain(tokens()).logits) > 1e-2
    merge_lora_(model)
    assert relative_rms(model(tokens()).logits, out) < 1e-5
    unmerge_lora_(model)
    assert torch.equal(model(tokens()).logits, out)
    merge_lora_(model)
    remove_lora_(model)
    assert {n: (p.shape, p.requires_grad) for n, p in model.named_parameters()} == {
        n: (p.shape, True) for n, p in names.items()
    }
    assert relative_rms(model(tokens()).logits, out) < 1e-5
    model.load_state_dict(make_model(1).state_dict())
    assert type(model.blocks[0].ffn.router) is type(plain.blocks[0].ffn.router) and lora_config(model) is None

    model = trained(config)
    merge_lora_(model)
    unmerge_lora_(model)
    remove_lora_(model)
    assert all(torch.equal(p, names[n]) for n, p in model.named_parameters())
    assert torch.equal(model(tokens()).logits, plain(tokens()).logits)
    apply_lora_(model, config)


def test_trainable_parameters_are_counted():
    model = make_model()
    total = sum(p.numel() for p in model.parameters())
    width, inner, layers, rank = 32, 32, 2, 4
    each = rank * (width + 2 * inner) + rank * (inner + width)
    for shared, count in ((False, 6), (True, 1)):
        twin = copy.deepcopy(model)
        apply_lora_(twin, LoRAConfig(rank=rank, shared=shared))
        assert trainable_parameters(twin) == (layers * count * each, total + layers * count * each)
    assert trainable_parameters(model) == (total, total)
    model.embedding.weight.requires_grad_(False)
    apply_lora_(model, LoRAConfig(rank=rank, experts=False, router=True))
    assert trainable_parameters(model)[0] == layers * rank * (width + 7)
    remove_lora_(model)
    assert trainable_parameters(model)[0] == total - model.embedding.weight.numel(), "what was frozen stays frozen"


def test_generation_and_copies_work_with_adapters():
    model = trained(ALL)
    out = model.generate(tokens(), 5)
    assert torch.equal(copy.deepcopy(model).generate(tokens(), 5), out)
    merge_lora_(model)
    twin = copy.deepcopy(model)
    unmerge_lora_(twin)
    assert torch.equal(twin.generate(tokens(), 5), out)


@kinds
def test_an_adapter_comes_back_from_its_file(tmp_path, config):
    model, path = trained(config), tmp_path / "adapter.safetensors"
    save_adapter(model, path)
    save_adapter(model, path)
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["moe_guide_lora"])["rank"] == config.rank
    assert list(tmp_path.iterdir()) == [path]
    stored = load_file(path)
    assert (
        stored.keys() == adapters(model).keys() and path.stat().st_size < 100_000 + 4 * trainable_parameters(model)[0]
    )
    plain = make_model()
    load_adapter_(plain, path)
    assert lora_config(plain) == config
    assert torch.equal(plain(tokens()).logits, model(tokens()).logits)
    other = trained(config, seed=1)
    load_adapter_(other, path)
    assert torch.equal(other(tokens()).logits, model(tokens()).logits)


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    path, model = tmp_path / "adapter.safetensors", trained(ALL)
    with pytest.raises(ValueError, match="no adapters to save"):
        save_adapter(make_model(), path)
    with pytest.raises(ValueError, match=r"adapter.safetensors is missing or damaged"):
        load_adapter_(model, path)
    save_adapter(model, path)
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"has LoRAConfig\(rank=4.* but the model's adapters are LoRAConfig\(rank=8"):
        load_adapter_(trained(LoRAConfig()), path)
    other = build_model(override(CONFIG, {"tie_embeddings": False, "num_experts": 5, "num_layers": 3}))
    before = {n: (p.requires_grad, p.clone()) for n, p in other.named_parameters()}
    with pytest.raises(ValueError, match=r"missing blocks.2.*is \(6, 4, 32\) there and \(5, 4, 32\) here"):
        load_adapter_(other, path)
    assert {n: p.requires_grad for n, p in other.named_parameters()} == {n: flag for n, (flag, _) in before.items()}
    merge_lora_(model)
    with pytest.raises(ValueError, match="adapters are merged: unmerge_lora_"):
        load_adapter_(model, path)
    path.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="missing or damaged"):
        load_adapter_(make_model(), path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="not one that save_adapter wrote"):
        load_adapter_(make_model(), path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"alpha": 0.0}, r"alpha=0.0 above 0"),
        ({"experts": False}, "nothing would be adapted"),
        ({"linears": "q_proj"}, r"linears='q_proj' must be a tuple of names, \('q_proj',\)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_config_that_cannot_work_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LoRAConfig(**options)


def test_a_model_without_what_is_named_is_refused():
    model = make_model()
    with pytest.raises(ValueError, match="the model has no qproj to adapt"):
        apply_lora_(model, LoRAConfig(linears=("qproj", "k_proj")))
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="no stacked experts, router to adapt"):
        apply_lora_(nn.Sequential(nn.Linear(2, 2)), LoRAConfig(router=True))
    with pytest.raises(ValueError, match="give the module that holds it"):
        apply_lora_(GroupedExperts(2, 4, 4), LoRAConfig())
    apply_lora_(model, ALL)
    with pytest.raises(ValueError, match="has adapters already"):
        apply_lora_(model, ALL)
