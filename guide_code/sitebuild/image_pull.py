"""Brings the locked images into the cache.

A whole cache makes no request and does not even import the hub's client.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from guide_code.sitebuild.image_cache import Pulled, cached_path, look_up
from guide_code.sitebuild.image_lock import Lock, LockedFile

if TYPE_CHECKING:
    from guide_code.sitebuild.image_download import Patience

WORKERS = 8


def pull(
    lock: Lock,
    cache: Path,
    *,
    endpoint: str | None = None,
    token: str | None = None,
    patience: "Patience | None" = None,
    advance: Callable[[int], None] = lambda size: None,
) -> Pulled:
    """Brings what the cache lacks, at the locked commit.

    Interrupt it at any time: finished files stay, and an unfinished one goes on where it stopped. Two pulls into one
    cache take turns.

    Args:
        lock: What to bring.
        cache: The cache's folder; made if it does not exist.
        endpoint: The hub's address, `HF_ENDPOINT` or the public hub by default.
        token: Sent to the hub's own host, and only after it has refused to serve without one. By default the one
            that `hf auth login` has stored or `HF_TOKEN` names.
        patience: Limits; the defaults suit the public hub.
        advance: Called with the size of each file that is done.
    """
    result = look_up(lock, cache)
    for path in result.paths:
        advance(lock.files[path].size)
    if not result.failures:
        return result

    from filelock import FileLock

    from guide_code.sitebuild.image_download import Download, Patience

    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".pulling"):
        removed, had = result.removed, set(result.paths)
        result = look_up(lock, cache)  # another pull may have brought the rest meanwhile
        result.removed = removed
        for path in result.paths.keys() - had:
            advance(lock.files[path].size)
        if not result.failures:
            return result
        missing = [lock.files[path] for path in result.failures]
        download = Download(lock, cache, endpoint, token, patience or Patience())
        turn = threading.Lock()

        def fetch(file: LockedFile) -> None:
            reason = download.fetch(file)
            with turn:
                if reason:
                    result.failures[file.path] = reason
                    return
                del result.failures[file.path]
                result.paths[file.path] = cached_path(cache, file)
                result.downloaded += 1
                advance(file.size)

        pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="pull")
        try:
            list(pool.map(fetch, missing))
        except BaseException:
            download.stop("the pull was interrupted")
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return result
