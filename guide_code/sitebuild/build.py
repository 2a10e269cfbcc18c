"""Builds the site: prepare, MkDocs in strict mode, link check, and only then the swap into place."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mkdocs.commands.build import build as mkdocs_build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort, MkDocsException

from guide_code.sitebuild.figures import FigureError
from guide_code.sitebuild.links import check_site
from guide_code.sitebuild.notebooks import NotebookError
from guide_code.sitebuild.offline import make_offline, write_search_script
from guide_code.sitebuild.page_cache import PageCache
from guide_code.sitebuild.prepare import Prepared, prepare


class SiteError(Exception):
    """The site cannot be built; the message says what to change. The previous site is untouched."""


def build_site(
    root: Path,
    *,
    offline: bool = False,
    allow_stale: bool = False,
    into: Path | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Builds the site and returns its folder.

    Args:
        root: The project's folder, with `mkdocs.yml`.
        offline: Build for reading without a server (`file://`).
        allow_stale: Keep outputs of notebooks of which only imported code has changed (previews).
        into: The folder of the site; `site/`, or `site-offline/` when `offline`, below `root` by default.
        say: Gets progress lines.

    Raises:
        SiteError: With the cause; what was in `into` before still is.
    """
    target = into or root / ("site-offline" if offline else "site")
    cache = root / ".cache"
    cache.mkdir(exist_ok=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as name, _warnings_to(say):
        workspace, site = Path(name), Path(name) / "site"
        try:
            prepared = prepare(root, workspace, allow_stale=allow_stale, say=say)
            prepared.pages = PageCache(root, "site-offline" if offline else "site")
            before = time.monotonic()
            site_url = _render(root, site, prepared, offline)
            prepared.timings["pages"] = time.monotonic() - before
        except (NotebookError, FigureError, MkDocsException, Abort, ValueError, SyntaxError, OSError) as error:
            raise SiteError(str(error)) from error
        before = time.monotonic()
        problems = check_site(site, site_url, remote=prepared.images.remote) + prepared.images.wrong_files(site)
        if problems:
            raise SiteError("links and images of the built site:\n" + "\n".join(f"  {problem}" for problem in problems))
        prepared.timings["link check"] = time.monotonic() - before
        _swap(site, target)
    prepared.pages.clean()
    if prepared.images.unused():
        say(f"images: no page shows {', '.join(prepared.images.unused())}")
    parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in prepared.timings.items())
    say(f"{target} is built in {time.monotonic() - start:.1f} s ({parts})")
    return target


def _render(root: Path, site: Path, prepared: Prepared, offline: bool) -> str:
    """Runs MkDocs; returns the public address of the site."""
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")  # Material prints it when loaded; our pins settle the matter
    config = load_config(str(root / "mkdocs.yml"), site_dir=str(site), strict=True)
    config.extra["prepared"] = prepared
    if offline:
        make_offline(config)
    config.plugins.on_startup(command="build", dirty=False)
    try:
        mkdocs_build(config)
    finally:
        config.plugins.on_shutdown()
    if offline:
        write_search_script(site)
    return config.site_url or ""


def _swap(new: Path, target: Path) -> None:
    """Puts `new` in the place of `target`: two renames, so that no moment shows half a site."""
    new.chmod(0o755)
    target.parent.mkdir(parents=True, exist_ok=True)
    old = new.with_name("previous")
    if target.exists():
        target.replace(old)
    try:
        new.replace(target)
    except OSError:  # another file system
        shutil.move(new, target)


@contextmanager
def _warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    """Shows warnings of MkDocs and its plugins as lines of `say`."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(f"{record.levelname.lower()}: {record.getMessage()}")

    handler = Lines(logging.WARNING)
    logger = logging.getLogger("mkdocs")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
