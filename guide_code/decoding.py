"""One token after another: a batch of prompts continued, greedily or at random, with a key-value cache.

Nucleus (top-p) sampling: Holtzman et al. 2020 (arXiv:1904.09751), section 3.1.
Copy alone: needs torch only.

B batch, S prompt length, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Generators = torch.Generator | Sequence[torch.Generator]


def decode(
    model: Any,
    prompt_BS: Tensor,
    max_new_tokens: int,
    *,
    mask_BS: Tensor | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: Generators | None = None,
    stop_tokens: Collection[int] = (),
    pad_token: int | None = None,
    prefill_chunk: int | None = None,
) -> Iterator[Tensor]:
    """Token ids (B,), step by step, until every sequence has stopped or has its ``max_new_tokens``.

    The model is in evaluation mode meanwhile, where no expert has a capacity. So decoding equals one forward over the
    whole text, and a prompt in a batch equals the prompt alone, up to rounding. In training with a capacity neither
    holds: what is dropped depends on the other tokens of the call.

    Args:
        model: has ``make_cache`` and ``forward`` of a :class:`~guide_code.transformer.Transformer`.
        prompt_BS: token ids; shorter prompts are padded on the left, see :func:`pad_left`.
        max_new_tokens: most tokens to add to each.
        mask_BS: 1 or True where the prompt is real.
        temperature: 0 takes the most likely token; otherwise logits are divided by it before the softmax.
        top_p: sample among the most likely tokens only, as few as hold at least this probability. 1: among all.
        generator: of the random numbers; one per sequence makes a sampled batch equal each prompt alone.
        stop_tokens: ids that end a sequence; the stop token itself is the last that it yields.
        pad_token: what a sequence yields after its end; the first of ``stop_tokens`` when not given.
        prefill_chunk: most prompt tokens of one call, which bounds the memory of a long prompt; None: all at once.

    Raises:
        ValueError: a value is out of range, the prompt is empty or ends in padding, the mask has another shape, or
            the result would be longer than the model allows.
    """
    if prompt_BS.shape[1] == 0:
        raise ValueError("the prompt is empty; give at least one token")
    if mask_BS is not None:
        if mask_BS.shape != prompt_BS.shape:
            raise ValueError(f"mask_BS has shape {tuple(mask_BS.shape)}, but the prompts {tuple(prompt_BS.shape)}")
        ends = mask_BS[:, -1].bool()
        if not ends.all():
            raise ValueError(f"prompts {(~ends).nonzero()[:, 0].tolist()} end in padding: pad them on the left")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature={temperature} must be at least 0 and top_p={top_p} in (0, 1]")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ValueError(f"prefill_chunk={prefill_chunk} must be at least 1, or None for the whole prompt at once")
    if isinstance(generator, Sequence) and len(generator) != len(prompt_BS):
        raise ValueError(f"{len(generator)} generators for {len(prompt_BS)} prompts: give one, or one for each")
    stops = torch.tensor(sorted(stop_tokens), device=prompt_BS.device, dtype=torch.int64)
    pad = pad_token if pad_token is not None else next(iter(stop_tokens), 0)
    cache = model.make_cache(len(prompt_BS), prompt_BS.shape[1] + max_new_tokens)
    choose = {"temperature": temperature, "top_p": top_p, "generator": generator}
    return _decode(model, cache, prompt_BS, mask_BS, max_new_tokens, prefill_chunk, choose, stops, pad)


@torch.inference_mode()
def _decode(model, cache, prompt_BS, mask_BS, max_new_tokens, prefill_chunk, choose, stops, pad) -> Iterator[Tensor]:
    chunk = prefill_chunk or prompt_BS.shape[1]
    masks = [None] * prompt_BS.shape[1] if mask_BS is None else mask_BS.split(chunk, dim=1)
    logits, done_B = None, torch.zeros(len(prompt_BS), dtype=torch.bool, device=prompt_BS.device)
    was_training = model.training
    model.eval()
    try:
        for part_BS, part_mask_BS in zip(prompt_BS.split(chunk, dim=1), masks, strict=False):
            logits = None  # frees those of the chunk before
            logits = model(part_BS, mask_BS=part_mask_BS, cache=cache).logits
        for step in range(max_new_tokens):
            assert logits is not None
            tokens_B = torch.where(done_B, pad, sample_tokens(logits[:, -1], **choose))
            yield tokens_B
            if len(stops):
                done_B = done_B | torch.isin(tokens_B, stops)
                if done_B.all():
                    break
            if step + 1 < max_new_tokens:  # tokens after the end reach no expert and are seen by nobody
                logits = model(tokens_B[:, None], mask_BS=~done_B[:, None] if len(stops) else None, cache=cache).logits
    finally:
        model.train(was_training)


def sample_tokens(
    logits_BV: Tensor, *, temperature: float = 0.0, top_p: float = 1.0, generator: Generators | None = None
) -> Tensor:
    """One token id per row, (B,).

    A row costs one random number, so equal seeds give equal tokens whatever ``top_p`` is.

    Args:
        logits_BV: of the next token.
        temperature: 0 takes the most likely token.
        top_p: of all tokens, keep the likeliest ones until they hold at least this probability.
        generator: one for all rows, or one for each.
    """
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    # float64: a sum over 150,000 tokens in float32 could end below the random number, which then chooses none.
    wide_BV = logits_BV.to(torch.float64)
    scaled_BV = (wide_BV - wide_BV.amax(dim=-1, keepdim=True)) / temperature
    probabilities_BV, order_BV = scaled_BV.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV  # held by the tokens that are likelier
    mass_BV = torch.where(before_BV < top_p, probabilities_BV, 0.0).cumsum(dim=-1)
    threshold_B1 = _uniform(len(logits_BV), generator, logits_BV.device)[:, None] * mass_BV[:, -1:]
    place_B1 = (mass_BV <= threshold_B1).sum(dim=-1, keepdim=True)
    return order_BV.gather(1, place_B1)[:, 0]


def pad_left(
    prompts: Sequence[Sequence[int]], *, pad_token: int = 0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Prompts of several lengths as ``(prompt_BS, mask_BS)``, padded on the left: all end in the last column.

    Raises:
        ValueError: a prompt is empty.
    """
    empty = [index for index, prompt in enumerate(prompts) if not len(prompt)]
    if empty or not prompts:
        raise ValueError(f"prompts {empty} are empty; give at least one token each")
    length = max(len(prompt) for prompt in prompts)
    rows = [[pad_token] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    masks = [[False] * (length - len(prompt)) + [True] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(masks, device=device)


def _uniform(count: int, generator: Generators | None, device: torch.device) -> Tensor:
    """(count,) numbers in [0, 1), drawn where the generators live."""
    generators = generator if isinstance(generator, Sequence) else [generator]
    each = 1 if isinstance(generator, Sequence) else count
    parts = [
        torch.rand(each, dtype=torch.float64, generator=g, device=device if g is None else g.device) for g in generators
    ]
    return torch.cat(parts).to(device)
