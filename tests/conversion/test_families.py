"""Every family against transformers: the same logits and tokens, and the same files when saved back."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

import transformers
from small_models import MODELS, SHAPE, make

from guide_code.conversion.folders import prepare, run
from guide_code.conversion.loading import own_tensors
from guide_code.conversion.reader import INDEX, SINGLE, FolderSource
from guide_code.convert import load_hf, save_hf
from guide_code.testing.contract import relative_rms

TOKENS = torch.randint(0, SHAPE["vocab_size"], (2, 23), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(TOKENS)


@pytest.fixture(scope="module", params=list(MODELS))
def case(request, tmp_path_factory):
    """(model of transformers, its folder in one file, its logits)."""
    model = make(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "original"
    model.save_pretrained(folder)
    with torch.inference_mode():
        return model, folder, model(TOKENS).logits


def tensors_of(folder):
    source = FolderSource(folder)
    return {name: source.read(name) for name in source.tensors}


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@torch.inference_mode()
def assert_same_logits(model, expected):
    assert relative_rms(model(TOKENS).logits, expected) < 2e-5


def test_logits_and_greedy_tokens_are_equal(case):
    theirs, folder, logits = case
    ours = load_hf(folder)
    assert_same_logits(ours, logits)
    assert not [name for name, tensor in ours.state_dict().items() if tensor.is_meta]
    expected = theirs.generate(TOKENS, max_new_tokens=12, do_sample=False, attention_mask=MASK)
    assert torch.equal(ours.generate(TOKENS, 12), expected)


@pytest.mark.parametrize("shards", [1, 3])
def test_saved_back_the_files_are_equal(case, tmp_path, shards):
    theirs, folder, logits = case
    original = tensors_of(folder)
    size = sum(tensor.numel() * 4 for tensor in original.values())
    if shards > 1:
        theirs.save_pretrained(tmp_path / "sharded", max_shard_size=size // shards + 5000)
        folder = tmp_path / "sharded"
        assert len(FolderSource(folder).files) >= shards
    save_hf(load_hf(folder), tmp_path / "back", shard_bytes=size // shards + 5000)
    back = FolderSource(tmp_path / "back")
    assert (tmp_path / "back" / INDEX).exists() == (shards > 1) and len(back.files) >= shards
    assert_same_tensors(tensors_of(tmp_path / "back"), original)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    with torch.inference_mode():  # weights mapped from a file may be unaligned, and round otherwise in a matmul
        assert_same_logits(again, logits)


def test_the_stacked_layout_of_transformers_in_files_and_in_memory(case, tmp_path):
    theirs, _, logits = case
    assert_same_logits(load_hf(theirs), logits)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    assert_same_logits(load_hf(tmp_path), logits)


def test_every_element_is_used_exactly_once(case, tmp_path):
    """known_failures C-04. Each element of the checkpoint gets a number of its own; ours must hold exactly those."""
    _, folder, _ = case
    numbered, count = {}, 0
    for name, tensor in tensors_of(folder).items():
        numbered[name] = torch.arange(count, count + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        count += tensor.numel()
    assert count < 2**24, "float32 could not tell them apart"
    shutil.copy(folder / "config.json", tmp_path)
    save_file(numbered, tmp_path / SINGLE, metadata={"format": "pt"})
    ours = torch.cat([tensor.detach().flatten() for tensor in own_tensors(load_hf(tmp_path)).values()])
    assert torch.equal(ours.sort().values, torch.arange(count, dtype=torch.float32))


def test_through_our_own_format_and_back(case, tmp_path):
    _, folder, logits = case
    run(prepare(folder, "guide"), tmp_path / "run")
    run(prepare(tmp_path / "run", "hf"), tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(folder))
    assert_same_logits(load_hf(tmp_path / "back"), logits)


def test_its_configuration_comes_back_from_ours_alone(case, tmp_path):
    """config.json is lost: one written from our ModelConfig gives transformers the same model."""
    _, folder, logits = case
    ours = load_hf(folder)
    save_hf(ours, tmp_path / "back", config=ours.origin.config, family=json_of(folder)["model_type"])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    with torch.inference_mode():
        assert relative_rms(again(TOKENS).logits, logits) < 1e-6


def test_a_missing_and_an_extra_tensor_are_errors_that_name_them(case, tmp_path):
    """known_failures C-04."""
    _, folder, _ = case
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / SINGLE)
    for name in ("model.norm.weight", "model.layers.2.input_layernorm.weight"):
        save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / SINGLE)
        with pytest.raises(ValueError, match=rf"missing \[{name}\]"):
            load_hf(tmp_path)
    for name in ("model.layers.7.input_layernorm.weight", "model.layers.1.mlp.experts.9.extra.weight"):
        save_file({**tensors, name: torch.zeros(2)}, tmp_path / SINGLE)
        with pytest.raises(ValueError, match=rf"unexpected \[{name}\]"):
            load_hf(tmp_path)


def json_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens_are_left_out_by_name(name, tmp_path):
    model = make(name, num_nextn_predict_layers=2)
    model.save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / SINGLE)
    further = {f"model.layers.{layer}.eh_proj.weight": torch.randn(4, 4) for layer in (3, 4)}
    save_file(tensors | further, tmp_path / "hf" / SINGLE, metadata={"format": "pt"})
    ours = load_hf(tmp_path / "hf")
    assert ours.origin.ignored.keys() == further.keys()
    assert set(ours.origin.ignored.values()) == {"predicts further tokens in training (num_nextn_predict_layers)"}
    save_hf(ours, tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors)
    assert json_of(tmp_path / "back")["num_nextn_predict_layers"] == 0


def test_config_files_of_before_transformers_5_mean_the_same(tmp_path):
    """rope_theta and rope_scaling at the top, torch_dtype, and fields that only training used."""
    model = make("deepseek_v3")
    model.save_pretrained(tmp_path / "hf")
    values = json_of(tmp_path / "hf")
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": rope.pop("rope_type")}}
    values |= {"torch_dtype": values.pop("dtype"), "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    values |= {"moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "auto_map": {"a": "b"}}
    del values["rope_interleave"], values["head_dim"], values["qk_head_dim"]
    (tmp_path / "hf/config.json").write_text(json.dumps(values))
    with torch.inference_mode():
        assert_same_logits(load_hf(tmp_path / "hf"), model(TOKENS).logits)


def test_the_language_model_of_a_llama4_that_also_sees(tmp_path):
    model = make("llama4_text")
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vision |= {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    both = transformers.Llama4Config(text_config=model.config.to_dict(), vision_config=vision)
    seeing = transformers.Llama4ForConditionalGeneration(both)
    seeing.language_model.load_state_dict(model.state_dict())
    seeing.save_pretrained(tmp_path / "hf")
    names = FolderSource(tmp_path / "hf").tensors
    ours = load_hf(tmp_path / "hf")
    with torch.inference_mode():
        assert_same_logits(ours, model(TOKENS).logits)
    assert len(ours.origin.ignored) == sum("language_model" not in name for name in names) > 10
    save_hf(ours, tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "back"), model.state_dict())
    assert json_of(tmp_path / "back")["model_type"] == "llama4_text"


@pytest.mark.parametrize(
    ("original", "long_factor", "equal"),
    [
        (64, [1.0, 2.0, 3.0, 4.0, 5.0], True),
        (16, [1.0, 1.1, 1.2, 1.3, 1.4], True),
        (16, [1.0, 2.0, 3.0, 4.0, 5.0], False),
    ],
)
def test_phi_moe_with_its_long_context(original, long_factor, equal, tmp_path):
    """Beyond the original context transformers takes ``long_mscale`` but stays at ``short_factor``: pinned
    as its fault, since LongRoPE (arXiv:2402.13753) is about the factors, so that we notice a repair."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4], "long_factor": long_factor}
    model = make("phimoe", rope_parameters=rope | {"short_mscale": 1.1, "long_mscale": 1.3})
    model.save_pretrained(tmp_path / "hf")
    ours = load_hf(tmp_path / "hf")
    with torch.inference_mode():
        difference = relative_rms(ours(TOKENS).logits, model(TOKENS).logits)
    assert difference < 2e-5 if equal else difference > 0.01
    save_hf(ours, tmp_path / "back", family="phimoe")
    assert load_hf(tmp_path / "back").origin.config == ours.origin.config
