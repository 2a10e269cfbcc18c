import dataclasses

import pytest
import torch

from guide_code.build import build_model
from guide_code.config import dense_twin, override
from guide_code.conversion.loading import Origin
from guide_code.conversion.upcycle import upcycle
from guide_code.presets import tiny
from guide_code.testing.contract import relative_rms

CONFIG = dataclasses.replace(dense_twin(tiny()), num_layers=3, intermediate_size=48, hidden_size=64, vocab_size=90)
TOKENS = torch.randint(0, 90, (3, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def dense(request):
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, tie_embeddings=request.param)
    model = build_model(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.__dict__["origin"] = Origin(config)
    return model


@pytest.mark.parametrize(
    ("num_experts", "top_k", "granularity", "fields"),
    [
        (4, 1, 1, {}),
        (4, 2, 1, {}),
        (8, 3, 2, {}),
        (3, 1, 4, {"load_balancing_coef": 0.01}),
        (4, 2, 3, {"score_fn": "sigmoid", "expert_bias_rate": 0.001, "router_bias": True}),
        (5, 5, 8, {"first_k_dense": 2, "backend": "loop"}),
    ],
)
def test_the_logits_are_those_of_the_dense_model(dense, num_experts, top_k, granularity, fields):
    sizes = {"num_experts": num_experts, "top_k": top_k, "granularity": granularity}
    sparse = upcycle(dense, **sizes, generator=torch.Generator().manual_seed(1), **fields)
    out, expected = sparse(TOKENS), dense(TOKENS).logits
    assert relative_rms(out.logits, expected) < 2e-6
    for layer, routing in enumerate(out.routings):
        if layer < fields.get("first_k_dense", 0):
            assert routing is None
            continue
        groups = routing.ids // granularity
        assert groups.unique().numel() > top_k or top_k == num_experts, "the router tells tokens apart"
        _, count = groups[0].unique(return_counts=True)
        assert (count == granularity).all(), "all slices of a copy or none"
    assert sparse.origin.config.moe.num_experts == num_experts * granularity
    assert sparse.origin.config.moe.moe_intermediate_size == 48 // granularity


def test_it_can_be_rebuilt_from_its_configuration(dense):
    sparse = upcycle(dense, num_experts=4, top_k=2, granularity=2)
    again = build_model(sparse.origin.config).eval()
    again.load_state_dict(sparse.state_dict())
    assert torch.equal(again(TOKENS).logits, sparse(TOKENS).logits)
    tied = sparse.origin.config.tie_embeddings
    assert (sparse.head.weight is sparse.embedding.weight) == tied


def test_the_dense_model_is_left_alone(dense):
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    sparse = upcycle(dense, num_experts=4, top_k=2)
    with torch.no_grad():
        for parameter in sparse.parameters():
            parameter.fill_(9.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())


def test_every_parameter_learns_and_copies_part(dense):
    sparse = upcycle(dense, num_experts=4, top_k=2, granularity=2, generator=torch.Generator().manual_seed(1))
    sparse.train()
    logits = sparse(TOKENS).logits
    (logits * torch.randn(logits.shape)).sum().backward()
    for name, parameter in sparse.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
    grad = sparse.blocks[0].ffn.experts.down_proj.grad.unflatten(0, (4, 2))
    assert not torch.allclose(grad[0], grad[1])


def test_dtype_is_kept(dense):
    sparse = upcycle(dense.to(torch.bfloat16), num_experts=4, top_k=2)
    dense.float()
    assert {parameter.dtype for parameter in sparse.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"granularity": 5}, "granularity=5 must divide intermediate_size=48"),
        ({"granularity": 0}, "granularity=0 must divide"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False would change the logits; upcycling needs True"),
        ({"num_shared_experts": 1}, "num_shared_experts=1 would change the logits"),
        ({"top_k": 5}, "top_k=5 exceeds num_experts=4"),
        ({"config": override(tiny(), {})}, "is a mixture of experts already"),
    ],
)
def test_what_cannot_be_exact_is_refused(dense, options, words):
    with pytest.raises(ValueError, match=words):
        upcycle(dense, **{"num_experts": 4, "top_k": 2} | options)


def test_a_model_without_a_known_configuration():
    with pytest.raises(ValueError, match="config=None: give the ModelConfig"):
        upcycle(build_model(CONFIG), num_experts=4, top_k=2)
    assert upcycle(build_model(CONFIG), num_experts=4, top_k=2, config=CONFIG)
