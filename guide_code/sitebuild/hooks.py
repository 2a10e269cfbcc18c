"""The MkDocs hooks. Each is a few lines around a function that works without MkDocs."""

import fnmatch
import json
import logging
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import get_toc
from mkdocs.utils import get_relative_url

from guide_code.sitebuild.api import API_URI
from guide_code.sitebuild.citations import BIBLIOGRAPHY_URI, CitationError, cite
from guide_code.sitebuild.colab import colab_url
from guide_code.sitebuild.figure_html import expand_figures
from guide_code.sitebuild.figures import FigureError
from guide_code.sitebuild.glossary import GLOSSARY_URI, link_terms
from guide_code.sitebuild.notebook_html import rebuild
from guide_code.sitebuild.notebook_pages import download_uri
from guide_code.sitebuild.prepare import Prepared

# Docstrings may name objects as Sphinx does, :func:`x`; the code span alone says as much to a reader.
_ROLE = re.compile(r":(func|class|meth|mod|attr|data|exc):(?=<code)")

log = logging.getLogger("mkdocs.hooks.guide")


def _prepared(config: MkDocsConfig) -> Prepared:
    try:
        return config.extra["prepared"]
    except KeyError:
        raise PluginError(
            "build the site with `make site`: it runs the notebooks and draws the figures first"
        ) from None


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Mounts generated files and lists them where the navigation has a pattern."""
    prepared = _prepared(config)
    for item in prepared.mounted:
        clash = files.get_file_from_path(item.uri)
        if clash is not None:
            raise PluginError(f"{item.uri} is generated, but docs/{item.uri} exists too: rename one of them")
        file = File.generated(config, item.uri, abs_src_path=str(item.path))
        if item.path.as_posix().endswith(item.uri):
            # mkdocs-jupyter wraps the file in an object that computes the path anew from this folder.
            file.src_dir = item.path.as_posix().removesuffix(item.uri)
        files.append(file)
    uris = [item.uri for item in prepared.mounted if item.page]
    config.nav = expand_navigation(config.nav, uris)
    check_collisions(files)
    return files


def expand_navigation(nav: Any, uris: list[str]) -> Any:
    """Replaces each pattern of the navigation, such as `tutorials/*`, by the generated pages that it matches."""
    if isinstance(nav, str):
        return [uri for uri in uris if fnmatch.fnmatch(uri, nav)] if "*" in nav else nav
    if isinstance(nav, dict):
        return {title: expand_navigation(entry, uris) for title, entry in nav.items()}
    if isinstance(nav, list):
        flat = []
        for entry in nav:
            expanded = expand_navigation(entry, uris)
            flat.extend(expanded if isinstance(entry, str) and isinstance(expanded, list) else [expanded])
        return flat
    return nav


def check_collisions(files: Files) -> None:
    """Refuses two files that would be written to one place, such as `a.md` and the notebook `a`."""
    places: dict[str, str] = {}
    for file in files:
        uri = file.src_uri
        page = uri.endswith((".md", ".ipynb"))
        place = file.dest_uri if not uri.endswith(".ipynb") else posixpath.splitext(uri)[0]
        place = posixpath.splitext(uri)[0] if page else place
        place = place.casefold()
        if place in places:
            raise PluginError(f"{places[place]} and {uri} would become the same page: rename one of them")
        places[place] = uri


@event_priority(-100)  # after mkdocs-jupyter has put its own rendering in place
def on_pre_page(page: Page, config: MkDocsConfig, files: Files) -> Page:
    """Lets a page that has not changed come from the cache."""
    pages = _prepared(config).pages
    if pages is not None:
        pages.attach(page)
    return page


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts figures into the page."""
    if not page.file.src_uri.endswith(".md"):
        return markdown
    images = _prepared(config).images
    try:
        return expand_figures(
            markdown,
            page.file.url,
            page.file.src_uri,
            images.figures,
            why_drawn=images.why_drawn,
            used=images.used.add,
        )
    except FigureError as error:
        raise PluginError(f"{error}{images.advice}") from None


@event_priority(-100)  # after every plugin has had its say on the content
def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adds links to the bibliography and the glossary, and makes a page of a notebook."""
    uri = page.file.src_uri
    if uri.startswith(API_URI):
        return _ROLE.sub("", html)
    if uri.endswith(".ipynb"):
        html = _notebook(html, page, files, config.extra.get("repository") or "")
    else:  # sources that a lesson shows are open
        html = html.replace('<details class="mkdocstrings-source">', '<details class="mkdocstrings-source" open>')
        html = _ROLE.sub("", html)
    prepared = _prepared(config)
    try:
        html = cite(html, prepared.works, _address(BIBLIOGRAPHY_URI, page, files), uri)
    except CitationError as error:
        raise PluginError(str(error)) from None
    if uri == GLOSSARY_URI:
        return html
    return link_terms(html, prepared.terms, _address(GLOSSARY_URI, page, files))


def _address(uri: str, page: Page, files: Files) -> str:
    """The address of the page that is written in `uri`, seen from `page`."""
    file = files.get_file_from_path(uri)
    return get_relative_url(file.url, page.file.url) if file else ""


def _notebook(html: str, page: Page, files: Files, repository: str) -> str:
    """A notebook page in the theme's markup, with resolved links and its bar of facts and downloads."""
    content, headings = rebuild(html, lambda url: _resolve(url, page, files))
    page.toc = get_toc([heading.as_token() for heading in headings])  # pyright: ignore[reportArgumentType]
    head, end, rest = content.partition("</h1>")
    if not end:
        raise PluginError(f"{page.file.src_uri} has no title: its first cell starts with '# The title'")
    return f"{head}{end}{_bar(page, repository)}{rest}"


def _resolve(url: str, page: Page, files: Files) -> str:
    """The address, seen from the page, of what a notebook calls `url`; warns where there is nothing.

    Both ways of writing hold: as files lie in the repository (`../docs/learn/moe_layer.md`, `02_next.py`) and as
    pages lie in the site (`../learn/moe_layer.md`, `02_next.ipynb`).
    """
    parts = urlsplit(url)
    if parts.scheme or parts.netloc or not parts.path or url.startswith("/"):
        return url
    target = posixpath.normpath(posixpath.join("tutorials", parts.path)).removeprefix("docs/")
    stem, suffix = posixpath.splitext(target)
    candidates = [f"{stem}.ipynb"] if suffix == ".py" else [target]
    for candidate in candidates:
        file = files.get_file_from_path(candidate)
        if file is not None:
            fragment = f"#{parts.fragment}" if parts.fragment else ""
            return get_relative_url(file.url, page.file.url) + fragment
    log.warning(
        "%s links to %r, but there is no %s in docs/ or among the generated files", page.file.src_uri, url, target
    )
    return url


def _bar(page: Page, repository: str) -> str:
    """When and where the notebook ran, its two downloads, and, where the site has a repository, Colab."""
    source = Path(str(page.file.abs_src_path))
    guide = json.loads(source.read_text(encoding="utf-8"))["metadata"]["guide"]
    base = get_relative_url(download_uri(source.stem), page.file.url)
    stale = (
        '<p class="nb-stale" role="note">Preview: the outputs below come from an earlier version of the code.</p>'
        if guide["stale"]
        else ""
    )
    colab = f'<a class="md-button" href="{colab_url(repository, source.stem)}">Open in Colab</a>' if repository else ""
    return (
        f'<div class="nb-bar" data-search-exclude>'
        f'<a class="md-button" href="{base}.ipynb" download>Notebook <small>.ipynb</small></a>'
        f'<a class="md-button" href="{base}.py" download>Script <small>.py</small></a>{colab}'
        f"<span>Ran in {guide['seconds']:.0f} s on {escape(guide['hardware'])}, {guide['date']}</span></div>{stale}"
    )
