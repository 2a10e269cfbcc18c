"""Logits of small random models equal those of transformers, family by family, weights copied by hand.

Every weight is random, biases and norms too, and every size differs from its neighbours where the family allows.
"""

import pytest
import torch
import transformers
from torch import nn

from guide_code.build import build_model
from guide_code.config import ModelConfig, MoEConfig, RopeScaling, override
from guide_code.testing.contract import relative_rms
from tests.shapes import watch_shapes

D, H, U, A, I, E, K, L, V = 24, 6, 2, 8, 20, 8, 3, 4, 50  # noqa: E741
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.7}

HF = {
    "vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H, "num_key_value_heads": U,
    "num_experts_per_tok": K, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
OURS = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 28, "num_layers": L, "num_heads": H, "num_kv_heads": U,
    "head_size": A, "max_length": 128,
}  # fmt: skip


def moe(**options):
    return MoEConfig(**{"hidden_size": D, "moe_intermediate_size": I, "num_experts": E, "top_k": K, **options})


def mixtral():
    theirs = transformers.MixtralConfig(
        **HF, head_dim=A, intermediate_size=I, num_local_experts=E, rope_parameters={"rope_theta": 500.0}
    )
    return theirs, ModelConfig(**OURS, rope_theta=500.0, moe=moe())


def qwen2_moe():
    theirs = transformers.Qwen2MoeConfig(
        **HF | {"num_attention_heads": 3, "num_key_value_heads": 1}, intermediate_size=28, moe_intermediate_size=I,
        shared_expert_intermediate_size=36, num_experts=E, norm_topk_prob=False, mlp_only_layers=[1],
    )  # fmt: skip
    ours = ModelConfig(
        **OURS | {"num_heads": 3, "num_kv_heads": 1}, norm_eps=1e-6, attention_bias=True, dense_layers=(1,),
        moe=moe(norm_topk_prob=False, num_shared_experts=1, shared_intermediate_size=36, shared_gate=True),
    )  # fmt: skip
    return theirs, ours


def qwen3_moe():
    theirs = transformers.Qwen3MoeConfig(
        **HF, head_dim=A, intermediate_size=28, moe_intermediate_size=I, num_experts=E, norm_topk_prob=True,
        decoder_sparse_step=2,
    )  # fmt: skip
    return theirs, ModelConfig(**OURS, norm_eps=1e-6, qk_norm="head", moe_layer_step=2, moe=moe())


def olmoe():
    theirs = transformers.OlmoeConfig(
        **HF | {"num_attention_heads": 3, "num_key_value_heads": 1}, intermediate_size=I, num_experts=E
    )
    shape = OURS | {"num_heads": 3, "num_kv_heads": 1}
    return theirs, ModelConfig(**shape, qk_norm="full", moe=moe(norm_topk_prob=False))


def glm4_moe():
    theirs = transformers.Glm4MoeConfig(
        **HF, head_dim=A, intermediate_size=28, moe_intermediate_size=I, n_routed_experts=E, n_shared_experts=2,
        n_group=4, topk_group=3, routed_scaling_factor=2.5, first_k_dense_replace=1, use_qk_norm=True,
        attention_bias=True, partial_rotary_factor=0.5,
    )  # fmt: skip
    routing = {"score_fn": "sigmoid", "use_expert_bias": True, "num_groups": 4, "top_k_groups": 3}
    ours = ModelConfig(
        **OURS, qk_norm="head", attention_bias=True, partial_rotary_factor=0.5, first_k_dense=1,
        moe=moe(**routing, routed_scaling_factor=2.5, num_shared_experts=2),
    )  # fmt: skip
    return theirs, ours


def gpt_oss():
    theirs = transformers.GptOssConfig(
        **HF, head_dim=A, intermediate_size=I, num_local_experts=E, sliding_window=4,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150.0, "truncate": False, **YARN},
    )  # fmt: skip
    ours = ModelConfig(
        **OURS, rope_theta=150.0, rope_scaling=RopeScaling(type="yarn", truncate=False, **YARN), attention_bias=True,
        attention_out_bias=True, attention_sinks=True, sliding_window=4,
        layer_types=("sliding_attention", "full_attention") * 2,
        moe=moe(activation="swigluoai", router_bias=True, expert_biases=True),
    )  # fmt: skip
    return theirs, ours


def llama4():
    scaling = {"factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs = transformers.Llama4TextConfig(
        **HF | {"num_experts_per_tok": 1}, head_dim=A, intermediate_size=I, intermediate_size_mlp=28,
        num_local_experts=E, interleave_moe_layer_step=2, no_rope_layers=[1, 1, 0, 1], attention_chunk_size=5,
        floor_scale=3, attn_scale=0.5, rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **scaling},
    )  # fmt: skip
    chunked = "chunked_attention"
    ours = ModelConfig(
        **OURS, rope_theta=500.0, rope_scaling=RopeScaling(type="llama3", **scaling), rope_interleaved=True,
        qk_norm="l2", nope_layers=(2,), attn_temperature_tuning=True, floor_scale=3, attn_scale=0.5,
        attention_chunk_size=5, layer_types=(chunked, chunked, "full_attention", chunked), moe_layer_step=2,
        moe=moe(top_k=1, score_fn="sigmoid", norm_topk_prob=False, weight_on_input=True, num_shared_experts=1),
    )  # fmt: skip
    return theirs, ours


def deepseek_v2():
    theirs = transformers.DeepseekV2Config(
        **HF | LATENT | {"num_key_value_heads": H, "q_lora_rank": None}, intermediate_size=28, moe_intermediate_size=I,
        n_routed_experts=E, n_shared_experts=2, n_group=4, topk_group=2, topk_method="group_limited_greedy",
        routed_scaling_factor=3.0, first_k_dense_replace=1,
        rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, **YARN, **MSCALE},
    )  # fmt: skip
    routing = {"norm_topk_prob": False, "num_groups": 4, "top_k_groups": 2, "group_score": "max"}
    ours = ModelConfig(
        **OURS | LATENT | {"num_kv_heads": H, "head_size": 14, "q_lora_rank": None}, norm_eps=1e-6, rope_theta=500.0,
        rope_scaling=RopeScaling(type="yarn", **YARN, **MSCALE), rope_interleaved=True, first_k_dense=1,
        moe=moe(**routing, routed_scaling_factor=3.0, num_shared_experts=2),
    )  # fmt: skip
    return theirs, ours


def deepseek_v3():
    theirs = transformers.DeepseekV3Config(
        **HF | LATENT | {"num_key_value_heads": H}, intermediate_size=28, moe_intermediate_size=I, n_routed_experts=E,
        n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=2,
        rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, **YARN, **MSCALE},
    )  # fmt: skip
    routing = {"score_fn": "sigmoid", "use_expert_bias": True, "num_groups": 4, "top_k_groups": 2}
    ours = ModelConfig(
        **OURS | LATENT | {"num_kv_heads": H, "head_size": 14}, norm_eps=1e-6, rope_theta=500.0,
        rope_scaling=RopeScaling(type="yarn", **YARN, **MSCALE), rope_interleaved=True, first_k_dense=2,
        moe=moe(**routing, routed_scaling_factor=2.5, num_shared_experts=1),
    )  # fmt: skip
    return theirs, ours


def phimoe():
    factors = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 6.0, 8.0]}
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32, "short_mscale": 1.2, "long_mscale": 1.4}
    theirs = transformers.PhimoeConfig(
        **HF | {"num_attention_heads": 3, "num_key_value_heads": 1, "num_experts_per_tok": 2}, intermediate_size=I,
        num_local_experts=E, attention_bias=True, lm_head_bias=True, router_jitter_noise=0.3,
        rope_parameters={"rope_type": "longrope", "rope_theta": 500.0, **factors, **scaling},
    )  # fmt: skip
    lengths = {name: tuple(values) for name, values in factors.items()}
    ours = ModelConfig(
        **OURS | {"num_heads": 3, "num_kv_heads": 1}, norm="layer", head_bias=True, attention_bias=True,
        attention_out_bias=True, rope_theta=500.0, rope_scaling=RopeScaling(type="longrope", **lengths, **scaling),
        moe=moe(top_k=2, router="sparse_mixer", norm_topk_prob=False, router_jitter=0.3),
    )  # fmt: skip
    return theirs, ours


FAMILIES = (mixtral, qwen2_moe, qwen3_moe, olmoe, glm4_moe, gpt_oss, llama4, deepseek_v2, deepseek_v3, phimoe)

RENAMED = {
    "model.embed_tokens": "embedding", "model.layers": "blocks", "model.norm": "norm", "lm_head": "head",
    "self_attn": "attention", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "feed_forward": "ffn", "mlp": "ffn", "block_sparse_moe": "ffn", "ffn.gate.": "ffn.router.",
    "e_score_correction_bias": "expert_bias", "shared_experts": "shared", "shared_expert_gate": "shared.gate",
    "shared_expert": "shared", "q_a_layernorm": "q_a_norm", "kv_a_layernorm": "kv_a_norm",
    "kv_a_proj_with_mqa": "kv_a_proj", "attention.qk_norm": "attention.qk_norm",
}  # fmt: skip


def copy_(ours: nn.Module, theirs: nn.Module):
    """Every weight of theirs to ours by name; gate and up are stacked, some experts transposed."""
    wanted, given = dict(ours.state_dict()), {}
    for name, value in theirs.state_dict().items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if ".experts." in name and name.endswith("_proj") and value.shape != wanted[name].shape:
            value = value.transpose(1, 2)
        given[name] = value
    for name in list(given):
        if name.endswith("gate_proj.weight"):
            up = given.pop(name.replace("gate_proj", "up_proj"))
            given[name.replace("gate_proj", "gate_up_proj")] = torch.cat([given.pop(name), up])
    given = {
        name if name in wanted or ".experts." in name else name.replace("ffn.", "ffn.feed_forward.", 1): value
        for name, value in given.items()
    }
    state = {n: v for n, v in wanted.items() if "balancer" in n or "extra_state" in n}
    ours.load_state_dict(given | state, strict=True)


def pair(family):
    their_config, our_config = family()
    kinds = {"Llama4TextConfig": "Llama4ForCausalLM"}
    name = type(their_config).__name__
    theirs = getattr(transformers, kinds.get(name, name.replace("Config", "ForCausalLM")))(their_config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, value in theirs.state_dict().items():
            if value.is_floating_point():
                value.normal_(0.0, 0.4, generator=generator)
                if "norm" in key:
                    value += 1.0
    ours = build_model(our_config).eval()
    copy_(ours, theirs)
    return ours, theirs


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
@torch.no_grad()
def test_logits_and_parameter_counts_equal(family):
    ours, theirs = pair(family)
    tokens_BS = torch.randint(0, V, (2, 13))
    expected, logits = theirs(tokens_BS).logits, ours(tokens_BS).logits
    assert relative_rms(logits, expected) < 2e-5
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def random_model(family):
    model = build_model(family()[1]).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if value.is_floating_point() and "balancer" not in key:
                value.normal_(0.0, 0.4, generator=generator)
                if "norm" in key:
                    value += 1.0
    return model


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
@torch.no_grad()
def test_a_cache_fed_in_any_pieces_equals_one_forward(family):
    """known_failures G-03. Windows of 4 and chunks of 5 wrap around several times in 17 tokens."""
    model, tokens_BS = random_model(family), torch.randint(0, V, (4, 17))
    expected = model(tokens_BS).logits
    for pieces in ((1,) * 17, (3,) * 5 + (2,), (17,), (9, 1, 1, 6), (2, 11, 4)):
        cache = model.make_cache(4, 17)
        parts = [model(part, cache=cache).logits for part in tokens_BS.split(pieces, dim=1)]
        assert relative_rms(torch.cat(parts, dim=1), expected) < 1e-5, pieces
    alone = model.make_cache(1, 20)
    parts = [model(part, cache=alone).logits for part in tokens_BS[2:3].split(3, dim=1)]
    assert relative_rms(torch.cat(parts, dim=1), expected[2:3]) < 1e-5
    short = model.make_cache(4, 17)
    assert relative_rms(model(tokens_BS[:, :3], cache=short).logits, expected[:, :3]) < 1e-5


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("side", ["left", "right", "between"])
@torch.no_grad()
def test_padding_on_any_side_changes_no_logit(family, side):
    model, tokens_BS = random_model(family), torch.randint(0, V, (3, 18))
    lengths = (6, 11, 14)
    mask_BS = torch.zeros(3, 18, dtype=torch.bool)
    for row, length in zip(mask_BS, lengths, strict=True):
        if side == "left":
            row[18 - length :] = True
        else:
            row[: length if side == "right" else length // 2] = True
            if side == "between":
                row[18 - (length - length // 2) :] = True
    cache = model.make_cache(3, 18)
    whole = model(tokens_BS, mask_BS=mask_BS).logits
    chunks = zip(tokens_BS.split(5, dim=1), mask_BS.split(5, dim=1), strict=True)
    cached = torch.cat([model(tokens, mask_BS=mask, cache=cache).logits for tokens, mask in chunks], dim=1)
    for row, mask_S in enumerate(mask_BS):
        expected = model(tokens_BS[row, mask_S][None]).logits[0]
        assert relative_rms(whole[row, mask_S], expected) < 1e-5
        assert relative_rms(cached[row, mask_S], expected) < 1e-5


def reached(window, chunked, length):
    """Which tokens change the output of each token, found by changing them one at a time; one layer, no MoE."""
    kind = "chunked_attention" if chunked else "sliding_attention"
    size = {"attention_chunk_size" if chunked else "sliding_window": window}
    config = ModelConfig(**OURS | {"num_layers": 1}, layer_types=(kind,), **size)
    model, tokens_BS = build_model(config).eval(), torch.zeros(1, length, dtype=torch.int64)
    base = model(tokens_BS).logits[0]
    changed = []
    for token in range(length):
        other_BS = tokens_BS.clone()
        other_BS[0, token] = 7
        changed.append((model(other_BS).logits[0] != base).any(dim=-1))
    return torch.stack(changed, dim=1)


@torch.no_grad()
def test_a_window_of_w_reaches_exactly_w_keys_and_a_chunk_its_own_block():
    seen = reached(4, False, 10)
    assert seen.sum(dim=1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert seen[9].nonzero()[:, 0].tolist() == [6, 7, 8, 9]
    assert reached(4, True, 10).sum(dim=1).tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


@torch.no_grad()
def test_caches_hold_no_more_than_the_attention_can_see():
    model = build_model(gpt_oss()[1])
    shapes = [layer.keys.shape[2] for layer in model.make_cache(2, 100).layers]
    assert shapes == [5, 100, 5, 100], "a window of 4 and one slot for what nobody will see"
    latent = build_model(deepseek_v3()[1]).make_cache(2, 100).layers[0]
    assert latent.keys.shape == (2, 1, 100, 12) and latent.values.shape == (2, 1, 100, 8)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_every_parameter_learns(family):
    """And bfloat16 autocast gives finite gradients to the same ones."""
    model, tokens_BS = random_model(family).train(), torch.randint(0, V, (4, 16))
    for narrow in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
            logits = model(tokens_BS).logits
        logits.float().backward(torch.randn(4, 16, V))
        gradients = {name: p.grad for name, p in model.named_parameters()}
        assert not [name for name, grad in gradients.items() if grad is None or not grad.isfinite().all()]
        assert not [name for name, grad in gradients.items() if not grad.any()]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_suffixes_tell_the_truth(family):
    config = override(family()[1], {"backend": "grouped"})
    model, tokens_BS, mask_BS = build_model(config), torch.randint(0, V, (5, 13)), torch.ones(5, 13)
    mask_BS[0, :3] = 0
    with watch_shapes() as watch:
        logits = model(tokens_BS, mask_BS=mask_BS).logits
        logits.backward(torch.randn_like(logits))
        model.generate(tokens_BS, 2, mask_BS=mask_BS)
    assert not watch.complaints and watch.looked_at > 300
