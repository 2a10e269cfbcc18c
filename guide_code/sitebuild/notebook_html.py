"""Rebuilds the HTML that mkdocs-jupyter gives for a notebook in the terms of the site's own theme.

mkdocs-jupyter brings 600 kB of JupyterLab's styles and scripts to every page, a second code highlighter with fixed
colours, loaders for mathematics and diagrams from other hosts, and links as they stand in the notebook. Here only
the content is kept: prose, code and outputs, marked up as the theme marks up its own pages. So both kinds of page
look alike in both palettes, share one mathematics set-up and one copy button, and load nothing else.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from bs4 import BeautifulSoup, Tag

_MATH = re.compile(r"\$|\\\(|\\\[|\\begin\{")
_PLAIN_LANGUAGE = "python"


@dataclass
class Heading:
    """One heading of a notebook page, in the form in which MkDocs builds its table of contents."""

    level: int
    id: str
    name: str
    children: list["Heading"] = field(default_factory=list)

    def as_token(self) -> dict:
        """This heading and those below it as the Markdown library's `toc_tokens`."""
        children = [child.as_token() for child in self.children]
        return {"level": self.level, "id": self.id, "name": self.name, "children": children}


def rebuild(rendered: str, resolve: Callable[[str], str]) -> tuple[str, list[Heading]]:
    """The page's HTML and its headings.

    Args:
        rendered: The HTML that mkdocs-jupyter returns.
        resolve: Maps a relative `href` or `src` of a Markdown cell or an output to the one that the page needs.
    """
    soup = BeautifulSoup(rendered, "html.parser")
    page = BeautifulSoup("", "html.parser")
    for cell in soup.select(".jp-Notebook > .jp-Cell"):
        prose = cell.select_one(".jp-RenderedMarkdown")
        if prose is not None:
            page.append(_prose(page, prose))
        else:
            page.append(_code_cell(page, cell))
        page.append("\n")
    for attribute in ("href", "src"):
        for tag in page.select(f"[{attribute}]"):
            tag[attribute] = resolve(str(tag[attribute]))
    return str(page), _headings(page)


def _prose(page: BeautifulSoup, prose: Tag) -> Tag:
    prose.attrs = {"class": "nb-prose nb-math" if _MATH.search(prose.get_text()) else "nb-prose"}
    for block in prose.select("div.highlight"):
        block.replace_with(_code_block(page, block, _PLAIN_LANGUAGE))
    for anchor in prose.select("a.anchor-link"):
        anchor["class"] = "headerlink"
        anchor["title"] = "Permanent link"
    for image in prose.find_all("img"):
        image["loading"], image["decoding"] = "lazy", "async"
    return prose


def _code_cell(page: BeautifulSoup, cell: Tag) -> Tag:
    result = page.new_tag("div", attrs={"class": "nb-cell"})
    tags = [tag.get_text(strip=True) for tag in cell.select(".cell-tag")]
    source = cell.select_one(".highlight-ipynb")
    if source is not None and source.get_text(strip=True):
        block = _code_block(page, source, "python")
        if "hide-input" in tags:
            folded = page.new_tag("details", attrs={"class": "nb-folded"})
            summary = page.new_tag("summary")
            summary.string = "Show the code"
            folded.extend([summary, block])
            block = folded
        result.append(block)
    for output in cell.select(".jp-OutputArea-output"):
        result.append(_output(page, output))
    return result


def _code_block(page: BeautifulSoup, block: Tag, language: str) -> Tag:
    """The theme's own code block: its copy button and its colours attach to exactly this markup."""
    outer = page.new_tag("div", attrs={"class": f"language-{language} highlight"})
    pre, code = page.new_tag("pre"), page.new_tag("code")
    old = block.find("pre")
    assert isinstance(old, Tag)
    code.extend(list(old.contents))
    pre.append(code)
    outer.append(pre)
    return outer


def _output(page: BeautifulSoup, output: Tag) -> Tag:
    kind = "nb-output"
    latex = output.get("data-mime-type") == "text/latex"
    if latex or "jp-RenderedMarkdown" in (output.get("class") or []):
        kind += " nb-math"
    elif output.find("img"):
        kind += " nb-figure"
    elif output.find("table"):
        kind += " nb-table"
    result = page.new_tag("div", attrs={"class": kind, "data-search-exclude": ""})
    result.extend(list(output.contents))
    for table in result.find_all("table"):
        table.attrs = {}  # the theme styles and scrolls tables that carry no class
    for pre in result.find_all("pre"):
        pre["tabindex"] = "0"  # scrolls sideways, so the keyboard must reach it
    for style in result.find_all("style"):
        style.decompose()
    return result


def _headings(page: BeautifulSoup) -> list[Heading]:
    top: list[Heading] = []
    path: list[Heading] = []
    for tag in page.select(".nb-prose :is(h1, h2, h3, h4, h5, h6)"):
        name = "".join(str(part) for part in tag.contents if getattr(part, "name", None) != "a")
        heading = Heading(int(tag.name[1]), str(tag.get("id", "")), name)
        while path and path[-1].level >= heading.level:
            path.pop()
        (path[-1].children if path else top).append(heading)
        path.append(heading)
    return top
