"""Pulling images from a hub that misbehaves in every way seen: nothing wrong stays, nothing right is lost.

The run ends by saying how many faults were tried and survived.
"""

import os
import time

import pytest
from hub import WRITER
from pull_faults import (
    IMAGES,
    SHORT,
    VICTIM,
    always,
    contents,
    corrupted,
    dropped,
    empty,
    endless,
    html,
    hung_up,
    long,
    nonsense,
    once,
    pointer,
    redirect,
    short,
    silent,
    status,
    trickling,
    wrong_part,
)

from guide_code.sitebuild.image_cache import cached_path, stale_entries
from guide_code.sitebuild.image_download import Patience
from guide_code.sitebuild.image_pull import pull

PASSING = {
    "corrupted": corrupted, "short": short, "empty": empty, "long": long, "endless": endless, "html": html,
    "pointer": pointer, "dropped": dropped, "silent": silent, "trickling": trickling, "hung up": hung_up,
    "not http": nonsense, "wrong part": wrong_part, "408": status(408), "429": status(429),
    "429 wait": status(429, Retry_After="0.2"), "429 window": status(429, RateLimit='"resolve";r=0;t=1'),
    "500": status(500), "502": status(502), "503": status(503), "503 wait": status(503, Retry_After="0.1"),
    "504": status(504), "416": status(416), "401 once": status(401),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.fault
def test_a_fault_that_passes_costs_only_an_attempt(hub, lock, cache, name):
    hub.fault = once(PASSING[name])
    token = WRITER if name == "401 once" else ""
    result = pull(lock, cache, token=token, patience=SHORT)
    assert result.failures == {} and contents(lock, cache) == IMAGES
    assert not stale_entries(lock, cache), "no part is left"
    assert len(hub.images_asked_for()) == len(IMAGES) + 1


LASTING = {
    "corrupted": (corrupted, "another sha256"), "short": (short, "1000 bytes, and the lock says 3000"),
    "empty": (empty, "0 bytes"), "long": (long, "more than the 3000 bytes"), "endless": (endless, "more than the 3000"),
    "html": (html, "a web page"), "pointer": (pointer, "a Git LFS pointer"), "hung up": (hung_up, "connection failed"),
    "silent at once": (lambda handler: time.sleep(0.5), "no answer in time"),
    "503": (status(503), "HTTP 503"), "429": (status(429), "HTTP 429"),
    "429 for an hour": (status(429, Retry_After="3600"), "asks to wait 3600 s"),
    "404": (status(404, X_Error_Code="EntryNotFound"), "no such file at commit"),
    "410": (status(410), "HTTP 410"), "401": (status(401), "it is private"), "403": (status(403), "it is private"),
    "round and round": (redirect("?again"), "more than 5 redirects"),
    "to a file": (redirect("file:///etc/passwd"), "was refused"),
    "to ftp": (redirect("ftp://127.0.0.1/x"), "was refused"),
    "to nothing": (redirect("http://127.0.0.1:9/x"), "connection failed"),
}  # fmt: skip


@pytest.mark.parametrize("name", LASTING)
@pytest.mark.fault
def test_a_fault_that_stays_is_told_with_address_and_reason(hub, lock, cache, name):
    fault, words = LASTING[name]
    hub.fault = always(fault)
    result = pull(lock, cache, token="", patience=SHORT)
    assert words in result.failures[VICTIM]
    assert f"/datasets/owner/images/resolve/{lock.commit}/{VICTIM}" in result.failures[VICTIM]
    assert not cached_path(cache, lock.files[VICTIM]).exists()
    assert len([path for path in hub.images_asked_for() if path.endswith(VICTIM)]) <= 3 * 6, "attempts are bounded"

    hub.fault = lambda handler, path: False
    had = len(result.paths)
    before = len(hub.images_asked_for())
    result = pull(lock, cache, token="", patience=SHORT)
    assert result.failures == {} and contents(lock, cache) == IMAGES, "nothing right is lost"
    assert len(hub.images_asked_for()) - before == len(IMAGES) - had, "what was there is not asked for again"


@pytest.mark.parametrize("damage", ["a bit", "shorter", "longer", "a link", "empty"])
@pytest.mark.fault
def test_a_tampered_cache_is_found_and_mended(hub, lock, cache, damage, tmp_path):
    pull(lock, cache, token="", patience=SHORT)
    path, data = cached_path(cache, lock.files[VICTIM]), IMAGES[VICTIM]
    if damage == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
    else:
        time_of_file = path.stat().st_mtime
        path.write_bytes(
            {"a bit": bytes([data[0] ^ 1]) + data[1:], "shorter": data[:-1], "longer": data + b"x", "empty": b""}[
                damage
            ]
        )
        os.utime(path, (time_of_file, time_of_file))
    before = len(hub.images_asked_for())
    result = pull(lock, cache, token="", patience=SHORT)
    assert result.removed == [VICTIM] and result.downloaded == 1
    assert contents(lock, cache) == IMAGES and not path.is_symlink()
    assert len(hub.images_asked_for()) - before == 1


@pytest.mark.fault
def test_an_interrupted_file_goes_on_where_it_stopped(hub, lock, cache):
    hub.fault = always(dropped)
    assert pull(lock, cache, token="", patience=Patience(attempts=1)).failures
    hub.fault = lambda handler, path: False
    assert pull(lock, cache, token="", patience=SHORT).failures == {}
    assert hub.requests[-1].headers["range"] == "bytes=1234-"
    assert contents(lock, cache) == IMAGES


@pytest.mark.parametrize("size", [700, 3000, 9000])
@pytest.mark.fault
def test_a_part_with_wrong_bytes_is_not_built_on(hub, lock, cache, size):
    cache.mkdir()
    (cache / f"{lock.files[VICTIM].sha256}.part").write_bytes(bytes(size))
    assert pull(lock, cache, token="", patience=SHORT).failures == {}
    assert contents(lock, cache) == IMAGES and not stale_entries(lock, cache)


@pytest.mark.fault
def test_a_link_in_the_place_of_a_part_is_not_followed(hub, lock, cache, tmp_path):
    cache.mkdir()
    (tmp_path / "precious").write_bytes(b"keep")
    (cache / f"{lock.files[VICTIM].sha256}.part").symlink_to(tmp_path / "precious")
    assert pull(lock, cache, token="", patience=SHORT).failures == {}
    assert (tmp_path / "precious").read_bytes() == b"keep" and contents(lock, cache) == IMAGES
