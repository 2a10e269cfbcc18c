"""Real text with no download: the Python standard library's own source, or any folder of text.

The text becomes token ids by a byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) trained on it, and every token
gets a class (keyword, name, string, ...) from Python's own ``tokenize``. The result is cached and memory-mapped.

B batch, S sequence, N tokens of a split.
"""

import hashlib
import io
import itertools
import json
import keyword
import os
import shutil
import sys
import sysconfig
import tempfile
import tokenize
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

CLASSES = ("other", "keyword", "name", "number", "string", "operator", "comment", "indentation", "space")
"""What a token is part of. "other": text that is not Python, or that ``tokenize`` rejects."""

END_OF_TEXT = "<|endoftext|>"
"""Token 0, between files."""

_FORMAT = "2"  # change it when the files in the cache change their meaning
# Generated tables: a tenth of the library that is nobody's prose.
_TABLES = {"encodings", "pydoc_data"}
_FSTRING_MIDDLE = getattr(tokenize, "FSTRING_MIDDLE", None)  # from Python 3.12 on
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", *_TABLES}


@dataclass(frozen=True)
class Split:
    """Token ids and token classes, memory-mapped."""

    tokens: Tensor
    """(N,) int32."""
    classes: Tensor
    """(N,) uint8 indices into :data:`CLASSES`."""

    def batch(self, batch_size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows of ``length + 1`` tokens, so that inputs and shifted targets have ``length`` each.

        Returns:
            Token ids (B, length + 1) int64, and the classes of the same tokens.

        Raises:
            ValueError: the split is shorter than one window.
        """
        starts_B1 = torch.randint(0, self._room(length), (batch_size, 1), generator=generator)
        return self._windows(starts_B1 + torch.arange(length + 1))

    def windows(self, batch_size: int, length: int, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The split from its start in windows that predict each token once, as :meth:`batch` returns them.

        Args:
            batch_size: windows per batch; the last batch may be smaller.
            length: predicted tokens per window; a shorter rest at the end is left out.
            limit: at most this many batches, their windows spread evenly over the split; None for all of it.
        """
        starts = torch.arange(0, self._room(length), length)
        if limit is not None and limit * batch_size < len(starts):
            starts = starts[torch.arange(limit * batch_size) * len(starts) // (limit * batch_size)]
        for starts_B in starts.split(batch_size):
            yield self._windows(starts_B[:, None] + torch.arange(length + 1))

    def _room(self, length: int) -> int:
        if len(self.tokens) <= length:
            raise ValueError(
                f"a window of {length} tokens and its target do not fit into a split of {len(self.tokens)}: "
                "shorten the sequence or give more text"
            )
        return len(self.tokens) - length

    def _windows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens[index].long(), self.classes[index].long()


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and the two splits of a text."""

    train: Split
    validation: Split
    tokenizer: Tokenizer
    files: int
    """Files that were read."""
    digest: str
    """Hash of text, split and tokenizer: equal for equal tokens."""
    skipped: dict[str, int]
    """Files that were not, by reason: "empty", "binary" (or not UTF-8), "unreadable"; "beyond max_bytes" if given."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> Tensor:
        """Token ids (N,) int64 of a text."""
        return torch.tensor(self.tokenizer.encode(text).ids, dtype=torch.int64)

    def decode(self, ids: Tensor) -> str:
        """The text of token ids (N,)."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def load_corpus(
    path: str | Path | None = None,
    *,
    tokenizer: str = "bpe",
    vocab_size: int = 1024,
    validation_fraction: float = 0.1,
    max_bytes: int | None = None,
    cache_dir: str | Path | None = None,
) -> Corpus:
    """Read, split and tokenize a text, or take the result from the cache.

    Whole files go to one split: in the order of a hash of their path, the same on every machine, files that fit into
    the validation share of the characters are taken for it. A single file is cut near its end instead.

    Args:
        path: a folder or file of text in UTF-8; the running Python's standard library when None (its tests aside).
        tokenizer: "bpe", or "bytes" for one token per byte (257 ids, whatever ``vocab_size`` says).
        vocab_size: number of ids of the BPE, at least 257.
        validation_fraction: share of the characters for validation, in (0, 1).
        max_bytes: take files, in an order decided by a hash of their path, as long as they fit into this size; None
            takes all.
        cache_dir: where to keep results; ``moe-guide/corpus`` in the user's cache folder when None.

    Raises:
        ValueError: an argument is out of range, or the path holds no text; the message counts what was skipped.
    """
    if tokenizer not in ("bpe", "bytes"):
        raise ValueError(f'tokenizer must be "bpe" or "bytes", got {tokenizer!r}')
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction must be in (0, 1), got {validation_fraction}")
    if tokenizer == "bpe" and vocab_size < 257:
        raise ValueError(f"vocab_size must be at least 257 (256 bytes and {END_OF_TEXT}), got {vocab_size}")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, or None for all, got {max_bytes}")
    root = Path(sysconfig.get_path("stdlib") if path is None else path).expanduser()
    texts, skipped = read_texts(root, max_bytes)
    size = 257 if tokenizer == "bytes" else vocab_size
    versions = [*sys.version_info[:2], tokenizers.__version__]  # newer Pythons see tokens inside f-strings
    key = hashlib.sha256(json.dumps([_FORMAT, CLASSES, versions, size, validation_fraction]).encode())
    for name, text in texts.items():
        key.update(f"{name}\0{len(text)}\0".encode())
        key.update(text.encode())
    digest = key.hexdigest()[:32]
    folder = _cache_root(cache_dir) / digest
    if not _is_whole(folder):
        _build(folder, texts, size, validation_fraction)
    sizes = json.loads((folder / "sizes.json").read_text())
    train, validation = (_open_split(folder, name, sizes[f"{name}.classes"]) for name in ("train", "validation"))
    trained = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Corpus(train, validation, trained, len(texts), digest, skipped)


def read_texts(root: Path, max_bytes: int | None = None) -> tuple[dict[str, str], dict[str, int]]:
    """Text by relative path, in the order of a hash of the path; and how many files were skipped, by reason.

    Hidden files and folders are left out, links to folders are not followed.

    Raises:
        ValueError: the path does not exist, or holds no text.
    """
    if not root.exists():
        raise ValueError(f"the corpus path {root} does not exist")
    skipped = {"empty": 0, "binary": 0, "unreadable": 0} | ({} if max_bytes is None else {"beyond max_bytes": 0})
    files = _find(root, skipped)
    texts, total = {}, 0
    for name in sorted(files, key=_hash):
        reason, text, size = "", "", 0
        try:
            size = files[name].stat().st_size
            if max_bytes is not None and total + size > max_bytes:
                reason = "beyond max_bytes"
            else:
                text = files[name].read_bytes().decode("utf-8-sig")
                reason = "binary" if "\0" in text else "" if text.strip() else "empty"
        except OSError:
            reason = "unreadable"
        except UnicodeDecodeError:
            reason = "binary"
        if reason:
            skipped[reason] += 1
        else:
            texts[name] = text
            total += size
    if not texts:
        counts = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise ValueError(f"no text in {root}: {len(files)} files found, skipped {counts}")
    return texts, skipped


def _find(root: Path, skipped: dict[str, int]) -> dict[str, Path]:
    """Candidates by relative path; folders that cannot be listed are counted as unreadable."""
    if not root.is_dir():
        return {root.name: root}
    library = root == Path(sysconfig.get_path("stdlib"))
    found = {}

    def refuse(error: OSError) -> None:
        skipped["unreadable"] += 1

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if not f.startswith(".") and not (library and f in _SKIPPED_FOLDERS)]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and (not library or name.endswith(".py")):
                found[path.relative_to(root).as_posix()] = path
    return found


def classify(text: str) -> bytearray:
    """The class of every character of a Python source; all "other" when ``tokenize`` rejects it."""
    classes = bytearray([CLASSES.index("space")]) * len(text)
    starts, position = [0], 0
    for line in io.StringIO(text):
        position += len(line)
        starts.append(position)
    indentation = CLASSES.index("indentation")
    for start, end in itertools.pairwise(starts):
        blank = len(text[start:end]) - len(text[start:end].lstrip(" \t"))
        classes[start : start + blank] = bytes([indentation]) * blank
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            kind = _class_of(token)
            if kind is not None:
                start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
                # The second brace of "{{" belongs to no token; a brace that does comes next and overwrites this.
                end += token.type == _FSTRING_MIDDLE and text[end : end + 1] in ("{", "}")
                classes[start:end] = bytes([kind]) * (end - start)
    except (tokenize.TokenError, SyntaxError):
        return bytearray([CLASSES.index("other")]) * len(text)
    return classes


def _class_of(token: tokenize.TokenInfo) -> int | None:
    kind = tokenize.tok_name[token.type]
    if kind == "NAME":
        return CLASSES.index("keyword" if keyword.iskeyword(token.string) else "name")
    if kind.startswith(("FSTRING", "TSTRING")):  # f-strings come in parts from Python 3.12 on
        return CLASSES.index("string")
    names = {"NUMBER": "number", "STRING": "string", "OP": "operator", "COMMENT": "comment"}
    return CLASSES.index(names[kind]) if kind in names else None


def _build(folder: Path, texts: dict[str, str], vocab_size: int, validation_fraction: float) -> None:
    """Write a complete folder under a temporary name, then rename it: readers see all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        parts = _split(texts, validation_fraction)
        tokenizer = _train_tokenizer(parts["train"].values(), vocab_size)
        tokenizer.save(str(work / "tokenizer.json"))
        for name, members in parts.items():
            with open(work / f"{name}.tokens", "wb") as tokens, open(work / f"{name}.classes", "wb") as classes:
                for file, text, encoding in _encode(tokenizer, members):
                    python = classify(text) if file.endswith(".py") else bytearray(len(text))
                    # The class of a token is that of its last character: " def" is a keyword, not a space.
                    kinds = bytes([python[end - 1] for _, end in encoding.offsets])
                    tokens.write(array("i", [*encoding.ids, 0]).tobytes())
                    classes.write(kinds + bytes([CLASSES.index("other")]))
        sizes = {path.name: path.stat().st_size for path in work.iterdir()}
        (work / "sizes.json").write_text(json.dumps(sizes))
        if folder.exists() and not _is_whole(folder):
            shutil.rmtree(folder)
        try:
            work.rename(folder)
        except OSError:
            if not _is_whole(folder):  # else another process was first, with the same result
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _encode(tokenizer: Tokenizer, texts: dict[str, str]) -> Iterator[tuple[str, str, Encoding]]:
    """Name, text and encoding; batches use every core, and small ones keep little in memory."""
    items = list(texts.items())
    for first in range(0, len(items), 64):
        batch = items[first : first + 64]
        encodings = tokenizer.encode_batch([text for _, text in batch])
        yield from ((name, text, encoding) for (name, text), encoding in zip(batch, encodings, strict=True))


def _split(texts: dict[str, str], fraction: float) -> dict[str, dict[str, str]]:
    if len(texts) == 1:
        [(name, text)] = texts.items()
        cut = text.rfind("\n", 0, int(len(text) * (1 - fraction))) + 1 or int(len(text) * (1 - fraction))
        return {"train": {name: text[:cut]}, "validation": {name: text[cut:]}}
    room = fraction * sum(map(len, texts.values()))
    validation = set()
    for name in sorted(texts, key=_hash):
        if len(texts[name]) <= room:
            validation.add(name)
            room -= len(texts[name])
    validation = validation or {min(texts, key=lambda name: len(texts[name]))}  # each file alone is more than its share
    return {
        "train": {name: text for name, text in texts.items() if name not in validation},
        "validation": {name: text for name, text in texts.items() if name in validation},
    }


def _train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _open_split(folder: Path, name: str, count: int) -> Split:
    tokens = torch.from_file(str(folder / f"{name}.tokens"), size=count, dtype=torch.int32)
    return Split(tokens, torch.from_file(str(folder / f"{name}.classes"), size=count, dtype=torch.uint8))


def _cache_root(cache_dir: str | Path | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-guide" / "corpus"


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
