"""Names for cached results: one hash over everything that a result depends on."""

import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path


def cache_key(stem: str, root: Path, files: Iterable[Path], *, form: str) -> str:
    """`stem` and a hash of the files' names and bytes, the pinned versions and Python's version.

    Args:
        stem: What the key is for; kept readable at the front.
        root: The project's folder; file names are taken relative to it, so that a moved checkout keeps its cache.
        files: The files below `root` that the result depends on.
        form: Names the form of the result; change it when the code that writes the result changes.
    """
    root = root.resolve()
    digest = hashlib.sha256(f"{form} {platform.python_version()}\n".encode())
    constraints = root / "constraints.txt"
    covered: set[Path] = {*files, constraints} if constraints.is_file() else set(files)
    for file in sorted(covered):
        data = file.read_bytes()
        digest.update(f"{file.resolve().relative_to(root).as_posix()} {len(data)}\n".encode())
        digest.update(data)
    return f"{stem}-{digest.hexdigest()[:20]}"
