"""No image is in git: this repository now, and every way in which one could come."""

import base64
import os
import subprocess
import sys

import pytest
import yaml
from site_project import ROOT

from guide_code.sitebuild.no_images import MAX_BYTES, git_problems

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
SVG = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"></svg>'
INLINE = b"![x](data:image/png;base64," + base64.b64encode(PNG) + b")"
OUTPUT = b'{"cells": [{"outputs": [{"data": {"image/png": "' + base64.b64encode(PNG) + b'"}}]}]}'


def git(root, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, timeout=60, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    return tmp_path


def put(root, path, data):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(data)


BAD = {
    "docs/x.png": (b"", "an image"),
    "docs/x.SVG": (b"", "an image"),
    "docs/img/photo": (b"\xff\xd8\xff\xe0", "an image"),
    "docs/renamed.txt": (PNG, "an image"),
    "docs/drawing.txt": (SVG, "an image"),
    "docs/page.md": (b"# Page\n\n" + INLINE, "as base64"),
    "notebooks/n.ipynb": (OUTPUT, "as base64"),
    "notebooks/n.py": (b"# %% [markdown]\n# " + INLINE, "as base64"),
    "docs/data/big.json": (b"1" * (MAX_BYTES + 1), f"{MAX_BYTES + 1} bytes"),
    "docs/\u00fc x\ty.png": (PNG, "an image"),
}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_this_repository_holds_no_image():
    assert git_problems(ROOT) == []


def test_pre_commit_runs_the_same_check():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = [hook for hook in repo["hooks"] if hook["id"] == "no-images"]
    assert hook["entry"].endswith("python -m guide_code.sitebuild.no_images") and hook["always_run"]


def test_what_could_be_added_is_refused_with_advice(repository):
    for path, (data, _) in BAD.items():
        put(repository, path, data)
    problems = git_problems(repository)
    assert len(problems) == len(BAD)
    for path, (_, words) in BAD.items():
        (problem,) = [problem for problem in problems if problem.startswith(f"{path}: ")]
        assert words in problem and "Instead: " in problem


def test_what_was_committed_is_refused_even_when_it_is_gone_again(repository):
    for path, (data, _) in BAD.items():
        put(repository, path, data)
    git(repository, "add", "-f", ".")
    git(repository, "commit", "-qm", "one")
    assert len(git_problems(repository)) == len(BAD), "each once, and not again for the commit"
    git(repository, "rm", "-qr", ".")
    git(repository, "commit", "--allow-empty", "-qm", "two")
    problems = git_problems(repository)
    assert len(problems) == len(BAD)
    for path, (_, words) in BAD.items():
        (problem,) = [problem for problem in problems if problem.startswith(f"{path} in commit ")]
        assert words in problem and "git rebase" in problem
    assert git_problems(repository, commits=1) == [], "further back it cannot be helped"


def test_what_is_staged_counts_and_not_what_lies_there(repository):
    put(repository, "docs/page.md", INLINE)
    git(repository, "add", ".")
    put(repository, "docs/page.md", b"# Clean again\n")
    assert len(git_problems(repository)) == 1


def test_a_tracked_file_that_becomes_one_is_refused_before_it_is_staged(repository):
    put(repository, "docs/page.md", b"# Page\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "one")
    put(repository, "docs/page.md", INLINE)
    assert len(git_problems(repository)) == 1


def test_an_image_that_a_merge_brings_is_refused(repository):
    put(repository, "a.md", b"a")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "one")
    git(repository, "checkout", "-qb", "side")
    put(repository, "x.png", PNG)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "side")
    git(repository, "checkout", "-q", "-")
    git(repository, "merge", "-q", "--no-ff", "-m", "merge", "side")
    assert [problem.split(":")[0] for problem in git_problems(repository, commits=1)] == ["x.png"]


def test_what_is_allowed_passes(repository):
    put(repository, ".gitignore", b"site/\n")
    put(repository, "site/x.png", PNG)
    put(repository, "docs/data/images.lock", b"1" * (MAX_BYTES + 1))
    put(repository, "constraints.txt", b"1" * (MAX_BYTES + 1))
    put(repository, "docs/page.md", b"Write `data:image/png;base64,...` and never `<svg>` or \x89PNG.")
    put(repository, "tests/test_x.py", b"PNG = b'data:image/png;base64," + base64.b64encode(PNG) + b"'")
    put(repository, "docs/clip.html", b"<p><svg></svg></p>")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "one")
    assert git_problems(repository) == []


def test_the_command_fails_where_there_is_one_and_says_so_where_there_is_no_git(repository, tmp_path_factory):
    def run(folder):
        words = [sys.executable, "-m", "guide_code.sitebuild.no_images"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)

    assert run(repository).returncode == 0
    put(repository, "x.png", PNG)
    failed = run(repository)
    assert failed.returncode == 1 and failed.stderr.startswith("x.png: an image. Instead: draw it")
    with pytest.raises(RuntimeError, match="not a git repository"):
        git_problems(tmp_path_factory.mktemp("elsewhere"))
