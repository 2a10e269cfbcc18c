"""A checkpoint of one kind turned into the other, folder to folder, without the model in memory."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guide_code.checkpoint import latest_checkpoint, load_config
from guide_code.config import ModelConfig, to_dict
from guide_code.conversion.loading import assemble_, empty_model, own_tensors, stored_dtype, tied_head
from guide_code.conversion.quantized import plain_source
from guide_code.conversion.reader import FolderSource, PrefixSource, Source, read_json
from guide_code.conversion.registry import differences, family_of, read_config, write_config
from guide_code.conversion.table import Plan, check_plan, make_plan
from guide_code.conversion.writer import Entry, new_folder, write_checkpoint, write_texts

SHARD_BYTES = 5_000_000_000
HF_CONFIG = "hf_config.json"
CARRIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files that are copied as they are."""


class Conversion(NamedTuple):
    """A conversion that is ready to run: everything has been checked, nothing written."""

    entries: list[Entry]
    texts: dict[str, str]
    """JSON files for the folder of the tensors, by name."""
    run_texts: dict[str, str]
    """For the folder above it."""
    subfolder: str
    """Where the tensors go, in the destination."""
    carried: list[Path]
    plan: str
    """What the result depends on."""
    ignored: dict[str, str]


def kind_of(folder: Path) -> str:
    """ "guide" for a run of ours or one of its checkpoints, "hf" for a folder of transformers.

    Raises:
        ValueError: it is neither.
    """
    if (folder / "step.json").is_file() or any(folder.glob("step-*/step.json")):
        return "guide"
    if (folder / "config.json").is_file():
        return "hf"
    raise ValueError(f"{folder} has neither a config.json nor checkpoints called step-N")


def prepare(source: Path, to: str, *, shard_bytes: int = SHARD_BYTES) -> Conversion:
    """Read configurations and headers, and check that everything fits.

    Args:
        source: folder of the checkpoint.
        to: "guide" or "hf", the other kind than that of the source.
        shard_bytes: most bytes of one file.

    Raises:
        ValueError: as :func:`guide_code.convert.load_hf`, or the source is of that kind already.
    """
    kind = kind_of(source)
    if kind == to:
        raise ValueError(f"{source} is of the kind {to!r} already")
    return _to_guide(source, shard_bytes) if to == "guide" else _to_hf(source, shard_bytes)


def run(
    conversion: Conversion,
    destination: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> int:
    """Write what was prepared; go on where a killed run of the same conversion stopped.

    Args:
        conversion: from :func:`prepare`.
        destination: a folder that does not exist yet.
        shard_bytes: as in :func:`prepare`.
        on_bytes: told of the bytes of every tensor.

    Returns:
        Bytes that the run before had finished.

    Raises:
        ValueError: the destination exists, or another process is writing it.
    """
    with new_folder(destination, keep=True) as work:
        inner = work / conversion.subfolder
        kept = write_checkpoint(
            inner, conversion.entries, max_bytes=shard_bytes, plan=conversion.plan, on_bytes=on_bytes
        )
        write_texts(inner, conversion.texts)
        write_texts(work, conversion.run_texts)
        for path in conversion.carried:
            shutil.copyfile(path, work / path.name)
    return kept


def open_hf(folder: Path, dtype: torch.dtype | None = None) -> tuple[Source, dict[str, Any], list[Path]]:
    """Tensors, config.json and files of a checkpoint of transformers.

    Quantised tensors look like plain ones. Of a model that also sees, only the language model is looked at.
    """
    hf_config, files = read_json(folder / "config.json"), FolderSource(folder)
    source = plain_source(files, hf_config.get("quantization_config"), dtype or torch.bfloat16)
    if "text_config" in hf_config:
        family = family_of(hf_config["text_config"])
        hf_config = hf_config["text_config"] | {"architectures": [family.architecture]}
        source = PrefixSource(source, "language_model.")
    return source, hf_config, files.files


def match(
    hf_config: dict[str, Any], config: ModelConfig, ours: dict[str, Tensor], source: Source
) -> tuple[Plan, dict[str, str]]:
    """Which tensor of a checkpoint is which part of ours, and why the others are left out.

    Raises:
        ValueError: as :func:`guide_code.conversion.table.check_plan`.
    """
    family = family_of(hf_config)
    plan = make_plan(family.table, ours, source.tensors.keys())
    return plan, check_plan(plan, ours, source.tensors, {**family.ignored(hf_config), **tied_head(ours, source)})


def hf_entries(hf_config: dict[str, Any], ours: dict[str, Tensor], source: Source) -> list[Entry]:
    """Every tensor of a checkpoint of transformers, made from ours when it is written."""
    entries = []
    for name, piece in make_plan(family_of(hf_config).table, ours).by_theirs.items():
        like = piece.form.to_theirs(piece.region(ours[piece.ours].to("meta")))

        def make(piece=piece) -> Tensor:
            return piece.form.to_theirs(piece.region(source.read(piece.ours)))

        entries.append(Entry(name, tuple(like.shape), source.tensors[piece.ours].dtype, make))
    return entries


def hf_config_for(
    config: ModelConfig, known: dict[str, Any], dtype: torch.dtype, family: str | None = None
) -> dict[str, Any]:
    """A config.json: the one that the model came with where it still tells the truth, else a new one.

    Raises:
        ValueError: the family, or any family when None is given, does not compute this configuration.
    """
    result = dict(known)
    if family or not known or differences(read_config(known), config):
        result = write_config(config, family)
    result.pop("quantization_config", None)  # what is written is dequantised
    if "num_nextn_predict_layers" in result:
        result["num_nextn_predict_layers"] = 0  # nor are layers written that predict further tokens
    result["torch_dtype" if "torch_dtype" in result else "dtype"] = str(dtype).removeprefix("torch.")
    return result


def _to_guide(folder: Path, shard_bytes: int) -> Conversion:
    source, hf_config, files = open_hf(folder)
    config = read_config(hf_config)
    ours = own_tensors(empty_model(config))
    plan, ignored = match(hf_config, config, ours, source)
    dtypes = {
        name: stored_dtype(plan, name, source) if isinstance(like, torch.nn.Parameter) else like.dtype
        for name, like in ours.items()
    }
    scratch: list[Tensor] = []  # made when it is needed, used by one tensor after the other

    def make(name: str) -> Tensor:
        if not scratch:
            most = max(like.numel() * dtypes[name].itemsize for name, like in ours.items())
            scratch.append(torch.empty(most, dtype=torch.uint8))
        size = ours[name].numel() * dtypes[name].itemsize
        out = scratch[0][:size].view(dtypes[name]).view(ours[name].shape)
        return assemble_(out, plan.by_ours[name], source)

    entries = [
        Entry(name, tuple(like.shape), dtypes[name], functools.partial(make, name)) for name, like in ours.items()
    ]
    return Conversion(
        entries,
        {"config.json": json.dumps(to_dict(config), indent=2), "step.json": json.dumps({"step": 0})},
        {HF_CONFIG: json.dumps(hf_config, indent=2)},
        "step-00000000",
        carried_files(folder),
        _fingerprint("guide", shard_bytes, [*files, folder / "config.json"]),
        ignored,
    )


def _to_hf(folder: Path, shard_bytes: int) -> Conversion:
    step = latest_checkpoint(folder) if not (folder / "step.json").is_file() else folder
    run_folder = step.parent
    config, source = load_config(step), FolderSource(step)
    ours = own_tensors(empty_model(config))
    if source.tensors.keys() != ours.keys():
        lost, stray = sorted(ours.keys() - source.tensors.keys()), sorted(source.tensors.keys() - ours.keys())
        raise ValueError(f"{step} does not match its config.json: missing {lost}, unexpected {stray}")
    known = read_json(run_folder / HF_CONFIG) if (run_folder / HF_CONFIG).is_file() else {}
    hf_config = hf_config_for(config, known, source.tensors["embedding.weight"].dtype)
    return Conversion(
        hf_entries(hf_config, ours, source),
        {"config.json": json.dumps(hf_config, indent=2, sort_keys=True)},
        {},
        ".",
        carried_files(run_folder),
        _fingerprint("hf", shard_bytes, [*source.files, step / "config.json"]),
        {},
    )


def carried_files(folder: Path) -> list[Path]:
    """The tokenizer's and other files of a checkpoint that are copied along."""
    return [folder / name for name in CARRIED if (folder / name).is_file()]


def _fingerprint(to: str, shard_bytes: int, files: list[Path]) -> str:
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return json.dumps([to, shard_bytes, facts])
