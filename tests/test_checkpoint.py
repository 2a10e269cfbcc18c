import json

import pytest
import torch

from guide_code import checkpoint as checkpoint_module
from guide_code.build import build_model
from guide_code.checkpoint import checkpoints, latest_checkpoint, load_checkpoint, load_config, save_checkpoint
from guide_code.config import override
from guide_code.presets import tiny
from guide_code.train import TrainConfig, make_optimizer

CONFIG = override(
    tiny(),
    {
        "vocab_size": 300,
        "hidden_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_size": 16,
        "expert_bias_rate": 0.001,
    },
)


def make(seed=0):
    torch.manual_seed(seed)
    model = build_model(CONFIG)
    optimizer = make_optimizer(model, TrainConfig())
    model(torch.randint(0, 300, (2, 8))).logits.square().mean().backward()
    optimizer.step()
    model.blocks[0].ffn.router.expert_bias.uniform_()
    return model, optimizer


def test_everything_comes_back(tmp_path):
    model, optimizer = make()
    folder = save_checkpoint(tmp_path, 7, model, CONFIG, optimizer)
    expected = torch.rand(3)
    other, other_optimizer = make(seed=1)
    assert load_checkpoint(folder, other, load_config(folder), other_optimizer) == 7
    assert torch.equal(torch.rand(3), expected), "the random state"
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[a][key], other_optimizer.state[b][key])
    assert other.head.weight is other.embedding.weight
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


def test_old_checkpoints_go_and_the_newest_is_found(tmp_path):
    model, optimizer = make()
    for step in (10, 200, 30):
        save_checkpoint(tmp_path, step, model, CONFIG, optimizer, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000030", "step-00000200"]
    assert latest_checkpoint(tmp_path).name == "step-00000200"
    assert latest_checkpoint(tmp_path / "step-00000030").name == "step-00000030"


@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupted_write_leaves_the_previous_one(tmp_path, monkeypatch, call):
    model, optimizer = make()
    first = save_checkpoint(tmp_path, 1, model, CONFIG, optimizer)
    real, calls = checkpoint_module.save_file, []

    def crash(tensors, path):
        calls.append(path)
        if len(calls) == call:
            path.write_bytes(b"half")
            raise OSError("No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint_module, "save_file", crash)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, model, CONFIG, optimizer)
    assert latest_checkpoint(tmp_path) == first
    monkeypatch.undo()
    assert load_checkpoint(first, *make(seed=1)[:1], CONFIG) == 1
    assert load_checkpoint(save_checkpoint(tmp_path, 2, model, CONFIG, optimizer), model, CONFIG) == 2
    assert not list(tmp_path.glob(".writing*"))


def test_another_config_is_refused_with_every_difference(tmp_path):
    model, optimizer = make()
    folder = save_checkpoint(tmp_path, 1, model, CONFIG, optimizer)
    other = override(CONFIG, {"top_k": 1, "rope_theta": 5000.0})
    words = "moe.top_k is 2 in the checkpoint and 1 here; rope_theta is 10000.0 in the checkpoint and 5000.0 here"
    with pytest.raises(ValueError, match=words):
        load_checkpoint(folder, build_model(other), other)


def test_missing_and_unknown_weights_are_errors(tmp_path):
    model, optimizer = make()
    folder = save_checkpoint(tmp_path, 1, model, CONFIG, optimizer)
    weights = checkpoint_module.load_file(folder / "model.safetensors")
    weights["stray"] = weights.pop("norm.weight").clone()
    checkpoint_module.save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks \['norm.weight'\] and has unknown \['stray'\]"):
        load_checkpoint(folder, model, CONFIG)


def test_no_checkpoint_is_an_error(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="no checkpoint in"):
            latest_checkpoint(folder)


def test_a_checkpoint_is_plain_json_besides_tensors(tmp_path):
    model, optimizer = make()
    folder = save_checkpoint(tmp_path, 3, model, CONFIG, optimizer)
    assert json.loads((folder / "step.json").read_text()) == {"step": 3}
    assert json.loads((folder / "config.json").read_text())["moe"]["top_k"] == 2
