import math

import pytest
import torch
from typer.testing import CliRunner

from guide_code import conventions
from guide_code.balance import CONVENTIONS
from guide_code.conventions import (
    Table,
    angles,
    app,
    balanced_logits,
    coefficients,
    collapsed_logits,
    definitions,
    gradient_angle,
    layer_values,
    model_values,
    padded_logits,
    sequence_logits,
    skewed_logits,
    z_values,
)

COLLAPSE_OF_FIRST = 8 * 0.6224593  # the first expert of the pair holds e^.5 / (1 + e^.5) of the score


def cells(table, row):
    return [float(cell) for cell in next(r for r in table.rows if r[0] == row)[1:]]


@pytest.fixture(scope="module")
def one_layer():
    return layer_values()


@pytest.fixture(scope="module")
def four_layers():
    return model_values()


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (("hf", "switch"), [2.000, 8.000, 2.000, 2.000, 2.375]),
        (("megatron", "megatron_global", "megablocks", "swiss_nanotron", "deepspeed_topk"), [1, 4, 1, 1, 2.375 / 2]),
        (("tutel", "gshard", "fastmoe", "deepspeed_top1", "deepspeed_top2"), [1, 4.980, 1.245, 1, 1.249]),
        (("st_moe", "hf_switch"), [1, 4.980, 4.980, 1, 1.249]),
        (("sequence",), [1, 4, 4, 1, 2.375 / 2]),
    ],
)
def test_one_layer_has_the_values_worked_out_by_hand(one_layer, names, values):
    """The numbers that the functions of transformers, Megatron-LM, nanotron and Tutel gave on the same routings."""
    assert one_layer.columns[1:] == (
        "balanced",
        "all tokens on one pair",
        "each sequence on its own pair",
        "random, skewed",
        "padding, masked",
        "padding, counted",
    )
    for name in names:
        found = cells(one_layer, name)
        assert 1 < found.pop(3) / values[0] < values[1] / values[0]  # random: between balanced and collapsed
        assert found == pytest.approx(values, abs=1.1e-3), name


def test_capacity_makes_the_loss_of_fastmoe_switch_explode(one_layer):
    """0.15 of the tokens survive a collapse: all scores are divided by them."""
    balanced, collapsed, *_ = cells(one_layer, "fastmoe_switch")
    assert balanced == 1
    assert collapsed == pytest.approx(COLLAPSE_OF_FIRST * 1024 / 154, abs=1e-3)


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (("hf",), [2.000, 8.000, 2.000]),
        (("switch",), [2, 8, 8]),
        (("hf_switch",), [1, 4.980, 1.245]),
        (("megatron", "megatron_global", "deepspeed_topk", "sequence"), [4, 16, 16]),
        (("megablocks", "swiss_nanotron"), [1, 4, 4]),
        (("tutel", "gshard", "fastmoe", "deepspeed_top1", "deepspeed_top2", "st_moe"), [4, 19.919, 19.919]),
    ],
)
def test_four_layers_have_the_values_worked_out_by_hand(four_layers, names, values):
    for name in names:
        assert cells(four_layers, name)[:3] == pytest.approx(values, abs=1.1e-3), name


def test_the_random_column_keeps_the_ratios(four_layers):
    """Whatever the numbers drawn: the sum of four layers, twice their mean, and their mean."""
    values = {name: cells(four_layers, name)[3] for name in ("megatron", "switch", "megablocks", "hf")}
    assert values["megatron"] == pytest.approx(2 * values["switch"], rel=1e-3)
    assert values["megatron"] == pytest.approx(4 * values["megablocks"], rel=1e-3)
    assert values["hf"] < values["switch"]  # pooling hides what differs between layers


def test_every_convention_is_in_every_table_where_it_makes_sense(one_layer, four_layers):
    names = list(CONVENTIONS)
    assert [row[0] for row in definitions().rows] == [row[0] for row in one_layer.rows] == names
    names.remove("fastmoe_switch")
    assert [row[0] for row in four_layers.rows] == [row[0] for row in angles().rows] == names


def test_angles_are_zero_where_a_coefficient_translates():
    table = angles()
    for name in conventions.ALL_CHOICES:
        alike, apart = cells(table, name)
        assert alike == 0 and (apart == 0) == (name != "hf"), name
    for name in ("tutel", "st_moe", "sequence", "hf_switch"):
        assert min(cells(table, name)) > 1, name


def test_gradient_angle_by_hand():
    """One token, probabilities p, f on expert 0 ("tutel") or on 0 and 1 ("megatron")."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    first = p * (torch.tensor([1.0, 0, 0]) - p[0])
    both = p * (torch.tensor([0.5, 0.5, 0]) - (p[0] + p[1]) / 2)
    cosine = first @ both / first.norm() / both.norm()
    angle = gradient_angle(p.log()[None, None], 2, source="megatron", target="tutel")
    assert angle == pytest.approx(torch.rad2deg(torch.acos(cosine)).item(), rel=1e-6)
    assert gradient_angle(p.log()[None, None], 2, source="hf", target="megatron") == 0
    assert math.isnan(gradient_angle(torch.zeros(1, 4, 3), 3, source="hf", target="megatron"))  # no gradient at all


def test_coefficients_of_the_guide_and_of_published_models():
    rows = {row[0]: [float(cell) for cell in row[1:]] for row in coefficients().rows}
    assert coefficients().columns == (
        "model", "K", "MoE layers", "switch, hf", "megatron, deepspeed_topk", "megablocks, swiss_nanotron",
    )  # fmt: skip
    assert rows["Qwen3-30B-A3B"] == [8, 48, 0.001, 0.000167, 0.008]
    assert rows["Mixtral-8x7B"] == [2, 32, 0.02, 0.00125, 0.04]
    assert rows["small"] == [4, 7, 0.0175, 0.01, 0.08]  # 7 of its 8 layers are sparse; a mean of all divides by 8
    assert [row[0] for row in coefficients(["tiny"]).rows] == ["tiny"]


def test_z_losses():
    rows = {row[0]: float(row[2]) for row in z_values().rows}
    assert rows == {"st_moe": 17.296, "megatron": 17.296, "megablocks": 17.296, "hf_switch": 4.324,
                    "swiss_nanotron": 0.541}  # fmt: skip


def test_scenarios_are_what_they_are_called():
    for logits_TE, distinct in ((balanced_logits(), 8), (collapsed_logits(1), 2), (sequence_logits(), 8)):
        counts = torch.bincount(logits_TE.topk(2).indices.flatten(), minlength=8)
        assert (counts > 0).sum() == distinct and counts[counts > 0].unique().numel() == 1
    logits_TE, mask_T = padded_logits()
    assert logits_TE.shape == (512, 8) and mask_T.sum() == 384
    assert torch.equal(skewed_logits(), skewed_logits()) and not torch.equal(skewed_logits(1), skewed_logits())


def test_markdown_groups_equal_rows_aligns_numbers_and_marks_names():
    rows = (("hf", "2.0", "sum"), ("tutel", "1.0", "mean of all"), ("fastmoe", "1.0", "mean of all"))
    code = '{ style="white-space: nowrap" }'
    assert Table("t", ("convention", "value", "layers"), rows).grouped().markdown().splitlines() == [
        "| convention | value | layers |",
        "| --- | --: | --- |",
        f"| `hf`{code} | 2.0 | sum |",
        f"| `tutel`{code}, `fastmoe`{code} | 1.0 | mean of all |",
    ]
    assert Table("t", ("model",), (("a",),)).markdown().splitlines()[-1] == "| a |"


def test_the_command_prints_every_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    everything = CliRunner().invoke(app, [])
    assert everything.exit_code == 0
    for words in ("One layer, E = 8, K = 2", "4 layers", "Degrees", "Qwen3-30B-A3B", "z-loss", "Flaxformer"):
        assert words in everything.output
    one = CliRunner().invoke(app, ["--preset", "small"])
    assert one.exit_code == 0 and "0.0175" in one.output and "Qwen3" not in one.output
    wrong = CliRunner().invoke(app, ["--preset", "smal"])
    assert wrong.exit_code == 1 and "did you mean small" in wrong.output
