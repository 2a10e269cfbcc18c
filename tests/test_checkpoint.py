import json

import pytest
import torch

from guide_code import checkpoint as checkpoint_module
from guide_code.build import build_model
from guide_code.checkpoint import (
    checkpoints,
    claim_run,
    cut_metrics,
    latest_checkpoint,
    load_checkpoint,
    load_config,
    save_checkpoint,
)
from guide_code.config import override
from guide_code.presets import tiny
from guide_code.training.config import TrainConfig
from guide_code.training.optimizer import make_optimizer

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


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "config.json", "step.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_names_the_one_before_and_changes_nothing(tmp_path, name, damage):
    model, optimizer = make()
    save_checkpoint(tmp_path, 1, model, CONFIG, optimizer)
    folder = save_checkpoint(tmp_path, 2, model, CONFIG, optimizer)
    if damage == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes((folder / name).read_bytes()[:9])
    other, other_optimizer = make(seed=1)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    words = f"{name} is missing or damaged .*; delete .*step-00000002 to go on from .*step-00000001"
    with pytest.raises(ValueError, match=words):
        load_checkpoint(folder, other, CONFIG, other_optimizer)
    assert all(torch.equal(before[key], value) for key, value in other.state_dict().items())


def test_the_same_step_again_replaces_it_and_leaves_nothing_behind(tmp_path):
    model, optimizer = make()
    save_checkpoint(tmp_path, 1, model, CONFIG, optimizer)
    with torch.no_grad():
        model.norm.weight.fill_(7.0)
    folder = save_checkpoint(tmp_path, 1, model, CONFIG, optimizer)
    other, _ = make(seed=1)
    load_checkpoint(folder, other, CONFIG)
    assert (other.norm.weight == 7).all() and list(tmp_path.iterdir()) == [folder]


def test_random_states_of_gpus_travel_too(tmp_path, monkeypatch):
    model, optimizer = make()
    states = [torch.tensor([i, 1, 2], dtype=torch.uint8) for i in range(2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    folder = save_checkpoint(tmp_path, 1, model, CONFIG, optimizer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    seen = {}
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: seen.update({index: state.tolist()}))
    load_checkpoint(folder, *make(seed=1)[:1], CONFIG, make_optimizer(model, TrainConfig()))
    assert seen == {0: [0, 1, 2]}, "the second GPU is not here"


def test_metrics_after_the_checkpoint_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "counts": [[1]]}\n{"step": 3}\n{"step": 4, "lo')
    cut_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2, "counts": [[1]]}\n'
    cut_metrics(tmp_path / "none.jsonl", 2)
    assert not (tmp_path / "none.jsonl").exists()


def test_a_run_is_claimed_once_and_resumed_with_the_same_data(tmp_path):
    run, facts = tmp_path / "runs/a", {"batch_size": 8, "seed": 0}
    claim_run(run, facts, resume=False)
    claim_run(run, facts, resume=True)
    with pytest.raises(ValueError, match=r"runs.a holds a run already: give --resume"):
        claim_run(run, facts, resume=False)
    with pytest.raises(ValueError, match=r"other data: batch_size is 8 in .*run.json and 16 here"):
        claim_run(run, facts | {"batch_size": 16}, resume=True)


def test_no_checkpoint_is_an_error(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="no checkpoint in"):
            latest_checkpoint(folder)


def test_a_checkpoint_is_plain_json_besides_tensors(tmp_path):
    model, optimizer = make()
    folder = save_checkpoint(tmp_path, 3, model, CONFIG, optimizer)
    assert json.loads((folder / "step.json").read_text()) == {"step": 3}
    assert json.loads((folder / "config.json").read_text())["moe"]["top_k"] == 2
