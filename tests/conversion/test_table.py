import pytest
import torch

from guide_code.conversion.reader import Meta
from guide_code.conversion.table import PLAIN, TRANSPOSED, check_plan, gate_up, make_plan, part, rows

TABLE = {
    "norm.weight": "final.weight",
    "blocks.{l}.experts.gate_up_proj": [
        gate_up("layers.{l}.experts.{e}.gate", "layers.{l}.experts.{e}.up"),
        part("layers.{l}.experts.gate_up", TRANSPOSED),
    ],
    "blocks.{l}.bias": gate_up("layers.{l}.gate_bias", "layers.{l}.up_bias"),
}
OURS = {
    "norm.weight": torch.zeros(3),
    "blocks.1.experts.gate_up_proj": torch.zeros(2, 4, 3),
    "blocks.1.bias": torch.zeros(4),
}
PER_EXPERT = {f"layers.1.experts.{e}.{part}" for e in range(2) for part in ("gate", "up")}
FUSED = {"layers.1.experts.gate_up"}
REST = {"final.weight", "layers.1.gate_bias", "layers.1.up_bias"}


def metas(plan, ours):
    shapes = {n: p.form.to_theirs(p.region(ours[p.ours])).shape for n, p in plan.by_theirs.items()}
    return {name: Meta(tuple(shape), torch.float32) for name, shape in shapes.items()}


def test_two_experts_by_hand_from_single_matrices_to_a_stack_and_back():
    """known_failures C-03. 0..11 and 100..111: gate rows above up rows inside each expert."""
    per_expert = {}
    for e in range(2):
        per_expert[f"layers.1.experts.{e}.gate"] = torch.arange(6).view(2, 3) + 100 * e
        per_expert[f"layers.1.experts.{e}.up"] = torch.arange(6, 12).view(2, 3) + 100 * e
    ours = {"blocks.1.experts.gate_up_proj": torch.full((2, 4, 3), -1)}
    plan = make_plan(TABLE, ours, per_expert)
    stack = ours["blocks.1.experts.gate_up_proj"]
    for piece in plan.by_ours["blocks.1.experts.gate_up_proj"]:
        piece.region(stack).copy_(piece.form.to_ours(per_expert[piece.theirs]))
    assert stack[0].flatten().tolist() == list(range(12)) and stack[1].flatten().tolist() == list(range(100, 112))
    for name, piece in plan.by_theirs.items():
        assert torch.equal(piece.form.to_theirs(piece.region(stack)), per_expert[name])


@pytest.mark.parametrize("layout", [PER_EXPERT, FUSED])
def test_the_spelling_that_is_there_is_used(layout):
    plan = make_plan(TABLE, OURS, layout | REST)
    assert plan.by_theirs.keys() == layout | REST
    assert check_plan(plan, OURS, metas(plan, OURS), {}) == {}


def test_the_first_spelling_is_written():
    assert make_plan(TABLE, OURS).by_theirs.keys() == PER_EXPERT | REST


def test_a_mixture_of_spellings_is_missing_and_unexpected():
    present = make_plan(TABLE, OURS, PER_EXPERT | REST)
    theirs = metas(present, OURS)
    theirs["layers.1.experts.gate_up"] = theirs.pop("layers.1.experts.1.up")
    with pytest.raises(ValueError, match=r"missing \[layers.1.experts.1.up\]; unexpected \[layers.1.experts.gate_up\]"):
        check_plan(make_plan(TABLE, OURS, theirs), OURS, theirs, {})


def test_missing_unexpected_and_misshapen_tensors_are_named():
    plan = make_plan(TABLE, OURS)
    theirs = metas(plan, OURS)
    del theirs["final.weight"]
    theirs["stray"] = Meta((1,), torch.float32)
    theirs["layers.1.up_bias"] = Meta((5,), torch.float32)
    wanted = (
        r"missing \[final.weight\]; unexpected \[stray\]; layers.1.up_bias has shape \(5,\), but config.json asks "
        r"for \(2,\)"
    )
    with pytest.raises(ValueError, match=wanted):
        check_plan(plan, OURS, theirs, {})


def test_only_a_whole_name_is_ignored_and_the_reason_given():
    plan = make_plan(TABLE, OURS)
    theirs = metas(plan, OURS) | {"rotary.inv_freq": Meta((2,), torch.float32)}
    assert check_plan(plan, OURS, theirs, {r"rotary\..*": "computed"}) == {"rotary.inv_freq": "computed"}
    with pytest.raises(ValueError, match=r"unexpected \[rotary.inv_freq\]"):
        check_plan(plan, OURS, theirs, {r"rotary": "computed"})


def test_a_tensor_of_ours_without_a_place_is_named():
    with pytest.raises(ValueError, match=r"this family has no place for \[blocks.0.extra\]"):
        make_plan(TABLE, {"blocks.0.extra": torch.zeros(1)})


def test_a_table_that_leaves_or_reuses_elements_is_a_fault():
    with pytest.raises(AssertionError, match="norm"):
        make_plan({"norm": (rows("a", 0, 2),)}, {"norm": torch.zeros(4)})
    with pytest.raises(AssertionError, match="a is used twice"):
        make_plan({"x": "a", "y": "a"}, {"x": torch.zeros(1), "y": torch.zeros(1)})


def test_forms_are_inverses():
    t = torch.randn(4, 6)
    for form in (PLAIN, TRANSPOSED):
        assert torch.equal(form.to_ours(form.to_theirs(t)), t)
