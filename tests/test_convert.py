import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from guide_code.build import build_model
from guide_code.checkpoint import latest_checkpoint, load_checkpoint, load_config
from guide_code.config import MoEConfig, dense_twin, override
from guide_code.conversion.reader import INDEX, SINGLE, FolderSource
from guide_code.convert import app, load_hf, save_hf, upcycle
from guide_code.presets import tiny

CONFIG = override(tiny(), {"vocab_size": 300, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_size": 12})


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = build_model(CONFIG).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def folder(model, tmp_path):
    """A checkpoint of Mixtral's family."""
    save_hf(model, tmp_path / "hf", config=CONFIG)
    return tmp_path / "hf"


def rewrite(folder, changes=None, **config):
    """The same checkpoint with some tensors and fields of config.json changed; None removes."""
    values = json.loads((folder / "config.json").read_text()) | config
    text = json.dumps({name: value for name, value in values.items() if value != "remove"})
    (folder / "config.json").write_text(text)
    tensors = load_file(folder / SINGLE) | (changes or {})
    save_file({n: t.clone() for n, t in tensors.items() if t is not None}, folder / SINGLE, metadata={"format": "pt"})


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def invoke(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_our_own_model_goes_out_and_comes_back(model, folder):
    values = json.loads((folder / "config.json").read_text())
    assert values["model_type"] == "mixtral" and values["dtype"] == "float32" and values["tie_word_embeddings"]
    again = load_hf(folder)
    assert same(model, again) and again.head.weight is again.embedding.weight and not again.training
    assert again.origin.config.moe.top_k == 2 and again.origin.ignored == {}


def test_transformers_loads_what_we_wrote(model, folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(0, 300, (2, 9))
    with torch.inference_mode():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_dtypes_are_kept_or_chosen(model, tmp_path):
    save_hf(model.to(torch.bfloat16), tmp_path / "hf", config=CONFIG)
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"
    assert {p.dtype for p in load_hf(tmp_path / "hf").parameters()} == {torch.bfloat16}
    wide = load_hf(tmp_path / "hf", dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert torch.equal(wide.embedding.weight, model.embedding.weight.float())


def test_a_configuration_that_no_family_computes_is_refused_and_says_why(model, tmp_path):
    odd = dataclasses.replace(CONFIG, moe=dataclasses.replace(CONFIG.moe, score_fn="sqrtsoftplus"))
    with pytest.raises(ValueError, match=r"no family of transformers computes .*mixtral loses moe.score_fn='sqrtsoft"):
        save_hf(model, tmp_path / "out", config=odd)
    with pytest.raises(ValueError, match=r"llama does not compute this configuration: llama loses moe \(the mix"):
        save_hf(model, tmp_path / "out", config=CONFIG, family="llama")
    with pytest.raises(ValueError, match="config=None: give the ModelConfig"):
        save_hf(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_matters_in_training_only_does_not_stand_in_the_way(model, tmp_path):
    moe = dataclasses.replace(CONFIG.moe, capacity_factor=1.5, z_loss_coef=0.1, load_balancing_coef=0.5)
    save_hf(model, tmp_path / "out", config=dataclasses.replace(CONFIG, moe=moe))
    assert same(load_hf(tmp_path / "out"), model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, "model_type='bert' is not a family that can be converted"),
        ({"model_type": "mixtrall"}, "did you mean mixtral"),
        ({"num_local_experts": "remove"}, "config.json lacks num_local_experts"),
        ({"hidden_act": "gelu"}, "config.json has hidden_act='gelu'; only 'silu' is supported"),
        ({"clip_everything": 8.0}, "fields whose effect is unknown here: clip_everything=8.0"),
        ({"num_local_experts": 15}, "config.json asks for|unexpected|shape"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
    ],
)
def test_a_config_that_we_do_not_compute_is_refused(folder, changes, words):
    rewrite(folder, **changes)
    with pytest.raises(ValueError, match=words):
        load_hf(folder)


def test_a_tied_head_that_is_stored_again_must_be_the_embedding(model, folder):
    embedding = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    rewrite(folder, {"lm_head.weight": embedding})
    again = load_hf(folder)
    assert same(again, model) and again.origin.ignored == {"lm_head.weight": "the embedding again: they are tied"}
    rewrite(folder, {"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_hf(folder)


def test_frequencies_that_are_computed_may_be_stored(model, folder):
    rewrite(folder, {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    again = load_hf(folder)
    assert same(again, model) and list(again.origin.ignored.values()) == ["computed from rope_theta"]


def test_pickles_and_strangers_are_refused(tmp_path, folder):
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds pickles only"):
        load_hf(folder)
    with pytest.raises(ValueError, match=r"has neither a config.json nor checkpoints"):
        load_hf(tmp_path)


def test_a_name_with_one_slash_is_fetched_without_pickles_or_code(monkeypatch, folder, model):
    import huggingface_hub

    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert same(load_hf("owner/model"), model)
    assert asked["name"] == "owner/model"
    assert not [p for p in asked["allow_patterns"] if p.endswith((".py", ".bin", ".pt", "*"))]


def test_the_tokenizer_comes_along_from_a_folder_that_still_has_it(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "vocab.json").write_text("{}")
    ours = load_hf(folder)
    (folder / "vocab.json").unlink()
    save_hf(ours, tmp_path / "back")
    assert {p.name for p in (tmp_path / "back").iterdir()} == {"config.json", SINGLE, "tokenizer.json"}


def test_a_dense_checkpoint_is_upcycled(tmp_path):
    dense = dense_twin(CONFIG)
    torch.manual_seed(0)
    save_hf(build_model(dense), tmp_path / "llama", config=dense)
    assert json.loads((tmp_path / "llama/config.json").read_text())["model_type"] == "llama"
    loaded = load_hf(tmp_path / "llama")
    sparse = upcycle(loaded, num_experts=4, top_k=2)
    tokens = torch.randint(0, 300, (2, 9))
    torch.testing.assert_close(sparse(tokens).logits, loaded(tokens).logits, rtol=1e-5, atol=1e-5)
    save_hf(sparse, tmp_path / "mixtral")
    assert isinstance(load_hf(tmp_path / "mixtral").origin.config.moe, MoEConfig)


def test_the_command_converts_both_ways_and_carries_the_tokenizer(model, folder, tmp_path):
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).write_text(f'{{"a": "{name}"}}')
    (folder / "secret.py").write_text("print()")
    result = invoke(folder, tmp_path / "run", "--to", "guide")
    assert result.exit_code == 0 and "0.000" in result.output and "run" in result.output, result.output
    run = tmp_path / "run"
    step = latest_checkpoint(run)
    assert {p.name for p in run.iterdir()} == {
        "tokenizer.json", "generation_config.json", "hf_config.json", "step-00000000"
    }  # fmt: skip
    ours = build_model(load_config(step)).eval()
    assert load_checkpoint(step, ours, load_config(step)) == 0 and same(ours, model)
    for source in (run, step):
        back = tmp_path / f"back-{source.name}"
        assert invoke(source, back, "--to", "hf").exit_code == 0
        assert {p.name for p in back.iterdir()} == {
            "tokenizer.json", "generation_config.json", "config.json", SINGLE
        }  # fmt: skip
        assert same(load_hf(back), model)
        assert json.loads((back / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


def test_large_checkpoints_of_ours_come_in_shards_that_a_run_reads(model, folder, tmp_path):
    assert invoke(folder, tmp_path / "run", "--to", "guide", "--shard-size", "0.0001").exit_code == 0
    step = latest_checkpoint(tmp_path / "run")
    assert len(FolderSource(step).files) > 3 and (step / INDEX).is_file()
    ours = build_model(load_config(step))
    load_checkpoint(step, ours, load_config(step))
    assert same(ours, model)
    FolderSource(step).files[1].unlink()
    with pytest.raises(ValueError, match="checkpoint lacks"):
        load_checkpoint(step, ours, load_config(step))


KILLED = """
import os, pathlib, signal, sys
from guide_code.conversion.folders import prepare, run
seen = []
def on_bytes(count):
    seen.append(count)
    if len(seen) == 12:
        os.kill(os.getpid(), signal.SIGKILL)
source, target = map(pathlib.Path, sys.argv[1:])
run(prepare(source, "guide", shard_bytes=50_000), target, shard_bytes=50_000, on_bytes=on_bytes)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_killed_run_continues_with_its_finished_files(model, folder, tmp_path):
    target = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", KILLED, folder, target], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL and not target.exists(), done.stderr
    work = tmp_path / ".writing-run/step-00000000"
    finished = {p.name: os.stat(p).st_mtime_ns for p in work.glob("*.safetensors")}
    assert len(finished) >= 2
    result = invoke(folder, target, "--to", "guide", "--shard-size", "0.00005")
    assert result.exit_code == 0 and "that an earlier run had finished" in result.output
    step = latest_checkpoint(target)
    assert {name: os.stat(step / name).st_mtime_ns for name in finished} == finished
    ours = build_model(load_config(step))
    load_checkpoint(step, ours, load_config(step))
    assert same(ours, model)
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "run"} and not list(step.glob("*.partial"))


def test_the_command_says_what_is_wrong(folder, tmp_path):
    for args, words in [
        ((folder, tmp_path / "x", "--to", "hf"), "is of the kind 'hf' already"),
        ((tmp_path / "nowhere", tmp_path / "x", "--to", "hf"), "has neither a config.json nor checkpoints"),
        ((folder, folder, "--to", "guide"), "exists already"),
    ]:
        result = invoke(*args)
        assert result.exit_code == 1 and words in result.output.replace("\n", ""), result.output
    rewrite(folder, {"model.norm.weight": None})
    result = invoke(folder, tmp_path / "x", "--to", "guide")
    assert result.exit_code == 1 and "missing [model.norm.weight]" in result.output
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".writing*"))
