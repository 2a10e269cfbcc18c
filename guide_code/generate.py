"""Continue a prompt with a trained model: ``python -m guide_code.generate runs/latest --prompt "def "``."""

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from tokenizers import Tokenizer

from guide_code.build import build_model
from guide_code.checkpoint import latest_checkpoint, load_checkpoint, load_config
from guide_code.transformer import Transformer


def stream(model: Transformer, tokenizer: Tokenizer, prompt: str, max_new_tokens: int) -> Iterator[str]:
    """Greedy continuation in pieces of whole characters, as they come.

    Raises:
        ValueError: the prompt is empty, or prompt and continuation do not fit into the model.
    """
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise ValueError("the prompt is empty; give at least one character")
    if len(ids) + max_new_tokens > model.max_length:
        raise ValueError(
            f"the prompt's {len(ids)} tokens and {max_new_tokens} new ones exceed the model's max_length "
            f"of {model.max_length}"
        )
    model.eval()
    device = next(model.parameters()).device
    new, shown = [], ""
    with torch.inference_mode():
        cache = model.make_cache(1, len(ids) + max_new_tokens)
        tokens_BS = torch.tensor([ids], device=device)
        for _ in range(max_new_tokens):
            new.append(int(model(tokens_BS, cache=cache).logits[0, -1].argmax()))
            tokens_BS = torch.tensor([new[-1:]], device=device)
            text = tokenizer.decode(new, skip_special_tokens=False)
            if not text.endswith("\ufffd"):  # a character may need several tokens
                yield text[len(shown) :]
                shown = text


app = typer.Typer(add_completion=False)


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of one checkpoint in it.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 100,
) -> None:
    """Continue a prompt greedily, streaming to the terminal."""
    console = Console(stderr=True)
    try:
        folder = latest_checkpoint(run)
        config = load_config(folder)
        model = build_model(config)
        load_checkpoint(folder, model, config)
        if not (folder.parent / "tokenizer.json").is_file():
            raise ValueError(
                f"{folder.parent / 'tokenizer.json'} is missing: a checkpoint is read with its run's tokenizer"
            )
        tokenizer = Tokenizer.from_file(str(folder.parent / "tokenizer.json"))
        started = time.perf_counter()
        pieces = stream(model, tokenizer, prompt, tokens)
        first = next(pieces, "")  # raises before anything is printed
        for piece in itertools.chain([prompt, first], pieces):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        console.print(f"{tokens / (time.perf_counter() - started):,.0f} tokens/s")
    except ValueError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
