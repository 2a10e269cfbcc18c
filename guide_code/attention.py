"""Grouped-query attention and the key-value cache that makes decoding cheap.

Grouped queries: Ainslie et al. 2023 (arXiv:2305.13245); rotary positions: Su et al. 2021 (arXiv:2104.09864), eq. 34.
Copy alone: needs torch only.

B batch, S new tokens, M cached and new tokens, D hidden size, H heads, U key-value heads, A head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KVCache:
    """Keys and values of one layer: two (B, U, max_length, A) buffers filled from the left.

    Slots hold tokens in the order in which they came, padding included; who may see which slot is the model's
    affair.
    """

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values, self.length = keys, values, 0

    def append(self, keys_BUSA: Tensor, values_BUSA: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens; return all keys and values so far, (B, U, M, A) each."""
        end = self.length + keys_BUSA.shape[2]
        self.keys[:, :, self.length : end] = keys_BUSA
        self.values[:, :, self.length : end] = values_BUSA
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class GroupedQueryAttention(nn.Module):
    """Causal attention in which several query heads share a key-value head.

    Args:
        hidden_size: width D of a token.
        num_heads: query heads H.
        num_kv_heads: key-value heads U, a divisor of H; H of them is multi-head, 1 is multi-query attention.
        head_size: width A of a head.
        bias: add biases to the query, key and value projections.

    Raises:
        ValueError: the heads do not divide.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_size: int, *, bias: bool = False):
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.q_proj = nn.Linear(hidden_size, num_heads * head_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_size, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_size, hidden_size, bias=False)

    def forward(
        self,
        x_BSD: Tensor,
        rotary: tuple[Tensor, Tensor],
        visible_BSM: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """(B, S, D) to (B, S, D).

        Args:
            x_BSD: hidden states of the new tokens.
            rotary: cosines and sines (B, S, A) for their positions.
            visible_BSM: True where a new token may look at a token; None: at itself and all before it.
            cache: keys and values of the past; the new ones are appended.
        """
        q_BHSA = self._heads(self.q_proj(x_BSD), self.num_heads)
        k_BUSA = self._heads(self.k_proj(x_BSD), self.num_kv_heads)
        v_BUMA = self._heads(self.v_proj(x_BSD), self.num_kv_heads)
        q_BHSA, k_BUMA = apply_rotary(q_BHSA, *rotary), apply_rotary(k_BUSA, *rotary)
        if cache is not None:
            k_BUMA, v_BUMA = (t.to(q_BHSA.dtype) for t in cache.append(k_BUMA, v_BUMA))
        out_BHSA = F.scaled_dot_product_attention(
            q_BHSA,
            k_BUMA,
            v_BUMA,
            attn_mask=None if visible_BSM is None else visible_BSM[:, None],
            is_causal=visible_BSM is None,
            enable_gqa=self.num_kv_heads < self.num_heads,
        )
        return self.o_proj(out_BHSA.transpose(1, 2).flatten(2))

    def make_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache for this layer, in the dtype and on the device of its weights."""
        shape = (batch_size, self.num_kv_heads, max_length, self.head_size)
        like = self.k_proj.weight
        return KVCache(like.new_zeros(shape), like.new_zeros(shape))

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x.unflatten(-1, (num_heads, self.head_size)).transpose(1, 2)


def apply_rotary(x_BHSA: Tensor, cos_BSA: Tensor, sin_BSA: Tensor) -> Tensor:
    """Turn the pairs (i, i + A/2) of every head, in float32 or wider; the dtype of x comes back."""
    low, high = x_BHSA.chunk(2, dim=-1)
    turned_BHSA = torch.cat([-high, low], dim=-1)
    return (x_BHSA * cos_BSA[:, None] + turned_BHSA * sin_BSA[:, None]).to(x_BHSA.dtype)
