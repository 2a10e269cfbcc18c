"""Pulling images: what is asked for, by whom, with which secret, and what is left after any interruption.

Known failures U-03 and U-04 are here.
"""

import hashlib
import os
import subprocess
import sys
import threading
import time

import pytest
from hub import STRANGER, WRITER, published, random_images
from pull_faults import IMAGES, SHORT, VICTIM, contents
from site_project import ROOT

from guide_code.sitebuild.image_cache import CACHE, cached_path, look_up, stale_entries
from guide_code.sitebuild.image_download import Patience
from guide_code.sitebuild.image_lock import Lock, write_lock
from guide_code.sitebuild.image_pull import pull


def test_a_whole_cache_makes_no_request(hub, lock, cache):
    pull(lock, cache, token="", patience=SHORT)
    before = len(hub.requests)
    assert pull(lock, cache, token="", patience=SHORT).downloaded == 0
    assert len(hub.requests) == before
    code = (
        "import sys; from pathlib import Path; from guide_code.sitebuild.image_lock import read_lock\n"
        "from guide_code.sitebuild.image_pull import pull\n"
        "pull(read_lock(Path('.')), Path('cache')); print('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.fault
def test_a_moved_branch_changes_nothing(hub, lock, cache):
    moved = {path: data[::-1] for path, data in IMAGES.items()}
    hub.datasets["owner/images"].commit(moved)
    assert pull(lock, cache, token="", patience=SHORT).failures == {}
    assert contents(lock, cache) == IMAGES
    assert all(f"/resolve/{lock.commit}/" in path for path in hub.images_asked_for())


def test_a_new_commit_fetches_only_what_is_new(hub, lock, cache):
    pull(lock, cache, token="", patience=SHORT)
    newer = published(hub, IMAGES | {VICTIM: b"new"})
    before = len(hub.images_asked_for())
    assert pull(newer, cache, token="", patience=SHORT).downloaded == 1
    assert len(hub.images_asked_for()) - before == 1
    assert stale_entries(newer, cache) == [cached_path(cache, lock.files[VICTIM])]


@pytest.mark.fault
def test_offline_with_a_whole_cache_is_enough(hub, lock, cache, monkeypatch):
    pull(lock, cache, token="", patience=SHORT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert pull(lock, cache, token="", patience=SHORT).failures == {}
    cached_path(cache, lock.files[VICTIM]).unlink()
    before = len(hub.requests)
    result = pull(lock, cache, token="", patience=SHORT)
    assert list(result.failures) == [VICTIM] and "HF_HUB_OFFLINE" in result.failures[VICTIM]
    assert len(hub.requests) == before


@pytest.mark.fault
def test_without_a_network_it_ends_soon_and_names_what_is_missing(lock, cache):
    tries = Patience(attempts=2, pause=0.01, connect=1)
    result = pull(lock, cache, endpoint="http://127.0.0.1:9", token="", patience=tries)
    assert set(result.failures) == set(IMAGES) and "connection failed" in result.failures[VICTIM]


@pytest.mark.fault
def test_a_dataset_that_is_gone_is_asked_for_once(hub, lock, cache):
    del hub.datasets["owner/images"]
    result = pull(lock, cache, token="", patience=SHORT)
    assert set(result.failures) == set(IMAGES)
    assert len(hub.requests) <= 8, "not once for every file and attempt: at most one for each thread"


@pytest.mark.fault
def test_all_threads_wait_when_the_hub_asks_for_it(hub, cache):
    lock = published(hub, random_images(40, 100))
    times = []

    def busy(handler, path):
        times.append(time.monotonic())
        if len(times) == 1:
            handler.error(429, Retry_After="0.4")
            return True
        return False

    hub.fault = busy
    assert pull(lock, cache, token="", patience=SHORT).failures == {}
    early = [moment for moment in times if moment < times[0] + 0.35]
    assert len(early) <= 8 * 3, "only what was under way when the answer came"


def test_a_public_dataset_is_read_without_the_token(hub, lock, cache):
    """U-04: no image depends on a secret."""
    pull(lock, cache, token=WRITER, patience=SHORT)
    assert not [request for request in hub.requests if "authorization" in request.headers]


def test_a_private_dataset_is_read_with_the_token(hub, lock, cache):
    hub.datasets["owner/images"].private = True
    assert pull(lock, cache, token=WRITER, patience=SHORT).failures == {}
    result = pull(lock, cache.with_name("other"), token=STRANGER, patience=SHORT)
    assert set(result.failures) == set(IMAGES)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.fault
def test_the_token_stays_with_the_hub_through_redirects(hub, lock, cache, code):
    """U-04: large files lie on another host."""
    hub.datasets["owner/images"].private = True
    hub.objects |= {hashlib.sha256(data).hexdigest(): data for data in IMAGES.values()}

    def away(handler, path):
        if handler.where == "cdn" or handler.token != WRITER:
            return False
        target = f"{hub.cdn}/{lock.files[path].sha256}"
        handler.send(b"", code, Location=target, ETag='W/"weak"')
        return True

    hub.fault = away
    assert pull(lock, cache, token=WRITER, patience=SHORT).failures == {}
    assert contents(lock, cache) == IMAGES
    seen = {
        where: [r for r in hub.requests if r.where == where and "authorization" in r.headers]
        for where in ("hub", "cdn")
    }
    assert seen["hub"] and not seen["cdn"]
    assert len([request for request in hub.requests if request.where == "cdn"]) == len(IMAGES)


@pytest.mark.fault
def test_a_refusal_from_the_other_host_does_not_bring_out_the_token(hub, lock, cache):
    hub.large = (".svg",)
    hub.fault = lambda handler, path: handler.where == "cdn" and handler.error(403) is None
    result = pull(lock, cache, token=WRITER, patience=SHORT)
    assert "HTTP 403 from 127.0.0.1, where the hub keeps the bytes" in result.failures[VICTIM]
    assert not [request for request in hub.requests if "authorization" in request.headers]


@pytest.mark.fault
def test_odd_headers_do_not_matter(hub, lock, cache):
    """U-04: no length, a weak ETag, none at all."""

    def bare(handler, path):
        handler.send_response(200)
        handler.send_header("ETag", 'W/"weak;\\"quoted\\""')
        handler.end_headers()
        handler.wfile.write(IMAGES[path])
        handler.close_connection = True
        return True

    hub.fault = bare
    assert pull(lock, cache, token="", patience=SHORT).failures == {}
    assert contents(lock, cache) == IMAGES


@pytest.mark.fault
def test_two_pulls_into_one_cache_take_turns(hub, lock, cache):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(pull(lock, cache, token="", patience=SHORT))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [result.failures for result in results] == [{}, {}, {}]
    assert sum(result.downloaded for result in results) == len(hub.images_asked_for()) == len(IMAGES)


@pytest.mark.fault
def test_killed_in_the_middle_it_goes_on(hub, cache):
    """kill -9 leaves whole files and parts, never a wrong file; the next pull asks for the rest only."""
    images = random_images(30, 2000)
    lock = published(hub, images)
    hub.fault = lambda handler, path: time.sleep(0.1)
    code = (
        "import sys; sys.path.insert(0, 'tests'); from pathlib import Path\n"
        "from guide_code.sitebuild.image_lock import Lock, LockedFile\n"
        "from guide_code.sitebuild.image_pull import pull\n"
        f"lock = {lock!r}\n"
        f"pull(lock, Path({str(cache)!r}), endpoint={hub.endpoint!r}, token='')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 30
    while len(list(cache.glob("*.svg"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait(10)
    whole = look_up(lock, cache)
    assert 5 <= len(whole.paths) < 30 and whole.removed == []
    hub.fault = lambda handler, path: False
    before = len(hub.images_asked_for())
    assert pull(lock, cache, token="", patience=SHORT).failures == {}
    assert contents(lock, cache) == images and not stale_entries(lock, cache)
    assert len(hub.images_asked_for()) - before == 30 - len(whole.paths)


def test_progress_reaches_the_whole(hub, lock, cache):
    sizes = []
    pull(lock, cache, token="", patience=SHORT, advance=sizes.append)
    pull(lock, cache, token="", patience=SHORT, advance=sizes.append)
    assert sum(sizes) == 2 * sum(len(data) for data in IMAGES.values())


def test_an_empty_lock_needs_nothing(cache):
    assert pull(Lock(), cache).paths == {} and not cache.exists()


@pytest.mark.parametrize("revision", ["main", "0" * 40, "refs/pr/1"])
def test_addresses_are_written_as_the_hub_does(revision):
    """U-03: resolve and not blob or raw, the kind of repository, and every odd character escaped."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(
        "owner/name", "fig a/\u00fc.png", repo_type="dataset", revision=revision, endpoint="https://h.example"
    )
    escaped = revision.replace("/", "%2F")
    assert url == f"https://h.example/datasets/owner/name/resolve/{escaped}/fig%20a/%C3%BC.png"


@pytest.mark.parametrize("proxy", [False, True])
def test_a_mirror_and_a_proxy_of_the_environment_are_used(hub, lock, tmp_path, proxy):
    """U-04: as commands meet them; the stand-in plays the proxy too."""
    write_lock(tmp_path, lock)
    (tmp_path / "mkdocs.yml").write_text("site_name: x\n")
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": WRITER, "HF_HUB_DISABLE_TELEMETRY": "1"}
    if proxy:
        environment |= {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": hub.endpoint, "http_proxy": hub.endpoint}
    code = "from guide_code.images_cli import app; app()"
    words = [sys.executable, "-c", code, "pull", "--root", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert f"{len(IMAGES)} images are whole" in done.stdout, done.stderr
    assert contents(lock, tmp_path / CACHE) == IMAGES
    assert {request.path.startswith("http://hub.invalid/") for request in hub.requests} == {proxy}
    assert not [request for request in hub.requests if "authorization" in request.headers]
