"""Tensors by name, one at a time, from a folder of safetensors files or from a model in memory.

Files are mapped, not read: a tensor's bytes come in as they are copied out, and belong to the page cache. A pickle is
refused, since opening one runs whatever code it holds.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Meta(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """Where tensors come from."""

    tensors: dict[str, Meta]
    """Everything there is, by name."""

    def read(self, name: str) -> Tensor:
        """One tensor; it may share memory with the source, so do not write to it."""
        ...


class MemorySource:
    """The tensors of a state dict."""

    def __init__(self, state: Mapping[str, Tensor]):
        self._state = {name: tensor.detach() for name, tensor in state.items()}
        self.tensors = {name: Meta(tuple(t.shape), t.dtype) for name, t in self._state.items()}

    def read(self, name: str) -> Tensor:
        """The tensor itself."""
        return self._state[name]


class FolderSource:
    """The tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` lists.

    Args:
        folder: of the checkpoint.

    Raises:
        ValueError: there is no safetensors file (or only pickles), a shard is missing, a file is truncated or
            damaged, or the index and the files do not list the same tensors.
    """

    def __init__(self, folder: Path):
        self.folder, self._open = folder, {}
        listed = _weight_map(folder)
        self.tensors: dict[str, Meta] = {}
        self._file: dict[str, str] = {}
        for file in dict.fromkeys(listed.values()) if listed else [SINGLE]:
            for name, meta in self._scan(file).items():
                if name in self._file:
                    raise ValueError(f"{folder}: {name} is in both {self._file[name]} and {file}")
                self.tensors[name], self._file[name] = meta, file
        if listed and listed != self._file:
            lost = sorted(name for name in listed if self._file.get(name) != listed[name])
            stray = sorted(self._file.keys() - listed.keys())
            raise ValueError(
                f"{folder / INDEX} and its files disagree: not where the index says {shorten(lost)}; "
                f"in a file but not in the index {shorten(stray)}"
            )

    @property
    def files(self) -> list[Path]:
        """The safetensors files that hold the tensors."""
        return [self.folder / file for file in dict.fromkeys(self._file.values())]

    def read(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file."""
        file = self._file[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        return self._open[file].get_tensor(name)

    def _scan(self, file: str) -> dict[str, Meta]:
        path = self.folder / file
        try:
            with safe_open(path, framework="pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}
                kinds = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing: the checkpoint is incomplete") from error
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or damaged: {error}") from error
        unknown = sorted({dtype for _, dtype in kinds.values()} - _DTYPES.keys())
        if unknown:
            raise ValueError(f"{path} holds the type {', '.join(unknown)}, which is not supported")
        return {name: Meta(shape, _DTYPES[dtype]) for name, (shape, dtype) in kinds.items()}


class PrefixSource:
    """The tensors whose names begin with a prefix, which is cut off; the others keep their names."""

    def __init__(self, source: Source, prefix: str):
        self._names = {name.removeprefix(prefix): name for name in source.tensors}
        self._source = source
        self.tensors = {name: source.tensors[full] for name, full in self._names.items()}

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._source.read(self._names[name])


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: the file is missing, damaged, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def shorten(names: list[str], most: int = 8) -> str:
    """A few of many names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"[{', '.join(names[:most])}{more}]"


def _weight_map(folder: Path) -> dict[str, str]:
    """File by tensor name, from the index; empty for a single file."""
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ValueError(f"{folder / INDEX} has no weight_map")
        outside = sorted(file for file in set(listed.values()) if Path(file).name != file)
        if outside:
            raise ValueError(f"{folder / INDEX} points outside its folder: {shorten(outside)}")
        return listed
    if (folder / SINGLE).is_file():
        return {}
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} holds pickles only ({shorten(pickles, 3)}): reading one can run any code, so only safetensors "
            "are read. Save it again with transformers' save_pretrained, in a sandbox if you do not trust it"
        )
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")
