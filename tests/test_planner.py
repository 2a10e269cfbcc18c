"""The planner's numbers against what they stand for: built models, tensors kept by autograd, schedules of PyTorch."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from guide_code.build import build_model, parameter_counts
from guide_code.config import ModelConfig, MoEConfig
from guide_code.figures import pipeline_schedules, zero_stages
from guide_code.models import cost
from guide_code.parallel.expert import all_to_all_bytes
from guide_code.parallel.mesh import ParallelSizes, rank_groups
from guide_code.planner.cli import app, parse_bytes
from guide_code.planner.layers import layers_of
from guide_code.planner.plan import BYTES, Hardware, Job, make_plan, pipeline_bubble, pipeline_held
from guide_code.planner.suggest import suggest
from guide_code.planner.traffic import neighbours
from guide_code.presets import preset

MOE: dict[str, Any] = {
    "hidden_size": 32,
    "moe_intermediate_size": 40,
    "num_experts": 8,
    "top_k": 2,
    "backend": "grouped",
}
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_size": 16,
    "max_length": 64, "num_layers": 4, "moe": MoEConfig(**MOE, num_shared_experts=1), "first_k_dense": 1,
}  # fmt: skip
JOB, MACHINE = Job(sequence=64, batch=64), Hardware()


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "mixtral-8x7b", "qwen1.5-moe-a2.7b"])
def test_parameters_and_operations_are_those_of_the_model(name):
    config = preset(name)
    first, blocks, last = layers_of(config, 1025)
    parts = [first, *blocks, last]
    with torch.device("meta"):
        total, _ = parameter_counts(build_model(config))
    assert sum(p.split + p.copied + p.experts for p in parts) == total
    if config.layer_types is None:  # tokens of a sequence of 1025 look at 513 on average
        assert sum(p.flops + p.expert_flops for p in parts) == pytest.approx(cost(name, config, 513).flops_per_token)


LAYOUTS = [
    {"dp": 4}, {"dp": 4, "ep": 2}, {"tp": 2, "dp": 2, "ep": 4}, {"cp": 2, "dp": 2, "ep": 2, "etp": 2},
    {"pp": 2, "dp": 2, "ep": 2}, {"pp": 4, "tp": 2, "dp": 2, "cp": 2, "ep": 8},
]  # fmt: skip


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_together_hold_everything_once_or_as_often_as_the_stage_says(layout, zero):
    sizes, config = ParallelSizes(**layout), ModelConfig(**SHAPE)
    with torch.device("meta"):
        model = build_model(config)
    split = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "embedding", "head"}
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    whole = sum(p.numel() for n, p in model.named_parameters() if n.split(".")[-2] in split and ".experts." not in n)
    copied = parameter_counts(model)[0] - whole - experts
    plan = make_plan(config, sizes, replace(JOB, zero=zero), MACHINE)
    row = sizes.world_size // sizes.pp
    for name, since in (("parameters", 3), ("gradients", 2), ("optimizer", 1)):
        dense_copies, expert_copies = (1, 1) if zero >= since else (sizes.dp * sizes.cp, sizes.edp)
        dense = row * sum(stage.memory[f"dense {name}"] for stage in plan.stages)
        assert dense == pytest.approx(BYTES[name] * dense_copies * (whole + copied * sizes.tp))
        held = row * sum(stage.memory[f"expert {name}"] for stage in plan.stages)
        assert held == pytest.approx(BYTES[name] * expert_copies * experts)
    flops = row * sum(stage.flops for stage in plan.stages)
    per_token = cost("x", config, 64).flops_per_token - 2 * 4 * 4 * 32 * 31.5  # 32.5 tokens seen on average, not 64
    assert flops == pytest.approx(3 * 64 * 64 * per_token)


VARIANTS: dict[str, Any] = {
    "dense": {"moe": None, "first_k_dense": 0}, "qk": {"qk_norm": "head"}, "full": {"qk_norm": "full"}, "shared": {},
    "gate": {"moe": MoEConfig(**MOE, num_shared_experts=1, shared_gate=True)},
    "plain": {"moe": MoEConfig(**MOE, gated=False, activation="gelu")},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_are_the_tensors_that_autograd_keeps(variant, dtype):
    config = ModelConfig(**SHAPE | VARIANTS[variant])
    model = build_model(config).to(dtype)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = torch.randint(0, 64, (4, 64))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.cross_entropy(model(tokens).logits.flatten(0, 1).float(), tokens.flatten())
    first, blocks, last = layers_of(config, 64, dtype.itemsize)
    formula = sum(p.saved + p.saved_rows + p.saved_inner for p in (first, *blocks, last))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / tokens.numel()
    assert formula == pytest.approx(measured, rel=3e-3)  # weights of norms in float32, per layer, not per token


def test_recomputation_keeps_the_inputs_of_blocks_and_one_block():
    config, sizes = ModelConfig(**SHAPE), ParallelSizes()
    full, again = (make_plan(config, sizes, replace(JOB, recompute=r), MACHINE).stages[0] for r in (False, True))
    _, blocks, _ = layers_of(config, 64)
    each = [b.saved + b.saved_rows + b.saved_inner for b in blocks]
    saved = full.memory["activations"] - again.memory["activations"]
    assert saved == pytest.approx(64 * (sum(each) - max(each) - 2 * 32 * 4))
    assert again.flops > full.flops


def test_bytes_of_parameters_are_those_of_the_page_on_zero():
    assert BYTES == zero_stages.BYTES


@pytest.mark.parametrize(("ours", "drawn"), [("GPipe",) * 2, ("1F1B",) * 2, ("Interleaved1F1B", "Interleaved 1F1B")])
def test_bubble_and_held_micro_batches_are_those_of_the_schedules_of_torch(ours, drawn):
    assert pipeline_bubble(ours, 4, 8) == pytest.approx(pipeline_schedules.idle_share(drawn))
    assert pipeline_held(ours, 0, 4, 8) == pipeline_schedules.held(drawn)


@pytest.mark.parametrize("layout", [*LAYOUTS, {"dp": 16, "ep": 16}, {"pp": 2, "tp": 4, "dp": 8, "ep": 8, "etp": 2}])
def test_neighbours_are_those_of_the_mesh(layout):
    sizes = ParallelSizes(**layout)
    for axis in ("pp", "dp", "cp", "tp", "edp", "ep", "etp"):
        groups = rank_groups(sizes, axis)
        near = min(sum(other // 8 == rank // 8 for other in group) for group in groups for rank in group)
        assert neighbours(sizes, axis, 8) == (len(groups[0]), near)


def test_all_to_all_traffic_is_the_formula_of_the_module():
    sizes, config = (
        ParallelSizes(dp=16, ep=16),
        replace(ModelConfig(**SHAPE), moe=MoEConfig(**{**MOE, "num_experts": 16})),
    )
    sent = make_plan(config, sizes, JOB, MACHINE).stages[0].traffic["ep"]
    once = all_to_all_bytes(128, 128, 32, 16, element_size=2)
    passes = 4 * 3  # micro-batches, sparse layers
    total = passes * (2 * once - 16 * 8)
    assert (sent.intra, sent.inter) == (pytest.approx(total * 7 / 16), pytest.approx(total * 8 / 16))


@pytest.mark.parametrize(
    ("layout", "job", "words"),
    [
        ({"dp": 3, "ep": 3}, {}, "ep=3 does not divide num_experts=8"),
        ({"dp": 3, "etp": 3}, {}, "etp=3 must divide moe_intermediate_size=40"),
        ({"tp": 4}, {}, "tp=4 must divide num_kv_heads=2"),
        ({"cp": 5}, {}, "cp=5 x tp=1 must divide sequence=64"),
        ({"pp": 8}, {}, "pp=8 makes 8 stages of num_layers=4"),
        ({"dp": 48}, {}, "batch=64 must be a multiple of dp=48 x micro_batch=1: give batch=96"),
        ({}, {"sequence": 128}, "sequence=128 exceeds max_length=64"),
        ({}, {"zero": 4}, "zero=4 is no ZeRO stage: give 1, 2 or 3"),
    ],
)
def test_impossible_layouts_name_field_value_and_fix(layout, job, words):
    with pytest.raises(ValueError, match=words):
        make_plan(ModelConfig(**SHAPE), ParallelSizes(**layout), replace(JOB, **job), MACHINE)


def test_suggestions_fit_and_the_fastest_comes_first():
    config = preset("olmoe-1b-7b")
    plans = suggest(config, 8, Job(batch=64), MACHINE)
    assert plans and all(plan.sizes.world_size == 8 and not plan.misfits for plan in plans)
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    with pytest.raises(ValueError, match=r"gpus=1: no layout fits.*the largest part is expert optimizer"):
        suggest(config, 1, Job(batch=64), MACHINE)


def run(*words):
    return CliRunner().invoke(app, list(words))


def test_command():
    words = ["qwen3-30b-a3b", "--gpus", "64", "--ep", "8", "--pp", "2"]
    plan = json.loads(run(*words, "--json").stdout)
    assert plan["sizes"]["dp"] == 32 and plan["fits"] and len(plan["stages"]) == 2
    assert "memory, GB" in run(*words).output
    small = run(*words, "--hbm", "40GB").output
    assert "does not fit: stage 0 needs" in small and "largest part is activations" in small
    wrong = run(*words, "--hbm", "lots")
    assert wrong.exit_code == 1 and "hbm='lots'" in wrong.output and "80GB" in wrong.output
    assert "Nearest possible: dp=16" in run(*words, "--tp", "2", "--dp", "8").output
    assert parse_bytes("1.5 GiB") == 1.5 * 2**30
