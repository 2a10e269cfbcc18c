"""Publishes the figures to a dataset on the Hugging Face hub, and then locks them.

One commit, made on top of the commit that the lock names: a dataset that has moved meanwhile refuses it, so two
publishers cannot overwrite each other. The lock is written last, once the hub lists exactly these files. Killed at any
moment, the next run either finishes the work or starts it anew.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from guide_code.sitebuild.figures import draw_all, figure_sources, source_hash
from guide_code.sitebuild.image_card import LICENSE, dataset_card
from guide_code.sitebuild.image_lock import (
    FOLDER,
    Lock,
    LockedFile,
    check_dataset,
    check_lock,
    read_lock,
    write_lock,
)

_CARD = "README.md"


class PublishError(Exception):
    """Nothing was published, or nothing was locked; the message says why and what to do."""


@dataclass
class Difference:
    """How drawn figures differ from the lock, as paths in the dataset."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def lines(self) -> list[str]:
        """One line for each file."""
        marks = [("+", self.added), ("~", self.changed), ("-", self.removed)]
        return [f"{mark} {path}" for mark, paths in marks for path in paths]


def drawn_files(root: Path, *, say: Callable[[str], None] = print) -> dict[str, tuple[LockedFile, Path]]:
    """Every figure, drawn or from the cache of drawings, as it would be locked.

    Raises:
        LockError: A drawing may not be published: too large, or an unsafe name.
    """
    sources = figure_sources(root / "guide_code")
    result = {}
    for name, figure in draw_all(root, say=say).items():
        source = source_hash(sources[name], root)
        for key, variant in figure.variants.items():
            assert variant.path is not None
            data = variant.path.read_bytes()
            path = f"{FOLDER}/{name}-{key}{variant.suffix}"
            result[path] = (
                LockedFile(
                    path, hashlib.sha256(data).hexdigest(), len(data), variant.width, variant.height,
                    figure.alt, LICENSE, f"guide_code.figures.{name}", source,
                ),
                variant.path,
            )  # fmt: skip
    check_lock(Lock("any/name", "0" * 40, {path: file for path, (file, _) in result.items()}))
    return result


def difference(lock: Lock, drawn: dict[str, tuple[LockedFile, Path]]) -> Difference:
    """What publishing would change, without a request."""
    locked = lock.files
    return Difference(
        sorted(drawn.keys() - locked.keys()),
        sorted(path for path in drawn.keys() & locked.keys() if drawn[path][0].sha256 != locked[path].sha256),
        sorted(locked.keys() - drawn.keys()),
    )


def publish(
    root: Path,
    repo: str,
    *,
    token: str | None = None,
    endpoint: str | None = None,
    onto: str | None = None,
    say: Callable[[str], None] = print,
) -> Lock:
    """Uploads what has changed and returns the new lock, which it has written.

    Args:
        root: The project's folder.
        repo: The dataset, `OWNER/NAME`; created, public, if it does not exist.
        token: A token with the right to write; by default the stored one, or `HF_TOKEN`.
        endpoint: The hub's address, `HF_ENDPOINT` or the public hub by default.
        onto: The commit to build on, if it is not the one in the lock.
        say: Gets progress lines.

    Raises:
        PublishError: No token, no right, no network, or the dataset has moved. The lock is unchanged.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    check_dataset(repo)
    lock = read_lock(root)
    token = token or get_token()
    if not token:
        raise PublishError(
            "no token: make one with the right to write at https://huggingface.co/settings/tokens, then run "
            "`hf auth login` or set HF_TOKEN"
        )
    drawn = drawn_files(root, say=say)
    contents = {path: file.read_bytes() for path, (_, file) in drawn.items()}
    contents[_CARD] = dataset_card(file for file, _ in drawn.values()).encode()
    api = HfApi(endpoint=endpoint, token=token)
    with _in_words(repo):
        api.create_repo(repo, repo_type="dataset", exist_ok=True)
        head = str(api.repo_info(repo, repo_type="dataset").sha)
        there = _listing(api, repo, head)
        upload = [path for path, data in contents.items() if not _same(there.get(path), data)]
        delete = sorted(path for path in there if path.startswith(f"{FOLDER}/") and path not in contents)
        if upload or delete:
            parent = onto or (lock.commit if lock.dataset == repo else None)
            _check_parent(parent, head, there, repo)
            say(f"{repo}: uploading {len(upload)} files, deleting {len(delete)}")
            operations = [CommitOperationAdd(path, contents[path]) for path in upload]
            operations += [CommitOperationDelete(path) for path in delete]
            message = f"Publish {len(drawn)} images"
            done = api.create_commit(repo, operations, commit_message=message, repo_type="dataset", parent_commit=head)
            head = done.oid
            there = _listing(api, repo, head)
    wrong = [path for path, data in contents.items() if not _same(there.get(path), data)]
    if wrong:
        raise PublishError(f"the hub lists other bytes than were sent for {', '.join(wrong[:3])}: publish again")
    new = Lock(repo, head, {path: file for path, (file, _) in drawn.items()})
    write_lock(root, new)
    return new


def _check_parent(parent: str | None, head: str, there: dict[str, tuple[str, str | None]], repo: str) -> None:
    if parent is None and any(path.startswith(f"{FOLDER}/") for path in there):
        raise PublishError(
            f"{repo} already holds images, and docs/data/images.lock does not name it. Look at them; to replace them, "
            f"publish with --onto {head}"
        )
    if parent is not None and parent != head:
        raise PublishError(
            f"{repo} has moved from {parent[:8]} to {head[:8]}: someone else has published. Take their "
            f"docs/data/images.lock from git first; to replace their images, publish with --onto {head}"
        )


def _listing(api, repo: str, commit: str) -> dict[str, tuple[str, str | None]]:
    """Git hash and, for large files, sha256 of every file at a commit."""
    entries = api.list_repo_tree(repo, recursive=True, repo_type="dataset", revision=commit)
    return {
        entry.path: (entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
        for entry in entries
        if hasattr(entry, "blob_id")
    }


def _same(listed: tuple[str, str | None] | None, data: bytes) -> bool:
    """Whether the hub's listing of a file fits these bytes."""
    if listed is None:
        return False
    blob, sha256 = listed
    if sha256 is not None:
        return sha256 == hashlib.sha256(data).hexdigest()
    return blob == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def compare_with_hub(lock: Lock, paths: dict[str, Path], *, endpoint: str | None = None) -> list[str]:
    """Asks the hub what the locked commit holds, and says in words where it differs from the verified files `paths`.

    Raises:
        PublishError: The hub cannot be asked.
    """
    from huggingface_hub import HfApi

    from guide_code.sitebuild.image_lock import path_problems

    assert lock.dataset and lock.commit
    api = HfApi(endpoint=endpoint)
    with _in_words(lock.dataset):
        there = _listing(api, lock.dataset, lock.commit)
        head = str(api.repo_info(lock.dataset, repo_type="dataset").sha)
    problems = path_problems(path for path in there if path.startswith(f"{FOLDER}/"))
    for path, file in paths.items():
        if not _same(there.get(path), file.read_bytes()):
            problems.append(f"{path} differs at the hub" if path in there else f"{path} is gone from the hub")
    if head != lock.commit:
        problems.append(f"the dataset has moved on to {head[:8]}; the site stays at {lock.commit[:8]}")
    return problems


@contextmanager
def _in_words(repo: str) -> Iterator[None]:
    """Turns what the hub's client raises into a message that says what to do."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import httpx

    try:
        try:
            yield
        except RuntimeError as error:  # so the client wraps what happens to the upload of a large file
            if isinstance(error.__cause__, (HfHubHTTPError, httpx.HTTPError)):
                raise error.__cause__ from None
            raise
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        hints = {
            401: "the token was not accepted: make a new one at https://huggingface.co/settings/tokens",
            403: f"the token has no right to write to {repo}: it needs that right, and you a seat in the organisation",
            404: f"there is no dataset {repo} that this token can see",
            409: "someone else is publishing: wait, take their docs/data/images.lock from git, and publish again",
            412: "someone else has just published: take their docs/data/images.lock from git, and publish again",
            429: "the hub asks for patience: try again in five minutes",
        }
        hint = hints.get(status, "the hub has trouble: try again later")
        raise PublishError(f"HTTP {status} from the hub. {hint}. docs/data/images.lock is unchanged") from error
    except (httpx.HTTPError, OfflineModeIsEnabled) as error:
        raise PublishError(
            f"the hub cannot be reached ({type(error).__name__}: {error}). docs/data/images.lock is unchanged; run the "
            "same command again: what the hub already has is not sent twice"
        ) from error
