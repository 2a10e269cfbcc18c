"""Whole models in the two quantised formats: the logits are those of transformers with the dequantised weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from small_models import SHAPE, make
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from guide_code.conversion.folders import prepare, run
from guide_code.conversion.reader import SINGLE, FolderSource
from guide_code.convert import load_hf, save_hf
from guide_code.testing.contract import relative_rms

TOKENS = torch.randint(0, SHAPE["vocab_size"], (2, 11), generator=torch.Generator().manual_seed(0))


def store(model, folder, stored, quantization):
    """Save a model with its own config.json, other tensors, and a quantization_config."""
    model.save_pretrained(folder)
    save_file(stored, folder / SINGLE, metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(values))


@torch.inference_mode()
def assert_same(theirs, folder):
    ours = load_hf(folder, dtype=torch.float32)
    assert relative_rms(ours(TOKENS).logits, theirs(TOKENS).logits) < 2e-5
    return ours


def test_gpt_oss_in_mxfp4(tmp_path):
    theirs = make("gpt_oss", hidden_size=64, intermediate_size=32)
    theirs.save_pretrained(tmp_path / "plain")
    stored = load_file(tmp_path / "plain" / SINGLE)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, num_rows = stored.pop(name).shape
        shape = (num_experts, num_rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(119, 125, shape, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        theirs.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    store(theirs, tmp_path / "hf", stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    ours = assert_same(theirs, tmp_path / "hf")
    assert load_hf(tmp_path / "hf").blocks[0].ffn.experts.down_proj.dtype == torch.bfloat16

    save_hf(ours, tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(FolderSource(tmp_path / "back").read(name), theirs.get_parameter(name))
    run(prepare(tmp_path / "hf", "guide"), tmp_path / "run")
    run(prepare(tmp_path / "run", "hf"), tmp_path / "again")
    assert_same(theirs, tmp_path / "again")


def test_deepseek_v3_in_fp8(tmp_path):
    theirs = make("deepseek_v3", hidden_size=48, moe_intermediate_size=32, intermediate_size=64)
    theirs.save_pretrained(tmp_path / "plain")
    stored, plain = {}, {}
    for name, tensor in load_file(tmp_path / "plain" / SINGLE).items():
        stored[name] = plain[name] = tensor
        if "proj" in name and not any(size % 16 for size in tensor.shape):
            scale = torch.rand(tensor.shape[0] // 16, tensor.shape[1] // 16) * 0.01 + 0.002
            stored[name] = (tensor / scale.repeat_interleave(16, 0).repeat_interleave(16, 1)).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            plain[name] = Fp8Dequantize(None)._dequantize_one(stored[name], scale, torch.float32)
    assert sum(name.endswith("_scale_inv") for name in stored) > 60
    save_file(plain, tmp_path / "plain" / SINGLE, metadata={"format": "pt"})
    dequantised = type(theirs).from_pretrained(tmp_path / "plain")
    store(theirs, tmp_path / "hf", stored, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    assert_same(dequantised, tmp_path / "hf")
    del stored["model.layers.1.mlp.experts.3.down_proj.weight_scale_inv"]
    store(theirs, tmp_path / "hf", stored, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    with pytest.raises(ValueError, match=r"experts.3.down_proj.weight_scale_inv is missing"):
        load_hf(tmp_path / "hf")
