"""The language in which a family's table says which tensor of theirs is which part of ours.

A table maps the name of each of our tensors to how a checkpoint of that family spells it
(``{l}`` stands for the layer):

- ``"model.norm.weight"``: one tensor, equal to ours;
- ``part("...", TRANSPOSED)``: one tensor in another form;
- ``(rows("...gate...", 0, 2), rows("...up...", 1, 2))``: several tensors, each some rows of ours;
- ``{e}`` in a name: one tensor per expert, each a slice of our stacked experts;
- a list of these: spellings that occur in the wild, the one that is written first.

A tensor of theirs always fills one region of one of ours, through a form that only moves elements. So every table can
be read in both directions, and "each element exactly once" is checked by counting.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from torch import Tensor

from guide_code.conversion.reader import Meta, shorten


class Form(NamedTuple):
    """Two inverse functions that move elements and change none; they may return views."""

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]


PLAIN = Form(lambda t: t, lambda t: t)
TRANSPOSED = Form(lambda t: t.transpose(-1, -2), lambda t: t.transpose(-1, -2))


class Part(NamedTuple):
    """One tensor of theirs: rows ``index`` of ``count`` equal groups of ours, in some form."""

    theirs: str
    form: Form = PLAIN
    index: int = 0
    count: int = 1


def part(theirs: str, form: Form) -> Part:
    """The whole of ours, in another form."""
    return Part(theirs, form)


def rows(theirs: str, index: int, count: int, form: Form = PLAIN) -> Part:
    """Group ``index`` of ``count`` equal groups of our rows (the last axis but one of a matrix)."""
    return Part(theirs, form, index, count)


def gate_up(gate: str, up: str) -> tuple[Part, Part]:
    """Our gate and up projection in one: the gate's rows above those of the up projection."""
    return rows(gate, 0, 2), rows(up, 1, 2)


Spelling = str | Part | tuple[Part, ...]
Table = Mapping[str, Spelling | list[Spelling]]


class Piece(NamedTuple):
    """A line of a plan: where one tensor of theirs lies in ours."""

    ours: str
    theirs: str
    form: Form
    expert: int | None
    index: int
    count: int

    def region(self, ours: Tensor) -> Tensor:
        """The view of our tensor that this piece fills."""
        view = ours if self.expert is None else ours[self.expert]
        if self.count == 1:
            return view
        axis = max(view.ndim - 2, 0)
        size = view.shape[axis] // self.count
        return view.narrow(axis, self.index * size, size)


class Plan(NamedTuple):
    """All pieces of a model."""

    by_ours: dict[str, list[Piece]]
    by_theirs: dict[str, Piece]


def make_plan(table: Table, ours: Mapping[str, Tensor], present: Collection[str] | None = None) -> Plan:
    """Every piece of a model, in the spelling that a checkpoint uses.

    Args:
        table: of the family.
        ours: our tensors by name; only their shapes matter, so they may be on the meta device.
        present: names in the checkpoint that will be read; None when one will be written: the first spelling.

    Raises:
        ValueError: the family has no place for one of our tensors.
    """
    by_ours: dict[str, list[Piece]] = {}
    homeless = []
    for name, tensor in ours.items():
        pattern, layer = _pattern(name)
        if pattern not in table:
            homeless.append(name)
            continue
        entry = table[pattern]
        spellings = [_expand(s, name, layer, tensor) for s in (entry if isinstance(entry, list) else [entry])]
        found = spellings if present is None else sorted(spellings, key=lambda s: -sum(p.theirs in present for p in s))
        by_ours[name] = found[0]
    if homeless:
        raise ValueError(f"this family has no place for {shorten(homeless)}")
    by_theirs: dict[str, Piece] = {}
    for name, pieces in by_ours.items():
        assert sum(piece.region(ours[name]).numel() for piece in pieces) == ours[name].numel(), name
        for piece in pieces:
            assert piece.theirs not in by_theirs, f"{piece.theirs} is used twice"
            by_theirs[piece.theirs] = piece
    return Plan(by_ours, by_theirs)


def check_plan(
    plan: Plan, ours: Mapping[str, Tensor], theirs: Mapping[str, Meta], ignored: Mapping[str, str]
) -> dict[str, str]:
    """Compare a plan with what a checkpoint holds, strictly in both directions.

    Args:
        plan: from :func:`make_plan`.
        ours: our tensors.
        theirs: everything in the checkpoint.
        ignored: why a tensor is left out on purpose, by a regular expression that its whole name matches.

    Returns:
        The reason for every tensor that is left out.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape; the message names them.
    """
    missing = sorted(plan.by_theirs.keys() - theirs.keys())
    left, unexpected = {}, []
    for name in theirs:
        if name not in plan.by_theirs:
            reason = next((why for pattern, why in ignored.items() if re.fullmatch(pattern, name)), None)
            if reason is None:
                unexpected.append(name)
            else:
                left[name] = reason
    problems = [f"missing {shorten(missing)}"] if missing else []
    problems += [f"unexpected {shorten(sorted(unexpected))}"] if unexpected else []
    for name, piece in plan.by_theirs.items():
        wanted = tuple(piece.form.to_theirs(piece.region(ours[piece.ours]).to("meta")).shape)
        if name in theirs and theirs[name].shape != wanted:
            problems.append(f"{name} has shape {theirs[name].shape}, but config.json asks for {wanted}")
    if problems:
        raise ValueError("the checkpoint does not match its config.json: " + "; ".join(problems[:8]))
    return left


def _pattern(name: str) -> tuple[str, str]:
    found = re.match(r"blocks\.(\d+)\.", name)
    return (f"blocks.{{l}}.{name[found.end() :]}", found.group(1)) if found else (name, "")


def _parts(spelling: Spelling) -> tuple[Part, ...]:
    if isinstance(spelling, str):
        return (Part(spelling),)
    return (spelling,) if isinstance(spelling, Part) else spelling


def _expand(spelling: Spelling, name: str, layer: str, tensor: Tensor) -> list[Piece]:
    pieces = []
    for item in _parts(spelling):
        theirs = item.theirs.replace("{l}", layer)
        experts = range(tensor.shape[0]) if "{e}" in theirs else [None]
        pieces += [Piece(name, theirs.replace("{e}", str(e)), item.form, e, item.index, item.count) for e in experts]
    return pieces
