"""Checks the built site: every link and file resolves, and nothing is loaded from another host."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

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


def check_site(site: Path, site_url: str = "") -> list[str]:
    """Every broken or foreign reference of a built site, in words; an empty list means that there is none.

    Files with `file://` in mind and files for a server are checked alike: a folder stands for its `index.html`.

    Args:
        site: The folder of the built site.
        site_url: The site's public address; absolute links below it count as links into the site.
    """
    base_path = urlsplit(site_url).path.rstrip("/")
    pages: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    problems = []
    for path, page in pages.items():
        where = path.relative_to(site).as_posix()
        for url in page.loads:
            problems += _problem(where, url, site, base_path, site_url, pages, loaded=True)
        for url in page.links:
            problems += _problem(where, url, site, base_path, site_url, pages, loaded=False)
    for path in sorted(site.rglob("*.css")):
        where = path.relative_to(site).as_posix()
        for url in _css_urls(path.read_text(encoding="utf-8")):
            problems += _problem(where, url, site, base_path, site_url, pages, loaded=True)
    return sorted(set(problems))


def _problem(
    where: str, url: str, site: Path, base_path: str, site_url: str, pages: dict[Path, _Page], *, loaded: bool
) -> list[str]:
    if site_url and url.startswith(site_url):
        url = base_path + "/" + url[len(site_url) :].lstrip("/")
    parts = urlsplit(url)
    if parts.scheme == "data" or (parts.scheme in ("mailto", "javascript") and not loaded):
        return []
    if parts.scheme or parts.netloc:
        if parts.scheme in ("http", "https") and not loaded:
            return []
        return [f"{where}: {url} is loaded from another host" if loaded else f"{where}: odd link {url}"]
    if not url and loaded:
        return [f"{where}: an empty address is loaded"]
    target = unquote(urljoin(f"/{where}", parts.path)) if parts.path else f"/{where}"
    if parts.path.startswith("/"):
        target = target.removeprefix(base_path)
    file = site / target.lstrip("/")
    if file.is_dir():
        file = file / "index.html"
    if not file.resolve().is_relative_to(site.resolve()) or not file.is_file():
        return [f"{where}: {url} does not exist"]
    fragment = unquote(parts.fragment)
    if fragment and file in pages and fragment not in pages[file].anchors and not fragment.startswith(":~:"):
        return [f"{where}: {url} names a place #{fragment} that the page does not have"]
    return []
