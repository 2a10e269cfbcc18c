import pytest
import torch

from guide_code.latent_attention import LatentAttention
from guide_code.layers import RMSNorm
from guide_code.rotary import RotaryEmbedding, apply_rotary_interleaved, rotate_interleaved
from guide_code.testing.contract import relative_rms

D, H, L, N, W, A = 20, 3, 7, 6, 4, 5


def make(q_lora_rank):
    attention = LatentAttention(
        D, H, kv_lora_rank=L, nope_size=N, rope_size=W, value_size=A, q_lora_rank=q_lora_rank, temperature=1.3,
        kv_norm=RMSNorm(L), q_norm=None if q_lora_rank is None else RMSNorm(q_lora_rank), position=rotate_interleaved,
    ).double()  # fmt: skip
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention


def naive(attention, x_BSD, cos_BSW, sin_BSW):
    """One head and one query at a time."""
    q = (
        attention.q_proj(x_BSD)
        if attention.q_lora_rank is None
        else attention.q_b_proj(attention.q_a_norm(attention.q_a_proj(x_BSD)))
    )
    latent, k_rope = attention.kv_a_proj(x_BSD).split([L, W], dim=-1)
    kv = attention.kv_b_proj(attention.kv_a_norm(latent))
    k_rope = apply_rotary_interleaved(k_rope[:, None], cos_BSW, sin_BSW)[:, 0]
    out = []
    for h in range(H):
        q_nope, q_rope = q[..., h * (N + W) : (h + 1) * (N + W)].split([N, W], dim=-1)
        q_rope = apply_rotary_interleaved(q_rope[:, None], cos_BSW, sin_BSW)[:, 0]
        k_nope, v = kv[..., h * (N + A) : (h + 1) * (N + A)].split([N, A], dim=-1)
        scores = (q_nope @ k_nope.mT + q_rope @ k_rope.mT) * 1.3**2 / (N + W) ** 0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        out.append(scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v)
    return attention.o_proj(torch.cat(out, dim=-1))


@pytest.mark.parametrize("q_lora_rank", [None, 9])
def test_output_and_every_gradient_equal_one_head_at_a_time(q_lora_rank):
    attention, x_BSD = make(q_lora_rank), torch.randn(2, 6, D, dtype=torch.float64, requires_grad=True)
    rotary = RotaryEmbedding(W)(torch.arange(6).expand(2, 6))
    cotangent = torch.randn(2, 6, D, dtype=torch.float64)
    leaves = [x_BSD, *attention.parameters()]
    results = []
    for out in (attention(x_BSD, rotary), naive(attention, x_BSD, rotary.cos, rotary.sin)):
        results.append([out, *torch.autograd.grad(out, leaves, cotangent)])
    for ours, wanted in zip(*results, strict=True):
        assert relative_rms(ours, wanted) < 1e-10


@torch.no_grad()
def test_attending_to_latents_equals_attending_to_what_they_expand_to():
    attention, x_BSD = make(9), torch.randn(2, 6, D, dtype=torch.float64)
    rotary = RotaryEmbedding(W)(torch.arange(6).expand(2, 6))
    called = []
    for name in ("_attend_to_latents", "_attend_to_expanded"):
        original = getattr(attention, name)
        setattr(attention, name, lambda *a, original=original, name=name: called.append(name) or original(*a))
    cache = attention.make_cache(2, 6)
    assert relative_rms(attention(x_BSD, rotary, None, cache), attention(x_BSD, rotary)) < 1e-10
    assert called == ["_attend_to_latents", "_attend_to_expanded"]
    assert cache.keys.shape == (2, 1, 6, L) and cache.values.shape == (2, 1, 6, W)


@torch.no_grad()
def test_long_chunks_are_expanded_even_with_a_cache():
    """2 x 7 - 6 - 5 = 3 more channels per query and key, against 7 x 11 to expand a token: expand from 26 on."""
    attention = make(9)
    for new, name in ((25, "_attend_to_latents"), (26, "_attend_to_expanded")):
        called = []
        setattr(
            attention, name, lambda *a, called=called: called.append(1) or torch.zeros(1, H, a[0].shape[2], A).double()
        )
        x_BSD = torch.zeros(1, new, D, dtype=torch.float64)
        attention(x_BSD, RotaryEmbedding(W)(torch.zeros(1, new)), None, attention.make_cache(1, new))
        assert called == [1]
