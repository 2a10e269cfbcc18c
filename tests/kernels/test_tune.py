import ast
from pathlib import Path

import pytest
import torch

from guide_code.kernels import configs, tune
from guide_code.kernels.configs import CONFIGS, Config, Tile
from guide_code.kernels.record import Problem

SMALL = Problem(num_tokens=32, num_experts=2, top_k=1, hidden_size=64, intermediate_size=64)
BEST = {
    "up_kernel": Tile(128, 64, 64, 4, 3),
    "down_kernel": Tile(128, 128, 32, 8, 4),
    "hidden_gradient_kernel": Tile(128, 64, 32, 8, 2),
    "weight_gradient_kernel": Tile(64, 256, 64, 8, 4),
}


def distance(launch):
    """Milliseconds of an imagined GPU: least for the tiles above."""
    return 1.0 + sum(abs(a - b) for a, b in zip(launch.tile, BEST[launch.kernel.__name__], strict=True))


def test_the_fastest_tile_of_each_kernel_is_found():
    config, total = tune.tune(SMALL, torch.device("meta"), distance, start=lambda launch: None)
    assert dict(zip(BEST, config, strict=True)) == BEST
    assert total == 6.0, "down and weight_gradient are started twice, the others once"


def test_the_row_kernels_share_their_rows_even_against_the_best_of_one():
    def measure(launch):
        return 1.0 if launch.tile.rows == (64 if launch.kernel.__name__ == "up_kernel" else 128) else 1.5

    config, _ = tune.tune(SMALL, torch.device("meta"), measure, start=lambda launch: None)
    assert config.up.rows == config.down.rows == config.hidden_gradient.rows == 128


def test_no_tile_that_fits_is_an_error():
    with pytest.raises(ValueError, match="no tile fits"):
        tune.tune(SMALL, torch.device("meta"), lambda launch: float("inf"), start=lambda launch: None)


def test_without_a_gpu_nothing_is_written(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        tune.main(["--write"])
    assert stop.value.code == 2 and "the table stays as it is" in capsys.readouterr().err


def test_an_entry_is_replaced_and_every_other_byte_kept(tmp_path):
    path = tmp_path / "configs.py"
    source = Path(configs.__file__).read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")
    new = Config(*(Tile(64, 64, 32, 4, 2),) * 4)
    tune.write_entry(path, 90, tune.entry(new, "Tuned on a test"))
    written = path.read_text(encoding="utf-8")
    ast.parse(written)
    names: dict = {"__name__": "guide_code.kernels.rewritten", "__package__": "guide_code.kernels"}
    exec(compile(written, "configs.py", "exec"), names)
    tables = {key: [tuple(tile) for tile in config] for key, config in names["CONFIGS"].items()}
    expected = {key: [tuple(tile) for tile in config] for key, config in CONFIGS.items()}
    assert tables == expected | {90: [tuple(tile) for tile in new]}
    start, end = source.index("    90: Config("), source.index("    # Blackwell")
    assert written.startswith(source[:start]) and written.endswith(source[end:])
    assert [p.name for p in tmp_path.iterdir()] == ["configs.py"]


def test_candidates_hold_a_bearable_accumulator():
    for rows in tune.ROWS:
        tiles = list(tune.candidates(rows))
        assert len(tiles) == len(set(tiles)) >= 12
        assert all(32 <= t.rows * t.columns / (32 * t.warps) <= 128 for t in tiles)
