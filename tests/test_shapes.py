import dataclasses

import pytest
import torch

from guide_code.build import build_model
from guide_code.config import override
from guide_code.experts.grouped import GroupedExperts
from guide_code.experts.loop import LoopExperts
from guide_code.presets import tiny
from guide_code.testing.contract import Case, check_experts
from tests.shapes import check_frame, watch_shapes


@pytest.mark.parametrize("backend", ["loop", "grouped"])
def test_suffixes_tell_the_truth(backend):
    """Every size differs from every other, so that no two letters can be mixed up unseen."""
    changes = {
        "backend": backend, "vocab_size": 50, "hidden_size": 24, "moe_intermediate_size": 20, "num_layers": 2,
        "num_heads": 6, "num_kv_heads": 3, "head_size": 8, "num_experts": 12, "top_k": 4, "num_groups": 6,
        "top_k_groups": 5, "router_bias": True, "use_expert_bias": True, "capacity_factor": 1.0,
        "num_shared_experts": 1, "expert_biases": True, "score_fn": "sigmoid",
    }  # fmt: skip
    model = build_model(dataclasses.replace(override(tiny(), changes), first_k_dense=1))
    tokens_BS, mask_BS = torch.randint(0, 50, (5, 7)), torch.ones(5, 7)
    mask_BS[0, :3] = 0
    with watch_shapes() as watch:
        logits = model(tokens_BS, mask_BS=mask_BS).logits
        logits.backward(torch.randn_like(logits))
        model.generate(tokens_BS, 2, mask_BS=mask_BS)
    assert not watch.complaints
    assert watch.looked_at > 300 and len(watch.functions) > 25


@pytest.mark.parametrize("backend", [LoopExperts, GroupedExperts], ids=lambda b: b.__name__)
def test_suffixes_tell_the_truth_in_the_oracle_and_the_contract(backend):
    with watch_shapes() as watch:
        check_experts(backend, Case("distinct sizes", 11, 12, 8, 5, 3, bias=True), torch.float32)
    assert not watch.complaints and watch.looked_at > 20


def test_the_check_sees_a_lie():
    x = torch.zeros(3, 4)
    assert check_frame("f", {"x_TD": x, "y_DT": x.T})[0] == []
    assert "f: x_T has shape (3, 4)" in check_frame("f", {"x_T": x})[0]
    assert "T = 3 in x_TD" in check_frame("f", {"x_TD": x, "y_TD": x.T})[0][0]
    assert "but 1" in check_frame("f", {"x_T1": x})[0][0]
