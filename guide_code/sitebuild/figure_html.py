"""Puts figures into pages.

An author writes `![Caption, may be empty](figure:NAME)` on a line of its own. The page gets a `<figure>` with the
image for the palette in use, the layout that fits the window, alternative text and size. A click shows it large.
"""

import html
import re
from collections.abc import Callable

import markdown
from mkdocs.utils import get_relative_url

from guide_code.sitebuild.figures import Figure, FigureError, Variant
from guide_code.sitebuild.mounted import Mounted

FIGURES_URI = "assets/figures"
NARROW = "(max-width: 44.9375em)"  # the theme's own limit for phones
_REFERENCE = re.compile(r"^!\[(?P<caption>.*)\]\(figure:(?P<name>[^)\s]*)\)[ \t]*$", re.MULTILINE)
_SHIELD = "](\x00figure:"


def mount_figures(figures: dict[str, Figure]) -> list[Mounted]:
    """The files that the figures add to the site; none for what readers take from the hub."""
    return [
        Mounted(figure_uri(name, key, variant.suffix), variant.path)
        for name, figure in figures.items()
        for key, variant in figure.variants.items()
        if variant.path is not None
    ]


def figure_uri(name: str, variant: str, suffix: str) -> str:
    """The place of an image in the site."""
    return f"{FIGURES_URI}/{name}-{variant}{suffix}"


def expand_figures(
    text: str,
    page_url: str,
    where: str,
    figures: dict[str, Figure],
    *,
    why_drawn: str = "",
    used: Callable[[str], None] = lambda name: None,
) -> str:
    """Replaces every `![caption](figure:NAME)` line of a Markdown page by the figure's HTML.

    Args:
        text: The page's Markdown.
        page_url: The page's address in the site, from which the images are linked.
        where: The page's name for messages.
        figures: By name.
        why_drawn: If given, a page with figures that this machine drew ends with a note that says so.
        used: Gets the name of each figure that the page shows.

    Raises:
        FigureError: A name is unknown, or `figure:` is used elsewhere than on a line of its own.
    """
    drawn = []

    def expand(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in figures:
            raise FigureError(f"{where}: there is no figure {name!r}. Figures: {', '.join(sorted(figures))}")
        used(name)
        drawn.append(figures[name].drawn)
        return _figure_html(name, match["caption"], page_url, figures[name])

    result = _REFERENCE.sub(expand, _outside_fences(text))
    left = re.search(r"^.*\]\(figure:.*$", result, re.MULTILINE)
    if left:
        raise FigureError(f"{where}: a figure needs a line of its own: {left.group().strip()}")
    if any(drawn) and why_drawn:
        subject = "The figures" if all(drawn) else "Some figures"
        result += (
            '\n\n<p class="guide-drawn" role="note" data-search-exclude>'
            f"{subject} of this page were drawn when the site was built: {html.escape(why_drawn)}.</p>\n"
        )
    return result.replace(_SHIELD, "](figure:")


def _outside_fences(text: str) -> str:
    """Hides references inside fenced code and code spans, which show the syntax and mean no figure."""
    fence = re.compile(r"^(?P<mark>```+|~~~+).*?^(?P=mark)|`[^`\n]+`", re.MULTILINE | re.DOTALL)
    return fence.sub(lambda match: match.group().replace("](figure:", _SHIELD), text)


def _figure_html(name: str, caption: str, page_url: str, figure: Figure) -> str:
    images = "".join(_image(name, figure, palette, page_url) for palette in ("light", "dark"))
    if caption:
        rendered = markdown.markdown(
            caption,
            extensions=["pymdownx.arithmatex"],
            extension_configs={"pymdownx.arithmatex": {"generic": True}},
        )
        caption = f"<figcaption>{rendered.removeprefix('<p>').removesuffix('</p>')}</figcaption>"
    return f'<figure class="guide-figure">{images}{caption}</figure>'


def _image(name: str, figure: Figure, palette: str, page_url: str) -> str:
    """The image in one palette, inside a link to itself that the zoom takes over.

    The box's shape comes from the style and not from the image, so that nothing moves when an image comes late or
    not at all; `--narrow` is the shape below the limit for phones.
    """
    wide = figure.variants[f"wide-{palette}"]
    narrow = figure.variants.get(f"narrow-{palette}")

    def address(variant: Variant, layout: str) -> str:
        return variant.url or get_relative_url(figure_uri(name, f"{layout}-{palette}", variant.suffix), page_url)

    def attributes(variant: Variant, layout: str, kind: str) -> str:
        return f'{kind}="{address(variant, layout)}" width="{variant.width}" height="{variant.height}"'

    source = f'<source media="{NARROW}" {attributes(narrow, "narrow", "srcset")}>' if narrow else ""
    small = narrow or wide
    shape = f"--w:{wide.width};--h:{wide.height};--nw:{small.width};--nh:{small.height}"
    private = ' referrerpolicy="no-referrer"' if wide.url else ""
    return (
        f'<a class="guide-zoom only-{palette}" href="{address(wide, "wide")}"{private}>'
        f'<picture style="{shape}">{source}<img {attributes(wide, "wide", "src")} alt="{html.escape(figure.alt)}"'
        f'{private} loading="lazy" decoding="async"></picture></a>'
    )
