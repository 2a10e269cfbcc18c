import pytest
import torch
import torch.nn.functional as F

from guide_code.attention import WindowCache, attend
from guide_code.testing.contract import relative_rms


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_sinks_take_their_share_of_every_softmax(masked, num_kv_heads):
    """Output and every gradient, against a softmax over scores and sink in float64."""
    q, k, v = (torch.randn(2, h, 5, 6).double().requires_grad_() for h in (4, num_kv_heads, num_kv_heads))
    sinks_H = torch.randn(4).double().requires_grad_()
    visible_BSM = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 5, 5)
    if masked:
        visible_BSM = visible_BSM & (torch.rand(2, 1, 5) > 0.4) | torch.eye(5, dtype=torch.bool)
    wide_k, wide_v = (t.repeat_interleave(4 // num_kv_heads, dim=1) for t in (k, v))
    scores = (q @ wide_k.mT * 0.3).masked_fill(~visible_BSM[:, None], -torch.inf)
    shares = torch.cat([scores, sinks_H[:, None, None].expand(2, 4, 5, 1)], dim=-1).softmax(dim=-1)[..., :-1]
    wanted, cotangent = shares @ wide_v, torch.randn(2, 4, 5, 6).double()
    ours = attend(q, k, v, visible_BSM if masked else None, sinks_H=sinks_H, scale=0.3)
    assert relative_rms(ours, wanted) < 1e-12
    leaves = (q, k, v, sinks_H)
    for mine, theirs in zip(*(torch.autograd.grad(o, leaves, cotangent) for o in (ours, wanted)), strict=True):
        assert relative_rms(mine, theirs) < 1e-12


def test_without_sinks_it_is_plain_attention():
    q, k, v = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 5, 6), torch.randn(2, 2, 5, 3)
    wanted = F.scaled_dot_product_attention(q, *(t.repeat_interleave(2, dim=1) for t in (k, v)), is_causal=True)
    torch.testing.assert_close(attend(q, k, v, None), wanted)


@pytest.mark.parametrize("pieces", [(1,) * 11, (4, 4, 3), (11,), (2, 7, 2)])
def test_a_ring_keeps_the_last_real_tokens_of_every_sequence(pieces):
    """Two sequences with padding in different places; token n is the number n."""
    cache = WindowCache(torch.zeros(2, 1, 4, 1), torch.zeros(2, 1, 4, 1))
    valid_BS = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0]]).bool()
    number_BS, past_B1 = valid_BS.cumsum(dim=1), torch.zeros(2, 1, dtype=torch.int64)
    for part_BS, valid in zip(number_BS.split(pieces, dim=1), valid_BS.split(pieces, dim=1), strict=True):
        cache.expect(past_B1, valid)
        keys, values = cache.append(part_BS[:, None, :, None].float(), -part_BS[:, None, :, None].float())
        assert keys.shape[2] == 3 + part_BS.shape[1] and torch.equal(keys, -values)
        past_B1 = past_B1 + valid.sum(dim=1, keepdim=True)
    assert cache.keys[0, 0, :3, 0].tolist() == [7, 5, 6], "the last three of seven, each on (its number - 1) mod 3"
    assert cache.keys[1, 0, :3, 0].tolist() == [1, 2, 0]
