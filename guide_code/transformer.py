"""A decoder-only Transformer over attention and feed-forward modules that are passed in.

Vaswani et al. 2017 (arXiv:1706.03762), with the normalisation before each part (Xiong et al. 2020, arXiv:2002.04745).
Copy with decoding.py into one package: needs torch only.

B batch, S new tokens, M cached and new tokens, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .decoding import decode


class Output(NamedTuple):
    """What a model returns. A tuple, so that FSDP2 finds the tensors in it."""

    logits: Tensor
    """(B, S, V)."""
    routings: tuple
    """One ``Routing`` per layer, None for a dense layer; the router's decision before any drop."""


class Cache:
    """The past of a batch: a cache per layer, which slots hold real tokens, how many per sequence."""

    def __init__(self, layers: list, batch_size: int, max_length: int, device: torch.device):
        self.layers, self.max_length, self.length = layers, max_length, 0
        self.valid_BM = torch.zeros(batch_size, max_length, dtype=torch.bool, device=device)

    def append(self, valid_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Note the new tokens; return the validity of all so far (B, M) and the count of past ones (B, 1)."""
        past_B1 = self.valid_BM.sum(dim=1, keepdim=True)
        end = self.length + valid_BS.shape[1]
        self.valid_BM[:, self.length : end] = valid_BS
        self.length = end
        for layer in self.layers:
            layer.expect(past_B1, valid_BS)
        return self.valid_BM[:, :end], past_B1


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); ``ffn`` returns an ``MoEOutput``, dense or sparse."""

    def __init__(self, attention: nn.Module, ffn: nn.Module, attention_norm: nn.Module, ffn_norm: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.ffn_norm, self.ffn = ffn_norm, ffn

    @property
    def reach(self) -> tuple[int | None, bool]:
        """``window`` and ``chunked`` of the attention: how far it looks back; (None, False) to the first token."""
        return getattr(self.attention, "window", None), getattr(self.attention, "chunked", False)

    def forward(
        self,
        x_BSD: Tensor,
        rotary: tuple[Tensor, Tensor],
        visible_BSM: Tensor | None = None,
        mask_BS: Tensor | None = None,
        tokens_BS: Tensor | None = None,
        cache: Any = None,
    ) -> tuple[Tensor, Any]:
        """Hidden states (B, S, D) after the block, and the routing of its experts (None when dense)."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotary, visible_BSM, cache)
        ffn = self.ffn(self.ffn_norm(x_BSD), mask_BS, tokens_BS)
        return x_BSD + ffn.out, ffn.routing


class Transformer(nn.Module):
    """Embedding, blocks, normalisation, output projection.

    Args:
        embedding: (B, S) token ids to (B, S, D).
        blocks: the layers.
        norm: the last normalisation.
        head: (B, S, D) to (B, S, V).
        rotary: (B, S) positions to the tables that attention takes, computed once for all layers.
        max_length: positions that the model was made for.
    """

    def __init__(
        self,
        embedding: nn.Module,
        blocks: Sequence[nn.Module],
        norm: nn.Module,
        head: nn.Module,
        rotary: nn.Module,
        max_length: int,
    ):
        super().__init__()
        self.embedding, self.rotary = embedding, rotary
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head, self.max_length = norm, head, max_length

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        mask_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Output:
        """Next-token logits for every new token.

        Args:
            tokens_BS: token ids.
            mask_BS: 1 or True where a new token is real; padding may stand on either side. Its logits mean nothing.
            positions_BS: position of each new token; the count of real tokens before it when not given.
            cache: the past, from :meth:`make_cache`; the new tokens are appended to it.

        Raises:
            ValueError: more tokens than the model or the cache has room for, or a mask of another shape.
        """
        self._check(tokens_BS, mask_BS, cache)
        valid_BS = torch.ones_like(tokens_BS, dtype=torch.bool) if mask_BS is None else mask_BS.bool()
        valid_BM, past_B1 = valid_BS, valid_BS.new_zeros(len(valid_BS), 1, dtype=torch.int64)
        if cache is not None:
            valid_BM, past_B1 = cache.append(valid_BS)
        if positions_BS is None:
            positions_BS = past_B1 + (valid_BS.cumsum(dim=1) - 1).clamp_min(0)

        visible: dict[Any, Tensor | None] = {}
        blocks: list[Any] = list(self.blocks)
        for window, chunked in {block.reach for block in blocks}:
            reach = window, chunked
            if window is not None:
                visible[reach] = _visible_within(window, chunked, valid_BS, past_B1, cache)
            elif mask_BS is None and cache is None:
                visible[reach] = None  # attention is causal by itself, which is faster than a mask
            else:
                visible[reach] = _visible(valid_BM.cumsum(dim=1) - 1, valid_BM, tokens_BS.shape[1])

        x_BSD, rotary = self.embedding(tokens_BS), self.rotary(positions_BS)
        layers = [None] * len(self.blocks) if cache is None else cache.layers
        routings = []
        for block, layer in zip(blocks, layers, strict=True):
            x_BSD, routing = block(x_BSD, rotary, visible[block.reach], mask_BS, tokens_BS, layer)
            routings.append(routing)
        return Output(self.head(self.norm(x_BSD)), tuple(routings))

    def make_cache(self, batch_size: int, max_length: int) -> Cache:
        """An empty cache for ``batch_size`` sequences of at most ``max_length`` tokens, padding included.

        Raises:
            ValueError: the model is shorter than that.
        """
        if max_length > self.max_length:
            raise ValueError(f"a cache of max_length={max_length} exceeds the model's {self.max_length}")
        attentions: list[Any] = [block.attention for block in self.blocks]
        layers = [attention.make_cache(batch_size, max_length) for attention in attentions]
        return Cache(layers, batch_size, max_length, next(self.parameters()).device)

    def generate(
        self, prompt_BS: Tensor, max_new_tokens: int, *, mask_BS: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Continue prompts: (B, S + new) token ids, the prompts included; greedily unless ``options`` say otherwise.

        New tokens are ``max_new_tokens``, or fewer when every sequence has met a stop token.

        Args:
            prompt_BS: token ids; shorter prompts are padded on the left.
            max_new_tokens: most tokens to add to each.
            mask_BS: 1 or True where the prompt is real.
            **options: ``temperature``, ``top_p``, ``generator``, ``stop_tokens``, ``pad_token``, ``prefill_chunk`` of
                :func:`guide_code.decoding.decode`, which also gives tokens as they come.

        Raises:
            ValueError: the result would be longer than the model allows, the prompt is empty, or an option is wrong.
        """
        steps = decode(self, prompt_BS, max_new_tokens, mask_BS=mask_BS, **options)
        return torch.cat([prompt_BS, *(tokens_B[:, None] for tokens_B in steps)], dim=1)

    def _check(self, tokens_BS: Tensor, mask_BS: Tensor | None, cache: Cache | None) -> None:
        batch_size, new = tokens_BS.shape
        past = 0 if cache is None else cache.length
        room = self.max_length if cache is None else cache.max_length
        if past + new > room:
            holder = "model's max_length" if cache is None else "cache's max_length"
            raise ValueError(f"sequence of {past + new} tokens ({past} cached) exceeds the {holder} of {room}")
        if mask_BS is not None and mask_BS.shape != tokens_BS.shape:
            raise ValueError(
                f"mask_BS has shape {tuple(mask_BS.shape)} but tokens_BS {(batch_size, new)}; the mask covers the "
                "new tokens only (the cache knows the past) and is not additive"
            )
        if cache is not None and len(cache.valid_BM) != batch_size:
            raise ValueError(f"the cache holds {len(cache.valid_BM)} sequences but tokens_BS has {batch_size}")


def _visible(number_BM: Tensor, valid_BM: Tensor, new: int, window: int | None = None, chunked: bool = False) -> Tensor:
    """(B, S, M): which keys the last ``new`` tokens may look at.

    Real ones, none later than the token and all within reach; the token itself always, for a softmax needs one.
    Reach is counted in real tokens, so padding changes nothing.

    Args:
        number_BM: how many real tokens of its sequence stand before each key.
        valid_BM: False where a key is padding, or empty.
        new: tokens S that ask; their own keys are the last S.
        window: keys that a token sees, itself included.
        chunked: see the tokens of one's own block of ``window`` instead.
    """
    key_B1M, query_BS1 = number_BM[:, None], number_BM[:, -new:, None]
    seen_BSM = valid_BM[:, None] & (key_B1M <= query_BS1)
    if window is not None:
        near_BSM = key_B1M // window == query_BS1 // window if chunked else key_B1M > query_BS1 - window
        seen_BSM = seen_BSM & near_BSM
    slots = torch.arange(number_BM.shape[1], device=number_BM.device)
    return seen_BSM | (slots == slots[-new:, None])


def _visible_within(window: int, chunked: bool, valid_BS: Tensor, past_B1: Tensor, cache: Cache | None) -> Tensor:
    """:func:`_visible` for layers of limited reach, whose keys are those of their cache, then the new ones.

    A cache longer than the window is a ring of ``window`` slots, in which real token n stands at n mod window; a
    shorter one holds every slot.
    """
    number_BM, valid_BM = past_B1 + valid_BS.cumsum(dim=1) - 1, valid_BS
    if cache is not None and window < cache.max_length:
        slots = torch.arange(window, device=valid_BS.device)
        ring = past_B1 - 1 - (past_B1 - 1 - slots) % window  # the last token before now on each slot
        number_BM, valid_BM = torch.cat([ring, number_BM], dim=1), torch.cat([ring >= 0, valid_BS], dim=1)
    elif cache is not None:
        valid_BM = cache.valid_BM[:, : cache.length]
        number_BM = valid_BM.cumsum(dim=1) - 1
    return _visible(number_BM, valid_BM, valid_BS.shape[1], window, chunked)
