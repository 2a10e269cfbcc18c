"""Draws the figures of `guide_code.figures`, once per version of their code, and puts them into pages.

An author writes `![Caption, may be empty](figure:NAME)` on a line of its own. The page gets a `<figure>` with the
drawing for the palette in use, the layout that fits the window, the module's alternative text and the size.
"""

import html
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import markdown
from mkdocs.utils import get_relative_url

from guide_code.sitebuild.imports import import_closure
from guide_code.sitebuild.keys import cache_key
from guide_code.sitebuild.mounted import Mounted

FIGURES_URI = "assets/figures"
NARROW = "(max-width: 44.9375em)"  # the theme's own limit for phones
_NOT_FIGURES = {"__init__", "style", "shapes"}
_REFERENCE = re.compile(r"^!\[(?P<caption>.*)\]\(figure:(?P<name>[^)\s]*)\)[ \t]*$", re.MULTILINE)
_FORM = "figure 1"


class FigureError(Exception):
    """A page names a figure that does not exist, or a figure module breaks its contract."""


def figure_sources(package: Path) -> dict[str, Path]:
    """Name and module of every figure below the package folder `guide_code`."""
    return {path.stem: path for path in sorted((package / "figures").glob("*.py")) if path.stem not in _NOT_FIGURES}


def draw_all(root: Path, *, say: Callable[[str], None] = print) -> dict[str, dict]:
    """Brings all figures up to date in `.cache/figures`.

    Returns:
        For each figure its record: `alt`, and under `files` the path, width and height of every variant such as
        `wide-light`.
    """
    cache = root / ".cache" / "figures"
    records = {}
    kept = set()
    for name, source in figure_sources(root / "guide_code").items():
        folder = cache / cache_key(name, root, {source, *import_closure(source, root)}, form=_FORM)
        if not (folder / "figure.json").is_file():
            say(f"figure {name}: drawing")
            _draw_into(folder, name)
        records[name] = json.loads((folder / "figure.json").read_text(encoding="utf-8"))
        for variant, file in records[name]["files"].items():
            file["path"] = folder / f"{name}-{variant}.svg"
        kept.add(folder)
    for folder in cache.glob("*"):
        if folder not in kept and not folder.name.startswith("."):  # hidden: another build is drawing into it
            shutil.rmtree(folder)
    return records


def _draw_into(folder: Path, name: str) -> None:
    from guide_code.figures import style  # matplotlib takes a second to import: only when something is drawn

    module = importlib.import_module(f"guide_code.figures.{name}")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True, exist_ok=True)
    files = {}
    for layout in module.LAYOUTS:
        for palette in (style.LIGHT, style.DARK):
            variant = f"{layout}-{palette.name}"
            with style.consistent():
                figure = module.draw(palette, layout)
                width, height = style.save(figure, temporary / f"{name}-{variant}.svg")
            files[variant] = {"width": width, "height": height}
    record = {"alt": module.ALT, "files": files}
    (temporary / "figure.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)


def mount_figures(records: dict[str, dict]) -> list[Mounted]:
    """The files that the figures add to the site."""
    return [
        Mounted(f"{FIGURES_URI}/{name}-{variant}.svg", file["path"])
        for name, record in records.items()
        for variant, file in record["files"].items()
    ]


def expand_figures(text: str, page_url: str, where: str, records: dict[str, dict]) -> str:
    """Replaces every `![caption](figure:NAME)` line of a Markdown page by the figure's HTML.

    Args:
        text: The page's Markdown.
        page_url: The page's address in the site, from which the images are linked.
        where: The page's name for messages.
        records: What `draw_all` returned.

    Raises:
        FigureError: A name is unknown, or `figure:` is used elsewhere than on a line of its own.
    """
    result = _REFERENCE.sub(lambda match: _figure_html(match, page_url, where, records), _outside_fences(text))
    left = re.search(r"^.*\]\(figure:.*$", result, re.MULTILINE)
    if left:
        raise FigureError(f"{where}: a figure needs a line of its own: {left.group().strip()}")
    return result.replace(_SHIELD, "](figure:")


_SHIELD = "](\x00figure:"


def _outside_fences(text: str) -> str:
    """Hides references inside fenced code and code spans, which show the syntax and mean no figure."""
    fence = re.compile(r"^(?P<mark>```+|~~~+).*?^(?P=mark)|`[^`\n]+`", re.MULTILINE | re.DOTALL)
    return fence.sub(lambda match: match.group().replace("](figure:", _SHIELD), text)


def _figure_html(match: re.Match[str], page_url: str, where: str, records: dict[str, dict]) -> str:
    name, caption = match["name"], match["caption"]
    if name not in records:
        raise FigureError(f"{where}: there is no figure {name!r}. Figures: {', '.join(sorted(records))}")
    record = records[name]
    pictures = "".join(_picture(name, record, palette, page_url) for palette in ("light", "dark"))
    if caption:
        rendered = markdown.markdown(
            caption,
            extensions=["pymdownx.arithmatex"],
            extension_configs={"pymdownx.arithmatex": {"generic": True}},
        )
        caption = f"<figcaption>{rendered.removeprefix('<p>').removesuffix('</p>')}</figcaption>"
    return f'<figure class="guide-figure">{pictures}{caption}</figure>'


def _picture(name: str, record: dict, palette: str, page_url: str) -> str:
    def attributes(layout: str, kind: str) -> str:
        file = record["files"][f"{layout}-{palette}"]
        url = get_relative_url(f"{FIGURES_URI}/{name}-{layout}-{palette}.svg", page_url)
        return f'{kind}="{url}" width="{file["width"]}" height="{file["height"]}"'

    has_narrow = f"narrow-{palette}" in record["files"]
    source = f'<source media="{NARROW}" {attributes("narrow", "srcset")}>' if has_narrow else ""
    return (
        f'<picture class="only-{palette}">{source}<img {attributes("wide", "src")} '
        f'alt="{html.escape(record["alt"])}" loading="lazy" decoding="async"></picture>'
    )
