import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from guide_code.rotary import NoRotation, RopeScaling, Rotary, RotaryEmbedding, apply_rotary, apply_rotary_interleaved

ORIGINAL = {"original_max_position_embeddings": 64}
SCALINGS = [
    {"type": "linear", "factor": 4.0},
    {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    {"type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, **ORIGINAL},
    {"type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, **ORIGINAL},
    {"type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False, **ORIGINAL},
    {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False, **ORIGINAL},
    {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, **ORIGINAL},
    {"type": "yarn", "factor": 4.0, "attention_factor": 1.5, **ORIGINAL},
    {"type": "longrope", "factor": 4.0, "short_factor": (1.0, 1.5, 2.0, 3.0, 3.5, 4.0),
     "long_factor": (2.0, 4.0, 6.0, 8.0, 9.0, 9.5), **ORIGINAL},
]  # fmt: skip


@pytest.mark.parametrize("fields", SCALINGS, ids=lambda f: f["type"])
@pytest.mark.parametrize("length", [60, 70])
def test_tables_are_those_of_transformers(fields, length):
    parameters = {"rope_theta": 300.0, "rope_type": fields["type"]}
    parameters |= {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items() if k != "type"}
    config = LlamaConfig(
        hidden_size=24, num_attention_heads=2, head_dim=12, max_position_embeddings=256, rope_parameters=parameters
    )
    speeds_F, factor = ROPE_INIT_FUNCTIONS[fields["type"]](config, "cpu", seq_len=length)
    positions_BS = torch.arange(length)[None]
    angles_BSF = positions_BS[..., None] * speeds_F
    tables = RotaryEmbedding(12, 300.0, RopeScaling(**fields))(positions_BS)
    torch.testing.assert_close(tables.cos, torch.cat([angles_BSF] * 2, dim=-1).cos() * factor, atol=2e-5, rtol=0)
    torch.testing.assert_close(tables.sin, torch.cat([angles_BSF] * 2, dim=-1).sin() * factor, atol=2e-5, rtol=0)


def test_only_the_first_channels_turn_and_interleaved_pairs_come_out_as_halves():
    x_BHSA, tables = torch.randn(2, 3, 5, 10), RotaryEmbedding(6)(torch.arange(5).expand(2, 5))
    out = apply_rotary(x_BHSA, *tables[:2])
    assert torch.equal(out[..., 6:], x_BHSA[..., 6:]) and not torch.equal(out[..., 1:, :6], x_BHSA[..., 1:, :6])
    paired = torch.view_as_complex(x_BHSA[..., :6].unflatten(-1, (3, 2)).contiguous())
    turned = paired * torch.complex(tables.cos, tables.sin)[:, None, ..., :3]
    out = apply_rotary_interleaved(x_BHSA, *tables[:2])
    torch.testing.assert_close(out, torch.cat([turned.real, turned.imag, x_BHSA[..., 6:]], dim=-1))


def test_layers_without_positions_sharpen_their_queries_in_steps():
    q, k, positions_BS = torch.ones(1, 2, 4, 6), torch.ones(1, 1, 4, 6), torch.tensor([[0, 2, 3, 15]])
    where = Rotary(q, q, positions_BS)
    assert NoRotation()(q, k, where)[0] is q
    sharper, same = NoRotation(0.1, floor_scale=4.0)(q, k, where)
    assert same is k
    wanted = [1.0, 1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(5)]
    torch.testing.assert_close(sharper[0, 1, :, 3], torch.tensor(wanted))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"type": "ntk"}, "rope_scaling.type='ntk' must be one of linear"),
        ({"type": "linear", "factor": 0.5}, "rope_scaling.factor=0.5 must be at least 1"),
        ({"type": "yarn", "factor": 2.0}, "original_max_position_embeddings=0 must be at least 1"),
        ({"type": "llama3", "low_freq_factor": 5.0, **ORIGINAL}, "low_freq_factor=5.0 must not exceed"),
        ({"type": "longrope", "short_factor": (1.0,), **ORIGINAL}, "short_factor has 1 values and long_factor 0"),
    ],
)
def test_bad_scalings_are_refused_by_name_and_value(fields, words):
    with pytest.raises(ValueError, match=words):
        RopeScaling(**fields)


def test_widths_that_cannot_turn_are_refused():
    with pytest.raises(ValueError, match="must be even"):
        RotaryEmbedding(5)
    with pytest.raises(ValueError, match="'longrope' needs 2 factors for 4 channels, got 6"):
        RotaryEmbedding(4, scaling=RopeScaling(**SCALINGS[-1]))
