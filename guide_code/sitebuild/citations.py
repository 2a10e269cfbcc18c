"""Citations: `[@shazeer2017, eq. 1]` in a page or notebook links to the bibliography, which one data file holds.

`docs/data/bibliography.toml` has one table for each work:

    [shazeer2017]
    authors = ["Noam Shazeer", "Azalia Mirhoseini"]
    year = 2017
    title = "Outrageously Large Neural Networks"
    arxiv = "1701.06538"            # or url = "https://..."
    venue = "ICLR 2017"             # if it has one
"""

import re
import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path

from guide_code.sitebuild.html_text import rewrite_text

BIBLIOGRAPHY = Path("docs/data/bibliography.toml")
BIBLIOGRAPHY_URI = "reference/bibliography.md"
_KEY = r"[a-z][a-z0-9_-]*"
_CITATION = re.compile(rf"\[@({_KEY})((?:;\s*@{_KEY})*)(?:,\s*([^\]@]+))?\]")
_ATTEMPT = re.compile(r"\[@[^\]]*\]?")
_FIELDS = {"authors", "year", "title", "arxiv", "url", "venue"}


class CitationError(ValueError):
    """A work that is described wrongly, or that is cited and not described."""


@dataclass(frozen=True)
class Work:
    """One entry of the bibliography.

    Attributes:
        key: By which pages cite it.
        authors: Full names, in order; one organisation counts as one author, and "others" ends a list cut short.
        year: Of the first public version.
        title: As published.
        url: Where it can be read.
        arxiv: Its identifier there, or "".
        venue: Where it was published, or "".
    """

    key: str
    authors: tuple[str, ...]
    year: int
    title: str
    url: str
    arxiv: str = ""
    venue: str = ""

    @property
    def label(self) -> str:
        """Author and year, as in running text."""
        last = [name if " " not in name or name.startswith("The ") else name.split()[-1] for name in self.authors]
        names = last[0] if len(last) == 1 else " and ".join(last) if len(last) == 2 else f"{last[0]} et al."
        return f"{names} {self.year}"

    def bibtex(self) -> str:
        """The entry for a reader's own bibliography."""
        fields = {"author": " and ".join(self.authors), "title": f"{{{self.title}}}", "year": str(self.year)}
        if self.arxiv:
            fields |= {"eprint": self.arxiv, "archiveprefix": "arXiv"}
        if self.venue:
            fields["note"] = self.venue
        fields["url"] = self.url
        body = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items())
        return f"@misc{{{self.key},\n{body}\n}}\n"


def load_works(path: Path) -> dict[str, Work]:
    """The works of a bibliography by key, sorted by author and year.

    Raises:
        CitationError: A work lacks a field, has an unknown one, or says nowhere where it can be read.
    """
    works = []
    for key, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        where = f"{path.name}, [{key}]"
        if not re.fullmatch(_KEY, key):
            raise CitationError(f"{where}: a key is lower-case letters, digits, - and _")
        missing = {"authors", "year", "title"} - entry.keys()
        unknown = entry.keys() - _FIELDS
        if missing or unknown:
            raise CitationError(f"{where}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        if ("arxiv" in entry) == ("url" in entry):
            raise CitationError(f"{where}: give either arxiv or url")
        if not entry["authors"] or not isinstance(entry["year"], int):
            raise CitationError(f"{where}: authors is a list of at least one name, year a whole number")
        arxiv = entry.get("arxiv", "")
        if arxiv and not re.fullmatch(r"\d{4}\.\d{4,5}", arxiv):
            raise CitationError(f"{where}: arxiv = {arxiv!r} is no arXiv identifier such as 1701.06538")
        url = entry.get("url") or f"https://arxiv.org/abs/{arxiv}"
        venue = entry.get("venue", "")
        works.append(Work(key, tuple(entry["authors"]), entry["year"], entry["title"], url, arxiv, venue))
    works.sort(key=lambda work: (work.label.casefold(), work.title))
    return {work.key: work for work in works}


def cite(html: str, works: dict[str, Work], bibliography: str, where: str) -> str:
    """Turns every citation in the text of a page into links.

    `[@a]` becomes "Author 2017"; `[@a, eq. 4-6]` adds the place; `[@a; @b]` names both.

    Args:
        html: The page's content.
        works: By key.
        bibliography: The address of the bibliography, seen from the page.
        where: The page's name for messages.

    Raises:
        CitationError: A key is not in the bibliography, or brackets that begin like a citation are none.
    """

    def expand(match: re.Match[str]) -> str:
        keys = [match[1], *re.findall(rf"@({_KEY})", match[2])]
        for key in keys:
            if key not in works:
                raise CitationError(f"{where}: [@{key}] is not in {BIBLIOGRAPHY}")
        links = "; ".join(
            f'<a class="guide-cite" href="{bibliography}#{key}" title="{escape(works[key].title)}">'
            f"{escape(works[key].label)}</a>"
            for key in keys
        )
        return f"{links}, {match[3].strip()}" if match[3] else links

    def rewrite(text: str) -> str:
        left = _ATTEMPT.search(_CITATION.sub("", text))
        if left:
            raise CitationError(f"{where}: {left.group()} is no citation; write [@key], [@key, eq. 1] or [@one; @two]")
        return _CITATION.sub(expand, text)

    return rewrite_text(html, rewrite) if "[@" in html else html


def bibliography_list(works: dict[str, Work]) -> str:
    """The works as Markdown, each with an anchor that citations lead to."""
    lines = []
    for work in works.values():
        place = f"arXiv:{work.arxiv}" if work.arxiv else "read it"
        venue = f" {work.venue}." if work.venue else ""
        names = work.authors if len(work.authors) <= 6 else (*work.authors[:5], "others")
        authors = ", ".join(names).replace(", others", " and others")
        lines.append(
            f'<span id="{work.key}"></span>**{work.label}.** {authors}. *{work.title}*.{venue} [{place}]({work.url})\n'
        )
    return "\n".join(lines)


def bibtex_file(works: dict[str, Work]) -> str:
    """All works for BibTeX."""
    return "\n".join(work.bibtex() for work in works.values())
