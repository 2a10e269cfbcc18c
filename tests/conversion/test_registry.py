import dataclasses

import pytest

from guide_code.config import ModelConfig, MoEConfig
from guide_code.conversion.registry import FAMILIES, differences, family_of, read_config, write_config
from guide_code.presets import PRESETS, tiny

MOE = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "top_k": 2}
MODEL = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_layers": 4, "num_heads": 2}
MODEL |= {"num_kv_heads": 2, "head_size": 16, "max_length": 64}


def config(moe=None, **changes):
    return ModelConfig(**MODEL | changes, moe=MoEConfig(**MOE | (moe or {})))


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"tiny", "small"}))
def test_every_published_model_is_written_by_its_family_and_comes_back(name):
    families = {
        "qwen1.5": "qwen2_moe",
        "qwen3": "qwen3_moe",
        "kimi": "deepseek_v3",
        "gpt": "gpt_oss",
        "glm": "glm4_moe",
    }
    families |= {"deepseek": f"deepseek_v{name.partition('-v')[2][:1]}", "llama": "llama4_text", "phi": "phimoe"}
    written = write_config(PRESETS[name]())
    assert written["model_type"] == families.get(name.split("-")[0], name.split("-")[0])
    assert differences(read_config(written), PRESETS[name]()) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (config({"backend": "loop", "z_loss_coef": 0.1, "capacity_factor": 2.0, "router_jitter": 0.1}), config()),
        (config({"expert_bias_rate": 0.1}), config({"use_expert_bias": True})),
        (config(first_k_dense=2), config(dense_layers=(0, 1))),
        (config(moe_layer_step=2), config(dense_layers=(0, 2))),
        (config({"num_shared_experts": 2}), config({"num_shared_experts": 1, "shared_intermediate_size": 32})),
        (config({"group_score": "max"}), config()),
        (config(intermediate_size=99), config()),
        (config(layer_types=("full_attention",) * 4), config()),
    ],
)
def test_two_ways_to_write_the_same_model(one, other):
    assert differences(one, other) == [] == differences(other, one)


@pytest.mark.parametrize(
    ("changes", "moe", "name"),
    [
        ({"norm_eps": 1e-3}, {}, "norm_eps=0.001"),
        ({"intermediate_size": 99, "first_k_dense": 1}, {}, "intermediate_size=99"),
        ({"dense_layers": (3,)}, {}, "dense_layers=(3,)"),
        ({}, {"norm_topk_prob": False}, "moe.norm_topk_prob=False"),
        ({}, {"use_expert_bias": True}, "moe.use_expert_bias=True"),
        ({}, {"num_groups": 2, "top_k_groups": 1, "group_score": "max"}, "moe.group_score='max'"),
    ],
)
def test_what_makes_another_model_is_named(changes, moe, name):
    assert name in differences(config(), config(moe, **changes))


def test_dense_and_sparse_differ_in_one_word():
    dense = dataclasses.replace(config(), moe=None)
    assert differences(dense, config()) == ["moe (the mixture)"] and differences(config(), dense) == [
        "moe=None (dense)"
    ]


def test_the_margin_of_sparse_mixer_counts_in_evaluation_too():
    near, far = (config({"router": "sparse_mixer", "router_jitter": jitter}) for jitter in (0.01, 0.1))
    assert differences(near, far) == ["moe.router_jitter=0.1"]


def test_families_are_listed_under_their_own_name():
    assert all(family.model_type == name for name, family in FAMILIES.items())
    with pytest.raises(ValueError, match="model_type='None' is not a family"):
        family_of({})


def test_a_family_that_is_asked_for_says_what_it_loses():
    assert write_config(tiny())["model_type"] == "mixtral"
    with pytest.raises(ValueError, match=r"olmoe does not compute this configuration: olmoe loses qk_norm='none'"):
        write_config(tiny(), "olmoe")
