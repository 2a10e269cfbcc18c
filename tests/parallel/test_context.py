"""Training steps on two ranks that share each sequence against one process with whole sequences."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import relative_rms
from ranks import run_on_ranks
from test_tensor import DTYPES, RANKS, batch, build, train
from torch.distributed.device_mesh import init_device_mesh

from guide_code.parallel.context import context_parallel, mean_over_tokens, part_of
from guide_code.parallel.data import gradient_norm, mean_over, shard

LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
CASES = {"grouped queries": {"qk_norm": "full", "attention_sinks": True}, "latent": {"num_kv_heads": 4, **LATENT}}


def on_ranks(rank):
    group, found = dist.group.WORLD, {}
    with pytest.raises(ValueError, match="cp=2 must divide the sequence of 11 tokens: pad to 12"):
        part_of(torch.zeros(1, 11), group)
    for case, options in CASES.items():
        for dtype in DTYPES:
            model = context_parallel(build(dtype, **options), group)
            shard([*model.blocks, model], init_device_mesh("cpu", (RANKS,)))
            tokens, mask = batch(0)
            real = part_of(mask, group)
            logits = model(part_of(tokens[:, :-1], group), mask_BS=real).logits
            losses = F.cross_entropy(logits[real], part_of(tokens[:, 1:], group)[real], reduction="none")
            loss = mean_over_tokens(losses, group)
            loss.backward()
            norm = gradient_norm(model.parameters())
            grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            found[case, dtype] = grads | {"loss": mean_over(loss, group), "norm": norm}
    return found


@pytest.fixture(scope="module")
def results():
    return run_on_ranks(RANKS, on_ranks, time_limit=60)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equal_to_one_process(results, case, dtype):
    wanted = train(build(dtype, **CASES[case]), steps=1)
    for result in results:
        for name, value in result[case, dtype].items():
            assert wanted[name].any() and relative_rms(value, wanted[name].squeeze(0)) <= DTYPES[dtype], name


def test_a_window_is_refused():
    model = build(layer_types=("sliding_attention",) * 2, sliding_window=4)
    with pytest.raises(ValueError, match="give full_attention layers, not sliding or chunked"):
        context_parallel(model, None)
