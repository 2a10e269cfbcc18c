"""Switch models of transformers before and after ``speed_up_switch``: the same bits, with far fewer steps."""

import copy
import importlib
import io

import pytest
import torch
from torch import nn

from guide_code.hf_plugin import speed_up_switch

transformers = pytest.importorskip("transformers")
modeling = importlib.import_module("transformers.models.switch_transformers.modeling_switch_transformers")

SIZES = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_decoder_layers": 2,
    "num_sparse_decoder_layers": 1,
    "num_experts": 6,
    "expert_capacity": 4,
    "router_bias": True,
}


def make_model(**fields):
    """An encoder-decoder with one sparse layer on each side; every parameter is drawn."""
    model = transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**{**SIZES, **fields})
    )
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        if "layer_norm" in name:
            parameter.data += 1
    return model.eval()


def sped_up(model):
    model = copy.deepcopy(model)
    assert speed_up_switch(model) == 2
    return model


def make_layer(**fields):
    """One sparse layer, and the same one sped up."""
    config = transformers.SwitchTransformersConfig(**{**SIZES, **fields})
    theirs = modeling.SwitchTransformersSparseMLP(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    ours = copy.deepcopy(theirs)
    assert speed_up_switch(ours) == 1
    return theirs, ours


def inputs(batch=3, length=19):
    return {
        "input_ids": torch.randint(2, 61, (batch, length)),
        "decoder_input_ids": torch.randint(2, 61, (batch, length - 4)),
    }


def run(module, *args, seed=3, cotangent=None, **kwargs):
    """Output and gradients by name; None where there is none. Every random number starts from the seed."""
    module.zero_grad()
    torch.manual_seed(seed)
    out = module(*(t.clone() for t in args), **kwargs)  # a copy: jitter overwrites what it is given
    out = out if isinstance(out, torch.Tensor) else out.logits
    torch.manual_seed(seed)
    out.backward(torch.randn_like(out) if cotangent is None else cotangent)
    return out, {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same(theirs, ours):
    assert torch.equal(theirs[0], ours[0]) and theirs[0].abs().sum() > 0
    assert theirs[1].keys() == ours[1].keys()
    for name, grad in theirs[1].items():
        assert (grad is None) == (ours[1][name] is None), name
        assert grad is None or torch.equal(grad, ours[1][name]), name


@pytest.mark.parametrize(
    "fields",
    [
        {"dropout_rate": 0.0, "router_jitter_noise": 0.0},
        {"dropout_rate": 0.3, "router_jitter_noise": 0.0},
        {"dropout_rate": 0.3, "router_jitter_noise": 0.2},
    ],
    ids=["plain", "dropout", "dropout and jitter"],
)
@pytest.mark.parametrize("training", [False, True])
def test_logits_and_every_gradient(fields, training):
    model = make_model(**fields).train(training)
    batch = inputs()
    theirs, ours = run(model, **batch), run(sped_up(model), **batch)
    assert_same(theirs, ours)
    random = training and any(fields.values())
    assert torch.equal(run(model, seed=4, **batch)[0], theirs[0]) != random, "the seed matters where it should"


def test_the_losses_of_the_router_and_its_tuple():
    model = make_model(dropout_rate=0.0).train()
    batch = inputs() | {"labels": torch.randint(2, 61, (3, 15)), "output_router_logits": True}
    losses = []
    for module in (model, sped_up(model)):
        torch.manual_seed(0)
        out = module(**batch)
        module.zero_grad()
        out.loss.backward()
        routers = [m for m in module.modules() if isinstance(m, modeling.SwitchTransformersTop1Router)]
        losses.append([out.loss, *out.encoder_router_logits, *out.decoder_router_logits])
        losses[-1] += [router.classifier.weight.grad for router in routers]
    assert len(losses[0]) == 5 and all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_greedy_generation():
    model = make_model()
    input_ids = inputs()["input_ids"]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "decoder_start_token_id": 0}
    tokens = [m.generate(input_ids, **options) for m in (model, sped_up(model))]
    assert torch.equal(*tokens) and len(tokens[0][:, 1:].unique()) > 5


@pytest.mark.parametrize("capacity", [0, 2, 64])
@pytest.mark.parametrize("experts", [1, 6])
def test_dropped_tokens_give_zero_and_capacity_counts_per_sequence(capacity, experts):
    theirs, ours = make_layer(expert_capacity=capacity, num_experts=experts)
    x_BSD = torch.randn(3, 19, 32)
    kept_BS = theirs.router(x_BSD)[0].sum(dim=-1).bool()
    assert (kept_BS.sum() == 0) == (capacity == 0) and kept_BS.all() == (capacity == 64)
    assert torch.equal(theirs(x_BSD), ours(x_BSD))
    assert not ours(x_BSD)[~kept_BS].any() and ours(x_BSD)[kept_BS].all()


def test_an_idle_expert_has_no_gradient_as_before():
    theirs, ours = make_layer(num_experts=12)
    x_BSD = torch.randn(1, 5, 32)
    before, after = run(theirs, x_BSD), run(ours, x_BSD)
    assert_same(before, after)
    assert sum(grad is None for grad in after[1].values()) >= 14


def test_with_every_token_dropped_the_output_stays_in_the_graph():
    _, ours = make_layer(expert_capacity=0)
    x_BSD = torch.randn(1, 5, 32, requires_grad=True)
    ours(x_BSD).backward(torch.ones(1, 5, 32))
    assert x_BSD.grad is not None and not x_BSD.grad.any()


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("experts", [1, 6])
def test_few_tokens_and_one_expert(length, experts):
    theirs, ours = make_layer(num_experts=experts, dropout_rate=0.3)
    for batch in (1, 3):
        for training in (False, True):
            x_BSD = torch.randn(batch, length, 32)
            assert_same(run(theirs.train(training), x_BSD), run(ours.train(training), x_BSD))


@pytest.mark.parametrize("router_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 19])
def test_bfloat16_and_a_down_projection_kept_in_float32(router_dtype, length):
    theirs, ours = make_layer(router_dtype=router_dtype)
    x_BSD = torch.randn(2, length, 32).bfloat16()
    for layer in (theirs, ours):
        layer.bfloat16()
    assert_same(run(theirs, x_BSD), run(ours, x_BSD))
    for layer in (theirs, ours):
        for expert in layer.experts.values():
            expert.wo.float()
    assert_same(run(theirs, x_BSD), run(ours, x_BSD))
    assert ours(x_BSD).dtype == torch.bfloat16


def test_autocast():
    theirs, ours = make_layer()
    x_BSD = torch.randn(2, 19, 32)
    with torch.autocast("cpu", torch.bfloat16):
        results = [run(layer, x_BSD) for layer in (theirs, ours)]
    assert_same(*results)
    assert results[1][0].dtype == torch.float32


def test_parameters_keep_their_names_and_memory():
    model = make_model()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    types = {name: type(module) for name, module in model.named_modules() if not name.endswith("experts")}
    speed_up_switch(model)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert types == {name: type(m) for name, m in model.named_modules() if not name.endswith("experts")}
    make_model().load_state_dict(model.state_dict())


def test_the_second_call_changes_nothing():
    model = make_model()
    batch = inputs()
    expected = model(**batch).logits
    assert [speed_up_switch(model) for _ in range(3)] == [2, 0, 0]
    assert torch.equal(model(**batch).logits, expected)


def test_copies_and_pickles_stay_fast_and_their_own():
    model = make_model()
    speed_up_switch(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    batch = inputs()
    expected = model(**batch).logits
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert speed_up_switch(other) == 0 and torch.equal(other(**batch).logits, expected)
        other.zero_grad()
        with torch.no_grad():
            for expert in other.encoder.block[1].layer[-1].mlp.experts.values():
                expert.wo.weight.zero_()
        assert not torch.equal(other(**batch).logits, expected)
    assert torch.equal(model(**batch).logits, expected)


def test_offloaded_experts_are_fetched_when_used_and_only_then():
    """Hooks on the linear layers, as offloading puts them: idle experts' weights are never asked for."""
    theirs, ours = make_layer(num_experts=12)
    x_BSD = torch.randn(1, 5, 32)
    expected = theirs(x_BSD)
    used = theirs.router(x_BSD)[0].sum(dim=(0, 1)).nonzero().flatten().tolist()
    fetched = []
    for name, linear in ours.experts.named_modules():
        if isinstance(linear, nn.Linear):
            linear.held = linear.weight.data
            linear.weight.data = torch.empty(0)

            def fetch(linear, _, name=name):
                fetched.append(name)
                linear.weight.data = linear.held

            def drop(linear, _, out):
                linear.weight.data = torch.empty(0)

            linear.register_forward_pre_hook(fetch)
            linear.register_forward_hook(drop)
    with torch.no_grad():
        assert torch.equal(ours(x_BSD), expected)
    assert fetched == [f"expert_{e}.{part}" for e in used for part in ("wi", "wo")] and len(used) < 6


def test_a_forward_that_accelerate_wrapped_is_replaced_inside_the_wrapping():
    """What accelerate's add_hook_to_module leaves: the old forward as an attribute, a new one that calls it."""
    theirs, _ = make_layer()
    x_BSD = torch.randn(2, 19, 32)
    expected, experts, calls = theirs(x_BSD), theirs.experts, []
    experts._old_forward = experts.forward
    experts.forward = lambda *args: calls.append(1) or experts._old_forward(*args)
    assert speed_up_switch(theirs) == 1
    assert torch.equal(theirs(x_BSD), expected) and calls == [1]
    assert experts._old_forward.__func__ is type(experts).forward is not modeling.SwitchTransformersExperts.forward


def test_what_cannot_be_sped_up_is_refused_and_left_alone():
    with pytest.raises(ValueError, match="Linear has no SwitchTransformersSparseMLP"):
        speed_up_switch(nn.Linear(2, 2))

    class Sharded(modeling.SwitchTransformersExperts):
        """As fully_shard makes one."""

    model = make_model()
    last = model.decoder.block[1].layer[-1].mlp.experts
    last.__class__ = Sharded
    with pytest.raises(ValueError, match=r"decoder\.block\.1\..*\.mlp\.experts \(Sharded\) has another forward"):
        speed_up_switch(model)
    last.__class__ = modeling.SwitchTransformersExperts
    last.forward = lambda *args: torch.zeros(1)
    with pytest.raises(ValueError, match=r"\.mlp\.experts \(SwitchTransformersExperts\) has another forward"):
        speed_up_switch(model)
    del last.forward
    assert speed_up_switch(model) == 2, "nothing was changed by the calls that failed"
