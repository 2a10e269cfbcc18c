import pytest
import torch

from guide_code.experts.loop import loop_experts
from guide_code.experts.padded import PaddedExperts, padded_experts
from guide_code.testing.contract import relative_rms


def experts_and_inputs(capacity):
    torch.manual_seed(0)
    experts = PaddedExperts(3, 8, 4, bias=True, capacity=capacity)
    torch.nn.init.normal_(experts.down_proj_bias)
    ids_TK = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 0], [0, -1]])
    return experts, torch.randn(5, 8), ids_TK, torch.rand(5, 2)


@pytest.mark.parametrize("capacity", [0, 1, 3, 5, 9])
def test_a_full_box_drops_what_comes_later(capacity):
    experts, x_TD, ids_TK, weights_TK = experts_and_inputs(capacity)
    kept_TK, seen = ids_TK.clone(), [0, 0, 0]
    for token, ids in enumerate(ids_TK.tolist()):
        for slot, expert in enumerate(ids):
            if 0 <= expert < 3:
                kept_TK[token, slot] = expert if seen[expert] < capacity else 3
                seen[expert] += 1
    biases = {"gate_up_proj_bias": experts.gate_up_proj_bias, "down_proj_bias": experts.down_proj_bias}
    wanted_TD = loop_experts(x_TD, kept_TK, weights_TK, experts.gate_up_proj, experts.down_proj, **biases)
    assert relative_rms(experts(x_TD, ids_TK, weights_TK), wanted_TD) < 2e-6
    assert (kept_TK == 3).sum() == {0: 9, 1: 6, 3: 3, 5: 1, 9: 1}[capacity]


def test_no_limit_keeps_all_and_computes_the_fullest_box_for_every_expert(monkeypatch):
    experts, x_TD, ids_TK, weights_TK = experts_and_inputs(None)
    shapes, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: shapes.append(a.shape) or bmm(a, b))
    experts(x_TD, ids_TK, weights_TK)
    assert shapes == [(3, 5, 8), (3, 5, 4)], "expert 0 has five tokens, so all have five rows"


def test_a_negative_capacity_is_named():
    with pytest.raises(ValueError, match="capacity must be at least 0 or None, got -1"):
        padded_experts(*(torch.empty(0),) * 5, capacity=-1)
