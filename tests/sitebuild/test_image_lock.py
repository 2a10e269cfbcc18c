"""The lock file: what it keeps, and everything unsafe that it refuses."""

import json

import pytest
from hub import Hub, published, random_images
from site_project import ROOT

from guide_code.sitebuild.image_lock import (
    LOCK_FILE,
    MAX_BYTES,
    Lock,
    LockedFile,
    LockError,
    check_dataset,
    path_problems,
    read_lock,
    write_lock,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GOOD = LockedFile(
    "figures/a_b-wide-dark.svg", "0" * 64, 9, 720, 400, "Says: \u00fc.", "Apache-2.0", "guide_code.figures.a_b"
)


def locked(*files):
    return Lock("owner/name", COMMIT, {file.path: file for file in files})


def test_what_is_written_is_read_again(tmp_path):
    write_lock(tmp_path, locked(GOOD))
    assert read_lock(tmp_path) == locked(GOOD)
    assert (GOOD.figure, GOOD.variant, GOOD.suffix) == ("a_b", "wide-dark", ".svg")
    assert [path.name for path in (tmp_path / "docs/data").iterdir()] == ["images.lock"], "nothing temporary is left"
    data = json.loads((tmp_path / LOCK_FILE).read_text())
    assert set(data["files"][GOOD.path]) >= {"sha256", "size", "width", "height", "alt", "license", "drawn_by"}


def test_without_a_dataset_the_lock_says_so(tmp_path):
    assert read_lock(tmp_path) == Lock()
    write_lock(tmp_path, Lock())
    assert "No dataset is published yet" in (tmp_path / LOCK_FILE).read_text()
    assert read_lock(tmp_path) == Lock()


def test_the_lock_of_this_project_can_be_read():
    lock = read_lock(ROOT)
    assert (lock.dataset is None) == (lock.commit is None) == (not lock.files)


@pytest.mark.parametrize(
    "path",
    ["../x.svg", "a/../../x.svg", "/etc/x.svg", "C:/x.svg", "a\\x.svg", ".hidden.svg", "a/.git/x.svg", "a//x.svg",
     "x.svg/", "", "x", "x.html", "x.svg\n", "a b.svg", "x\u202e.svg", "x\0.svg", "~/x.svg"],
)  # fmt: skip
def test_paths_that_lead_elsewhere_are_refused(path):
    assert len(path_problems([path])) == 1


def test_paths_that_differ_in_case_only_are_refused():
    (problem,) = path_problems(["figures/A.svg", "figures/b.svg", "Figures/a.svg"])
    assert "differ in case only" in problem and "'figures/A.svg'" in problem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sha256": "0" * 63}, "64 hexadecimal digits"),
        ({"size": MAX_BYTES + 1}, f"at most {MAX_BYTES} bytes"),
        ({"size": True}, "size True"),
        ({"width": 0}, "width 0"),
        ({"height": "400"}, "height '400'"),
        ({"alt": ""}, "alt ''"),
        ({"extra": 1}, "is not a lock"),
    ],
)
def test_a_record_that_is_wrong_is_named(tmp_path, change, words):
    write_lock(tmp_path, locked(GOOD))
    data = json.loads((tmp_path / LOCK_FILE).read_text())
    data["files"][GOOD.path] |= change
    (tmp_path / LOCK_FILE).write_text(json.dumps(data))
    with pytest.raises(LockError, match=words):
        read_lock(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"commit": "main"}, "40 hexadecimal digits"),
        ({"commit": None}, "40 hexadecimal digits"),
        ({"dataset": "https://elsewhere.example/x"}, "OWNER/NAME"),
        ({"dataset": "../x"}, "OWNER/NAME"),
        ({"dataset": None}, "lists nothing"),
        ({"files": {"../x.svg": {}}}, "is not a lock"),
        ({"files": []}, "is not a lock"),
    ],
)
def test_a_lock_that_is_wrong_is_refused(tmp_path, change, words):
    write_lock(tmp_path, locked(GOOD))
    data = json.loads((tmp_path / LOCK_FILE).read_text()) | change
    (tmp_path / LOCK_FILE).write_text(json.dumps(data))
    with pytest.raises(LockError, match=words):
        read_lock(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "<<<<<<< HEAD", "{}"])
def test_a_file_that_is_no_lock_is_refused(tmp_path, text):
    (tmp_path / LOCK_FILE).parent.mkdir(parents=True)
    (tmp_path / LOCK_FILE).write_text(text)
    with pytest.raises(LockError, match="take it from git again"):
        read_lock(tmp_path)


def test_a_lock_that_cannot_be_read_is_never_written(tmp_path):
    write_lock(tmp_path, locked(GOOD))
    before = (tmp_path / LOCK_FILE).read_bytes()
    with pytest.raises(LockError):
        write_lock(tmp_path, Lock("owner/name", "main", {}))
    assert (tmp_path / LOCK_FILE).read_bytes() == before


@pytest.mark.parametrize("name", ["name", "a/b/c", "/b", "a/", "a b/c", "datasets/a/b", "-a/b"])
def test_a_dataset_needs_owner_and_name(name):
    with pytest.raises(LockError, match="OWNER/NAME"):
        check_dataset(name)


def test_a_link_in_the_cache_is_no_file(tmp_path):
    with Hub() as hub:
        lock = published(hub, random_images(1, 10))
    (file,) = lock.files.values()
    (tmp_path / "bytes").write_bytes(random_images(1, 10)[file.path])
    (tmp_path / "link").symlink_to(tmp_path / "bytes")
    assert file.matches(tmp_path / "bytes") and not file.matches(tmp_path / "link")
    assert not file.matches(tmp_path) and not file.matches(tmp_path / "gone")
