"""The routing playground computes what the package computes, and works for a reader with a keyboard."""

import json
import math
import random
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from site_project import ROOT

from guide_code.balance import (
    CONVENTIONS,
    expert_counts,
    load_balancing_loss,
    max_violation,
    required_arguments,
    z_loss,
)
from guide_code.capacity import apply_capacity, expert_capacity
from guide_code.routers import top_k_routing
from guide_code.sitebuild.tools import inline, routing_data, routing_families

SCRIPT = ROOT / "docs/assets/javascripts/routing.js"
ROUTING = ("top_k", "score_fn", "norm_topk_prob", "routed_scaling_factor", "num_groups", "top_k_groups", "group_score")
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def tool(browser, tmp_path_factory):
    """A page with the playground alone, opened from disk as offline readers do."""
    path = tmp_path_factory.mktemp("tool") / "tool.html"
    script = SCRIPT.read_text(encoding="utf-8")
    path.write_text(f'<meta charset="utf-8"><div id="routing-tool"></div>{routing_data()}<script>{script}</script>')
    page = browser.new_page()
    page.on("pageerror", lambda error: pytest.fail(f"script error: {error}"))
    page.goto(path.as_uri())
    yield page
    page.close()


def random_case(seed: int) -> dict:
    draw = random.Random(seed)
    experts, length = 8, 4
    groups = draw.choice([1, 2, 4])
    top_k = draw.randint(1, 4)
    logits = [[round(draw.gauss(0, 2), 2) for _ in range(experts)] for _ in range(8)]
    if seed % 5 == 0:  # ties: the lowest id comes first
        logits = [[float(round(x)) for x in row] for row in logits]
    return {
        "logits": logits,
        "length": length,
        "top_k": top_k,
        "score_fn": draw.choice(["softmax", "sigmoid", "sqrtsoftplus"]),
        "norm_topk_prob": draw.random() < 0.5,
        "routed_scaling_factor": draw.choice([1.0, 2.5, 16.0]),
        "num_groups": groups,
        "top_k_groups": draw.randint(math.ceil(top_k * groups / experts), groups),
        "group_score": draw.choice(["top2_sum", "max"]),
        "bias": [round(draw.gauss(0, 0.3), 2) for _ in range(experts)] if seed % 2 else [0.0] * experts,
        "padding": sorted(draw.sample(range(8), draw.choice([0, 0, 1, 3, 8 if seed % 7 == 0 else 4]))),
        "capacity_factor": draw.choice([0, 0.5, 1.0, 1.1, 1.25, 2.0]),
        "capacity_over": draw.choice(["batch", "sequence"]),
        "priority": draw.choice(["arrival", "tokens", "probability"]),
    }


def in_python(case: dict) -> dict:
    logits_TE = torch.tensor(case["logits"], dtype=torch.float64)
    tokens, experts = logits_TE.shape
    mask_T = torch.tensor([t not in case["padding"] for t in range(tokens)])
    options = {name: case[name] for name in ROUTING}
    bias_E = torch.tensor(case["bias"], dtype=torch.float64)
    routing = top_k_routing(logits_TE, expert_bias_E=bias_E, mask_T=mask_T, **options)
    kept, capacity = routing, None
    if case["capacity_factor"]:
        size = case["length"] if case["capacity_over"] == "sequence" else tokens
        capacity = expert_capacity(size, experts, case["top_k"], case["capacity_factor"])
        group_size = size if case["capacity_over"] == "sequence" else None
        kept = apply_capacity(routing, capacity, priority=case["priority"], group_size=group_size)
    counts_E = expert_counts(routing.ids, experts)
    given = {"num_layers": 1, "group_size": case["length"], "counts_E": counts_E}
    losses = {}
    for name, rule in CONVENTIONS.items():
        ids_TK = (kept if rule.counts == "kept" else routing).ids
        needed = {key: given[key] for key in required_arguments(name)}
        losses[name] = load_balancing_loss(routing.scores, ids_TK, convention=name, mask_T=mask_T, **needed).item()
    return {
        "scores": routing.scores.tolist(),
        "ids": routing.ids.tolist(),
        "weights": routing.weights.tolist(),
        "kept_ids": kept.ids.tolist(),
        "kept_weights": kept.weights.tolist(),
        "capacity": capacity,
        "counts": counts_E.tolist(),
        "losses": losses,
        "z_loss": z_loss(logits_TE, mask_T).item(),
        "max_violation": max_violation(counts_E).item(),
    }


def test_fifty_cases_agree_with_the_package(tool):
    cases = [random_case(seed) for seed in range(50)]
    rules = json.loads(tool.locator("#routing-data").text_content())["conventions"]
    results = tool.evaluate(
        "([cases, rules]) => cases.map((c) => guideRouting.compute({...c, logits: c.logits}, rules))", [cases, rules]
    )
    dropped = 0
    for case, result in zip(cases, results, strict=True):
        expected = in_python(case)
        rows, kept = result["rows"], result["kept"]
        assert [row["ids"] for row in rows] == expected["ids"], case
        assert [row["ids"] for row in kept] == expected["kept_ids"], case
        assert (result["capacity"], result["counts"]) == (expected["capacity"], expected["counts"]), case
        dropped += expected["ids"] != expected["kept_ids"]
        for name, part in (("scores", rows), ("weights", rows), ("kept_weights", kept)):
            for row, want in zip(part, expected[name], strict=True):
                assert row[name.removeprefix("kept_")] == pytest.approx(want, rel=1e-6, abs=1e-9), (name, case)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6, abs=1e-9), case
        for name in ("z_loss", "max_violation"):
            assert result[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9), case
    assert dropped > 10, "the cases must exercise the capacity"


def test_every_family_routes_as_its_preset(tool):
    assert len(routing_families()) >= 8
    for family, options in routing_families().items():
        tool.get_by_label("Router of").select_option(family)
        assert tool.get_by_label("Choices per token").input_value() == str(options["top_k"])
        assert tool.get_by_label("Scores").input_value() == options["score_fn"]
        assert tool.locator("td.tool-chosen").count() == 8 * options["top_k"]


def test_the_keyboard_changes_a_logit_and_the_address_holds_it(tool):
    tool.get_by_role("button", name="Start again").click()
    logit = tool.get_by_label("logit of token 2 for expert 5")
    logit.focus()
    before = float(logit.input_value())
    tool.keyboard.press("ArrowUp")
    assert float(logit.input_value()) == pytest.approx(before + 0.1)
    tool.get_by_label("token 7 is padding").check()
    tool.get_by_label("Capacity factor").fill("0.5")
    query = parse_qs(urlsplit(tool.evaluate("location.href")).query)
    assert float(query["logits"][0].split()[2 * 8 + 5]) == pytest.approx(before + 0.1)
    assert (query["padding"], query["capacity_factor"]) == (["7"], ["0.5"])
    facts, losses = tool.locator(".tool-facts").inner_text(), tool.locator(".tool-losses").inner_text()
    tool.reload()
    assert tool.locator(".tool-facts").inner_text() == facts and "% dropped" in facts
    assert tool.locator(".tool-losses").inner_text() == losses
    assert float(tool.get_by_label("logit of token 2 for expert 5").input_value()) == pytest.approx(before + 0.1)


@pytest.mark.parametrize(
    "query",
    [
        "family=none&top_k=99&num_groups=3&score_fn=tanh&capacity_factor=-1",
        "logits=1 2 3&bias=x&padding=9 a",
        "logits=" + " ".join(["NaN"] * 64),
        "top_k=&routed_scaling_factor=Infinity&family=DeepSeek-V3&top_k_groups=0",
    ],
)
def test_an_address_that_makes_no_sense_falls_back(tool, query):
    tool.goto(tool.url.split("?")[0] + "?" + query)
    text = tool.locator(".tool-losses").inner_text()
    assert "megatron" in text and "NaN" not in text and "Infinity" not in text


def test_the_python_it_offers_gives_the_loss_it_shows(tool):
    tool.goto(tool.url.split("?")[0] + "?family=DeepSeek-V3&capacity_factor=1&padding=3&bias=0.1 0 0 0 0 0 0.2 0")
    printed = []
    exec(tool.locator("details pre").text_content(), {"print": lambda value: printed.append(float(value))})
    shown = tool.locator(".tool-losses tr", has_text="Megatron-LM moe_utils").locator("td").nth(1).inner_text()
    assert printed == [pytest.approx(float(shown), abs=1e-4)]


def test_data_cannot_end_its_element():
    assert "</script>" not in inline("x", {"text": "</script>"})[:-9]
