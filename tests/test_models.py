import csv
import io
import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from guide_code.build import build_model
from guide_code.config import ModelConfig, MoEConfig, override
from guide_code.models import DTYPES, app, cost, costs
from guide_code.presets import small, tiny

MOE = MoEConfig(hidden_size=24, moe_intermediate_size=20, num_experts=8, top_k=2, num_shared_experts=1, backend="loop")
SHAPE = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 28, "num_layers": 4, "num_heads": 6, "num_kv_heads": 2,
    "head_size": 8, "max_length": 64, "first_k_dense": 1, "moe": MOE,
}  # fmt: skip
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 5, "num_kv_heads": 6}


@pytest.mark.parametrize("fields", [{}, LATENT, {"tie_embeddings": True}], ids=["grouped", "latent", "tied"])
def test_flops_are_those_that_torch_counts(fields):
    """A whole sequence of S tokens, for which torch counts the full square of scores: S tokens with S - 1 before."""
    config = ModelConfig(**SHAPE | fields)
    # Torch knows no count for the fused kernel of the CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        build_model(config)(torch.zeros(1, 16, dtype=torch.int64))
    assert counter.get_total_flops() == 16 * cost("x", config, 16).flops_per_token


def test_a_window_bounds_work_and_cache():
    kinds = ("sliding_attention", "full_attention") * 2
    config = ModelConfig(**SHAPE, layer_types=kinds, sliding_window=4)
    full, windowed = cost("x", ModelConfig(**SHAPE), 32), cost("x", config, 32)
    assert full.flops_per_token - windowed.flops_per_token == 2 * 2 * (32 - 4) * 6 * 16
    assert full.cache_bytes_per_token == 2 * 4 * 2 * 2 * 8, "bfloat16, layers, keys and values, heads, size"
    assert windowed.cache_bytes_per_token == 2 * 2 * 2 * 8 * (2 * 32 + 2 * 5) / 32, "4 slots and one to waste"


def test_known_numbers():
    """Latents of 512 + 64 in 61 layers: DeepSeek-V3's cache. Mixtral's totals: Jiang et al. 2024, section 2."""
    deepseek, mixtral = costs(["deepseek-v3", "mixtral-8x7b"])
    assert deepseek.cache_bytes_per_token == 2 * 61 * (512 + 64)
    assert mixtral.total_parameters // 10**8 == 467 and mixtral.active_parameters // 10**8 == 128
    assert mixtral.bytes == {dtype: mixtral.total_parameters * size for dtype, size in DTYPES.items()}
    dense = 2 * (mixtral.active_parameters - 32000 * 4096 - 65 * 4096)
    assert mixtral.flops_per_token == dense + 2 * 2 * 32 * 4096 * 4096
    assert cost("x", override(tiny(), {"max_length": 8}), 4096).context == 8
    with pytest.raises(ValueError, match="context=0"):
        cost("x", small(), 0)


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_command_prints_the_same_numbers_in_every_format():
    wanted = costs(["tiny", "llama-4-scout"], 128)
    rows = json.loads(run("tiny", "llama-4-scout", "--context", "128", "--json").stdout)
    assert [row["flops_per_token"] for row in rows] == [row.flops_per_token for row in wanted]
    assert rows[1]["unverified"] == ["rope_scaling", "max_length"]
    text = run("tiny", "llama-4-scout", "--context", "128", "--format", "csv").stdout
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [int(line["bytes_bfloat16"]) for line in lines] == [row.bytes["bfloat16"] for row in wanted]
    shown = run("tiny", "llama-4-scout").output
    assert "llama-4-scout *" in shown and "not verified: rope_scaling, max_length" in shown
    wrong = run("mixtral")
    assert wrong.exit_code == 1 and "did you mean mixtral-8x7b" in wrong.output
