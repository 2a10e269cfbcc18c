from math import prod

import pytest
import torch.distributed as dist
from ranks import run_on_ranks
from typer.testing import CliRunner

from guide_code.cli import app
from guide_code.parallel.mesh import (
    DENSE_AXES,
    EXPERT_AXES,
    ParallelSizes,
    build_meshes,
    check_experts,
    check_world_size,
    picture,
    rank_groups,
)

LAYOUTS = [dict(dp=2, tp=2, ep=4), dict(pp=2, cp=2, ep=2), dict(dp=4, ep=2, etp=2), dict(dp=2, cp=2, ep=2)]


def groups_of_meshes(rank, layouts):
    """For each layout and axis the ranks in this rank's group, as torch made them."""
    found = []
    for layout in layouts:
        dense, expert = build_meshes(ParallelSizes(**layout), "cpu")
        axes = {axis: mesh for mesh in (dense, expert) for axis in mesh.mesh_dim_names}
        found.append({axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis, mesh in axes.items()})
    return found


def test_the_groups_that_torch_makes_are_the_ones_in_the_picture():
    for rank, found in enumerate(run_on_ranks(4, groups_of_meshes, LAYOUTS)):
        for layout, groups in zip(LAYOUTS, found, strict=True):
            assert set(groups) == {*DENSE_AXES, *EXPERT_AXES}
            for axis, ranks in groups.items():
                assert ranks in rank_groups(ParallelSizes(**layout), axis) and rank in ranks, (layout, axis)


def test_folding_by_hand():
    """Eight ranks, tensor parallel pairs; experts over four consecutive ranks span both dp and tp."""
    sizes = ParallelSizes(dp=4, tp=2, ep=4)
    assert rank_groups(sizes, "tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rank_groups(sizes, "dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert rank_groups(sizes, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rank_groups(sizes, "edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sizes.edp == 2 and sizes.world_size == 8


def test_experts_stay_in_their_pipeline_stage():
    sizes = ParallelSizes(pp=2, dp=2, cp=2, ep=4)
    assert rank_groups(sizes, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rank_groups(sizes, "pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("axis", [*DENSE_AXES, *EXPERT_AXES])
def test_the_groups_of_an_axis_part_the_ranks(axis):
    sizes = ParallelSizes(pp=2, dp=2, cp=3, tp=2, ep=3, etp=2)
    groups = rank_groups(sizes, axis)
    assert sorted(rank for group in groups for rank in group) == list(range(prod((2, 2, 3, 2))))
    assert {len(group) for group in groups} == {getattr(sizes, axis)}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(dp=4, ep=3), "ep=3 x etp=1 = 3 does not divide .* = 4. Nearest possible: ep=2, ep=4, dp=3, dp=6$"),
        (dict(dp=2, ep=4, etp=3), "Nearest possible: dp=12$"),
        (dict(tp=2, ep=4), "ep=2, dp=2$"),
        (dict(dp=0), "dp counts ranks: it must be a positive integer, got 0"),
        (dict(tp=True), "tp counts ranks"),
    ],
)
def test_impossible_sizes_name_the_rule_and_what_is_possible(sizes, words):
    with pytest.raises(ValueError, match=words):
        ParallelSizes(**sizes)


@pytest.mark.parametrize(
    ("world", "fix"), [(12, "dp=3$"), (7, "dp=1 on 4 ranks or dp=2 on 8 ranks$"), (3, "dp=1 on 4")]
)
def test_another_number_of_ranks_is_refused_with_a_fix(world, fix):
    with pytest.raises(ValueError, match=f"but {world} were started. Nearest possible: {fix}"):
        check_world_size(ParallelSizes(pp=2, dp=2, tp=2), world)


def test_experts_that_cannot_be_split_are_refused():
    assert check_experts(ParallelSizes(dp=4, ep=4), 20) == 5
    with pytest.raises(ValueError, match=r"ep=8 does not divide num_experts=20. Nearest possible: ep=5, ep=10"):
        check_experts(ParallelSizes(dp=8, ep=8), 20)


def test_unknown_axis():
    with pytest.raises(ValueError, match=r"axis must be one of .* got 'sp'"):
        rank_groups(ParallelSizes(), "sp")


def test_the_picture():
    text = picture(ParallelSizes(dp=2, tp=2, ep=2), 8)
    assert "dense layers: pp 1 x dp 2 x cp 1 x tp 2" in text and "experts: pp 1 x edp 2 x ep 2 x etp 1" in text
    assert "   tp  |0 1|2 3|" in text and "   ep  |0 1|2 3|" in text and "  edp  |0 2|1 3|" in text
    assert "experts by place along ep: 0: 0-3, 1: 4-7" in text
    assert "cp  |" not in text and "|...|" in picture(ParallelSizes(dp=64, tp=2))


def test_the_command_prints_the_picture_or_the_rule():
    runner = CliRunner()
    done = runner.invoke(app, ["mesh", "--dp", "4", "--ep", "2", "--experts", "4", "--ranks", "4"])
    assert done.exit_code == 0 and "ep  |0 1|2 3|" in done.output and "1: 2-3" in done.output
    refused = runner.invoke(app, ["mesh", "--dp", "2", "--ep", "4"])
    assert refused.exit_code == 1 and "Nearest possible: ep=2, dp=4" in refused.output
    assert runner.invoke(app, ["mesh", "--dp", "2", "--ranks", "3"]).exit_code == 1
