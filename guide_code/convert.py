"""Checkpoints of transformers in and out: ``load_hf``, ``save_hf``, and ``moe-guide convert SRC DST --to guide``.

Each family has one table of names, in ``guide_code/conversion/families``, which is read in both directions.
"""

import json
import shutil
import time
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from torch import nn

from guide_code.config import ModelConfig
from guide_code.conversion.folders import (
    SHARD_BYTES,
    carried_files,
    hf_config_for,
    hf_entries,
    kind_of,
    match,
    open_hf,
    prepare,
    run,
)
from guide_code.conversion.loading import Origin, empty_model, fill_, own_tensors
from guide_code.conversion.reader import MemorySource
from guide_code.conversion.registry import read_config
from guide_code.conversion.upcycle import upcycle as upcycle  # users import it from here
from guide_code.conversion.writer import new_folder, write_checkpoint, write_texts
from guide_code.transformer import Transformer


def load_hf(path_or_model: str | Path | nn.Module, *, dtype: torch.dtype | None = None) -> Transformer:
    """A model of transformers as a :class:`Transformer` with the same logits.

    Memory stays within the model and its largest tensor: weights are read one at a time, straight into their place.

    Args:
        path_or_model: a folder with ``config.json`` and safetensors files, the name ``owner/name`` of a repository
            on the hub, or a model in memory.
        dtype: of the parameters; None keeps that of the checkpoint, bfloat16 where it is quantised.

    Returns:
        The model in evaluation mode. ``model.origin`` has its configuration, ``config.json``, and what was ignored.

    Raises:
        ValueError: the family or a field of config.json is not supported, a tensor is missing, unexpected or of
            another shape, a file is missing or damaged, or there are only pickles.
    """
    if isinstance(path_or_model, nn.Module):
        their_config: Any = path_or_model.config
        hf_config, source, carried = their_config.to_dict(), MemorySource(path_or_model.state_dict()), ()
    else:
        folder = _local(path_or_model)
        source, hf_config, _ = open_hf(folder, dtype)
        carried = tuple(carried_files(folder))
    config = read_config(hf_config)
    model = empty_model(config)
    plan, ignored = match(hf_config, config, own_tensors(model), source)
    fill_(model, plan, source, dtype)
    model.__dict__["origin"] = Origin(config, hf_config, ignored, carried)
    return model.eval()


def save_hf(
    model: Transformer,
    path: str | Path,
    *,
    config: ModelConfig | None = None,
    family: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model so that transformers loads it: config.json and safetensors files, with an index when several.

    The files of the tokenizer come along when the model was loaded from a folder that still has them.

    Args:
        model: its weights are written as they are.
        path: a folder that does not exist yet.
        config: what the model was built from; not needed for a model from :func:`load_hf`.
        family: ``model_type`` to write; None: the one that the model was loaded from, or the first that computes the
            same.
        shard_bytes: most bytes of one file.

    Raises:
        ValueError: the family, or every one of them, computes something else, or the folder exists.
    """
    origin: Origin | None = model.__dict__.get("origin")
    config = config or (origin.config if origin else None)
    if config is None:
        raise ValueError("config=None: give the ModelConfig that the model was built from")
    ours = own_tensors(model)
    known = origin.hf_config if origin else {}
    hf_config = hf_config_for(config, known, ours["embedding.weight"].dtype, family)
    entries = hf_entries(hf_config, ours, MemorySource(ours))
    with new_folder(Path(path)) as work:
        write_checkpoint(work, entries, max_bytes=shard_bytes)
        write_texts(work, {"config.json": json.dumps(hf_config, indent=2, sort_keys=True)})
        for file in origin.carried if origin else ():
            if file.is_file():
                shutil.copyfile(file, work / file.name)


def _local(path: str | Path) -> Path:
    """The folder itself, or the one into which a repository of the hub was downloaded: no pickles, no code."""
    folder = Path(path).expanduser()
    if folder.is_dir() or str(path).count("/") != 1 or folder.parent.is_dir():
        kind_of(folder)
        return folder
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "tokenizer.model", "*.txt", "*.jinja"]
    return Path(snapshot_download(str(path), allow_patterns=patterns))


class Kind(StrEnum):
    """Of a checkpoint folder."""

    hf = "hf"
    guide = "guide"


app = typer.Typer(add_completion=False)


@app.command()
def main(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a checkpoint, of transformers or ours.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make.")],
    to: Annotated[Kind, typer.Option("--to", help="The kind of checkpoint to write.")],
    shard_size: Annotated[float, typer.Option(help="Most gigabytes (10^9 bytes) of one file.", min=1e-6)] = 5.0,
) -> None:
    """Convert a checkpoint between transformers and this package; a run that was killed goes on when called again."""
    console = Console()
    try:
        started, shard_bytes = time.perf_counter(), int(shard_size * 1e9)
        conversion = prepare(_local(source), to.value, shard_bytes=shard_bytes)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=sum(entry.size for entry in conversion.entries))
            kept = run(
                conversion, destination, shard_bytes=shard_bytes, on_bytes=lambda count: bar.advance(task, count)
            )
        for reason, count in Counter(conversion.ignored.values()).items():
            console.print(f"left out {count} tensors: {escape(reason)}", highlight=False, soft_wrap=True)
        if kept:
            console.print(f"kept {kept / 1e9:.3g} GB that an earlier run had finished", highlight=False)
        total, seconds = sum(entry.size for entry in conversion.entries), time.perf_counter() - started
        console.print(
            f"{len(conversion.entries)} tensors, {total / 1e9:.3g} GB in {seconds:.1f} s: {destination}",
            highlight=False,
            soft_wrap=True,
        )
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
