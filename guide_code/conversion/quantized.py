"""Quantised checkpoints read as plain ones: block-scaled FP8 (DeepSeek-V3) and MXFP4 (gpt-oss); others are refused.

FP8: DeepSeek-V3, 2024 (arXiv:2412.19437), section 3.3.2: one float32 scale per block of 128 x 128 weights, in
``weight_scale_inv``; the last block of a row or column may be partial. MXFP4: OCP Microscaling Formats v1.0, section
5.2: 32 values of 4 bits (E2M1) share an exponent; ``openai/gpt-oss``, ``gpt_oss/torch/weights.py`` has their order.

E experts, R rows, C columns, Y blocks of 32 columns.
"""

from typing import Any

import torch
from torch import Tensor

from guide_code.conversion.reader import Meta, Source, shorten

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SCALE = "_scale_inv"
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def plain_source(source: Source, quantization: dict[str, Any] | None, dtype: torch.dtype) -> Source:
    """A source of dequantised tensors; the source itself where nothing is quantised.

    Args:
        source: the checkpoint.
        quantization: ``quantization_config`` of its config.json.
        dtype: of the dequantised tensors.

    Raises:
        ValueError: the format is not one of the two, or tensors are not what it says.
    """
    method = None if quantization is None else quantization.get("quant_method")
    if quantization is None:
        _refuse_strays(source)
        return source
    if method == "fp8":
        block = quantization.get("weight_block_size")
        if not (isinstance(block, list) and len(block) == 2):
            raise ValueError(f"FP8 with weight_block_size={block!r}: only scales per block (two sizes) are supported")
        return Fp8Source(source, (block[0], block[1]), dtype)
    if method == "mxfp4":
        return Mxfp4Source(source, dtype)
    raise ValueError(
        f"quantization_config has quant_method={method!r}; only block-scaled 'fp8' and 'mxfp4' can be dequantised. "
        "Convert a checkpoint in bfloat16 instead"
    )


class Fp8Source:
    """FP8 matrices with scales per block, each read as ``weight x scale`` in ``dtype``."""

    def __init__(self, source: Source, block: tuple[int, int], dtype: torch.dtype):
        self._source, self._block, self._dtype = source, block, dtype
        self.tensors: dict[str, Meta] = {}
        for name, meta in source.tensors.items():
            if name.removesuffix(_SCALE) in source.tensors and name.endswith(_SCALE):
                continue
            scale = source.tensors.get(name + _SCALE)
            if (meta.dtype in _EIGHT_BITS) != (scale is not None):
                raise ValueError(f"{name} is {meta.dtype} and {name + _SCALE} is {'there' if scale else 'missing'}")
            if scale is not None:
                grid = tuple(-(-size // step) for size, step in zip(meta.shape[-2:], block, strict=True))
                if scale.shape != (*meta.shape[:-2], *grid):
                    raise ValueError(f"{name + _SCALE} has shape {scale.shape}; {meta.shape} in {block} needs {grid}")
                meta = Meta(meta.shape, dtype)
            self.tensors[name] = meta

    def read(self, name: str) -> Tensor:
        """The tensor, dequantised if it needs to be."""
        stored = self._source.read(name)
        if stored.dtype not in _EIGHT_BITS:
            return stored
        return dequantize_fp8(stored, self._source.read(name + _SCALE), self._block, self._dtype)


class Mxfp4Source:
    """Pairs ``X_blocks``, ``X_scales`` read as one tensor ``X`` of shape (E, C, R), as gpt-oss lays out its experts."""

    def __init__(self, source: Source, dtype: torch.dtype):
        self._source, self._dtype = source, dtype
        self.tensors: dict[str, Meta] = {}
        for name, meta in source.tensors.items():
            if name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in source.tensors:
                continue
            if name.endswith("_blocks"):
                name = name.removesuffix("_blocks")
                scales = source.tensors.get(name + "_scales")
                if scales is None or len(meta.shape) != 4 or meta.shape[-1] != 16 or scales.shape != meta.shape[:-1]:
                    found = "missing" if scales is None else f"of shape {scales.shape}"
                    raise ValueError(f"{name}_blocks has shape {meta.shape} but {name}_scales is {found}")
                num_experts, num_rows, num_blocks, _ = meta.shape
                meta = Meta((num_experts, num_blocks * 32, num_rows), dtype)
            self.tensors[name] = meta

    def read(self, name: str) -> Tensor:
        """The tensor, dequantised if it needs to be."""
        if name in self._source.tensors:
            return self._source.read(name)
        blocks, scales = self._source.read(name + "_blocks"), self._source.read(name + "_scales")
        return dequantize_mxfp4(blocks, scales, self._dtype).transpose(1, 2)


def dequantize_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Each weight times the scale of its block, multiplied in float32, (..., R, C) in ``dtype``."""
    out = torch.empty(weight.shape, dtype=dtype)
    wide = scale.to(torch.float32).repeat_interleave(block[1], dim=-1)[..., : weight.shape[-1]]
    for index in range(scale.shape[-2]):  # a band of blocks at a time: the float32 copy stays small
        band = slice(index * block[0], (index + 1) * block[0])
        out[..., band, :] = weight[..., band, :].to(torch.float32) * wide[..., index, None, :]
    return out


def dequantize_mxfp4(blocks_ERYB: Tensor, scales_ERY: Tensor, dtype: torch.dtype) -> Tensor:
    """(E, R, C) values from (E, R, Y, 16) bytes, the low half of a byte first, and exponents with a bias of 127."""
    values = torch.tensor(FP4_VALUES, dtype=torch.float32)
    num_experts, num_rows, num_blocks, _ = blocks_ERYB.shape
    out_ERC = torch.empty(num_experts, num_rows, num_blocks * 32, dtype=dtype)
    for out_RC, blocks_RYB, scales_RY in zip(out_ERC, blocks_ERYB, scales_ERY, strict=True):  # one expert at a time
        halves = torch.stack([blocks_RYB & 15, blocks_RYB >> 4], dim=-1).flatten(-2)
        exponents = scales_RY.to(torch.int32)[..., None] - 127
        out_RC.copy_(torch.ldexp(values[halves.to(torch.int32)], exponents).flatten(-2))
    return out_ERC


def _refuse_strays(source: Source) -> None:
    narrow = sorted(name for name, meta in source.tensors.items() if not meta.dtype.is_floating_point or
                    meta.dtype in (*_EIGHT_BITS, torch.float8_e8m0fnu))  # fmt: skip
    if narrow:
        raise ValueError(
            f"{shorten(narrow)} are quantised or integers, but config.json has no quantization_config that says how"
        )
