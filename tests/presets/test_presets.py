import dataclasses
import json

import pytest
import torch
import transformers

from guide_code.build import build_model, parameter_counts
from guide_code.config import from_dict, to_dict
from guide_code.presets import PRESETS, UNVERIFIED, preset

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}


def attention(config):
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "num_experts_per_tok": config.moe.top_k,
    }  # fmt: skip


def their_class_and_config(name):
    """The class of transformers, and its configuration, every size from the published table and none from ours."""
    mla = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "pad_token_id": None,
    }
    mla |= {"rope_parameters": YARN}
    v3 = {"q_lora_rank": 1536, "moe_intermediate_size": 2048, "intermediate_size": 18432, "hidden_size": 7168}
    return {
        "mixtral-8x7b": ("Mixtral", {}),
        "mixtral-8x22b": (
            "Mixtral",
            {"vocab_size": 32768, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
             "num_attention_heads": 48, "head_dim": 128},
        ),
        "qwen1.5-moe-a2.7b": ("Qwen2Moe", {}),
        "qwen2-57b-a14b": (
            "Qwen2Moe",
            {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
             "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560,
             "shared_expert_intermediate_size": 20480},
        ),
        "qwen3-30b-a3b": ("Qwen3Moe", {"num_hidden_layers": 48, "head_dim": 128}),
        "qwen3-235b-a22b": (
            "Qwen3Moe",
            {"num_hidden_layers": 94, "head_dim": 128, "hidden_size": 4096, "num_attention_heads": 64,
             "moe_intermediate_size": 1536},
        ),
        "qwen3-coder-480b-a35b": (
            "Qwen3Moe",
            {"num_hidden_layers": 62, "head_dim": 128, "hidden_size": 6144, "num_attention_heads": 96,
             "num_key_value_heads": 8, "moe_intermediate_size": 2560, "num_experts": 160},
        ),
        "olmoe-1b-7b": ("Olmoe", {"intermediate_size": 1024}),
        "deepseek-v2-lite": (
            "DeepseekV2",
            {"hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None,
             "intermediate_size": 10944, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
             "num_experts_per_tok": 6, **mla},
        ),
        "deepseek-v2": (
            "DeepseekV2",
            {"hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "intermediate_size": 12288,
             "moe_intermediate_size": 1536, "n_routed_experts": 160, "first_k_dense_replace": 1,
             "num_experts_per_tok": 6, **mla},
        ),
        "deepseek-v3": ("DeepseekV3", mla | v3),
        "kimi-k2": (
            "DeepseekV3",
            mla | v3 | {"vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
                        "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        ),
        "gpt-oss-20b": ("GptOss", {"num_hidden_layers": 24, "num_local_experts": 32}),
        "gpt-oss-120b": ("GptOss", {}),
        "llama-4-scout": ("Llama4", {}),
        "llama-4-maverick": ("Llama4", {"num_local_experts": 128, "interleave_moe_layer_step": 2}),
        "glm-4.5": (
            "Glm4Moe",
            {"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92, "moe_intermediate_size": 1536,
             "n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True, "attention_bias": True,
             "head_dim": 128},
        ),
        "glm-4.5-air": ("Glm4Moe", {"attention_bias": True, "head_dim": 128}),
    }[name]  # fmt: skip


PUBLISHED = [name for name in (*PRESETS, *UNVERIFIED) if name not in ("tiny", "small")]
NOT_IN_TRANSFORMERS = ["deepseek-moe-16b"]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in NOT_IN_TRANSFORMERS])
def test_as_many_parameters_as_the_class_of_transformers_to_the_unit(name):
    prefix, fields = their_class_and_config(name)
    their_config = getattr(transformers, f"{prefix}TextConfig" if prefix == "Llama4" else f"{prefix}Config")(**fields)
    ours = preset(name, allow_unverified=True)
    with torch.device("meta"):
        theirs = getattr(transformers, f"{prefix}ForCausalLM")(their_config)
        model = build_model(ours)
    assert parameter_counts(model)[0] == sum(p.numel() for p in theirs.parameters())
    assert (their_config.num_hidden_layers, their_config.vocab_size) == (ours.num_layers, ours.vocab_size)


@pytest.mark.parametrize("name", (*PRESETS, *UNVERIFIED))
def test_presets_survive_json(name):
    config = preset(name, allow_unverified=True)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 1


def test_values_in_doubt_are_refused_by_name_and_value():
    with pytest.raises(ValueError, match=r"'deepseek-moe-16b' has unverified values \(norm_topk_prob=False\)"):
        preset("deepseek-moe-16b")
    with pytest.raises(ValueError, match="vocab_size=151936"):
        preset("qwen2-57b-a14b")
    for name, fields in UNVERIFIED.items():
        config = preset(name, allow_unverified=True)
        assert all(hasattr(config, field) or hasattr(config.moe, field) for field in fields), name
    with pytest.raises(ValueError, match="did you mean gpt-oss-120b"):
        preset("gpt-oss-120")
