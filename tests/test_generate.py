import pytest
import torch
from typer.testing import CliRunner

from guide_code import generate as generate_module
from guide_code.build import build_model
from guide_code.checkpoint import save_checkpoint
from guide_code.config import override
from guide_code.corpus import load_corpus
from guide_code.generate import app, stream
from guide_code.presets import tiny
from guide_code.train import TrainConfig, make_optimizer

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

    class Fixed(torch.nn.Module):
        max_length = 30

        def __init__(self, ids):
            super().__init__()
            self.ids, self.weight = iter(ids), torch.nn.Parameter(torch.zeros(1))

        def make_cache(self, *_):
            return None

        def forward(self, _tokens, cache):
            logits = torch.zeros(1, 1, 300)
            logits[0, 0, next(self.ids)] = 1
            return type("Out", (), {"logits": logits})

    ids = corpus.encode("—ï").tolist()
    assert len(ids) > 2, "each character takes several tokens"
    assert [p for p in stream(Fixed(ids), corpus.tokenizer, "x", len(ids)) if p] == ["—", "ï"]


def test_command_prints_prompt_and_continuation(run):
    folder, model, corpus = run
    result = CliRunner().invoke(app, [str(folder), "--prompt", "text", "--tokens", "5"])
    assert result.stdout == "text" + "".join(stream(model, corpus.tokenizer, "text", 5)) + "\n"
    assert result.exit_code == 0 and "tokens/s" in result.stderr


@pytest.mark.parametrize("pieces", [["ab", "", "c"], []])
def test_command_prints_every_piece_once(run, monkeypatch, pieces):
    monkeypatch.setattr(generate_module, "stream", lambda *_: iter(pieces))
    assert CliRunner().invoke(app, [str(run[0]), "--prompt", "text "]).stdout == f"text {''.join(pieces)}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "99"], "99 new ones exceed the model's max_length of 30"),
        (["--prompt", ""], "the prompt is empty"),
    ],
)
def test_command_says_what_is_wrong(run, arguments, words):
    folder, *_ = run
    result = CliRunner().invoke(app, [str(folder), *arguments])
    assert result.exit_code == 1 and words in result.output and not result.stdout
    assert "no checkpoint in" in CliRunner().invoke(app, [str(folder / "none")]).output
    (folder / "tokenizer.json").unlink()
    result = CliRunner().invoke(app, [str(folder)])
    assert result.exit_code == 1 and "tokenizer.json is missing" in result.output
