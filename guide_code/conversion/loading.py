"""From a source of tensors to a model: built without memory, then filled one tensor at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from guide_code.build import build_model
from guide_code.config import ModelConfig
from guide_code.conversion.reader import Source
from guide_code.conversion.table import Piece, Plan
from guide_code.transformer import Transformer


@dataclass(frozen=True)
class Origin:
    """Where a converted model came from; kept on the model as ``model.origin``."""

    config: ModelConfig
    hf_config: dict[str, Any] = field(default_factory=dict)
    """config.json as it was; empty when there was none."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Tensors of the checkpoint that the model does not hold, and why."""
    carried: tuple[Path, ...] = ()
    """Files of the tokenizer and the like, to be copied when the model is saved; a file that is gone is not."""


class _NoMemory(TorchFunctionMode):
    """``torch.empty`` makes tensors without memory: weights start with it, small constants do not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def empty_model(config: ModelConfig) -> Transformer:
    """A model whose large tensors are on the meta device."""
    with _NoMemory():
        return build_model(config)


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once under the first name."""
    seen, tensors = set(), {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def fill_(model: nn.Module, plan: Plan, source: Source, dtype: torch.dtype | None = None) -> None:
    """Give every tensor of a model memory and the values of a source, one after the other.

    Args:
        model: from :func:`empty_model`.
        plan: checked against the source.
        source: where the values are.
        dtype: of the parameters; None keeps that of the source. Buffers keep their own.
    """
    owners: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                owners.setdefault(id(tensor), []).append((table, name))
    for name, old in own_tensors(model).items():
        is_parameter = isinstance(old, nn.Parameter)
        new = torch.empty(old.shape, dtype=(dtype or stored_dtype(plan, name, source)) if is_parameter else old.dtype)
        assemble_(new, plan.by_ours[name], source)
        new = nn.Parameter(new) if is_parameter else new
        for table, attribute in owners[id(old)]:
            table[attribute] = new
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not left, f"still without memory: {left}"


def assemble_(out: Tensor, pieces: list[Piece], source: Source) -> Tensor:
    """Fill one of our tensors with all the pieces that a source has of it."""
    for piece in pieces:
        piece.region(out).copy_(piece.form.to_ours(source.read(piece.theirs)))
    return out


def stored_dtype(plan: Plan, name: str, source: Source) -> torch.dtype:
    """The dtype that holds all pieces of one of our tensors."""
    dtypes = [source.tensors[piece.theirs].dtype for piece in plan.by_ours[name]]
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def tied_head(ours: Mapping[str, Tensor], theirs: Source) -> dict[str, str]:
    """Which copy of a tied output projection may be left out; it has to equal the embedding.

    Raises:
        ValueError: it does not.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if "head.weight" in ours or head not in theirs.tensors or embedding not in theirs.tensors:
        return {}
    if not torch.equal(theirs.read(head), theirs.read(embedding)):
        raise ValueError(f"tie_word_embeddings is true, but {head} differs from {embedding}")
    return {"lm_head\\.weight": "the embedding again: they are tied"}
