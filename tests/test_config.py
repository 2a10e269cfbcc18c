import dataclasses
import json

import pytest
import torch

from guide_code.backends import BACKENDS, available_backends
from guide_code.build import build_model, build_moe, parameter_counts
from guide_code.config import ROUTERS, ModelConfig, MoEConfig, RopeScaling, dense_twin, from_dict, override, to_dict
from guide_code.moe import DenseFeedForward, MoE
from guide_code.presets import preset, small, tiny
from guide_code.routers import (
    ExpertChoiceRouter,
    HashRouter,
    QuantileRouter,
    SinkhornRouter,
    SparseMixerRouter,
    TopKRouter,
)

ROUTER_CLASSES = {
    "top_k": TopKRouter,
    "expert_choice": ExpertChoiceRouter,
    "hash": HashRouter,
    "sinkhorn": SinkhornRouter,
    "quantile": QuantileRouter,
    "sparse_mixer": SparseMixerRouter,
}
MOE = {"hidden_size": 16, "moe_intermediate_size": 8, "num_experts": 8, "top_k": 2}


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_presets_build_and_survive_json(name):
    config = preset(name)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    with torch.device("meta"):
        model = build_model(config)
    total, active = parameter_counts(model)
    assert active < total and all(p.is_meta for p in model.parameters())


def test_parameter_counts_by_hand():
    """tiny: embedding 1024 x 128 (tied), 2 layers, final norm."""
    attention = 128 * 128 + 2 * 128 * 64 + 128 * 128
    expert, router, norms = 3 * 32 * 128, 16 * 128, 2 * 128
    rest = 1024 * 128 + 128 + 2 * (attention + router + norms)
    assert parameter_counts(build_model(tiny())) == (rest + 2 * 16 * expert, rest + 2 * 2 * expert)


def test_dense_twin_has_the_same_active_parameters_but_for_routers():
    moe, dense = build_model(tiny()), build_model(dense_twin(tiny()))
    routers = sum(block.ffn.router.weight.numel() for block in moe.blocks)
    assert parameter_counts(dense)[0] == parameter_counts(dense)[1] == parameter_counts(moe)[1] - routers
    assert dense_twin(dense_twin(tiny())) == dense_twin(tiny())
    with pytest.raises(ValueError, match="first_k_dense=1"):
        dense_twin(small())


def test_build_moe_follows_the_config():
    config = MoEConfig(**MOE, capacity_factor=1.0, num_shared_experts=2, router_bias=True, expert_bias_rate=0.001)
    moe = build_moe(config)
    assert isinstance(moe, MoE) and moe.shared.down_proj.weight.shape == (16, 16)
    assert moe.router.bias is not None and moe.router.expert_bias is not None
    out = moe(torch.randn(4, 8, 16))
    assert (out.kept.ids < 8).sum() < out.routing.ids.numel() and torch.equal(out.routing.ids < 8, out.routing.ids >= 0)
    assert isinstance(build_moe(dataclasses.replace(config, num_experts=1, top_k=1)), DenseFeedForward)
    assert build_moe(MoEConfig(**MOE)).capacity is None


def test_every_backend_is_reported_and_gives_the_same():
    obstacles = available_backends("cpu")
    assert {b for b, obstacle in obstacles.items() if obstacle} == {"fused"}
    assert "TRITON_INTERPRET" in obstacles["fused"] and set(obstacles) == set(BACKENDS)
    outs = []
    for backend in ("auto", *(b for b in BACKENDS if not obstacles[b])):
        torch.manual_seed(1)
        moe = build_moe(MoEConfig(**MOE, backend=backend))
        with torch.no_grad():  # offloaded experts compute no gradients
            outs.append(moe(torch.linspace(-1, 1, 96).view(2, 3, 16)).out)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_trains_and_generates_in_a_model(router):
    changes = {"router": router, "load_balancing_coef": 0.0, "vocab_size": 64, "z_loss_coef": 0.01}
    model = build_model(override(tiny(), changes))
    assert {type(block.ffn.router) for block in model.blocks} == {ROUTER_CLASSES[router]}
    tokens_BS, mask_BS = torch.randint(0, 64, (2, 12)), torch.ones(2, 12)
    mask_BS[0, :4] = 0
    logits_BSV = model(tokens_BS, mask_BS=mask_BS).logits
    logits_BSV.backward(torch.randn_like(logits_BSV))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.generate(tokens_BS, 3).shape == (2, 15)
    assert parameter_counts(model)[1] < parameter_counts(model)[0]


def test_a_hash_router_needs_the_vocabulary_of_its_model():
    config = override(tiny(), {"load_balancing_coef": 0.0, "vocab_size": 64})
    moe = dataclasses.replace(config.moe, router="hash")
    with pytest.raises(ValueError, match=r"vocab_size=65 differs from moe\.vocab_size=64"):
        dataclasses.replace(config, moe=moe, vocab_size=65)


def test_identity_experts_are_built_counted_and_never_dropped():
    config = MoEConfig(**MOE, num_identity_experts=4, capacity_factor=0.5, weight_on_input=True)
    moe = build_moe(config)
    assert moe.weight_on_input and moe.router.num_experts == 12 and moe.experts.num_experts == 8
    out = moe(torch.randn(4, 16, 16))
    identity_TK = (out.routing.ids >= 8) & (out.routing.ids < 12)
    assert identity_TK.any() and torch.equal(out.kept.ids[identity_TK], out.routing.ids[identity_TK])
    assert (out.kept.ids == 12).any()
    assert moe.balancer.counts.shape == (12,) and moe.balancer.counts.sum() == 64 * 2


def test_capacity_options_reach_the_drop():
    x_BSD = torch.randn(4, 16, 16)
    kept = {}
    for options in ({}, {"capacity_priority": "probability"}, {"capacity_renormalize": True}):
        torch.manual_seed(3)
        kept[str(options)] = build_moe(MoEConfig(**MOE, capacity_factor=0.5, **options))(x_BSD).kept
    plain, by_weight, renormalised = kept.values()
    assert not torch.equal(plain.ids, by_weight.ids) and torch.equal(plain.ids, renormalised.ids)
    totals_T = renormalised.weights.sum(dim=1)
    torch.testing.assert_close(totals_T, (renormalised.ids < 8).any(dim=1).to(totals_T))
    assert ((plain.weights.sum(dim=1) > 0) & (plain.weights.sum(dim=1) < 0.99)).any()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 9}, "top_k=9 exceeds num_experts=8"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"num_groups": 3}, "num_groups=3 must divide num_experts=8"),
        ({"num_groups": 4, "top_k_groups": 5}, r"top_k_groups=5 must be in \[1, num_groups=4\]"),
        ({"num_groups": 8, "top_k_groups": 1}, "top_k=2 experts cannot come from top_k_groups=1"),
        ({"score_fn": "sigmod"}, "score_fn='sigmod' must be one of .*did you mean sigmoid"),
        ({"backend": "triton"}, "backend='triton' must be one of auto"),
        ({"activation": "swish"}, "activation='swish' must be one of"),
        ({"activation": "swigluoai", "gated": False}, "activation='swigluoai' .* needs gated=True"),
        ({"load_balancing_convention": "megatorn"}, "did you mean megatron"),
        ({"router_jitter": 1.5}, "router_jitter=1.5"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0 must be above 0"),
        ({"z_loss_coef": -1.0}, "z_loss_coef=-1.0 must be at least 0"),
        ({"router": "expert_choise"}, "router='expert_choise' must be one of .*did you mean expert_choice"),
        ({"capacity_priority": "fifo"}, "capacity_priority='fifo' must be one of"),
        ({"num_identity_experts": -1}, "num_identity_experts=-1 must be at least 0"),
        ({"num_identity_experts": 2, "top_k": 11}, r"top_k=11 exceeds num_experts=8 \+ num_identity_experts=2"),
        (
            {"num_identity_experts": 8, "num_groups": 2, "top_k_groups": 2},
            "num_identity_experts=8 needs .*num_groups=2",
        ),
        ({"num_identity_experts": 2, "router": "sinkhorn"}, "num_identity_experts=2 needs router='top_k'"),
        ({"num_identity_experts": 2, "num_experts": 1}, "num_identity_experts=2 needs .*num_experts=1"),
        ({"router": "sinkhorn", "num_groups": 2, "top_k_groups": 2}, "num_groups=2 needs router='top_k'"),
        ({"router": "quantile", "expert_bias_rate": 0.1}, "expert_bias_rate=0.1 need router='top_k'"),
        ({"router": "hash", "vocab_size": 9, "load_balancing_coef": 0.1}, "load_balancing_coef=0.1 cannot change"),
        ({"router": "expert_choice", "load_balancing_coef": 0.1}, "load_balancing_coef=0.1 cannot change"),
        ({"router": "expert_choice", "capacity_factor": 1.0}, "capacity_factor=1.0: router='expert_choice' never"),
        ({"router": "hash"}, "vocab_size=None: router='hash' needs the number of token ids"),
        ({"router": "quantile", "top_k": 8}, "top_k=8 must be below num_experts=8"),
    ],
)
def test_bad_moe_fields_are_named_with_their_values(fields, words):
    with pytest.raises(ValueError, match=words):
        MoEConfig(**{**MOE, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_size": 7}, "head_size=7 must be even"),
        ({"first_k_dense": 5}, r"first_k_dense=5 must be in \[0, num_layers=2\]"),
        ({"hidden_size": 64}, "hidden_size=64 differs from moe.hidden_size=128"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
    ],
)
def test_bad_model_fields_are_named_with_their_values(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(tiny(), **fields)


def test_override_reaches_both_levels_and_reads_strings():
    config = override(tiny(), {"hidden_size": "64", "top_k": 4, "capacity_factor": "1.25", "tie_embeddings": "false"})
    assert config.hidden_size == config.moe.hidden_size == 64
    assert config.moe.top_k == 4 and config.moe.capacity_factor == 1.25 and config.tie_embeddings is False
    assert override(config, {"capacity_factor": "none"}).moe.capacity_factor is None
    for changes, words in (
        ({"topk": 4}, "no config field is called 'topk'; did you mean top_k"),
        ({"top_k": "two"}, "top_k='two' is not a valid int"),
        ({"capacity_factor": "x"}, "is not a valid float or none"),
        ({"zzz": 1}, "valid names: activation"),
    ):
        with pytest.raises(ValueError, match=words):
            override(tiny(), changes)
    with pytest.raises(ValueError, match="top_k is a field of the MoE layer, but this config is dense"):
        override(dense_twin(tiny()), {"top_k": 1})


def test_unknown_and_missing_names_are_refused():
    with pytest.raises(ValueError, match="no preset is called 'tinny'; did you mean tiny"):
        preset("tinny")
    values = to_dict(tiny())
    with pytest.raises(ValueError, match="ModelConfig has no field 'num_layer'; did you mean num_layers"):
        from_dict({**values, "num_layer": 3})
    values["moe"].pop("top_k")
    with pytest.raises(ValueError, match="MoEConfig lacks top_k"):
        from_dict(values)


def test_init_gives_every_kind_of_weight_its_value():
    model = build_model(
        ModelConfig(**{**to_dict(tiny()), "moe": MoEConfig(**{**to_dict(tiny())["moe"], "router_bias": True})})
    )
    block = model.blocks[0]
    assert (block.ffn_norm.weight == 1).all() and (block.ffn.router.bias == 0).all()
    assert block.ffn.router.weight.std().item() == pytest.approx(128**-0.5, rel=0.1)
    assert block.ffn.experts.gate_up_proj.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert block.ffn.experts.down_proj.std().item() == pytest.approx(512**-0.5, rel=0.05)
    assert block.attention.o_proj.weight.std().item() == pytest.approx(512**-0.5, rel=0.05)


LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 6, "num_kv_heads": 4}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"qk_norm": "heads"}, "qk_norm='heads' must be one of .*did you mean head"),
        ({"norm": "batch"}, "norm='batch' must be one of rms, layer"),
        ({"partial_rotary_factor": 0.0}, r"partial_rotary_factor=0.0 must be in \(0, 1\]"),
        ({"partial_rotary_factor": 0.05}, "head_size=32 x partial_rotary_factor=0.05 must be even"),
        ({"layer_types": ("full_attention",)}, "layer_types has 1 entries but num_layers=2"),
        ({"layer_types": ("full_attention", "sparse")}, "layer_types has 'sparse'; valid: full_attention"),
        ({"sliding_window": 4}, "sliding_window=4 and layer_types with 0 of 'sliding_attention'"),
        (
            {"layer_types": ("chunked_attention",) * 2},
            "attention_chunk_size=None and layer_types with 2 of 'chunked_attention'",
        ),
        ({"nope_layers": (2,)}, r"nope_layers=\(2,\) must be in \[0, num_layers=2\)"),
        ({"attn_temperature_tuning": True}, "attn_temperature_tuning=True acts in nope_layers only"),
        ({"tie_embeddings": True, "head_bias": True}, "head_bias=True cannot be had with tie_embeddings=True"),
        ({"moe_layer_step": 0}, "moe_layer_step=0 must be at least 1"),
        ({"v_head_dim": 4}, "v_head_dim=4 needs kv_lora_rank, got None"),
        ({"kv_lora_rank": 8}, "kv_lora_rank=8 needs qk_nope_head_dim, qk_rope_head_dim, v_head_dim"),
        (LATENT | {"qk_rope_head_dim": 10}, "head_size=32 must be qk_nope_head_dim=20 . qk_rope_head_dim=10"),
        (LATENT | {"num_kv_heads": 2}, "num_kv_heads=2 must be num_heads=4 with kv_lora_rank"),
        (LATENT | {"qk_norm": "head"}, "qk_norm='head' must be 'none' with kv_lora_rank=8"),
    ],
)
def test_bad_architectures_are_named_with_their_values(fields, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(tiny(), **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shared_gate": True}, "shared_gate=True .* need shared experts, got num_shared_experts=0"),
        ({"shared_intermediate_size": 4}, "shared_intermediate_size=4 need shared experts"),
        (
            {"num_experts": 1, "top_k": 1, "num_shared_experts": 1, "shared_gate": True},
            "shared_gate=True needs several",
        ),
        ({"router": "sparse_mixer", "score_fn": "sigmoid"}, "score_fn='sigmoid' must be 'softmax' with router"),
    ],
)
def test_bad_shared_experts_and_mixers_are_named_with_their_values(fields, words):
    with pytest.raises(ValueError, match=words):
        MoEConfig(**{**MOE, **fields})


def test_sparse_layers_are_those_of_step_and_lists():
    config = dataclasses.replace(override(tiny(), {"num_layers": 8}), first_k_dense=1)
    assert config.sparse_layers == (1, 2, 3, 4, 5, 6, 7)
    assert dataclasses.replace(config, moe_layer_step=2, dense_layers=(3,)).sparse_layers == (1, 5, 7)
    assert dataclasses.replace(config, moe=None).sparse_layers == ()
    model = build_model(dataclasses.replace(config, moe_layer_step=2, dense_layers=(3,)))
    assert [isinstance(block.ffn, MoE) for block in model.blocks] == [n in (1, 5, 7) for n in range(8)]


def test_tuples_and_scalings_survive_json_and_overrides():
    scaling = RopeScaling(type="yarn", factor=2.0, original_max_position_embeddings=16)
    config = dataclasses.replace(
        tiny(), rope_scaling=scaling, nope_layers=(1,), sliding_window=4,
        layer_types=("sliding_attention", "full_attention"),
    )  # fmt: skip
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    changed = override(
        config, {"nope_layers": "0,1", "rope_scaling": "none", "layer_types": "full_attention, sliding_attention"}
    )
    assert changed.nope_layers == (0, 1) and changed.rope_scaling is None
    assert changed.layer_types == ("full_attention", "sliding_attention")
    with pytest.raises(ValueError, match="rope_scaling='yarn' is not a valid RopeScaling or none"):
        override(config, {"rope_scaling": "yarn"})
    with pytest.raises(ValueError, match="RopeScaling has no field 'factr'; did you mean factor"):
        from_dict({**to_dict(config), "rope_scaling": {"type": "linear", "factr": 2.0}})
