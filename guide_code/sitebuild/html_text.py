"""Rewrites the running text of a page's HTML, and leaves code, links, headings and mathematics as they are."""

import re
from collections.abc import Callable

_TAG = re.compile(r"(<!--.*?-->|<[^>]*>)", re.DOTALL)
_NAME = re.compile(r"</?([a-zA-Z][\w-]*)")
_CLASS = re.compile(r'\bclass="([^"]*)"')
_VOID = {"br", "hr", "img", "input", "source", "wbr", "col", "meta", "link"}
CLOSED_TAGS = frozenset({"a", "button", "code", "pre", "script", "style", "svg", "textarea", "label", "select"})
HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6", "summary", "title", "th", "dt"})
_MATHEMATICS = "arithmatex"


def rewrite_text(html: str, rewrite: Callable[[str], str], *, skip: frozenset[str] = CLOSED_TAGS) -> str:
    """Applies `rewrite` to each stretch of text that no element in `skip`, and no formula, encloses.

    Args:
        html: Well nested, as Markdown and the notebook renderer write it.
        rewrite: Gets text with its entities as they are, and gives HTML.
        skip: Names of elements whose text stays.
    """
    parts = _TAG.split(html)
    closed: list[str] = []  # the open elements from the first that is skipped on
    for place, part in enumerate(parts):
        if place % 2 == 0:
            if not closed and part.strip():
                parts[place] = rewrite(part)
            continue
        name = _NAME.match(part)
        if name is None or part.endswith("/>") or name[1].lower() in _VOID:
            continue
        tag = name[1].lower()
        if part.startswith("</"):
            if closed and closed[-1] == tag:
                closed.pop()
        elif closed or tag in skip or _is_mathematics(part):
            closed.append(tag)
    return "".join(parts)


def _is_mathematics(tag: str) -> bool:
    classes = _CLASS.search(tag)
    return classes is not None and _MATHEMATICS in classes[1].split()
