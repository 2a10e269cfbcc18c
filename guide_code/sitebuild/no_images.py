"""Keeps images out of git: `python -m guide_code.sitebuild.no_images`, called by the tests and by pre-commit.

An image that was once committed stays in every clone for ever, also after it is deleted. So this looks at the index, at
files that are not ignored and could be added, and at what the last commits have brought.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MAX_BYTES = 200_000
COMMITS = 50
EXEMPT = {"docs/data/images.lock", "constraints.txt"}  # from the limit of size
_SUFFIXES = set(".png .apng .jpg .jpeg .gif .webp .svg .svgz .ico .bmp .tif .tiff .avif .heic .heif .jxl .eps".split())
_MAGIC = re.compile(
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|BM....\0\0\0\0|II\*\0|MM\0\*|....ftyp(avif|heic|mif1)|\0\0\1\0"
    rb"|(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?(<!DOCTYPE svg[^>]*>\s*)?<svg[\s>]",
    re.DOTALL,
)
_BASE64 = re.compile(
    rb"data:image/[\w.+-]+;[^,\s\"')]*base64,\s*[A-Za-z0-9+/]{20,}"
    rb"|\"image/(png|jpeg|gif|webp)\"\s*:\s*\[?\s*\"[A-Za-z0-9+/]{20,}"  # an output cell
)
_TEXT_PAGES = {".md", ".ipynb", ".html"}

_INSTEAD = {
    "image": "draw it by a module in guide_code/figures, name it in the page as `![caption](figure:NAME)`, and run "
    "`moe-guide images publish` (docs/how-to/publish_images.md)",
    "large": "make it smaller, write code that computes it, or publish it in a dataset",
    "base64": "commit a notebook as a py:percent script, without outputs; name a figure as `![caption](figure:NAME)`",
}


def git_problems(root: Path, *, commits: int = COMMITS) -> list[str]:
    """What must not be in git and is, or is about to be, in words: where it is, why not, and what to do instead.

    Args:
        root: The folder of a git repository.
        commits: How many commits of the history to look at.

    Raises:
        RuntimeError: `root` is no git repository, or git is missing.
    """
    found: dict[str, str] = {}
    for path in _lines(root, "ls-files", "-z", "--others", "--modified", "--exclude-standard"):
        file = root / path
        if file.is_file():
            _judge(found, path, file.read_bytes(), "")
    blobs = [(path, blob, "") for path, blob in _index(root)] + list(_history(root, commits))
    contents = _contents(root, {blob for _, blob, _ in blobs})
    for path, blob, where in blobs:
        _judge(found, path, contents[blob], where)
    return [f"{place}: {problem}" for place, problem in sorted(found.items())]


def _judge(found: dict[str, str], path: str, data: bytes, commit: str) -> None:
    if path in found:
        return
    suffix = PurePosixPath(path).suffix.lower()
    page = suffix in _TEXT_PAGES or (suffix == ".py" and path.startswith("notebooks/"))
    if suffix in _SUFFIXES or _MAGIC.match(data):
        what, kind = "an image", "image"
    elif page and _BASE64.search(data):
        what, kind = "holds an image as base64", "base64"
    elif len(data) > MAX_BYTES and path not in EXEMPT:
        what, kind = f"{len(data)} bytes, and at most {MAX_BYTES} are allowed", "large"
    else:
        return
    if commit:
        undo = "take it out of that commit before you push (`git rebase -i`): it would stay in every clone"
        found[f"{path} in commit {commit[:8]}"] = f"{what}; {undo}. Instead: {_INSTEAD[kind]}"
    else:
        found[path] = f"{what}. Instead: {_INSTEAD[kind]}"


def _index(root: Path) -> Iterator[tuple[str, str]]:
    """Path and blob of every file in the index; submodules have none."""
    for line in _lines(root, "ls-files", "-z", "--stage"):
        about, _, path = line.partition("\t")
        mode, blob, _ = about.split()
        if mode != "160000":
            yield path, blob


def _history(root: Path, commits: int) -> Iterator[tuple[str, str, str]]:
    """Path, blob and commit of every file that a recent commit has added or changed."""
    if not _git(root, "rev-list", "--all", "--max-count=1"):
        return
    log = ("log", "-z", f"--max-count={commits}", "--format=%H", "--raw", "--no-abbrev", "--no-renames", "-m", "--root")
    fields = iter(_lines(root, *log))
    commit = ""
    for text in fields:
        text = text.strip()
        if re.fullmatch(r"[0-9a-f]{40,64}", text):
            commit = text
        elif text.startswith(":"):
            _, mode, _, blob, status = text.split()
            path = next(fields)
            if status != "D" and mode != "160000":
                yield path, blob, commit


def _contents(root: Path, blobs: set[str]) -> dict[str, bytes]:
    """The bytes of blobs, by their hash."""
    ordered = sorted(blobs)
    stream = _git(root, "cat-file", "--batch", stdin="\n".join(ordered).encode() + b"\n")
    contents, start = {}, 0
    for blob in ordered:
        end = stream.index(b"\n", start)
        name, kind, *size = stream[start:end].decode().split()
        assert name == blob
        length = int(size[0]) if kind == "blob" else 0  # "missing" where a partial clone lacks it
        contents[blob] = stream[end + 1 : end + 1 + length]
        start = end + 1 + length + (1 if kind == "blob" else 0)
    return contents


def _lines(root: Path, *words: str) -> list[str]:
    return [text for text in _git(root, *words).decode("utf-8", "surrogateescape").split("\0") if text]


def _git(root: Path, *words: str, stdin: bytes = b"") -> bytes:
    try:
        done = subprocess.run(["git", *words], cwd=root, input=stdin, capture_output=True, check=True, timeout=120)
    except FileNotFoundError:
        raise RuntimeError("git is not installed, so its files cannot be checked") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"git {words[0]}: {error.stderr.decode(errors='replace').strip()}") from None
    return done.stdout


if __name__ == "__main__":
    problems = git_problems(Path.cwd())
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    sys.exit(bool(problems))
