"""Is a checkpoint the same model here as in transformers? ``moe-guide verify SRC`` compares them layer by layer."""

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from guide_code.conversion.folders import open_hf
from guide_code.conversion.registry import read_config
from guide_code.convert import load_hf


class Difference(NamedTuple):
    """How far two tensors are apart."""

    name: str
    relative_rms: float
    """Root mean square of the difference over that of the reference."""
    largest: float
    """Largest absolute difference over the root mean square of the reference."""


def verify(
    folder: str | Path, *, num_sequences: int = 2, length: int = 32, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Difference]:
    """Feed random tokens to both models: the difference after every layer, then of the logits.

    One model is in memory at a time. A layer sees what the layers below it made, so the first large number in the list
    is where to look.

    Args:
        folder: of a checkpoint of transformers.
        num_sequences: sequences of random token ids.
        length: tokens of each.
        dtype: in which both compute. In bfloat16 some tokens choose other experts by rounding alone.
        seed: of the tokens.

    Raises:
        ValueError: the checkpoint cannot be loaded, or transformers is not installed.
    """
    _, hf_config, _ = open_hf(Path(folder), dtype)  # says what is wrong with the files before transformers opens them
    vocab_size = read_config(hf_config).vocab_size
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(0, vocab_size, (num_sequences, length), generator=generator)
    theirs = _reference(folder, hf_config, dtype)
    expected = _run(theirs, theirs.get_decoder().layers, tokens_BS)
    del theirs
    gc.collect()
    ours = load_hf(folder, dtype=dtype)
    got = _run(ours, ours.blocks, tokens_BS)
    names = [*(f"layer {index}" for index in range(len(expected) - 1)), "logits"]
    return [_compare(*triple) for triple in zip(names, got, expected, strict=True)]


def _reference(folder: str | Path, hf_config: dict[str, Any], dtype: torch.dtype) -> Any:
    try:
        from transformers import AutoModelForCausalLM, FineGrainedFP8Config
        from transformers.utils.quantization_config import Mxfp4Config
    except ImportError as error:
        raise ValueError("transformers is not installed; pip install 'moe-guide[hf]'") from error
    options: dict[str, Any] = {"dtype": dtype}
    method = hf_config.get("quantization_config", {}).get("quant_method")
    if method == "fp8":
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    elif method == "mxfp4":
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.inference_mode()
def _run(model: nn.Module, layers: Iterable[nn.Module], tokens_BS: Tensor) -> list[Tensor]:
    """What each layer gives, then the logits."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.append((output if isinstance(output, Tensor) else output[0]).clone())

    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        logits = model(tokens_BS).logits
    finally:
        for handle in handles:
            handle.remove()
    return [*seen, logits]


def _compare(name: str, got: Tensor, expected: Tensor) -> Difference:
    expected = expected.double()
    difference, scale = got.double() - expected, expected.square().mean().sqrt()
    rms, largest = difference.square().mean().sqrt() / scale, difference.abs().max() / scale
    return Difference(name, rms.item(), largest.item())


app = typer.Typer(add_completion=False)


@app.command()
def main(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a checkpoint of transformers.")],
    length: Annotated[int, typer.Option(help="Tokens per sequence.", min=1)] = 32,
    sequences: Annotated[int, typer.Option(help="Sequences of random tokens.", min=1)] = 2,
    tolerance: Annotated[float, typer.Option(help="Largest relative RMS of the logits that passes.")] = 1e-4,
    seed: Annotated[int, typer.Option(help="Of the tokens.")] = 0,
) -> None:
    """Compare a checkpoint here and in transformers, layer by layer, in float32; exit status 1 when they differ."""
    console = Console()
    try:
        found = verify(source, num_sequences=sequences, length=length, seed=seed)
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    table = Table("after", "relative RMS", "largest difference / RMS")
    for row in found:
        table.add_row(row.name, f"{row.relative_rms:.1e}", f"{row.largest:.1e}")
    console.print(table)
    if not found[-1].relative_rms <= tolerance:
        first = next((row.name for row in found if not row.relative_rms <= tolerance), "logits")
        console.print(f"[red]different[/]: beyond {tolerance} from {first} on")
        raise typer.Exit(1)
    console.print(f"[green]same[/] within {tolerance}")


if __name__ == "__main__":
    app()
