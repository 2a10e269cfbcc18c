"""Files of the site that are not in `docs/`: the list that the MkDocs hook mounts, or that `stage` copies.

MkDocs mounts them in place. A tool without hooks gets the same site from a plain copy:
`python -m guide_code.sitebuild stage DIRECTORY`.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mounted:
    """One generated file and its place in the site.

    Attributes:
        uri: Where it lies, relative to `docs/`, with forward slashes.
        path: The file that holds its bytes.
        page: True if it becomes a page, False if it is copied as it is.
    """

    uri: str
    path: Path
    page: bool = False


def stage(docs: Path, mounted: Iterable[Mounted], into: Path) -> None:
    """Writes `docs` and every mounted file below `into`, which must not exist yet."""
    shutil.copytree(docs, into)
    for item in mounted:
        target = into / item.uri
        if target.exists():
            raise FileExistsError(f"{item.uri} is generated, but docs/{item.uri} exists too: rename one of them")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(item.path, target)
