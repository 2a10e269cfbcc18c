"""Checks the built site: every link and file resolves, and nothing is loaded from another host."""

import posixpath
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED_LINK_RELS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch"}
_CSS_URL = re.compile(r"url\(\s*[\"']?([^\"')]+)[\"']?\s*\)|@import\s+[\"']([^\"']+)[\"']")


@dataclass
class _Page(HTMLParser):
    """What one HTML file refers to, and the places in it that others can refer to."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        self.anchors.update(values[name] for name in ("id", "name") if values.get(name))
        if tag in ("a", "area") and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and _LOADED_LINK_RELS & set(values.get("rel", "").lower().split()):
            self.loads.append(values.get("href", ""))
        if tag == "link" and values.get("rel", "") in ("next", "prev"):
            self.links.append(values.get("href", ""))
        self.loads.extend(values[name] for name in ("src", "poster", "data") if name in values)
        self.loads.extend(part.split()[0] for part in values.get("srcset", "").split(",") if part.strip())
        self.loads.extend(_css_urls(values.get("style", "")))

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loads.extend(_css_urls(data))


def _css_urls(css: str) -> list[str]:
    return [first or second for first, second in _CSS_URL.findall(css)]


def check_site(site: Path, site_url: str = "", *, remote: str = "") -> list[str]:
    """Every broken or foreign reference of a built site, in words; an empty list means that there is none.

    Files with `file://` in mind and files for a server are checked alike: a folder stands for its `index.html`.

    Args:
        site: The folder of the built site.
        site_url: The site's public address; absolute links below it count as links into the site.
        remote: If given, images whose address begins so may be loaded from there, and nothing else.
    """
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    pages: dict[str, _Page] = {}
    for name in sorted(files):
        if name.endswith(".html"):
            pages[name] = _Page()
            pages[name].feed((site / name).read_text(encoding="utf-8"))
    references = [(name, url, True) for name, page in pages.items() for url in page.loads]
    references += [(name, url, False) for name, page in pages.items() for url in page.links]
    for name in files:
        if name.endswith(".css"):
            references += [(name, url, True) for url in _css_urls((site / name).read_text(encoding="utf-8"))]
    if remote:
        references = [item for item in references if not item[1].startswith(remote)]
    problems = (_problem(where, url, loaded, site_url, files, pages) for where, url, loaded in set(references))
    return sorted(problem for problem in problems if problem)


def _problem(where: str, url: str, loaded: bool, site_url: str, files: set[str], pages: dict[str, _Page]) -> str | None:
    base_path = urlsplit(site_url).path.rstrip("/")
    if site_url and url.startswith(site_url):
        url = base_path + "/" + url[len(site_url) :].lstrip("/")
    parts = urlsplit(url)
    if parts.scheme == "data" or (parts.scheme in ("mailto", "javascript") and not loaded):
        return None
    if parts.scheme or parts.netloc:
        if parts.scheme in ("http", "https") and not loaded:
            return None
        return f"{where}: {url} is loaded from another host" if loaded else f"{where}: odd link {url}"
    if not url and loaded:
        return f"{where}: an empty address is loaded"
    path = parts.path.removeprefix(base_path) if parts.path.startswith("/") else parts.path
    target = posixpath.normpath(posixpath.join(posixpath.dirname(where), unquote(path)) if path else where).lstrip("/")
    file = target if target in files else posixpath.join("" if target == "." else target, "index.html")
    if file not in files:
        return f"{where}: {url} does not exist"
    fragment = unquote(parts.fragment)
    if fragment and file in pages and fragment not in pages[file].anchors and not fragment.startswith(":~:"):
        return f"{where}: {url} names a place #{fragment} that the page does not have"
    return None
