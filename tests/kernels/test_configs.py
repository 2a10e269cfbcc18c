import pytest
import torch

from guide_code.kernels import configs
from guide_code.kernels.configs import CONFIGS, FEW, FEW_ROWS, FLOAT32, INTERPRETED, UNALIGNED, choose_config

SHAPE = (64, 2048, 1024)
ALL = {"few": FEW, "float32": FLOAT32, "interpreted": INTERPRETED, **CONFIGS}


@pytest.mark.parametrize("name", ALL)
def test_row_kernels_share_their_row_tiles(name):
    config = ALL[name]
    assert config.up.rows == config.down.rows == config.hidden_gradient.rows == config.rows
    for tile in config:
        assert all(value & (value - 1) == 0 for value in tile[:4]), "Triton takes powers of two"


def test_the_choice_depends_on_shapes_alone():
    many, few = 64 * FEW_ROWS + 1, 64 * FEW_ROWS
    assert choose_config(90, torch.bfloat16, many, SHAPE, "silu") == CONFIGS[90]
    assert choose_config(90, torch.bfloat16, many, SHAPE, "gelu").up.columns < CONFIGS[90].up.columns
    assert choose_config(90, torch.bfloat16, few, SHAPE, "silu") == FEW
    assert choose_config(90, torch.bfloat16, many, (64, 2056, 1024), "silu") == UNALIGNED
    assert choose_config(90, torch.bfloat16, many, (64, 2048, 1032), "silu") == UNALIGNED
    assert choose_config(90, torch.float32, many, SHAPE, "silu") == FLOAT32
    assert choose_config(0, torch.float32, many, SHAPE, "silu") == INTERPRETED


@pytest.mark.parametrize(
    ("capability", "entry"), [((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((10, 0), 100), ((10, 3), 100), ((12, 0), 80)]
)
def test_each_gpu_finds_its_entry(monkeypatch, capability, entry):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert configs.architecture_of.__wrapped__(torch.device("cuda:0")) == entry
    assert configs.architecture_of(torch.device("cpu")) == 0
