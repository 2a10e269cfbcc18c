"""The numbers that figures show: against the package's code, published values, and counting by hand."""

import json
import math
import re
from itertools import pairwise

import pytest
import torch
from site_project import ROOT
from torch.distributed.pipelining import schedules

from guide_code.balance import expert_counts
from guide_code.capacity import PRIORITIES, apply_capacity
from guide_code.figures import (
    capacity_drops,
    context_ring,
    device_mesh,
    execution_paths,
    expert_choice,
    expert_folding,
    expert_parallel_flow,
    fine_grained_experts,
    group_routing,
    load_over_training,
    memory_by_strategy,
    moe_dataflow,
    offload_cache,
    pipeline_schedules,
    pooled_loss,
    router_anatomy,
    router_order,
    shapes,
    timeline,
    total_vs_active,
    zero_stages,
)
from guide_code.figures.measure import load_over_training as measure
from guide_code.presets import preset
from guide_code.routers import top_k_routing

MEASURED = json.loads((ROOT / "docs/data/results/load_over_training.json").read_text())


def test_the_routing_of_the_data_flow_is_what_the_code_computes():
    scores = torch.full((4, moe_dataflow.NUM_EXPERTS), 1e-4)
    scores.scatter_(1, torch.tensor(moe_dataflow.CHOICES), torch.tensor(moe_dataflow.WEIGHTS))
    routing = top_k_routing(scores.log(), top_k=2)
    assert routing.ids.tolist() == [list(ids) for ids in moe_dataflow.CHOICES]
    assert torch.allclose(routing.weights, torch.tensor(moe_dataflow.WEIGHTS), atol=1e-3)
    assert moe_dataflow.counts() == expert_counts(routing.ids, moe_dataflow.NUM_EXPERTS).tolist()
    order = routing.ids.flatten().sort(stable=True).indices.tolist()
    assert [token * 2 + choice for _, token, choice in moe_dataflow.sorted_rows()] == order


def test_the_router_shows_a_softmax_and_says_so():
    scores = [math.exp(logit) for logit in router_anatomy.LOGITS]
    scores = [score / sum(scores) for score in scores]
    best = sorted(range(8), key=lambda expert: -scores[expert])[:2]
    assert router_anatomy.routing().ids[0].tolist() == best == [5, 1]
    weights = [scores[expert] / sum(scores[e] for e in best) for expert in best]
    assert router_anatomy.routing().weights[0].tolist() == pytest.approx(weights, rel=1e-5)
    for value in (*(scores[expert] for expert in best), *weights):
        assert f"{value:.2f}" in router_anatomy.ALT


def test_every_router_chooses_once_and_names_its_source():
    for router in router_order.ROUTERS:
        kinds = [kind for _, kind in router.steps]
        assert kinds.count("score") == 1 and "choice" in kinds and kinds.count("scale") <= 1
        assert re.search(r"arXiv:\d{4}\.\d{5}|transformers", router.source)


@pytest.mark.parametrize(
    ("model", "name"),
    {
        "Mixtral 8x7B": "mixtral-8x7b",
        "Qwen3 30B-A3B": "qwen3-30b-a3b",
        "OLMoE 1B-7B": "olmoe-1b-7b",
        "DeepSeek-V2": "deepseek-v2",
        "DeepSeek-V3": "deepseek-v3",
        "gpt-oss 120b": "gpt-oss-120b",
    }.items(),
)
def test_a_routers_steps_are_those_of_its_preset(model, name):
    moe = preset(name).moe
    steps = [words for words, _ in next(router for router in router_order.ROUTERS if router.model == model).steps]
    order = [moe.score_fn]
    if moe.use_expert_bias:
        order.append("+ bias for the choice")
    if moe.num_groups > 1:
        rule = {"max": "max", "top2_sum": "top-2 sum"}[moe.group_score]
        order.append(f"{moe.top_k_groups} of {moe.num_groups} groups by {rule}")
    order += [f"top {moe.top_k}"] + ["\u00f7 sum"] * moe.norm_topk_prob
    order += [f"\u00d7 {moe.routed_scaling_factor:g}"] * (moe.routed_scaling_factor != 1)
    if model.startswith("gpt-oss"):  # softmax over all, top k, divide by the sum: the same as softmax over the k
        assert order == ["softmax", "top 4", "\u00f7 sum"] and moe.router_bias
        order = ["top 4", "softmax over the 4"]
    assert steps == order


@pytest.mark.parametrize("priority", PRIORITIES)
def test_the_drawn_queues_are_what_capacity_keeps(priority):
    torch.manual_seed(4)
    kept = apply_capacity(capacity_drops.routing(), capacity_drops.capacity(), priority=priority)
    ids = kept.ids.tolist()
    for expert, queue in enumerate(capacity_drops.queues(priority)):
        served = {token for token, _ in queue[: capacity_drops.capacity()]}
        assert served == {token for token in range(8) if expert in ids[token]}
    assert sum(map(len, capacity_drops.queues(priority))) == 16


def test_the_queues_are_those_of_the_description():
    first = {name: [token for token, _ in capacity_drops.queues(name)[0]] for name in PRIORITIES}
    assert first["arrival"] == [0, 1, 2, 4, 6, 7, 3]
    assert first["tokens"] == [0, 1, 2, 3, 4, 6, 7]
    assert first["probability"][:4] == [6, 4, 7, 0]
    assert sorted(first["random"]) == [0, 1, 2, 3, 4, 6, 7] and first["random"] not in list(first.values())[:3]


def test_the_pooled_loss_hides_the_collapse():
    first, second, pooled = pooled_loss.values()
    assert first == ([1.0, 0.0], pytest.approx([0.75, 0.25]), pytest.approx(1.5))
    assert second == ([0.0, 1.0], pytest.approx([0.25, 0.75]), pytest.approx(1.5))
    assert pooled == ([0.5, 0.5], pytest.approx([0.5, 0.5]), pytest.approx(1.0))


def test_the_measured_loads_are_shares_and_the_description_holds():
    assert {"command", "machine", "versions", "date"} <= set(MEASURED)
    assert MEASURED["settings"] == measure.RUNS, "measure again after a change of the settings"
    assert MEASURED["steps"] == list(range(measure.BLOCK, measure.STEPS + 1, measure.BLOCK))
    for shares in MEASURED["shares"].values():
        assert len(shares) == len(MEASURED["steps"])
        assert all(sum(row) == pytest.approx(1, abs=1e-3) and len(row) == 16 for row in shares)
    last = {name: sorted(shares[-1]) for name, shares in MEASURED["shares"].items()}
    said = load_over_training.ALT
    words = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    assert f"ends with {last['none'][-1] * 100:.0f} %" in said
    assert f"and {words[sum(share < 0.1 / 16 for share in last['none'])]} with almost none" in said
    for name in ("loss", "bias"):
        assert f"between {last[name][0] * 100:.0f} % and {last[name][-1] * 100:.0f} %" in said
    busiest = {name: load_over_training.busiest(shares) for name, shares in MEASURED["shares"].items()}
    assert min(busiest["none"][3:]) > 5 and max(busiest["loss"][-1], busiest["bias"][-1]) < 2


def test_each_way_to_execute_copies_what_it_says():
    assert execution_paths.costs() == {
        "loop": (3, 3, 8),
        "padded": (12, 12, 2),
        "grouped": (8, 8, 2),
        "fused": (0, 8, 2),
    }


def test_the_exchange_loses_no_row():
    sent = sorted(row for rank in range(2) for row in expert_parallel_flow.permuted(rank))
    assert sent == sorted(row for rank in range(2) for row in expert_parallel_flow.received(rank))
    assert sent == [(0, 0), (0, 2), (1, 1), (2, 0), (2, 2), (2, 3), (3, 1), (3, 3)]
    assert [len(expert_parallel_flow.received(rank)) for rank in range(2)] == [3, 5]
    links = list(expert_parallel_flow._links())
    assert len(links) == 6 * 8 and len({(start, end) for start, end, _ in links}) == 6 * 8


def test_zero_takes_the_memory_of_its_paper():
    shown = [f"{zero_stages.gigabytes(stage):.1f}" for stage in zero_stages.STAGES]
    assert shown == ["120.0", "31.4", "16.6", "1.9"]  # arXiv:1910.02054, figure 1


@pytest.mark.parametrize("name", pipeline_schedules.SCHEDULES)
def test_a_schedule_runs_every_action_once_after_what_it_needs(name):
    rows = pipeline_schedules.timed(name)
    stages = 4 * pipeline_schedules.SCHEDULES[name][1]
    ends = {(slot.stage, slot.kind, slot.micro_batch): slot for row in rows for slot in row}
    assert len(ends) == sum(map(len, rows))
    for stage in range(stages):
        for micro_batch in range(8):
            forward = ends[stage, "F", micro_batch]
            backward = ends.get((stage, "B", micro_batch)) or ends[stage, "I", micro_batch]
            assert backward.start >= forward.end
            if stage:
                assert forward.start >= ends[stage - 1, "F", micro_batch].end
                before = ends.get((stage - 1, "B", micro_batch)) or ends[stage - 1, "I", micro_batch]
                assert before.start >= backward.end
            if backward.kind == "I":
                assert ends[stage, "W", micro_batch].start >= backward.end
    for row in rows:
        assert all(one.end <= other.start for one, other in pairwise(row))


def test_the_idle_time_is_that_of_the_papers():
    ranks, batches = 4, 8
    idle = {name: pipeline_schedules.idle_share(name) for name in pipeline_schedules.SCHEDULES}
    plain = (ranks - 1) / (batches + ranks - 1)  # arXiv:2104.04473, section 2.2: bubble over ideal time (p - 1) / m
    assert idle["GPipe"] == pytest.approx(plain) and idle["1F1B"] == pytest.approx(plain)
    assert idle["Interleaved 1F1B"] == pytest.approx((ranks - 1) / (2 * batches + ranks - 1))
    third = (ranks - 1) / (3 * batches + ranks - 1)  # arXiv:2401.10241, table 2: (p - 1)(F + B - W) with F = B = W
    assert idle["Zero bubble"] == pytest.approx(third)
    held = {name: pipeline_schedules.held(name) for name in idle}
    assert held == {"GPipe": 8, "1F1B": 4, "Interleaved 1F1B": 5.5, "Zero bubble": 4}
    for name in idle:
        assert f"{idle[name] * 100:.0f} %" in pipeline_schedules.ALT


def test_the_drawn_order_is_pytorchs():
    stage = pipeline_schedules._stage(0, 4)
    theirs = schedules.ScheduleGPipe(stage, 8).pipeline_order
    for rank in range(4):
        ours = [f"{stage}{kind}{batch}" for stage, kind, batch in pipeline_schedules.order("GPipe")[rank]]
        assert ours == [str(action) for action in theirs[rank] if action and "REDUCE" not in str(action)]


def test_zigzag_evens_out_the_causal_work():
    assert context_ring.work(zigzag=False) == [2, 6, 10, 14]
    assert context_ring.work(zigzag=True) == [8, 8, 8, 8]
    assert sum(context_ring.work(zigzag=True)) == 8 * 8 / 2


def test_meshes_fold_the_same_ranks():
    for mesh in expert_folding.MESHES.values():
        assert math.prod(mesh.values()) == expert_folding.RANKS
        places = [tuple(shapes.coordinates(rank, mesh).values()) for rank in range(expert_folding.RANKS)]
        assert len(set(places)) == expert_folding.RANKS
    held = [expert_folding.holds({"etp": 2, "ep": 4}, rank) for rank in (0, 1, 2)]
    assert held == ["$E_0$, $E_1$\nhalf 0", "$E_0$, $E_1$\nhalf 1", "$E_2$, $E_3$\nhalf 0"]


@pytest.mark.parametrize("name", device_mesh.MESHES)
def test_the_groups_of_a_rank_are_lines_of_the_mesh(name):
    mesh = device_mesh.MESHES[name]
    ranks = torch.arange(16).view(*reversed(mesh.values()))
    place = (ranks == device_mesh.RANK).nonzero()[0].tolist()
    for dim, along in enumerate(reversed(mesh)):
        line = ranks[tuple(slice(None) if d == dim else at for d, at in enumerate(place))]
        assert device_mesh.groups(name)[along] == line.tolist()


def test_fine_grained_designs_do_the_same_work():
    shares = [(d.top_k + d.shared) / (d.experts + d.shared) for d in fine_grained_experts.DESIGNS]
    assert shares == [0.25] * 3
    assert all(len(d.picked) == d.top_k and max(d.picked) < d.experts for d in fine_grained_experts.DESIGNS)
    assert [fine_grained_experts.choices(d) for d in fine_grained_experts.DESIGNS] == [28, 10_518_300, 2_629_575]


def test_the_cache_forgets_what_was_used_least_recently():
    trace = [[0, 1], [2, 0], [3, 0], [2, 3]]  # the oldest, 0, is in use when 1 makes room
    found = offload_cache.simulate(trace, 3)
    assert found == [({0, 1}, {0, 1}), ({2}, {0, 1, 2}), ({3}, {0, 2, 3}), (set(), {0, 2, 3})]
    assert offload_cache.hit_rate(trace, 3) == 0.5
    with pytest.raises(ValueError, match="slots=1"):
        offload_cache.simulate([[0, 1]], 1)
    rates = [offload_cache.hit_rate(MEASURED["trace"], slots) for slots in range(2, 17)]
    assert rates == sorted(rates)
    distinct = len({expert for ids in MEASURED["trace"] for expert in ids})
    assert rates[-1] == 1 - distinct / 128


def test_the_time_line_is_in_order_and_dated_by_its_sources():
    dates = [event.date for event in timeline.EVENTS]
    assert dates == sorted(dates) and dates[0] == "1991" and dates[-1] == "2026"
    for event in timeline.EVENTS:
        number = re.search(r"arXiv:(\d\d)(\d\d)\.\d{4,5}$", event.source)
        assert event.source and (number is None or event.date == f"20{number[1]}-{number[2]}"), event


def test_the_two_group_rules_pick_other_experts():
    best = sorted(range(16), key=lambda expert: -group_routing.SCORES[expert])
    for rule, groups in (("max", {0, 3}), ("top2_sum", {0, 1})):
        allowed = [expert for expert in best if expert // 4 in groups]
        assert group_routing.chosen(rule) == allowed[: group_routing.TOP_K]
    assert group_routing.chosen("max") == [0, 12, 2, 15] and group_routing.chosen("top2_sum") == [0, 4, 5, 2]


def test_rows_pick_experts_or_columns_pick_tokens():
    by_token, by_expert = (expert_choice.picks(name) for name in ("token", "expert"))
    assert [sum(row) for row in by_token] == [2] * 6 and [sum(column) for column in zip(*by_token, strict=True)] == [
        6,
        4,
        1,
        1,
    ]
    assert [sum(column) for column in zip(*by_expert, strict=True)] == [3] * 4
    assert {sum(row) for row in by_expert} == {1, 2, 3}


def test_published_sizes_are_those_of_the_papers():
    billions = {name: (count.active / 1e9, count.total / 1e9) for name, count in total_vs_active.published().items()}
    assert list(billions) == sorted(billions, key=lambda name: -billions[name][1])
    stated = {  # the model cards and papers; gpt-oss and Kimi count without embeddings, hence the margins
        "mixtral-8x7b": (12.9, 46.7),
        "deepseek-v3": (37, 671),
        "qwen3-30b-a3b": (3.3, 30.5),
        "qwen3-235b-a22b": (22, 235),
        "olmoe-1b-7b": (1.3, 6.9),
        "kimi-k2": (32, 1000),
        "gpt-oss-120b": (5.1, 117),
    }
    for name, (active, total) in stated.items():
        assert billions[name] == (pytest.approx(active, rel=0.13), pytest.approx(total, rel=0.03))
    for name, said in re.findall(r"([a-z][\w-]+-[\w-]+) ([\d.]+ of [\d.,]+\d)", total_vs_active.ALT):
        active, total = (float(number.replace(",", "")) for number in said.split(" of "))
        assert active == float(f"{billions[name][0]:.2g}") and total == float(
            f"{billions[name][1]:.{max(3, len(str(int(total))))}g}"
        ), name


def test_memory_follows_its_formula():
    count = total_vs_active.Parameters(total=100, active=20, experts=80)
    held = memory_by_strategy.gigabytes(memory_by_strategy.Strategy("ZeRO-1", experts=8, stages=2), count, ranks=40)
    assert held == pytest.approx({"parameters": 30e-9, "gradients": 30e-9, "optimizer": 30e-9})  # 20 / 2 + 80 / 16 = 15
    plain = memory_by_strategy.gigabytes(memory_by_strategy.Strategy(), count)
    assert sum(plain.values()) == pytest.approx(16 * 100e-9)
    count = total_vs_active.parameters(memory_by_strategy.PRESET)
    for strategy in memory_by_strategy.STRATEGIES.values():
        total = sum(memory_by_strategy.gigabytes(strategy, count).values())
        assert re.search(rf"\b{total:.3g}\b".replace(".", r"\."), memory_by_strategy.ALT)
