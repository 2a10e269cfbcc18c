"""Experts on disk: a folder with one safetensors file per layer, complete or not there at all.

Files are mapped, not read: an expert's bytes come in as they are copied out, and belong to the page cache. The format:
https://huggingface.co/docs/safetensors, "Format".
"""

import contextlib
import errno
import filecmp
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from guide_code.experts.expert_cache import MemoryStore as MemoryStore  # users import it from here

_KEY = "moe_guide_experts"


class MappedStore(MemoryStore):
    """The same over tensors that are mapped from files: reading costs page cache, not memory. It cannot be changed."""


def build_store(folder: Path, layers: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write the experts of some layers, each expert's tensors side by side, to be read by :func:`open_store`.

    The folder appears under its name when it is complete. A second process that builds the same store at the same
    time finds it there, equal to its own, and is content.

    Args:
        folder: to make.
        layers: by the name of a layer, the stacked weights (E, ...) of its experts by name, as in a state dict.

    Raises:
        ValueError: weights have no data, disagree about the number of experts, or the folder holds another store.
        OSError: it cannot be written; the message says where.
    """
    for name, tensors in layers.items():
        lost = sorted(field for field, tensor in tensors.items() if tensor.is_meta)
        if lost:
            raise ValueError(f"{name}: {', '.join(lost)} on the meta device hold no data that could be stored")
    with _work_folder(folder) as work:
        for name, tensors in layers.items():
            store = MemoryStore({field: tensor.detach().cpu().contiguous() for field, tensor in tensors.items()})
            each = {f"{e}.{field}": t for e in range(store.num_experts) for field, t in store.read(e).items()}
            file = work / f"{name}.safetensors"
            save_file(each, file, metadata={_KEY: json.dumps(_facts(store))})
            _flush(file)
        _flush(work)
        try:
            work.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if not _equal(work, folder):
                raise ValueError(f"{folder} holds other files: delete it, or give another folder") from error
    _flush(folder.parent)


def open_store(folder: Path, layer: str) -> MappedStore:
    """The experts of one layer. Everything that could be missing or wrong is looked for now, not at the first token.

    Raises:
        ValueError: the file is missing, truncated or no store, or experts lack tensors or have some of another dtype
            or shape; the message names file, experts and tensors.
    """
    path = folder / f"{layer}.safetensors"
    try:
        file: Any = safe_open(path, framework="pt")
        facts = json.loads((file.metadata() or {}).get(_KEY, "null"))
        found = {name: file.get_slice(name) for name in file.keys()}
        kinds = {name: (part.get_shape(), part.get_dtype()) for name, part in found.items()}
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: build the store again") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}): build the store again") from error
    if facts is None:
        raise ValueError(f"{path} is a safetensors file, but not one that build_store wrote")
    problems, wanted = [], set()
    for expert in range(facts["num_experts"]):
        for field, (shape, dtype) in facts["fields"].items():
            name = f"{expert}.{field}"
            wanted.add(name)
            if name not in kinds:
                problems.append(f"expert {expert} lacks {field}")
            elif kinds[name] != (shape, dtype):
                problems.append(f"{field} of expert {expert} is {kinds[name]}, not {(shape, dtype)}")
    problems += [f"{name} is unknown" for name in sorted(kinds.keys() - wanted)]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{path}: {'; '.join(problems[:5])}{more}: build the store again")
    return MappedStore(
        {field: [file.get_tensor(f"{e}.{field}") for e in range(facts["num_experts"])] for field in facts["fields"]}
    )


@contextlib.contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """A folder of this process alone beside the one to make, gone at the end unless it was renamed."""
    work = folder.with_name(f".writing-{folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise OSError(
            error.errno, f"no expert store can be written to {folder.parent} ({error.strerror}): give another folder"
        ) from error
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _facts(store: MemoryStore) -> dict[str, Any]:
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if store.dtype not in names:
        raise ValueError(f"a store takes {', '.join(str(dtype) for dtype in names)}, not {store.dtype}")
    fields = {field: [list(shape), names[store.dtype]] for field, shape in store.shapes.items()}
    return {"num_experts": store.num_experts, "fields": fields}


def _equal(a: Path, b: Path) -> bool:
    names = {path.name for path in a.iterdir()}
    return names == {path.name for path in b.iterdir()} and all(
        filecmp.cmp(a / name, b / name, shallow=False) for name in names
    )


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
