"""The cache of pulled images, and the check of every byte in it.

Files are named by their hash, so that no name from a dataset ever becomes a path, and a new commit fetches only what is
new.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from guide_code.sitebuild.image_lock import Lock, LockedFile

CACHE = ".cache/images"


@dataclass
class Pulled:
    """What the cache holds after a look or a pull.

    Attributes:
        paths: Verified files in the cache, by path in the dataset.
        failures: Why the others are missing, by path.
        downloaded: How many files came over the network this time.
        removed: Files of the cache that were deleted because their bytes were wrong.
    """

    paths: dict[str, Path] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    downloaded: int = 0
    removed: list[str] = field(default_factory=list)


def cached_path(cache: Path, file: LockedFile) -> Path:
    """The place of a file in the cache."""
    return cache / f"{file.sha256}{file.suffix}"


def look_up(lock: Lock, cache: Path) -> Pulled:
    """What the cache holds, without a request. Entries with wrong bytes, and links, are deleted."""
    result = Pulled()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        intact = list(pool.map(lambda file: file.matches(cached_path(cache, file)), lock.files.values()))
    for file, good in zip(lock.files.values(), intact, strict=True):
        path = cached_path(cache, file)
        if good:
            result.paths[file.path] = path
            continue
        result.failures[file.path] = "not in the cache"
        if path.is_symlink() or path.exists():
            path.unlink()
            result.failures[file.path] = "its copy in the cache had wrong bytes"
            result.removed.append(file.path)
    return result


def stale_entries(lock: Lock, cache: Path) -> list[Path]:
    """What lies in the cache and is not of this lock: earlier versions, and parts of downloads that were given up."""
    keep = {cached_path(cache, file).name for file in lock.files.values()} | {".pulling"}
    return sorted(path for path in cache.glob("*") if path.name not in keep) if cache.is_dir() else []
