"""Whole models of transformers, random in every parameter: "guide" gives what "eager" gives.

"eager" is the loop over experts in each model's own file.
"""

import copy
import json

import pytest
import torch
from torch import nn

from guide_code.hf_plugin import explain, register
from guide_code.testing.contract import relative_rms

transformers = pytest.importorskip("transformers")

SHARED = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "MixtralConfig": {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {
        "moe_intermediate_size": 20, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 8,
    },
    "OlmoeConfig": {"intermediate_size": 12, "num_experts": 9, "num_experts_per_tok": 4},
    "DeepseekV3Config": {
        "moe_intermediate_size": 8, "intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
        "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
    "GptOssConfig": {
        "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4,
    },
}  # fmt: skip


def make_model(config_name, **fields):
    """A causal model with tiny sizes; every parameter and every bias for choice is drawn."""
    register()
    config = getattr(transformers, config_name)(**{**SHARED, **MODELS[config_name], **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        if "norm" in name:
            parameter.data += 1
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.3)
    return model


def with_guide(model):
    model = copy.deepcopy(model)
    model.set_experts_implementation("guide")
    return model


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.removesuffix("Config"))
def pair(request):
    """A model that runs "eager" and its copy that runs "guide"."""
    torch.manual_seed(1)
    theirs = make_model(request.param)
    return theirs, with_guide(theirs)


def tokens(model, batch=2, length=11):
    return torch.randint(3, model.config.vocab_size, (batch, length))


def test_logits_and_every_gradient(pair):
    theirs, ours = pair
    input_ids = tokens(theirs)
    expected, actual = (model(input_ids).logits for model in pair)
    assert relative_rms(actual, expected) < 5e-6
    cotangent = torch.randn_like(expected)
    for model, logits in ((theirs, expected), (ours, actual)):
        model.zero_grad()
        logits.backward(cotangent)
    parameters = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm() > 0, f"{name} takes no part: the test is blind"
        assert relative_rms(parameters[name].grad, parameter.grad) < 2e-5, name


def test_greedy_generation(pair):
    input_ids = tokens(pair[0], batch=3, length=5)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(input_ids)}
    expected, actual = (m.generate(input_ids, pad_token_id=0, eos_token_id=None, **options) for m in pair)
    assert torch.equal(actual, expected) and expected.shape == (3, 17)
    assert len(expected[:, 5:].unique()) > 5, "one token over and over would hide a difference"


def test_state_dict_and_configuration_do_not_change(pair, tmp_path):
    theirs, ours = pair
    state, expected = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(expected)
    assert all(state[name].data_ptr() == p.data_ptr() for name, p in ours.named_parameters())
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    ours.save_pretrained(tmp_path)
    assert "guide" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="guide").eval()
    assert set(explain(loaded).values()) == set(explain(ours).values())
    input_ids = tokens(theirs)
    assert torch.equal(loaded(input_ids).logits, ours(input_ids).logits)


def test_each_runs_as_announced(pair):
    theirs, ours = pair
    activation = "swigluoai" if theirs.config.model_type == "gpt_oss" else "silu"
    dense = getattr(theirs.config, "first_k_dense_replace", 0)
    assert list(explain(ours)) == [f"model.layers.{layer}.mlp.experts" for layer in range(dense, 2)]
    assert set(explain(ours).values()) == {f"grouped_experts, activation {activation!r}"}
    assert set(explain(theirs).values()) == {"experts_implementation='eager', not 'guide'"}


def test_bfloat16_is_at_least_as_near_to_float32_as_eager(pair):
    """Every expert chosen: else a choice that rounding flips would drown the difference."""
    theirs, _ = pair
    name = type(theirs.config).__name__
    num_experts = next(value for field, value in MODELS[name].items() if field.endswith("_experts"))
    groups = {"n_group": 1, "topk_group": 1} if name.startswith("Deepseek") else {}
    exact = make_model(name, num_experts_per_tok=num_experts, **groups)
    eager = copy.deepcopy(exact).bfloat16()
    input_ids = tokens(exact, batch=8)
    exact.load_state_dict(eager.state_dict())
    with torch.no_grad():
        errors = [relative_rms(m(input_ids).logits, exact(input_ids).logits) for m in (eager, with_guide(eager))]
    assert 1e-3 < errors[1] < 1.1 * errors[0], errors
