import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from guide_code import generate as generate_module
from guide_code.build import build_model
from guide_code.checkpoint import save_checkpoint
from guide_code.config import override
from guide_code.convert import app as convert_app
from guide_code.convert import save_hf
from guide_code.corpus import load_corpus
from guide_code.generate import app, load, stream
from guide_code.presets import tiny
from guide_code.training.config import TrainConfig
from guide_code.training.optimizer import make_optimizer

CONFIG = override(
    tiny(),
    {"vocab_size": 300, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_size": 16, "max_length": 30},
)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / f"text/{number}.txt").write_text(f"naïve — text {number}\n" * 50)
    corpus = load_corpus(tmp_path / "text", vocab_size=300, cache_dir=tmp_path / "cache")
    model = build_model(CONFIG)
    save_checkpoint(tmp_path / "run", 1, model, CONFIG, make_optimizer(model, TrainConfig()))
    corpus.tokenizer.save(str(tmp_path / "run/tokenizer.json"))
    return tmp_path / "run", model, corpus


def test_stream_gives_the_greedy_continuation_in_whole_characters(run):
    _, model, corpus = run
    prompt = corpus.encode("text")
    expected = model.generate(prompt[None], 20)[0, len(prompt) :]
    pieces = list(stream(model, corpus.tokenizer, "text", 20))
    text = corpus.decode(expected)
    assert text.startswith("".join(pieces)) and set(text[len("".join(pieces)) :]) <= {"\ufffd"}
    assert len(pieces) == 20, "one per token"


class Fixed(torch.nn.Module):
    """Says what it was told to say."""

    max_length = 30

    def __init__(self, ids):
        super().__init__()
        self.ids, self.weight = iter(ids), torch.nn.Parameter(torch.zeros(1))

    def make_cache(self, *_):
        return None

    def forward(self, _tokens, mask_BS, cache):
        logits = torch.zeros(1, 1, 300)
        logits[0, 0, next(self.ids)] = 1
        return type("Out", (), {"logits": logits})


def test_a_character_comes_when_its_last_token_does_and_a_stop_token_shows_nothing(run):
    *_, corpus = run
    ids = corpus.encode("—ï").tolist()
    assert len(ids) > 2, "each character takes several tokens"
    pieces = list(stream(Fixed(ids), corpus.tokenizer, "x", len(ids)))
    assert [p for p in pieces if p] == ["—", "ï"] and len(pieces) == len(ids)
    end = corpus.tokenizer.token_to_id("<|endoftext|>")
    assert list(stream(Fixed([*ids, end, *ids]), corpus.tokenizer, "x", 20, stop_tokens={end}))[-2:] == ["ï", ""]


def test_words_of_a_tokenizer_that_marks_spaces_keep_theirs():
    """Decoding the new tokens alone would drop the space in front of the first, as Llama's tokenizer does."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(["hello world text"] * 9, trainer)
    ids, prompt = (tokenizer.encode(text).ids for text in ("hello world text", "hello"))
    assert tokenizer.decode(ids[len(prompt) :]) == "world text"
    assert "".join(stream(Fixed(ids[len(prompt) :]), tokenizer, "hello", 2)) == " world text"


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_command_prints_prompt_and_continuation(run):
    folder, model, corpus = run
    result = invoke(folder, "--prompt", "text", "--tokens", 5)
    assert result.stdout == "text" + "".join(stream(model, corpus.tokenizer, "text", 5)) + "\n"
    assert result.exit_code == 0 and "tokens/s" in result.stderr and "experts:" not in result.stderr
    same = invoke(folder, "--prompt", "text", "--tokens", 5, "--prefill-chunk", 1)
    assert same.stdout == result.stdout


def test_command_samples_by_seed(run):
    options = ("--prompt", "text", "--temperature", 2, "--top-p", 0.99, "--tokens", 15)
    outs = [invoke(run[0], *options, "--seed", seed).stdout for seed in (0, 0, 1)]
    assert outs[0] == outs[1] != outs[2]


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_command_with_offloaded_experts_prints_the_same_and_what_was_moved(run, place):
    folder, *_ = run
    options = (folder, "--prompt", "text", "--tokens", 8)
    result = invoke(*options, "--offload", place, "--cache-experts", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout == invoke(*options).stdout
    assert "requests found theirs on the device" in result.stderr and "GB moved" in result.stderr


def test_stop_tokens_come_from_the_command_and_from_the_model(run):
    folder, model, corpus = run
    prompt = corpus.encode("text")
    new = model.generate(prompt[None], 20)[0, len(prompt) :].tolist()
    place = next(i for i in range(1, 20) if new[i] not in new[:i])
    shown = "text" + "".join(stream(model, corpus.tokenizer, "text", place)) + "\n"
    word = corpus.tokenizer.id_to_token(new[place])
    assert invoke(folder, "--prompt", "text", "--tokens", 20, "--stop", word).stdout == shown
    for found in (new[place], [299, new[place]]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
        assert invoke(folder, "--prompt", "text", "--tokens", 20).stdout == shown
    assert load(folder).stop_tokens == {299, new[place]}


@pytest.mark.parametrize("pieces", [["ab", "", "c"], []])
def test_command_prints_every_piece_once(run, monkeypatch, pieces):
    monkeypatch.setattr(generate_module, "stream", lambda *_, **__: iter(pieces))
    assert invoke(run[0], "--prompt", "text ").stdout == f"text {''.join(pieces)}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "99"], "99 new ones exceed the model's max_length of 30"),
        (["--prompt", ""], "the prompt is empty"),
        (["--top-p", "0", "--tokens", "5"], "top_p=0.0 in (0, 1]"),
        (["--stop", "naïve text"], "the tokenizer has no token 'naïve text'"),
        (["--device", "moon"], "device='moon' cannot be used"),
        (["--device", "meta"], "device='meta' cannot be used"),
    ],
)
def test_command_says_what_is_wrong(run, arguments, words):
    folder, *_ = run
    result = invoke(folder, *arguments)
    assert result.exit_code == 1 and words in result.output and not result.stdout
    assert "no checkpoint in" in invoke(folder / "none").output
    (folder / "tokenizer.json").unlink()
    result = invoke(folder)
    assert result.exit_code == 1 and "tokenizer.json is missing" in result.output


def test_a_model_of_transformers_is_read_as_it_is_and_converted(run, tmp_path):
    """Several files, and the tokenizer and end of the text that come with the model."""
    folder, model, _ = run
    save_hf(model, tmp_path / "hf", config=CONFIG, shard_bytes=100_000)
    (tmp_path / "hf/tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "hf/generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    options = ("--prompt", "text", "--tokens", 8)
    expected = invoke(folder, *options).stdout
    done = CliRunner().invoke(convert_app, [str(tmp_path / "hf"), str(tmp_path / "ours"), "--to", "guide"])
    assert done.exit_code == 0, done.output
    for source, more in (("hf", ()), ("ours", ()), ("ours", ("--offload", "disk", "--cache-experts", 3))):
        result = invoke(tmp_path / source, *options, *more)
        assert result.stdout == expected, result.output
        assert load(tmp_path / source).stop_tokens == {7, 8}
    refused = invoke(tmp_path / "hf", "--offload", "disk")
    assert refused.exit_code == 1 and "moe-guide convert" in refused.output
