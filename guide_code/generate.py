"""Continue a prompt with a trained or converted model: ``moe-guide generate runs/latest --prompt "def "``."""

import itertools
import sys
import time
from collections.abc import Collection, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markup import escape
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from guide_code.checkpoint import latest_checkpoint
from guide_code.conversion.reader import read_json
from guide_code.convert import load_hf
from guide_code.decoding import decode
from guide_code.offload import load_model, offload_stats
from guide_code.transformer import Transformer


def stream(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    stop_tokens: Collection[int] = (),
    **options: Any,
) -> Iterator[str]:
    """The continuation as it comes, one string per token: "" until a character is whole, and for a stop token.

    Args:
        model: in evaluation mode meanwhile.
        tokenizer: of the model.
        prompt: the text to continue.
        max_new_tokens: most tokens to add.
        stop_tokens: ids that end the text.
        **options: ``temperature``, ``top_p``, ``generator``, ``prefill_chunk`` of
            :func:`~guide_code.decoding.decode`; greedy without any.

    Raises:
        ValueError: the prompt is empty, prompt and continuation do not fit into the model, or an option is wrong.
    """
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise ValueError("the prompt is empty; give at least one character")
    if len(ids) + max_new_tokens > model.max_length:
        raise ValueError(
            f"the prompt's {len(ids)} tokens and {max_new_tokens} new ones exceed the model's max_length "
            f"of {model.max_length}"
        )
    prompt_BS = torch.tensor([ids], device=next(model.parameters()).device)
    text = DecodeStream(ids=ids, skip_special_tokens=False)  # the prompt decides about the first space
    for tokens_B in decode(model, prompt_BS, max_new_tokens, stop_tokens=stop_tokens, **options):
        token = int(tokens_B)
        yield "" if token in stop_tokens else text.step(tokenizer, token) or ""


class Loaded(NamedTuple):
    """What it takes to continue a text."""

    model: Transformer
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    """``eos_token_id`` of generation_config.json or config.json, where a converted model has one."""


def load(
    folder: Path, *, offload: str | None = None, cache_experts: int = 8, device: torch.device | str = "cpu"
) -> Loaded:
    """A model and its tokenizer.

    Args:
        folder: of a run or of one checkpoint in it, trained or from ``moe-guide convert``; or of a model of
            transformers, which is converted in memory.
        offload: "cpu", "disk" or None, see :func:`guide_code.offload.load_model`.
        cache_experts: experts of each layer on the device, with ``offload``.
        device: of the model.

    Raises:
        ValueError: something is missing or damaged, a model of transformers is to be offloaded, or PyTorch cannot use
            the device.
    """
    _check_device(device)
    if (folder / "config.json").is_file() and not (folder / "step.json").is_file():
        if offload is not None:
            raise ValueError(f"experts are offloaded from our own files: moe-guide convert {folder} DST --to guide")
        home, model = folder, load_hf(folder).to(device)
    else:
        checkpoint = latest_checkpoint(folder)
        home = checkpoint.parent
        model = load_model(checkpoint, offload=offload, cache_experts=cache_experts, device=device)
    if not (home / "tokenizer.json").is_file():
        raise ValueError(f"{home / 'tokenizer.json'} is missing: a model is read with its own tokenizer")
    tokenizer = Tokenizer.from_file(str(home / "tokenizer.json"))
    return Loaded(model, tokenizer, _end_tokens(home))


def _check_device(device: torch.device | str) -> None:
    try:
        torch.zeros(1, device=device).item()  # the meta device holds no data, others may not be there
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={str(device)!r} cannot be used ({str(error).splitlines()[0]}): try cpu") from error


def _end_tokens(home: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json", "hf_config.json"):
        found = read_json(home / name).get("eos_token_id") if (home / name).is_file() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


class Place(StrEnum):
    """Where experts wait."""

    cpu = "cpu"
    disk = "disk"


app = typer.Typer(add_completion=False)


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="Folder of a run, of a checkpoint in it, or of a transformers model.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = 100,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.", min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest that hold this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A token that ends the text; may be repeated.")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help="Most prompt tokens at once.", min=1)] = None,
    device: Annotated[str, typer.Option(help="Where to compute, as torch names it.")] = "cpu",
    offload: Annotated[Place | None, typer.Option(help="Where experts wait; without it, on the device.")] = None,
    cache_experts: Annotated[int, typer.Option(min=1, help="Experts of a layer on the device, with --offload.")] = 8,
) -> None:
    """Continue a prompt, streaming to the terminal."""
    console = Console(stderr=True)
    try:
        loaded = load(run, offload=offload, cache_experts=cache_experts, device=device)
        pieces = stream(
            loaded.model,
            loaded.tokenizer,
            prompt,
            tokens,
            stop_tokens=loaded.stop_tokens | _ids(loaded.tokenizer, stop or []),
            temperature=temperature,
            top_p=top_p,
            generator=torch.Generator().manual_seed(seed),
            prefill_chunk=prefill_chunk,
        )
        started = time.perf_counter()
        first = next(pieces, None)  # raises before anything is printed
        prompted, count = time.perf_counter(), 0
        for piece in itertools.chain([prompt, first or ""], pieces):
            sys.stdout.write(piece)
            sys.stdout.flush()
            count += 1
        sys.stdout.write("\n")
        rate = (count - 2) / (time.perf_counter() - prompted)  # the first token is the prompt's affair
        console.print(f"prompt {prompted - started:.2f} s, then {rate:,.1f} tokens/s", highlight=False)
        if offload is not None:
            stats = offload_stats(loaded.model)
            console.print(
                f"experts: {stats.hit_rate:.0%} of {stats.requests:,} requests found theirs on the device; "
                f"{stats.bytes_moved / 1e9:.3g} GB moved, {stats.prefetched:,} experts of it ahead of need",
                highlight=False,
                soft_wrap=True,
            )
    except ValueError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _ids(tokenizer: Tokenizer, words: list[str]) -> frozenset[int]:
    ids = set()
    for word in words:
        token = tokenizer.token_to_id(word)
        if token is None:
            raise ValueError(f"the tokenizer has no token {word!r}")
        ids.add(token)
    return frozenset(ids)


if __name__ == "__main__":
    app()
