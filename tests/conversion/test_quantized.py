import pytest
import torch

from guide_code.conversion.quantized import FP4_VALUES, dequantize_fp8, dequantize_mxfp4, plain_source
from guide_code.conversion.reader import MemorySource

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def random_fp8(*shape):
    return (torch.randn(shape) * 50).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_equals_transformers(dtype):
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scale = random_fp8(256, 384), torch.rand(2, 3) + 0.01
    expected = module.Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)
    assert torch.equal(dequantize_fp8(weight, scale, (128, 128), dtype), expected)


def test_fp8_with_partial_blocks_at_the_end():
    """DeepSeek-V3's kv_a_proj_with_mqa has 576 rows: four blocks and a half."""
    weight, scale = random_fp8(3, 72, 40), torch.rand(3, 5, 3) + 0.01
    expected = torch.empty(3, 72, 40)
    for r in range(72):
        for c in range(40):
            expected[:, r, c] = weight[:, r, c].float() * scale[:, r // 16, c // 16]
    assert torch.equal(dequantize_fp8(weight, scale, (16, 16), torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_equals_transformers(dtype):
    module = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (3, 8, 5, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 8, 5), dtype=torch.uint8)
    expected = module.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    found = dequantize_mxfp4(blocks, scales, dtype).transpose(1, 2)
    assert found.shape == (3, 160, 8) and torch.equal(found, expected)


def test_mxfp4_by_hand():
    """Byte 0x72 holds 1.0 (2) and then 6.0 (7); exponent 128 doubles them."""
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, :2] = torch.tensor([0x72, 0x9F])
    found = dequantize_mxfp4(blocks, torch.tensor([[[128]]], dtype=torch.uint8), torch.float32)
    assert found.flatten().tolist() == [2.0, 12.0, -12.0, -1.0] + [0.0] * 28
    assert sorted(FP4_VALUES) == sorted([*FP4_VALUES[:8], *(-v for v in FP4_VALUES[:8])])


def test_fp8_tensors_look_plain():
    weight, scale, norm = random_fp8(200, 130), torch.rand(2, 2), torch.randn(4)
    state = {"w.weight": weight, "w.weight_scale_inv": scale, "norm.weight": norm, "lonely_scale_inv": norm}
    source = plain_source(MemorySource(state), FP8, torch.float32)
    assert source.tensors["w.weight"] == ((200, 130), torch.float32)
    assert source.tensors.keys() == {"w.weight", "norm.weight", "lonely_scale_inv"}, "a stray scale is not swallowed"
    assert torch.equal(source.read("w.weight"), dequantize_fp8(weight, scale, (128, 128), torch.float32))
    assert torch.equal(source.read("norm.weight"), norm)


def test_mxfp4_tensors_look_plain():
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 6, 3), dtype=torch.uint8)
    state = {"e.up_blocks": blocks, "e.up_scales": scales, "e.up_bias": torch.randn(2, 6)}
    source = plain_source(MemorySource(state), MXFP4, torch.bfloat16)
    assert source.tensors["e.up"] == ((2, 96, 6), torch.bfloat16) and source.tensors.keys() == {"e.up", "e.up_bias"}
    assert torch.equal(source.read("e.up"), dequantize_mxfp4(blocks, scales, torch.bfloat16).transpose(1, 2))
    assert torch.equal(source.read("e.up_bias"), state["e.up_bias"])


@pytest.mark.parametrize(
    ("quantization", "state", "words"),
    [
        ({"quant_method": "gptq"}, {}, "quant_method='gptq'; only block-scaled 'fp8' and 'mxfp4'"),
        ({"quant_method": "fp8"}, {}, "weight_block_size=None: only scales per block"),
        (FP8, {"w.weight": random_fp8(4, 4)}, "w.weight is torch.float8_e4m3fn and w.weight_scale_inv is missing"),
        (
            FP8,
            {"w.weight": torch.ones(4, 4), "w.weight_scale_inv": torch.ones(1, 1)},
            "w.weight is torch.float32 and w.weight_scale_inv is there",
        ),
        (
            FP8,
            {"w.weight": random_fp8(200, 4), "w.weight_scale_inv": torch.ones(1, 1)},
            r"w.weight_scale_inv has shape \(1, 1\); \(200, 4\) in \(128, 128\) needs \(2, 1\)",
        ),
        (MXFP4, {"e_blocks": torch.zeros(1, 1, 1, 16)}, "e_scales is missing"),
        (MXFP4, {"e_blocks": torch.zeros(1, 2, 1, 16), "e_scales": torch.zeros(1, 1, 1)}, "e_scales is of shape"),
        (None, {"w.weight": random_fp8(4, 4)}, r"\[w.weight\] are quantised or integers, but config.json has no"),
        (None, {"qweight": torch.zeros(2, dtype=torch.int32)}, r"\[qweight\] are quantised or integers"),
    ],
)
def test_what_is_not_documented_is_refused(quantization, state, words):
    with pytest.raises(ValueError, match=words):
        plain_source(MemorySource(state), quantization, torch.bfloat16)


def test_a_plain_checkpoint_is_passed_through():
    source = MemorySource({"a": torch.zeros(2)})
    assert plain_source(source, None, torch.bfloat16) is source
