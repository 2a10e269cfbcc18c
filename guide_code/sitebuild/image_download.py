"""One file from the hub: requests, redirects, waiting, and the check of its bytes.

The hub's own client accepts a wrong body of the right length (huggingface_hub 2.4.0) and makes two requests for each
file, one of them to learn a size and a hash that the lock already has. So the requests are made here, on the client's
connections; addresses, proxies, certificates and the offline switch are the client's.
"""

import hashlib
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import get_session, httpx

from guide_code.sitebuild.image_cache import cached_path
from guide_code.sitebuild.image_lock import Lock, LockedFile

_REDIRECTS = 5


@dataclass(frozen=True)
class Patience:
    """How long to try, all in seconds.

    Attributes:
        attempts: Requests for one file before it is given up.
        pause: Wait after the first failed attempt; it doubles each time.
        longest_wait: The longest wait that the hub may ask for; its window for counting requests is 300 s.
        connect: Until a connection stands.
        silence: Without a byte.
        total: For one file in one attempt, however steadily it trickles.
        give_up_after: Files given up one after the other, with none in between that came, before the rest is.
    """

    attempts: int = 4
    pause: float = 0.5
    longest_wait: float = 310
    connect: float = 5
    silence: float = 20
    total: float = 120
    give_up_after: int = 3


class _Given(Exception):
    """No further attempt would help; `everywhere` if that holds for every other file too."""

    def __init__(self, reason: str, *, everywhere: bool = False):
        super().__init__(reason)
        self.everywhere = everywhere


class _Failed(Exception):
    """An attempt failed and the next may not; `wait` seconds were asked for."""

    def __init__(self, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.wait = wait


class Download:
    """Fetches files of one dataset at one commit; its methods may be called from several threads."""

    def __init__(self, lock: Lock, cache: Path, endpoint: str | None, token: str | None, patience: Patience):
        assert lock.dataset and lock.commit
        self._dataset, self._commit = lock.dataset, lock.commit
        self._cache, self._patience = cache, patience
        self._endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._token = token if token is not None else get_token()
        self._authorised = False  # a public dataset needs no token, and a stale one would be refused
        self._stopped = ""
        self._wake = threading.Event()
        self._not_before = 0.0
        self._given_up = 0
        self._timeout = httpx.Timeout(patience.silence, connect=patience.connect)

    def stop(self, reason: str) -> None:
        """Ends all fetches, also those that wait, as soon as they notice."""
        self._stopped = self._stopped or reason
        self._wake.set()

    def fetch(self, file: LockedFile) -> str:
        """Brings one file into the cache; returns an empty string, or why it could not."""
        reason = ""
        url = hf_hub_url(self._dataset, file.path, repo_type="dataset", revision=self._commit, endpoint=self._endpoint)
        for attempt in range(self._patience.attempts):
            self._rest(self._not_before - time.monotonic())
            if self._stopped:
                return reason or self._stopped
            try:
                self._attempt(url, file)
                self._given_up = 0
                return ""
            except _Given as error:
                reason = f"{url}: {error}"
                if error.everywhere:
                    self.stop(reason)
                return reason
            except _Failed as error:
                reason = f"{url}: {error}"
                if error.wait is not None:
                    # The hub counts requests for each address, so all threads wait.
                    self._not_before = max(self._not_before, time.monotonic() + error.wait)
                elif attempt + 1 < self._patience.attempts:
                    self._rest(self._patience.pause * 2**attempt * random.uniform(0.75, 1.25))
        self._given_up += 1
        if self._given_up >= self._patience.give_up_after:
            self.stop(f"given up, since others failed: {reason}")
        return f"{reason} ({self._patience.attempts} attempts)"

    def _rest(self, seconds: float) -> None:
        if seconds > 0:
            self._wake.wait(seconds)

    def _attempt(self, url: str, file: LockedFile) -> None:
        part = self._cache / f"{file.sha256}.part"
        if part.is_symlink():
            part.unlink()
        have = part.stat().st_size if part.is_file() else 0
        if have >= file.size:
            part.unlink()
            have = 0
        deadline = time.monotonic() + self._patience.total
        try:
            with self._response(url, have) as response:
                self._refuse(response, part)
                resumed = have > 0 and response.status_code == 206
                if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                    part.unlink()
                    raise _Failed("the rest was asked for, and another part came")
                self._store(response, part, file, resumed, deadline)
        except OfflineModeIsEnabled:
            raise _Given("HF_HUB_OFFLINE is set", everywhere=True) from None
        except httpx.TimeoutException as error:
            raise _Failed(f"no answer in time ({type(error).__name__})") from None
        except httpx.InvalidURL as error:
            raise _Given(f"an address that cannot be used ({error})") from None
        except httpx.HTTPError as error:
            raise _Failed(f"the connection failed ({type(error).__name__}: {error})") from None

    @contextmanager
    def _response(self, url: str, start: int) -> Iterator[httpx.Response]:
        """The answer after redirects. Each hop is made here, so that the token stays on the hub's own origin."""
        session = get_session()
        for _ in range(_REDIRECTS + 1):
            headers = {"Accept-Encoding": "identity"}
            if start:
                headers["Range"] = f"bytes={start}-"
            if self._authorised and self._token and _origin(url) == _origin(self._endpoint):
                headers["Authorization"] = f"Bearer {self._token}"
            request = session.build_request("GET", url, headers=headers, timeout=self._timeout)
            response = session.send(request, stream=True, follow_redirects=False)
            try:
                if not response.has_redirect_location:
                    yield response
                    return
                target = urljoin(url, response.headers["Location"])
            finally:
                response.close()
            schemes = (urlsplit(url).scheme, urlsplit(target).scheme)
            if schemes[1] != "https" and schemes != ("http", "http"):
                raise _Given(f"a redirect to {target} was refused: https is needed")
            url = target
        raise _Given(f"more than {_REDIRECTS} redirects")

    def _refuse(self, response: httpx.Response, part: Path) -> None:
        """Raises for every status that brings no bytes."""
        status = response.status_code
        if status in (200, 206):
            return
        ours = _origin(str(response.url)) == _origin(self._endpoint)
        asked = "Authorization" in response.request.headers
        if status in (401, 403, 404) and ours and self._token and not asked:
            self._authorised = True
            raise _Failed(f"HTTP {status} without a token", wait=0)
        if status in (401, 403) and not ours:
            raise _Failed(f"HTTP {status} from {response.url.host}, where the hub keeps the bytes")
        if status in (401, 403):
            hint = "the token has no access" if asked else "it is private: `hf auth login`, or make it public"
            raise _Given(f"HTTP {status}: dataset {self._dataset} cannot be read; {hint}", everywhere=True)
        if status == 404:
            everywhere = response.headers.get("X-Error-Code") in ("RepoNotFound", "RevisionNotFound")
            raise _Given(
                f"HTTP 404: dataset {self._dataset} has no such file at commit {self._commit[:8]}",
                everywhere=everywhere,
            )
        if status == 416:
            part.unlink(missing_ok=True)
            raise _Failed("HTTP 416: the part that was here did not fit")
        if status == 429:
            wait = _asked_wait(response.headers)
            if wait is not None and wait > self._patience.longest_wait:
                raise _Given(f"HTTP 429: the hub asks to wait {wait:.0f} s; try again then", everywhere=True)
            raise _Failed("HTTP 429: too many requests", wait=wait)
        if status >= 500 or status == 408:
            raise _Failed(f"HTTP {status}", wait=_short_wait(response.headers, self._patience.longest_wait))
        raise _Given(f"HTTP {status}")

    def _store(self, response: httpx.Response, part: Path, file: LockedFile, resumed: bool, deadline: float) -> None:
        """Writes the body behind what is there, and renames it only if it is exactly the locked file.

        A connection that breaks leaves the part for the next attempt; any other wrong end deletes it.
        """
        before = part.read_bytes() if resumed else b""
        digest, size = hashlib.sha256(before), len(before)
        head = before[:64]
        with part.open("ab" if resumed else "wb") as stream:
            for chunk in response.iter_bytes():  # as they come: a size would hold bytes back until a chunk is full
                size += len(chunk)
                if size > file.size:
                    break
                head = head + chunk[: 64 - len(head)]
                digest.update(chunk)
                stream.write(chunk)
                if time.monotonic() > deadline:
                    raise _Failed(f"{size} of {file.size} bytes came in {self._patience.total:.0f} s")
                if self._stopped:
                    raise _Failed(self._stopped)
        if size == file.size and digest.hexdigest() == file.sha256:
            part.replace(cached_path(self._cache, file))
            return
        part.unlink()
        raise _Failed(f"wrong bytes: {_describe(head, response, size, file)}")


def _describe(head: bytes, response: httpx.Response, size: int, file: LockedFile) -> str:
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer came in place of the image"
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "a web page came in place of the image; a proxy or a login page may stand between"
    if size > file.size:
        return f"more than the {file.size} bytes of the lock"
    if size < file.size:
        return f"{size} bytes, and the lock says {file.size}"
    return f"the right size, but another sha256 than the lock's {file.sha256[:12]}"


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _asked_wait(headers: httpx.Headers) -> float | None:
    """Seconds to wait by `Retry-After` or `RateLimit: "resolve";r=0;t=55`; None if neither says so."""
    asked = re.fullmatch(r"\s*(\d+(\.\d+)?)\s*", headers.get("Retry-After", ""))
    if asked:
        return float(asked[1])
    limit = re.search(r";\s*t\s*=\s*(\d+)", headers.get("RateLimit", ""))
    return float(limit[1]) if limit else None


def _short_wait(headers: httpx.Headers, longest: float) -> float | None:
    wait = _asked_wait(headers)
    return wait if wait is not None and wait <= longest else None
