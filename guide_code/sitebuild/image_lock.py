"""The lock file `docs/data/images.lock`: which images the site shows, byte for byte, and where they are published.

Publishing writes it, the build reads it, and git keeps it: an old checkout shows its old images. It is JSON, one
block for each file. Until a dataset is published it says so, and every build draws the figures itself.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

LOCK_FILE = "docs/data/images.lock"
FOLDER = "figures"  # of the dataset
MAX_BYTES = 5_000_000  # of one image
MAX_FILES = 2_000
_NOT_PUBLISHED = "No dataset is published yet: every build draws the figures itself."
_WRITTEN_BY = "Written by `moe-guide images publish`. Commit it; do not edit it."
_SAFE_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*\.(svg|png|webp)")
_DATASET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_FIELDS = {"sha256": str, "size": int, "width": int, "height": int, "alt": str, "license": str, "drawn_by": str}


class LockError(ValueError):
    """The lock file cannot be used; the message names the field, its value and the fix."""


@dataclass(frozen=True)
class LockedFile:
    """One file of the dataset.

    Attributes:
        path: Its path in the dataset, `figures/NAME-LAYOUT-PALETTE.svg`.
        sha256: Of its bytes, in hexadecimal.
        size: In bytes.
        width: In CSS pixels; a PNG or WebP file holds twice as many.
        height: In CSS pixels.
        alt: What the image shows, for readers who do not see it.
        license: SPDX identifier.
        drawn_by: The module whose `draw` made it.
        source: A hash of that module and of what it imports, to tell when it has changed.
    """

    path: str
    sha256: str
    size: int
    width: int
    height: int
    alt: str
    license: str
    drawn_by: str
    source: str = ""

    @property
    def figure(self) -> str:
        """The name by which pages call the figure."""
        return PurePosixPath(self.path).stem.rsplit("-", 2)[0]

    @property
    def variant(self) -> str:
        """Layout and palette, such as `wide-dark`."""
        return PurePosixPath(self.path).stem.removeprefix(self.figure + "-")

    @property
    def suffix(self) -> str:
        """`.svg`, `.png` or `.webp`."""
        return PurePosixPath(self.path).suffix

    def matches(self, path: Path) -> bool:
        """Whether `path` is a plain file, and no link, that holds exactly the locked bytes."""
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != self.size:
                return False
            return hashlib.sha256(path.read_bytes()).hexdigest() == self.sha256
        except OSError:
            return False


@dataclass(frozen=True)
class Lock:
    """What is published.

    Attributes:
        dataset: `OWNER/NAME` on the hub, or None until one is published.
        commit: The dataset's commit, 40 hexadecimal digits, or None.
        files: By path.
    """

    dataset: str | None = None
    commit: str | None = None
    files: dict[str, LockedFile] = field(default_factory=dict)

    def figures(self) -> dict[str, dict[str, LockedFile]]:
        """The files by figure and variant."""
        result: dict[str, dict[str, LockedFile]] = {}
        for file in self.files.values():
            result.setdefault(file.figure, {})[file.variant] = file
        return result


def check_dataset(name: str) -> str:
    """Returns the name of a dataset if it has the form `OWNER/NAME`.

    Raises:
        LockError: It has not.
    """
    if not _DATASET.fullmatch(name):
        raise LockError(f"dataset {name!r} has not the form OWNER/NAME, such as my-name/moe-guide-images")
    return name


def path_problems(paths: Iterable[str]) -> list[str]:
    """Why paths of a dataset may not be used, in words.

    Refused are absolute paths, `..`, hidden names, characters that some file system or address treats specially, other
    formats, and two paths that a file system without upper and lower case cannot tell apart.
    """
    problems, seen = [], {}
    for path in sorted(paths):
        if not _SAFE_PATH.fullmatch(path):
            problems.append(
                f"path {path!r}: use letters, digits, '_', '-', '.' and '/', no part that begins with '.', "
                "and the suffix .svg, .png or .webp"
            )
        elif path.casefold() in seen:
            problems.append(f"paths {seen[path.casefold()]!r} and {path!r} differ in case only: rename one figure")
        seen[path.casefold()] = path
    return problems


def file_problems(file: LockedFile) -> list[str]:
    """Why the record of one file may not be used, in words."""
    problems = []
    for name, kind in _FIELDS.items():
        value = getattr(file, name)
        if not isinstance(value, kind) or isinstance(value, bool) or not value:
            problems.append(f"{name} {value!r} of {file.path}: a {kind.__name__} that is not empty or 0 is needed")
    if not problems and not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
        problems.append(f"sha256 {file.sha256!r} of {file.path}: 64 hexadecimal digits are needed")
    if not problems and not 0 < file.size <= MAX_BYTES:
        problems.append(f"size {file.size} of {file.path}: at most {MAX_BYTES} bytes are allowed")
    return problems


def check_lock(lock: Lock) -> Lock:
    """Returns a lock in which nothing is unsafe or missing.

    Raises:
        LockError: With every problem.
    """
    problems = []
    if lock.dataset is None:
        if lock.commit is not None or lock.files:
            problems.append("dataset null, but commit or files are given: a lock without a dataset lists nothing")
    else:
        if not isinstance(lock.dataset, str) or not _DATASET.fullmatch(lock.dataset):
            problems.append(f"dataset {lock.dataset!r}: OWNER/NAME is needed")
        if not isinstance(lock.commit, str) or not re.fullmatch(r"[0-9a-f]{40}", lock.commit):
            problems.append(f"commit {lock.commit!r}: 40 hexadecimal digits are needed; a branch would move")
    if len(lock.files) > MAX_FILES:
        problems.append(f"{len(lock.files)} files: at most {MAX_FILES} are allowed")
    problems += path_problems(lock.files)
    for file in lock.files.values():
        problems += file_problems(file)
    if problems:
        raise LockError(f"{LOCK_FILE} cannot be used:\n" + "\n".join(f"  {problem}" for problem in problems[:20]))
    return lock


def read_lock(root: Path) -> Lock:
    """The lock of the project at `root`; an empty one where there is no file.

    Raises:
        LockError: The file is not a lock, or holds something unsafe.
    """
    path = root / LOCK_FILE
    if not path.is_file():
        return Lock()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        files = {name: LockedFile(path=name, **record) for name, record in data["files"].items()}
        lock = Lock(data["dataset"], data["commit"], files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LockError(f"{LOCK_FILE} is not a lock ({error}): take it from git again, or publish again") from None
    return check_lock(lock)


def write_lock(root: Path, lock: Lock) -> None:
    """Puts the lock in the place of the old one, in one step."""
    check_lock(lock)
    files = {name: asdict(lock.files[name]) for name in sorted(lock.files)}
    for record in files.values():
        del record["path"]
    about = _WRITTEN_BY if lock.dataset else _NOT_PUBLISHED
    data = {"about": about, "dataset": lock.dataset, "commit": lock.commit, "files": files}
    path = root / LOCK_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
