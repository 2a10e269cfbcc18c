"""Links the first use of each glossary term on a page to its definition, which shows on hovering.

`docs/reference/glossary.md` is the source. A term is a definition with an anchor:

    **Active parameters**{ #active-parameters }
    :   The parameters that one token is multiplied by.
"""

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from guide_code.sitebuild.html_text import CLOSED_TAGS, HEADINGS, rewrite_text

GLOSSARY = Path("docs/reference/glossary.md")
GLOSSARY_URI = "reference/glossary.md"
_ENTRY = re.compile(r"^\*\*(?P<terms>[^*]+)\*\*\{ #(?P<anchor>[\w-]+) \}\n:   (?P<text>(?:.+\n)(?:    .+\n)*)", re.M)
_BARE = re.compile(r"^\*\*[^*]+\*\*\n:", re.M)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CITATION = re.compile(r"\s*\(\[@[^\]]*\]\)|\[@[^\]]*\]")


@dataclass(frozen=True)
class Term:
    """An entry: its words (the first is its name, the others count as well), its anchor, its definition as text."""

    words: tuple[str, ...]
    anchor: str
    text: str


def load_terms(path: Path) -> list[Term]:
    """The terms of the glossary.

    Raises:
        ValueError: A term has no anchor, or two terms share a word.
    """
    source = path.read_text(encoding="utf-8")
    bare = _BARE.search(source)
    if bare:
        raise ValueError(f"{path.name}: {bare.group().splitlines()[0]} has no anchor; write **Term**{{ #term }}")
    terms, seen = [], set()
    for match in _ENTRY.finditer(source):
        words = tuple(word.strip() for word in match["terms"].split(","))
        for word in words:
            if word.casefold() in seen:
                raise ValueError(f"{path.name}: {word} is defined twice")
            seen.add(word.casefold())
        text = re.sub(r"[*`$]", "", _LINK.sub(r"\1", _CITATION.sub("", match["text"])))
        terms.append(Term(words, match["anchor"], " ".join(text.split())))
    return terms


def link_terms(html: str, terms: list[Term], glossary: str) -> str:
    """Links the first use of each term in running text.

    A longer term wins over a shorter one inside it: "shared expert" is not a use of "expert".

    Args:
        html: A page's content.
        terms: Of the glossary.
        glossary: Its address, seen from the page.
    """
    by_word = {word.casefold(): term for term in terms for word in term.words}
    if not by_word:
        return html
    ordered = sorted(by_word, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, ordered))})(s?)(?![\w-])", re.IGNORECASE)
    done: set[str] = set()

    def expand(match: re.Match[str]) -> str:
        term = by_word[match[1].casefold()]
        if term.anchor in done:
            return match.group()
        done.add(term.anchor)
        title = escape(term.text, quote=True)
        return f'<a class="guide-term" href="{glossary}#{term.anchor}" title="{title}">{match.group()}</a>'

    return rewrite_text(html, lambda text: pattern.sub(expand, text), skip=CLOSED_TAGS | HEADINGS | {"strong"})
