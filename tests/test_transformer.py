import dataclasses

import pytest
import torch
from torch import nn

from guide_code.attention import GroupedQueryAttention
from guide_code.build import build_model
from guide_code.config import override
from guide_code.layers import FeedForward, RMSNorm
from guide_code.presets import tiny
from guide_code.rotary import RotaryEmbedding, apply_rotary
from guide_code.testing.contract import relative_rms

CONFIG = override(
    dataclasses.replace(tiny(), first_k_dense=1),
    {"vocab_size": 50, "hidden_size": 32, "num_layers": 3, "max_length": 40, "num_shared_experts": 1},
)


def make_model():
    model = build_model(CONFIG).eval()
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            nn.init.normal_(parameter, std=0.3)
    return model


def naive_attention(attention, x_BSD, positions_BS):
    """One query at a time, in float64."""
    heads, groups, size = attention.num_heads, attention.num_kv_heads, attention.head_size
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = ((x_BSD.double() @ p.weight.double().T).unflatten(-1, (-1, size)) for p in projections)

    def turn(t):
        half = size // 2
        speeds = 10000.0 ** (-torch.arange(half, dtype=torch.float64) * 2 / size)
        angles = positions_BS[..., None, None] * speeds
        low, high = t[..., :half], t[..., half:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

    q, k = turn(q), turn(k)
    out = torch.zeros_like(q)
    for b, s, h in ((b, s, h) for b in range(len(x_BSD)) for s in range(x_BSD.shape[1]) for h in range(heads)):
        group = h // (heads // groups)
        shares = (k[b, : s + 1, group] @ q[b, s, h] / size**0.5).softmax(0)
        out[b, s, h] = shares @ v[b, : s + 1, group]
    return out.flatten(2) @ attention.o_proj.weight.double().T


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_equals_one_query_at_a_time(num_kv_heads):
    attention = GroupedQueryAttention(16, 4, num_kv_heads, 6)
    x_BSD, positions_BS = torch.randn(2, 5, 16), torch.tensor([[0, 1, 2, 3, 4], [7, 9, 11, 12, 20]])
    out = attention(x_BSD, RotaryEmbedding(6)(positions_BS))
    assert relative_rms(out, naive_attention(attention, x_BSD, positions_BS)) < 2e-6


def test_rotary_keeps_lengths_and_depends_on_distance_only():
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    rotary = RotaryEmbedding(8)

    def score(i, j):
        turned = [apply_rotary(t, *rotary(torch.tensor([[p]]))[:2]) for t, p in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum().item()

    assert score(3, 1) == pytest.approx(score(13, 11), rel=1e-4)
    assert apply_rotary(q, *rotary(torch.tensor([[5]]))[:2]).norm().item() == pytest.approx(q.norm().item(), rel=1e-6)


def test_rms_norm_and_feed_forward_by_hand():
    norm = RMSNorm(4, eps=0.0)
    nn.init.normal_(norm.weight)
    x = torch.tensor([[1.0, 2.0, 2.0, 4.0]])
    torch.testing.assert_close(norm(x), x / 2.5 * norm.weight)
    assert norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    ffn = FeedForward(4, 3)
    gate, up = ffn.gate_up_proj.weight[:3] @ x[0], ffn.gate_up_proj.weight[3:] @ x[0]
    torch.testing.assert_close(ffn(x)[0], ffn.down_proj.weight @ (gate * gate.sigmoid() * up))


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_decoding_with_a_cache_equals_one_forward(chunk):
    """known_failures G-03, dropless: token by token, in chunks, and at once."""
    model, tokens_BS = make_model(), torch.randint(0, 50, (2, 10))
    expected = model(tokens_BS).logits
    cache = model.make_cache(2, 10)
    parts = [model(part, cache=cache).logits for part in tokens_BS.split(chunk, dim=1)]
    assert relative_rms(torch.cat(parts, dim=1), expected) < 1e-5


def test_left_padding_changes_no_logit():
    model = make_model()
    short, long = torch.randint(0, 50, (4,)), torch.randint(0, 50, (7,))
    batch = torch.stack([torch.cat([torch.zeros(3, dtype=torch.int64), short]), long])
    mask_BS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
    out = model(batch, mask_BS=mask_BS)
    assert relative_rms(out.logits[0, 3:], model(short[None]).logits[0]) < 1e-5
    assert relative_rms(out.logits[1], model(long[None]).logits[0]) < 1e-5
    right = model(batch.flip(1)[:1], mask_BS=mask_BS.flip(1)[:1])
    assert relative_rms(right.logits[0, :4], model(short.flip(0)[None]).logits[0]) < 1e-5
    assert out.logits.isfinite().all()


def test_generate_is_greedy_and_a_batch_equals_each_prompt_alone():
    model = make_model().train()
    short, long = torch.randint(0, 50, (3,)), torch.randint(0, 50, (6,))
    batch = torch.stack([torch.cat([torch.zeros(3, dtype=torch.int64), short]), long])
    mask_BS = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    together = model.generate(batch, 8, mask_BS=mask_BS)
    assert model.training
    model.eval()
    for row, prompt in ((together[0, 3:], short), (together[1], long)):
        for _ in range(8):
            prompt = torch.cat([prompt, model(prompt[None]).logits[0, -1].argmax()[None]])
        assert row.tolist() == prompt.tolist()


def test_generation_counts_nothing_in_the_balancers():
    model = make_model().train()
    model.generate(torch.zeros(1, 2, dtype=torch.int64), 3)
    assert sum(block.ffn.balancer.counts.sum() for block in model.blocks if hasattr(block.ffn, "balancer")) == 0


def test_routings_are_one_per_layer_and_none_where_dense():
    out = make_model()(torch.randint(0, 50, (2, 5)))
    assert [routing is None for routing in out.routings] == [True, False, False]
    assert out.routings[1].ids.shape == (10, 2) and out.logits.shape == (2, 5, 50)


def test_too_long_is_refused_with_both_lengths():
    model = make_model()
    with pytest.raises(ValueError, match=r"sequence of 41 tokens .* exceeds the model's max_length of 40"):
        model(torch.zeros(1, 41, dtype=torch.int64))
    with pytest.raises(ValueError, match="max_length=41 exceeds the model's 40"):
        model.make_cache(1, 41)
    cache = model.make_cache(1, 3)
    model(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match=r"sequence of 4 tokens \(2 cached\) exceeds the cache's max_length of 3"):
        model(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="cache holds 1 sequences but tokens_BS has 2"):
        model(torch.zeros(2, 1, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="exceeds the model's 40"):
        model.generate(torch.zeros(1, 30, dtype=torch.int64), 11)
    with pytest.raises(ValueError, match="prompt is empty"):
        model.generate(torch.zeros(1, 0, dtype=torch.int64), 1)


@pytest.mark.parametrize("shape", [(1, 5), (1, 1, 1, 5)], ids=str)
def test_a_mask_over_past_and_new_tokens_is_refused(shape):
    """known_failures M-02: the cache knows the past; a mask covers the new tokens."""
    model = make_model()
    cache = model.make_cache(1, 8)
    model(torch.zeros(1, 4, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="the mask covers the new tokens only"):
        model(torch.zeros(1, 1, dtype=torch.int64), mask_BS=torch.ones(shape), cache=cache)
    assert model(torch.zeros(1, 1, dtype=torch.int64), mask_BS=torch.ones(1, 1), cache=cache).logits.isfinite().all()


def test_explicit_positions_are_used():
    model, tokens_BS = make_model(), torch.randint(0, 50, (1, 5))
    moved = model(tokens_BS, positions_BS=torch.arange(5)[None] + 9).logits
    assert relative_rms(moved, model(tokens_BS).logits) < 1e-4, "only distances matter"
    stretched = model(tokens_BS, positions_BS=torch.arange(5)[None] * 3).logits
    assert relative_rms(stretched, model(tokens_BS).logits) > 1e-2


def test_model_runs_and_trains_under_autocast():
    model, tokens_BS = make_model().train(), torch.randint(0, 50, (2, 6))
    expected = model(tokens_BS).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens_BS).logits
    logits.float().backward(torch.randn(2, 6, 50))
    assert relative_rms(logits, expected) < 0.1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    cached = torch.autocast("cpu", dtype=torch.bfloat16)
    with torch.no_grad(), cached:
        assert model.eval().generate(tokens_BS, 3).shape == (2, 9)
