"""Renders a page once per version of what it shows: its text, the code that it names or runs, data, and settings.

Most of a build is spent on pages that are what they were: code blocks that run, docstrings that are laid out. The key
of a page covers every file that either can read, as the key of a notebook does.
"""

import json
import logging
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import get_toc

from guide_code.sitebuild.imports import import_closure, module_file
from guide_code.sitebuild.keys import cache_key

_FORM = "page 1"
_MODULE = re.compile(r"\bguide_code(?:\.\w+)+")
_FROM_PACKAGE = re.compile(r"\bfrom guide_code import (.+)")
_INCLUDED = re.compile(r'--8<--\s+"([^":]+)')
_NAVIGATION = re.compile(r"^nav:.*?(?=^\S)", re.MULTILINE | re.DOTALL)


class PageCache:
    """The rendered pages of a project, below `.cache/pages`.

    Args:
        root: The project's folder.
        kind: Of the build; each has entries of its own, since links differ.
    """

    def __init__(self, root: Path, kind: str = "site"):
        self._root = root
        self._folder = root / ".cache/pages" / kind
        self._used: set[Path] = set()
        settings = _NAVIGATION.sub("", (root / "mkdocs.yml").read_text(encoding="utf-8"))
        self._shared = [*sorted((root / "docs/data").rglob("*")), *sorted((root / "guide_code/sitebuild").glob("*.py"))]
        self._form = f"{_FORM} {settings}"

    def attach(self, page: Page) -> None:
        """Makes the page take its content from the cache, or put it there."""
        page.render = partial(self._render, page, page.render)

    def clean(self) -> None:
        """Removes what the build that ends did not use."""
        for path in self._folder.glob("*.json"):
            if path not in self._used:
                path.unlink(missing_ok=True)

    def key(self, page: Page) -> str:
        """The name of the page's entry."""
        assert page.markdown is not None
        files = {path for path in self._shared if path.is_file()}
        names = set(_MODULE.findall(page.markdown))
        for imported in _FROM_PACKAGE.findall(page.markdown):
            names |= {f"guide_code.{name}" for name in re.findall(r"\w+", imported)}
        for name in names:
            path = self._file_of(name)
            if path is not None:
                files |= {path, *import_closure(path, self._root, names_in_strings=True)}
        files |= {path for name in _INCLUDED.findall(page.markdown) if (path := self._root / name).is_file()}
        stem = re.sub(r"\W+", "-", page.file.src_uri)
        return cache_key(stem, self._root, files, form=f"{self._form} {page.url} {page.markdown}")

    def _file_of(self, name: str) -> Path | None:
        """The file of the longest beginning of `guide_code.moe.MoE` that is a module."""
        while "." in name:
            path = module_file(name, self._root)
            if path is not None:
                return path
            name = name.rpartition(".")[0]
        return None

    def _render(self, page: Page, render: Any, config: MkDocsConfig, files: Files) -> None:
        path = self._folder / f"{self.key(page)}.json"
        self._used.add(path)
        if path.is_file():
            _restore(page, json.loads(path.read_text(encoding="utf-8")), config, files)
            return
        entry = _record(page, partial(render, config, files), config)
        if entry is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(json.dumps(entry), encoding="utf-8")
        part.replace(path)


def _record(page: Page, render: Any, config: MkDocsConfig) -> dict[str, Any] | None:
    """Renders the page; returns all that rendering left behind, or None where a warning says that it went wrong."""
    plugins: Any = config.plugins
    autorefs, inventory = plugins["autorefs"], plugins["mkdocstrings"].handlers.inventory
    anchors: list[tuple[list, dict]] = []
    register, known = autorefs.register_anchor, set(inventory)

    def record_anchor(page: Page, *args: Any, **kwargs: Any) -> None:
        anchors.append((list(args), kwargs))
        register(page, *args, **kwargs)

    named, warnings = vars(page).get("title"), _Warnings(logging.WARNING)
    logging.getLogger("mkdocs").addHandler(warnings)
    autorefs.register_anchor = record_anchor
    try:
        render()
    finally:
        del autorefs.register_anchor
        logging.getLogger("mkdocs").removeHandler(warnings)
    if warnings.seen:
        return None
    return {
        "content": page.content,
        "toc": [_token(item) for item in page.toc],
        "title": getattr(page, "_title_from_render", None),
        "notebook_title": title if (title := vars(page).get("title")) != named else None,
        "anchors_present": None if page.present_anchor_ids is None else sorted(page.present_anchor_ids),
        "anchors_linked": {file.src_uri: links for file, links in (page.links_to_anchors or {}).items()},
        "anchors": anchors,
        "inventory": [vars(inventory[name]) for name in inventory if name not in known],
    }


def _restore(page: Page, entry: dict[str, Any], config: MkDocsConfig, files: Files) -> None:
    """Puts the page and the plugins into the state that rendering would have left."""
    plugins: Any = config.plugins
    autorefs, handlers = plugins["autorefs"], plugins["mkdocstrings"].handlers
    page.content = entry["content"]
    page.toc = get_toc(entry["toc"])
    page._title_from_render = entry["title"]
    if entry["notebook_title"] is not None:
        page.title = entry["notebook_title"]
    page.present_anchor_ids = None if entry["anchors_present"] is None else set(entry["anchors_present"])
    linked = {files.get_file_from_path(uri): links for uri, links in entry["anchors_linked"].items()}
    page.links_to_anchors = {file: links for file, links in linked.items() if file is not None}
    for args, kwargs in entry["anchors"]:
        autorefs.register_anchor(page, *args, **kwargs)
    handlers.get_handler("python")  # it writes its style sheet if it was used
    for item in entry["inventory"]:
        handlers.inventory.register(**item)


def _token(item: Any) -> dict[str, Any]:
    """A heading of the table of contents, as the extension `toc` gives it."""
    return {"level": item.level, "id": item.id, "name": item.title, "children": [_token(c) for c in item.children]}


class _Warnings(logging.Handler):
    seen = False

    def emit(self, record: logging.LogRecord) -> None:
        self.seen = True
