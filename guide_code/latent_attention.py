"""Multi-head latent attention: keys and values of all heads come from one narrow latent, which is all that is cached.

DeepSeek-V2 (arXiv:2405.04434), section 2.1 and eq. 37-47.
Copy together with ``rotary`` and ``attention``: needs torch only.

B batch, S new tokens, M cached and new tokens, D hidden size, H heads, L latent width, W rotary width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .attention import KVCache, attend
from .rotary import Rotary, rotate


class LatentAttention(nn.Module):
    """Causal attention over latents.

    A key is a part expanded from the latent, one per head and without position, beside a rotary part that all heads
    share. DeepSeek-V3 caches 512 + 64 numbers per token and layer where multi-head attention would cache 32,768.

    Args:
        hidden_size: width D of a token.
        num_heads: heads H.
        kv_lora_rank: width L of the latent of keys and values.
        nope_size: channels of a query or key without position (``qk_nope_head_dim``).
        rope_size: channels W with rotary positions (``qk_rope_head_dim``).
        value_size: channels of a value (``v_head_dim``).
        q_lora_rank: width of the latent of queries; None: they are projected directly.
        kv_norm: normalises the latent of keys and values; None: nothing does.
        q_norm: the same for queries; needs ``q_lora_rank``.
        position: as in ``GroupedQueryAttention``; it sees the rotary channels only.
        temperature: scores are multiplied by its square (YaRN as in DeepSeek: ``mscale_all_dim``).
    """

    window = None
    chunked = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        nope_size: int,
        rope_size: int,
        value_size: int,
        q_lora_rank: int | None = None,
        kv_norm: nn.Module | None = None,
        q_norm: nn.Module | None = None,
        position: Callable[[Tensor, Tensor, Rotary], tuple[Tensor, Tensor]] = rotate,
        temperature: float = 1.0,
    ):
        super().__init__()
        self.num_heads, self.kv_lora_rank = num_heads, kv_lora_rank
        self.nope_size, self.rope_size, self.value_size = nope_size, rope_size, value_size
        self.position = position
        self.scale = (nope_size + rope_size) ** -0.5 * temperature**2
        q_width = num_heads * (nope_size + rope_size)
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, q_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=False)
            self.q_a_norm = q_norm or nn.Identity()
            self.q_b_proj = nn.Linear(q_lora_rank, q_width, bias=False)
        self.kv_a_proj = nn.Linear(hidden_size, kv_lora_rank + rope_size, bias=False)
        self.kv_a_norm = kv_norm or nn.Identity()
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * (nope_size + value_size), bias=False)
        self.o_proj = nn.Linear(num_heads * value_size, hidden_size, bias=False)
        self.q_lora_rank = q_lora_rank

    def forward(
        self,
        x_BSD: Tensor,
        rotary: Rotary,
        visible_BSM: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """(B, S, D) to (B, S, D); arguments as those of ``GroupedQueryAttention``, tables (B, S, W)."""
        q = self.q_proj(x_BSD) if self.q_lora_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x_BSD)))
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q_nope, q_BHSW = q.split([self.nope_size, self.rope_size], dim=-1)
        latent_BSL, k_BSW = self.kv_a_proj(x_BSD).split([self.kv_lora_rank, self.rope_size], dim=-1)
        latent_B1ML = self.kv_a_norm(latent_BSL)[:, None]
        q_BHSW, k_B1MW = self.position(q_BHSW, k_BSW[:, None], rotary)
        if cache is not None:
            latent_B1ML, k_B1MW = (t.to(q_BHSW.dtype) for t in cache.append(latent_B1ML, k_B1MW))
        # Expanding costs M x L x (nope + value) per head. Attending to the latents themselves saves that, but widens
        # every score and every sum to L channels.
        widening = x_BSD.shape[1] * (2 * self.kv_lora_rank - self.nope_size - self.value_size)
        absorb = cache is not None and widening < self.kv_lora_rank * (self.nope_size + self.value_size)
        attend_to = self._attend_to_latents if absorb else self._attend_to_expanded
        return self.o_proj(attend_to(q_nope, q_BHSW, latent_B1ML, k_B1MW, visible_BSM).transpose(1, 2).flatten(2))

    def _attend_to_expanded(self, q_nope, q_BHSW, latent_B1ML, k_B1MW, visible_BSM) -> Tensor:
        """Keys and values of every head, as in training."""
        kv = self.kv_b_proj(latent_B1ML[:, 0]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([self.nope_size, self.value_size], dim=-1)
        k = torch.cat([k_nope, k_B1MW.expand(-1, self.num_heads, -1, -1)], dim=-1)
        return attend(torch.cat([q_nope, q_BHSW], dim=-1), k, v, visible_BSM, scale=self.scale)

    def _attend_to_latents(self, q_nope, q_BHSW, latent_B1ML, k_B1MW, visible_BSM) -> Tensor:
        """The same sums in another order: one key per token for all heads, the expansion moved to queries and output.

        q (W_k latent) = (q W_k) latent, and sum(share x W_v latent) = W_v sum(share x latent): DeepSeek-V2, section
        2.1.2.
        """
        expand = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)).to(q_nope.dtype)
        expand_k, expand_v = expand.split([self.nope_size, self.value_size], dim=1)
        q_BHSL = torch.einsum("bhsn,hnl->bhsl", q_nope, expand_k)
        q, k = torch.cat([q_BHSL, q_BHSW], dim=-1), torch.cat([latent_B1ML, k_B1MW], dim=-1)
        out_BHSL = attend(q, k, latent_B1ML, visible_BSM, scale=self.scale)
        return torch.einsum("bhsl,hvl->bhsv", out_BHSL, expand_v)

    def make_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache of latents and rotary keys, in the dtype and on the device of the weights."""
        like = self.kv_b_proj.weight
        latents, keys = (like.new_zeros(batch_size, 1, max_length, w) for w in (self.kv_lora_rank, self.rope_size))
        return KVCache(latents, keys)
