import dataclasses

import pytest
import torch
from torch import nn

from guide_code.build import build_model
from guide_code.config import override
from guide_code.decoding import decode, pad_left, sample_tokens
from guide_code.presets import tiny
from guide_code.testing.contract import relative_rms

CONFIG = override(
    dataclasses.replace(tiny(), first_k_dense=1),
    {"vocab_size": 50, "hidden_size": 32, "num_layers": 3, "max_length": 60, "num_shared_experts": 1},
)


def make_model(**changes):
    model = build_model(override(CONFIG, changes)).eval()
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            nn.init.normal_(parameter, std=0.3)
    return model


def prompts():
    return [torch.randint(0, 50, (length,)).tolist() for length in (2, 9, 5, 1)]


def generators(count):
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


@pytest.mark.parametrize("chunk", [None, 1, 3, 9, 20])
def test_a_batch_in_chunks_equals_each_prompt_alone_without_a_cache(chunk):
    """known_failures G-03: batch 1 against 4, any number of tokens per call."""
    model, each = make_model(), prompts()
    batch, mask_BS = pad_left(each)
    together = model.generate(batch, 12, mask_BS=mask_BS, prefill_chunk=chunk)
    for row, padding, prompt in zip(together, (~mask_BS).sum(dim=1), each, strict=True):
        for _ in range(12):
            prompt = [*prompt, int(model(torch.tensor([prompt])).logits[0, -1].argmax())]
        assert row[padding:].tolist() == prompt


@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_logits_of_padded_chunks_equal_one_forward(chunk):
    model, each = make_model(), prompts()
    batch, mask_BS = pad_left(each)
    cache = model.make_cache(4, 9)
    parts = zip(batch.split(chunk, dim=1), mask_BS.split(chunk, dim=1), strict=True)
    logits = torch.cat([model(part, mask_BS=mask, cache=cache).logits for part, mask in parts], dim=1)
    for row, mask_S, prompt in zip(logits, mask_BS, each, strict=True):
        assert relative_rms(row[mask_S], model(torch.tensor([prompt])).logits[0]) < 1e-5


def test_a_capacity_drops_in_training_only_so_decoding_still_equals_one_forward():
    """known_failures G-03: with a capacity, decoding and prefill would differ; evaluation has none."""
    model, tokens_BS = make_model(capacity_factor=0.5), torch.randint(0, 50, (2, 12))
    expected = model(tokens_BS).logits
    cache = model.make_cache(2, 12)
    parts = [model(part, cache=cache).logits for part in tokens_BS.split(1, dim=1)]
    assert relative_rms(torch.cat(parts, dim=1), expected) < 1e-5
    assert relative_rms(model.train()(tokens_BS).logits, expected) > 1e-2, "training drops"
    free = make_model()
    free.load_state_dict(model.state_dict())
    assert torch.equal(model.generate(tokens_BS, 5), free.generate(tokens_BS, 5)) and model.training


def test_sampled_batches_equal_each_prompt_alone_with_a_generator_each():
    model, each = make_model(), prompts()
    batch, mask_BS = pad_left(each)
    options = {"temperature": 0.8, "top_p": 0.9}
    together = model.generate(batch, 10, mask_BS=mask_BS, generator=generators(4), **options)[:, 9:]
    for index, prompt in enumerate(each):
        alone = model.generate(torch.tensor([prompt]), 10, generator=generators(4)[index], **options)
        assert together[index].tolist() == alone[0, len(prompt) :].tolist()
    one = [model.generate(batch, 10, generator=torch.Generator().manual_seed(1), **options) for _ in range(2)]
    assert torch.equal(*one) and not torch.equal(one[0][:, 9:], together), "a seed decides"


def test_samples_follow_the_distribution_and_the_nucleus():
    logits_BV = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[torch.tensor([2, 0, 3, 1])].expand(20_000, 4)

    def shares(**options):
        tokens_B = sample_tokens(logits_BV, generator=torch.Generator().manual_seed(0), **options)
        return (tokens_B.bincount(minlength=4) / len(tokens_B))[torch.tensor([1, 3, 0, 2])].tolist()

    assert shares(temperature=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.01)
    squares = [0.25, 0.09, 0.0225, 0.0025]
    assert shares(temperature=0.5) == pytest.approx([s / sum(squares) for s in squares], abs=0.01)
    assert shares(temperature=1.0, top_p=0.79) == pytest.approx([0.625, 0.375, 0, 0], abs=0.01)
    assert shares(temperature=1.0, top_p=0.81) == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0], abs=0.01)
    assert shares(temperature=1.0, top_p=1e-9) == shares(temperature=1e-12) == shares() == [1, 0, 0, 0]


def test_no_random_number_can_fall_off_the_end(monkeypatch):
    last = torch.nextafter(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0))
    for value, allowed in ((last, {4}), (torch.tensor(0.0, dtype=torch.float64), {0})):
        monkeypatch.setattr(torch, "rand", lambda count, value=value, **_: value.expand(count))
        logits_BV = torch.tensor([[3.0, 2.0, -torch.inf, -torch.inf, 1.0]]).expand(3, 5)
        assert set(sample_tokens(logits_BV, temperature=0.7).tolist()) == allowed


def test_a_sequence_ends_at_its_stop_token_and_the_others_go_on():
    model, each = make_model(), prompts()
    batch, mask_BS = pad_left(each)
    free = model.generate(batch, 20, mask_BS=mask_BS)[:, 9:]
    stops = {int(free[0, 3]), int(free[1, 7])}
    rows = model.generate(batch, 20, mask_BS=mask_BS, stop_tokens=stops, pad_token=49)[:, 9:]
    ends = []
    for row, expected in zip(rows.tolist(), free.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(expected) if token in stops), len(expected))
        assert row[:end] == expected[: len(row)][:end] and set(row[end:]) <= {49}
        ends.append(end)
    assert rows.shape[1] == max(ends) and min(ends) < max(ends)
    alone = model.generate(torch.tensor(each[:1]), 20, stop_tokens=stops)
    assert alone[0, 2:].tolist() == free[0, : ends[0]].tolist()


def test_a_reader_who_leaves_early_leaves_the_model_as_it_was():
    model = make_model().train()
    steps = decode(model, torch.zeros(1, 2, dtype=torch.int64), 9)
    assert model.training
    next(steps)
    assert not model.training
    steps.close()
    assert model.training and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"top_p": 0.0}, r"top_p=0.0 in \(0, 1\]"),
        ({"prefill_chunk": 0}, "prefill_chunk=0 must be at least 1"),
        ({"generator": generators(3)}, "3 generators for 2 prompts"),
        ({"mask_BS": torch.ones(2, 4)}, r"mask_BS has shape \(2, 4\), but the prompts \(2, 3\)"),
        ({"mask_BS": torch.tensor([[1, 1, 1], [1, 1, 0]])}, r"prompts \[1\] end in padding: pad them on the left"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_wrong_options_are_named_before_any_token(options, words):
    with pytest.raises(ValueError, match=words):
        decode(make_model(), torch.zeros(2, 3, dtype=torch.int64), 4, **options)
    with pytest.raises(ValueError, match=r"prompts \[1\] are empty"):
        pad_left([[1], []])
