import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from guide_code.build import build_model
from guide_code.config import override
from guide_code.conversion.reader import SINGLE
from guide_code.convert import save_hf
from guide_code.presets import tiny
from guide_code.verify import app, verify

transformers = pytest.importorskip("transformers")

CONFIG = override(tiny(), {"vocab_size": 300, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_size": 12})


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    save_hf(build_model(CONFIG), tmp_path / "hf", config=CONFIG)
    return tmp_path / "hf"


def test_the_same_model_is_the_same_after_every_layer(folder):
    found = verify(folder)
    assert [row.name for row in found] == ["layer 0", "layer 1", "logits"]
    assert all(0 < row.relative_rms < 2e-6 and row.relative_rms <= row.largest < 2e-5 for row in found)


def test_it_shows_where_models_part(folder, monkeypatch):
    """A fault in the second layer of ours alone: the first layer agrees, what comes after does not."""
    import guide_code.verify as module

    real = module.load_hf

    def faulty(*args, **options):
        model = real(*args, **options)
        with torch.no_grad():
            model.blocks[1].ffn.experts.down_proj.mul_(1.01)
        return model

    monkeypatch.setattr(module, "load_hf", faulty)
    found = verify(folder)
    assert found[0].relative_rms < 2e-6 < 1e-4 < found[1].relative_rms
    result = CliRunner().invoke(app, [str(folder)])
    assert result.exit_code == 1 and "beyond 0.0001 from layer 1 on" in result.output
    assert CliRunner().invoke(app, [str(folder), "--tolerance", "0.5"]).exit_code == 0


def test_the_command_prints_a_table(folder):
    result = CliRunner().invoke(app, [str(folder), "--length", "5", "--sequences", "1"])
    assert result.exit_code == 0 and "layer 1" in result.output and "same within 0.0001" in result.output


def test_nan_is_not_the_same(folder):
    tensors = load_file(folder / SINGLE)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    assert CliRunner().invoke(app, [str(folder)]).exit_code == 1


def test_a_truncated_file_is_named_before_transformers_opens_it(folder):
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:-8])
    result = CliRunner().invoke(app, [str(folder)])
    assert result.exit_code == 1 and "error:" in result.output
    assert f"{SINGLE} is truncated or damaged" in result.output.replace("\n", "")


def test_errors_are_one_line(tmp_path):
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 1 and "config.json is missing or damaged" in result.output
    for config in ({"vocab_size": 3}, {}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        result = CliRunner().invoke(app, [str(tmp_path)])
        assert result.exit_code == 1 and "error:" in result.output
