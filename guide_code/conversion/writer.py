"""Write a checkpoint tensor by tensor: never more than one of them in memory, a name only for what is complete.

A folder is written beside its destination and renamed at the end. Finished files are noted with their size and hash,
so that a run that was killed goes on after them. The format: https://huggingface.co/docs/safetensors, "Format".
"""

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guide_code.conversion.reader import INDEX, SINGLE

_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_PROGRESS = "progress.json"


class Entry(NamedTuple):
    """A tensor to write; ``make`` is called when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


def write_tensors(path: Path, entries: list[Entry], on_bytes: Callable[[int], None]) -> str:
    """One safetensors file, streamed; returns its SHA-256."""
    offset = 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        span = [offset, offset + entry.size]
        header[entry.name] = {"dtype": _TYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        offset += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(text)
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as helper:
        _write_all(file, memoryview(text))
        for entry in entries:
            tensor = entry.make().detach().cpu().contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry.name
            if entry.size:
                data = memoryview((ctypes.c_char * entry.size).from_address(tensor.data_ptr())).cast("B")
                hashed = helper.submit(digest.update, data)  # both let other threads run
                _write_all(file, data)
                hashed.result()
            on_bytes(entry.size)
        os.fsync(file.fileno())  # or a power cut after the rename could leave a complete name with half the bytes
    return digest.hexdigest()


def split(entries: list[Entry], max_bytes: int) -> dict[str, list[Entry]]:
    """Entries by file name, in order, each file up to ``max_bytes`` (a larger tensor gets a file of its own)."""
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.size > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.size
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": part for i, part in enumerate(files, start=1)}


def write_checkpoint(
    folder: Path,
    entries: list[Entry],
    *,
    max_bytes: int,
    plan: str = "",
    on_bytes: Callable[[int], None] = lambda count: None,
) -> int:
    """Write the tensors into ``folder``, and an index when it takes several files.

    Args:
        folder: may hold what a killed run of the same plan has finished, which is kept.
        entries: all tensors.
        max_bytes: of one file.
        plan: what the tensors depend on; when it differs from that of the run before, nothing is kept.
        on_bytes: told of the bytes of every tensor, kept ones included.

    Returns:
        The number of bytes that were kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files, kept = split(entries, max_bytes), 0
    done = _finished(folder, plan)
    for name, part in files.items():
        path, size = folder / name, sum(entry.size for entry in part)
        if name in done and path.is_file() and done[name] == _digest(path):
            kept += size
            on_bytes(size)
            continue
        partial = folder / f"{name}.partial"
        done[name] = write_tensors(partial, part, on_bytes)
        partial.replace(path)
        _write_text(folder / _PROGRESS, json.dumps({"plan": plan, "files": done}, indent=2))
    if len(files) > 1:
        where = {entry.name: name for name, part in files.items() for entry in part}
        index = {"metadata": {"total_size": sum(entry.size for entry in entries)}, "weight_map": where}
        _write_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True))
    (folder / _PROGRESS).unlink(missing_ok=True)
    return kept


@contextlib.contextmanager
def new_folder(destination: Path, *, keep: bool = False) -> Iterator[Path]:
    """A folder to fill; it gets the name ``destination`` when the block ends well.

    Args:
        destination: must not exist, or be an empty folder.
        keep: go on with what a killed run has left; a block that fails leaves the folder for the next run.

    Raises:
        ValueError: the destination exists, or another process is writing to it.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists already; give another path, or delete it first")
    work = destination.parent / f".writing-{destination.name}"
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _locked(work.with_suffix(f"{work.suffix}.lock"), destination):
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
        work.mkdir(exist_ok=True)
        try:
            yield work
        except BaseException:
            if not keep:
                shutil.rmtree(work, ignore_errors=True)
            raise
        if destination.is_dir():
            destination.rmdir()
        work.rename(destination)


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Text files by name, each complete or not there."""
    for name, text in texts.items():
        _write_text(folder / name, text)


def _write_all(file: RawIOBase, data: memoryview) -> None:
    while len(data):  # one call writes 2 GiB at most
        data = data[file.write(data) :]


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _finished(folder: Path, plan: str) -> dict[str, str]:
    """Hash by name of the files that a run before has finished; other leftovers are deleted."""
    done: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, KeyError):
        noted = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))
        if plan and noted["plan"] == plan:
            done = dict(noted["files"])
    for path in folder.glob("*.safetensors*"):
        if path.name not in done:
            path.unlink()
    return done


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path, destination: Path) -> Iterator[None]:
    """One writer at a time. The lock goes when its process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows: two writers there are the user's affair
        yield
        return
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process is writing {destination}") from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
