import os
import threading

import pytest
import torch

from guide_code import corpus as corpus_module
from guide_code.corpus import CLASSES, classify, load_corpus, read_texts

SOURCE = '''# naïve comment
import os


def größe(x, y=1.5):
    """A docstring
    in two lines."""
    if x >= 2:
        return f"{x} é" + 'b'
'''


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "text"
    (root / "sub").mkdir(parents=True)
    for number in range(12):
        (root / "sub" / f"file{number}.py").write_text(SOURCE.replace("größe", f"größe{number}"), encoding="utf-8")
    return root


def load(folder, tmp_path, **options):
    return load_corpus(folder, cache_dir=tmp_path / "cache", **{"vocab_size": 300, **options})


def classes_of(text, word):
    start = text.index(word)
    return {CLASSES[kind] for kind in classify(text)[start : start + len(word)]}


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("# naïve comment", "comment"), ("import", "keyword"), ("größe", "name"), ("1.5", "number"),
        ("(", "operator"), (">=", "operator"), ('"""A docstring\n    in two lines."""', "string"), (" é", "string"),
        ("'b'", "string"), ("        return"[:8], "indentation"), ("return", "keyword"), ("\n", "space"),
    ],
)  # fmt: skip
def test_every_character_has_the_class_of_its_token(word, kind):
    assert classes_of(SOURCE, word) == {kind}


def test_doubled_braces_are_string():
    text = 'f"a{{b}}c{{"'
    assert {CLASSES[kind] for kind in classify(text)} == {"string"}


@pytest.mark.parametrize("text", ["def f(:\n  'unclosed", "x = (\n", "if 1:\n    a\n  b\n", '"""'])
def test_text_that_tokenize_rejects_is_other(text):
    assert {CLASSES[kind] for kind in classify(text)} == {"other"}


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_text_survives_the_round_trip_and_classes_stay_aligned(folder, tmp_path, tokenizer):
    corpus = load(folder, tmp_path, tokenizer=tokenizer)
    assert corpus.decode(corpus.encode(SOURCE)) == SOURCE
    text = corpus.decode(corpus.train.tokens).split("<|endoftext|>")
    assert text.pop() == "" and all(part.startswith("# naïve") for part in text)
    assert len(corpus.train.tokens) == len(corpus.train.classes)
    file, start = text[0], text[0].index("import")
    before = len(corpus.encode(file[:start].rstrip("\n"))) + 1  # the line break before it
    inside = len(corpus.encode("import"))
    assert corpus.decode(corpus.train.tokens[before : before + inside]) == "import"
    kinds = corpus.train.classes[before - 1 : before + inside]
    assert [CLASSES[kind] for kind in kinds] == ["space", *["keyword"] * inside]


def test_a_token_that_begins_with_a_space_has_the_class_of_its_word(tmp_path):
    (tmp_path / "a.py").write_text("x = None\n" * 99)
    split = (corpus := load(tmp_path / "a.py", tmp_path)).train
    kinds = {corpus.decode(token[None]): CLASSES[kind] for token, kind in zip(split.tokens, split.classes, strict=True)}
    assert kinds == {"x": "name", " =": "operator", " None": "keyword", "\n": "space", "<|endoftext|>": "other"}


def test_the_split_is_by_file_and_the_same_everywhere(folder, tmp_path):
    corpus = load(folder, tmp_path, validation_fraction=0.3)
    parts = [corpus.decode(split.tokens) for split in (corpus.train, corpus.validation)]
    for number in range(12):
        assert sum(f"größe{number}(" in part for part in parts) == 1
    again = load_corpus(folder, cache_dir=tmp_path / "other", vocab_size=300, validation_fraction=0.3)
    assert torch.equal(again.train.tokens, corpus.train.tokens)
    assert again.tokenizer.to_str() == corpus.tokenizer.to_str()


@pytest.mark.parametrize("max_bytes", [None, 9000, 20_000])
def test_the_validation_share_holds_whatever_is_taken(tmp_path, max_bytes):
    (tmp_path / "text").mkdir()
    for number in range(100):
        (tmp_path / f"text/{number}.txt").write_text(f"{number} " + "words " * (10 + 3 * number % 100))
    corpus = load(tmp_path / "text", tmp_path, tokenizer="bytes", validation_fraction=0.2, max_bytes=max_bytes)
    sizes = [len(corpus.train.tokens), len(corpus.validation.tokens)]
    assert sizes[1] / sum(sizes) == pytest.approx(0.2, abs=0.05)
    if max_bytes is not None:
        assert 0.9 * max_bytes < sum(sizes) - corpus.files <= max_bytes
        assert corpus.skipped["beyond max_bytes"] == 100 - corpus.files


def test_one_big_file_does_not_become_the_validation_split(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / f"text/small{number}.txt").write_text("a few words\n" * 5)
    first = min((f"big{number}.txt" for number in range(99)), key=corpus_module._hash)
    (tmp_path / "text" / first).write_text("generated table\n" * 100)
    corpus = load(tmp_path / "text", tmp_path, tokenizer="bytes")
    assert "generated" not in corpus.decode(corpus.validation.tokens)


def test_limited_windows_are_spread_over_the_split(folder, tmp_path):
    split = load(folder, tmp_path, tokenizer="bytes").train
    starts = [row[0] for batch, _ in split.windows(2, 8) for row in batch.tolist()]
    few = [row.tolist() for batch, _ in split.windows(2, 8, limit=3) for row in batch]
    places = range(0, len(split.tokens) - 8, 8)
    assert few == [split.tokens[places[i * len(starts) // 6] :][:9].tolist() for i in range(6)]
    assert len(places) == len(starts) and 6 * 8 < len(split.tokens) // 2


def test_batches_are_windows_and_depend_on_the_generator_only(folder, tmp_path):
    split = load(folder, tmp_path).train
    tokens, classes = split.batch(4, 16, torch.Generator().manual_seed(3))
    again, _ = split.batch(4, 16, torch.Generator().manual_seed(3))
    assert tokens.shape == classes.shape == (4, 17) and tokens.dtype == torch.int64 and torch.equal(tokens, again)
    text = split.tokens.tolist()
    for row in tokens.tolist():
        assert any(text[start : start + 17] == row for start in range(len(text)))
    predicted = [t for batch, _ in split.windows(3, 16) for row in batch.tolist() for t in row[1:]]
    assert predicted == text[1 : 1 + len(predicted)] and len(text) - 1 - len(predicted) < 16
    assert sum(len(batch) for batch, _ in split.windows(2, 8, limit=2)) == 4
    with pytest.raises(ValueError, match=f"window of 9999 tokens .* split of {len(text)}"):
        split.batch(1, 9999, torch.Generator())


def test_a_warm_load_builds_nothing_and_a_changed_file_is_seen(folder, tmp_path, monkeypatch):
    first = load(folder, tmp_path)
    monkeypatch.setattr(corpus_module, "_build", lambda *_: pytest.fail("built again"))
    assert torch.equal(load(folder, tmp_path).train.tokens, first.train.tokens)
    monkeypatch.setattr(corpus_module.sys, "version_info", (3, 99, 0, "final", 0))  # its tokenize may differ
    with pytest.raises(pytest.fail.Exception, match="built again"):
        load(folder, tmp_path)
    monkeypatch.undo()
    (folder / "sub/file0.py").write_text("x = 12345\n" * 50)
    assert "12345" in "".join(load(folder, tmp_path).decode(s.tokens) for s in _splits(load(folder, tmp_path)))


def _splits(corpus):
    return corpus.train, corpus.validation


def test_a_truncated_cache_is_rebuilt(folder, tmp_path):
    first = load(folder, tmp_path)
    expected = first.train.tokens.clone()
    [victim] = (tmp_path / "cache").glob("*/train.tokens")
    del first
    os.truncate(victim, victim.stat().st_size - 8)
    assert torch.equal(load(folder, tmp_path).train.tokens, expected)


def test_two_at_once_are_safe_and_leave_no_rubbish(folder, tmp_path):
    failures = []

    def work():
        try:
            load(folder, tmp_path)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    [t.start() for t in threads], [t.join(60) for t in threads]
    assert not failures and len(list((tmp_path / "cache").iterdir())) == 1


def test_bad_files_are_skipped_with_a_count(folder, tmp_path, monkeypatch):
    (folder / "empty.txt").write_text(" \n")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\x00")
    (folder / "nul.txt").write_bytes(b"a\0b")
    (folder / ".hidden").write_text("no")
    (folder / "locked.txt").write_text("secret")
    read = corpus_module.Path.read_bytes

    def refuse(path):
        if path.name == "locked.txt":
            raise PermissionError
        return read(path)

    monkeypatch.setattr(corpus_module.Path, "read_bytes", refuse)
    (folder / "broken.txt").symlink_to("nowhere")
    (folder / ".git").mkdir()
    (folder / ".git/config").write_text("no")
    corpus = load(folder, tmp_path)
    assert corpus.skipped == {"empty": 1, "binary": 2, "unreadable": 2} and corpus.files == 12


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.py").write_bytes("\ufeffimport os\n".encode())
    assert read_texts(tmp_path)[0] == {"a.py": "import os\n"}


def test_an_empty_result_names_the_folder_and_the_counts(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(ValueError, match=r"no text in .*2 files found, skipped 1 empty, 1 binary, 0 unreadable"):
        load_corpus(tmp_path)
    with pytest.raises(ValueError, match=r"corpus path .*nowhere does not exist"):
        load_corpus(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokenizer": "words"}, "tokenizer must be"),
        ({"vocab_size": 100}, "vocab_size must be at least 257"),
        ({"validation_fraction": 1.0}, "validation_fraction must be in"),
        ({"max_bytes": 0}, "max_bytes must be at least 1"),
        ({"max_bytes": 10}, "no text .* 12 beyond max_bytes"),
    ],
)
def test_bad_arguments_are_named(options, words, folder):
    with pytest.raises(ValueError, match=words):
        load_corpus(folder, **options)


def test_a_single_file_is_cut_near_its_end(tmp_path):
    (tmp_path / "poem.txt").write_text("a line of verse\n" * 200)
    corpus = load(tmp_path / "poem.txt", tmp_path, tokenizer="bytes")
    assert len(corpus.validation.tokens) == pytest.approx(0.1 * 200 * 16, abs=20)
    assert {CLASSES[k] for k in corpus.train.classes.unique()} == {"other"}


def test_the_standard_library_is_there_without_a_download(tmp_path):
    texts, skipped = read_texts(corpus_module.Path(corpus_module.sysconfig.get_path("stdlib")), max_bytes=200_000)
    assert skipped["binary"] == 0 and sum(map(len, texts.values())) >= 190_000
    corpus = load_corpus(max_bytes=200_000, cache_dir=tmp_path)
    assert corpus.files == len(texts)
    seen = torch.bincount(corpus.train.classes.long(), minlength=len(CLASSES))
    assert all(seen[CLASSES.index(kind)] > 50 for kind in ("keyword", "name", "string", "operator", "indentation"))
