"""Checks that the shape suffix of a name tells the truth: ``x_TD`` has two dimensions, and T is one number.

A profile hook looks at the locals of every function of the package as it returns. Within one call the same letter
must mean the same size, a digit is itself, and J is 2I.
"""

import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

SUFFIX = re.compile(r"_([A-Z][A-Z0-9]*)$")
PACKAGE = str(Path(__file__).parent.parent / "guide_code")


def check_frame(function: str, values: dict) -> tuple[list[str], int]:
    """Complaints about the named tensors of one call, and how many were looked at."""
    sizes, complaints, looked_at = {}, [], 0
    for name, value in values.items():
        match = SUFFIX.search(name)
        if match is None or not isinstance(value, torch.Tensor) or name.isupper():
            continue
        looked_at += 1
        letters = match[1]
        if value.ndim != len(letters):
            complaints.append(f"{function}: {name} has shape {tuple(value.shape)}")
            continue
        for letter, size in zip(letters, value.shape, strict=True):
            wanted = int(letter) if letter.isdigit() else sizes.setdefault(letter, (size, name))[0]
            if size != wanted:
                first = letter if letter.isdigit() else f"{letter} = {wanted} in {sizes[letter][1]}"
                complaints.append(f"{function}: {name} has shape {tuple(value.shape)}, but {first}")
    return complaints, looked_at


@dataclass
class Watch:
    complaints: set = field(default_factory=set)
    functions: set = field(default_factory=set)
    looked_at: int = 0


@contextmanager
def watch_shapes():
    """Profile the block; yields an object whose ``complaints`` and ``looked_at`` are filled on the way."""

    watch = Watch()

    def hook(frame, event, _argument):
        if event == "return" and frame.f_code.co_filename.startswith(PACKAGE):
            name = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"
            complaints, looked_at = check_frame(name, frame.f_locals)
            watch.complaints.update(complaints)
            watch.looked_at += looked_at
            watch.functions.add(name)

    sys.setprofile(hook)
    try:
        yield watch
    finally:
        sys.setprofile(None)
