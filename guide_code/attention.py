"""Grouped-query attention and the key-value caches that make decoding cheap.

Grouped queries: Ainslie et al. 2023 (arXiv:2305.13245); windows: Beltagy et al. 2020 (arXiv:2004.05150), section 3.1;
attention sinks: openai/gpt-oss, ``gpt_oss/torch/model.py``, after Xiao et al. 2023 (arXiv:2309.17453).
Copy together with ``rotary``: needs torch only.

B batch, S new tokens, M cached and new tokens, D hidden size, H heads, U key-value heads, A head size, W window.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .rotary import Rotary, rotate


class KVCache:
    """Two buffers (B, U, max_length, any width) filled from the left: keys and values of one layer, or latents.

    Slots hold tokens in the order in which they came, padding included; who may see which slot is the model's
    affair.
    """

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values, self.length = keys, values, 0

    def expect(self, past_B1: Tensor, valid_BS: Tensor) -> None:
        """What :class:`WindowCache` needs to know before the next tokens; nothing here."""

    def append(self, keys_BUSA: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens; return all keys and values so far, (B, U, M, A) and (B, U, M, width of a value)."""
        end = self.length + keys_BUSA.shape[2]
        self.keys[:, :, self.length : end] = keys_BUSA
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class WindowCache:
    """Keys and values of the last W real tokens of every sequence: a ring in which token n has slot n mod W.

    Padding is never kept. Buffers have one slot more, into which goes what nobody will look at again.
    """

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values, self.slots_BS = keys, values, None

    def expect(self, past_B1: Tensor, valid_BS: Tensor) -> None:
        """Say where the next tokens go, before :meth:`append`.

        Args:
            past_B1: real tokens of every sequence so far.
            valid_BS: True where a new token is real.
        """
        window = self.keys.shape[2] - 1
        number_BS = past_B1 + valid_BS.cumsum(dim=1) - 1
        # Of tokens that fall on one slot the last must win, and a scatter promises no order: the others go to waste.
        kept_BS = valid_BS & (number_BS > number_BS[:, -1:] - window)
        self.slots_BS = torch.where(kept_BS, number_BS % window, window)

    def append(self, keys_BUSA: Tensor, values_BUSA: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens; return the ring as it was before, then the new ones, (B, U, W + S, A) each."""
        assert self.slots_BS is not None, "expect() comes first"
        slots_BUSA = self.slots_BS[:, None, :, None].expand_as(keys_BUSA)
        result = []
        for buffer, new_BUSA in ((self.keys, keys_BUSA), (self.values, values_BUSA)):
            new_BUSA = new_BUSA.to(buffer.dtype)
            result.append(torch.cat([buffer[:, :, :-1], new_BUSA], dim=2))
            buffer.scatter_(2, slots_BUSA, new_BUSA)
        self.slots_BS = None
        return result[0], result[1]


class GroupedQueryAttention(nn.Module):
    """Causal attention in which several query heads share a key-value head.

    Args:
        hidden_size: width D of a token.
        num_heads: query heads H.
        num_kv_heads: key-value heads U, a divisor of H; H of them is multi-head, 1 is multi-query attention.
        head_size: width A of a head.
        bias: add biases to the query, key and value projections.
        out_bias: add a bias to the output projection.
        q_norm: from queries (B, S, H*A) to the same shape, before they are turned; None: none.
        k_norm: the same for keys (B, S, U*A).
        position: from queries, keys and a ``Rotary`` to queries and keys that know their positions.
        sinks: give every head a logit that takes part in its softmax and adds nothing (gpt-oss).
        window: tokens that a query sees, itself included; None: all before it. The model masks; here it bounds the
            cache.
        chunked: the window is instead the block of that many positions in which the query stands (Llama-4).

    Raises:
        ValueError: the heads do not divide.
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        bias: bool = False,
        out_bias: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        position: Callable[[Tensor, Tensor, Rotary], tuple[Tensor, Tensor]] = rotate,
        sinks: bool = False,
        window: int | None = None,
        chunked: bool = False,
    ):
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.position, self.window, self.chunked = position, window, chunked
        self.q_proj = nn.Linear(hidden_size, num_heads * head_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_size, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_size, hidden_size, bias=out_bias)
        self.q_norm, self.k_norm = q_norm or nn.Identity(), k_norm or nn.Identity()
        self.register_parameter("sinks", nn.Parameter(torch.zeros(num_heads)) if sinks else None)

    def forward(
        self,
        x_BSD: Tensor,
        rotary: Rotary,
        visible_BSM: Tensor | None = None,
        cache: KVCache | WindowCache | None = None,
    ) -> Tensor:
        """(B, S, D) to (B, S, D).

        Args:
            x_BSD: hidden states of the new tokens.
            rotary: their positions, and cosines and sines (B, S, A) for them.
            visible_BSM: True where a new token may look at a token; None: at itself and all before it.
            cache: keys and values of the past; the new ones are appended.
        """
        q_BHSA = self._heads(self.q_norm(self.q_proj(x_BSD)), self.num_heads)
        k_BUSA = self._heads(self.k_norm(self.k_proj(x_BSD)), self.num_kv_heads)
        v_BUMA = self._heads(self.v_proj(x_BSD), self.num_kv_heads)
        q_BHSA, k_BUMA = self.position(q_BHSA, k_BUSA, rotary)
        if cache is not None:
            k_BUMA, v_BUMA = (t.to(q_BHSA.dtype) for t in cache.append(k_BUMA, v_BUMA))
        out_BHSA = attend(q_BHSA, k_BUMA, v_BUMA, visible_BSM, sinks_H=self.sinks)
        return self.o_proj(out_BHSA.transpose(1, 2).flatten(2))

    def make_cache(self, batch_size: int, max_length: int) -> KVCache | WindowCache:
        """An empty cache for this layer, in the dtype and on the device of its weights."""
        ring = self.window is not None and self.window < max_length
        slots = self.window + 1 if self.window is not None and ring else max_length
        shape = (batch_size, self.num_kv_heads, slots, self.head_size)
        like = self.k_proj.weight
        return (WindowCache if ring else KVCache)(like.new_zeros(shape), like.new_zeros(shape))

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x.unflatten(-1, (num_heads, self.head_size)).transpose(1, 2)


def attend(
    q_BHSA: Tensor,
    k_BUMA: Tensor,
    v: Tensor,
    visible_BSM: Tensor | None,
    *,
    sinks_H: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale x q k) v, (B, H, S, width of v), causal when no mask is given.

    Args:
        q_BHSA: queries.
        k_BUMA: keys; H / U query heads share one.
        v: values (B, U, M, any width).
        visible_BSM: True where a query may look.
        sinks_H: a logit per head in every softmax, whose share is lost; None: none.
        scale: of the scores; None: 1 / sqrt(A).
    """
    if scale is None:
        scale = float(q_BHSA.shape[-1] ** -0.5)
    if sinks_H is not None:
        # One key more that scores the sink, by a channel of its own, and has a value of zeros.
        sink_BHS1 = (sinks_H.to(q_BHSA.dtype) / scale)[:, None, None].expand_as(q_BHSA[..., :1])
        q_BHSA, k_BUMA, v = torch.cat([q_BHSA, sink_BHS1], dim=-1), F.pad(k_BUMA, (0, 1, 0, 1)), F.pad(v, (0, 0, 0, 1))
        k_BUMA[:, :, -1, -1] = 1.0
        if visible_BSM is None:
            seen = q_BHSA.shape[2]
            visible_BSM = torch.ones(seen, seen, dtype=torch.bool, device=v.device).tril().expand(len(v), -1, -1)
        visible_BSM = F.pad(visible_BSM, (0, 1), value=True)
    return F.scaled_dot_product_attention(
        q_BHSA,
        k_BUMA,
        v,
        attn_mask=None if visible_BSM is None else visible_BSM[:, None],
        is_causal=visible_BSM is None,
        scale=scale,
        enable_gqa=k_BUMA.shape[1] < q_BHSA.shape[1],
    )
