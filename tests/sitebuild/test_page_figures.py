"""Figures in pages: the HTML that a reference becomes, and what is refused."""

import importlib
import re

import pytest
from bs4 import BeautifulSoup
from PIL import Image

from guide_code.sitebuild.figure_html import expand_figures, mount_figures
from guide_code.sitebuild.figures import Figure, FigureError, Variant, differing_redraws, draw_all

FIGURES = {
    "flow": Figure(
        'Says "a" < b',
        {
            f"{layout}-{palette}": Variant(width, height)
            for layout, width, height in (("wide", 700, 90), ("narrow", 340, 200))
            for palette in ("light", "dark")
        },
    )
}
AT = "https://hub.example/datasets/a/b/resolve/0/figures/flow-"
REMOTE = {
    "flow": Figure(
        "Alt.", {key: Variant(v.width, v.height, url=AT + key) for key, v in FIGURES["flow"].variants.items()}
    )
}


def expanded(text, figures=FIGURES, **options):
    return BeautifulSoup(expand_figures(text, "learn/page/", "learn/page.md", figures, **options), "html.parser")


def test_a_reference_becomes_a_figure_for_both_palettes_and_widths():
    soup = expanded("Text\n\n![The *path* of $x$](figure:flow)\n\nmore")
    assert [a["class"] for a in soup.select("figure > a")] == [
        ["guide-zoom", "only-light"],
        ["guide-zoom", "only-dark"],
    ]
    image = soup.select_one(".only-dark > picture > img")
    assert image and image["src"] == "../../assets/figures/flow-wide-dark.svg"
    assert (image["alt"], image["width"], image["height"]) == ('Says "a" < b', "700", "90")
    assert (image["loading"], image["decoding"]) == ("lazy", "async")
    source = soup.select_one(".only-dark source")
    assert source and source["srcset"].endswith("flow-narrow-dark.svg") and "max-width" in source["media"]
    assert (source["width"], source["height"]) == ("340", "200")
    caption = soup.figcaption
    assert caption and caption.em and caption.select_one(".arithmatex")


def test_a_click_opens_the_wide_image_and_the_shape_is_known_before_any_image():
    soup = expanded("![](figure:flow)")
    assert [a["href"] for a in soup.select("a")] == [
        f"../../assets/figures/flow-wide-{p}.svg" for p in ("light", "dark")
    ]
    assert soup.select_one("picture")["style"] == "--w:700;--h:90;--nw:340;--nh:200"


def test_images_from_the_hub_tell_it_nothing_about_the_reader():
    soup = expanded("![](figure:flow)", REMOTE)
    for image in soup.select("img"):
        assert image["src"].startswith(AT) and image["referrerpolicy"] == "no-referrer"
        assert image["loading"] == "lazy" and image["width"] == "700"
    assert all(link["referrerpolicy"] == "no-referrer" for link in soup.select("a"))
    assert mount_figures(REMOTE) == []


def test_without_a_caption_there_is_none():
    assert not expanded("![](figure:flow)").select("figcaption")


def test_a_page_with_drawn_figures_says_so_at_its_end():
    published = {"flow": Figure("Alt.", FIGURES["flow"].variants, drawn=False)}
    note = expanded("![](figure:flow)\n\nEnd.", why_drawn="no <hub>").select_one(".guide-drawn")
    assert note.get_text() == "The figures of this page were drawn when the site was built: no <hub>."
    assert not expanded("No figure.", why_drawn="x").select(".guide-drawn")
    assert not expanded("![](figure:flow)", published, why_drawn="x").select(".guide-drawn")
    both = published | {"own": FIGURES["flow"]}
    note = expanded("![](figure:flow)\n\n![](figure:own)", both, why_drawn="x").select_one(".guide-drawn")
    assert note.get_text().startswith("Some figures")


def test_the_names_that_a_page_uses_are_told():
    used = set()
    expanded("![](figure:flow)", used=used.add)
    assert used == {"flow"}


def test_an_unknown_figure_is_an_error_with_the_names_that_exist():
    with pytest.raises(FigureError, match=r"learn/page.md: there is no figure 'flo'. Figures: flow"):
        expanded("![](figure:flo)")


def test_a_figure_within_a_line_is_refused():
    with pytest.raises(FigureError, match="a line of its own"):
        expanded("See ![](figure:flow) here")


@pytest.mark.parametrize("text", ["```\n![](figure:flow)\n```", "Write `![](figure:flow)`."])
def test_code_that_shows_the_syntax_is_left_alone(text):
    assert expand_figures(text, "", "index.md", FIGURES) == text


def test_drawing_happens_once_and_again_when_the_code_changes(project):
    lines = []
    figures = draw_all(project, say=lines.append)
    assert lines == ["figure dense_vs_moe: drawing"] and set(figures) == {"dense_vs_moe"}
    mounted = mount_figures(figures)
    assert len(mounted) == 4 and all(item.path.is_file() for item in mounted)
    assert all(re.fullmatch(r"assets/figures/dense_vs_moe-(wide|narrow)-(light|dark)\.svg", m.uri) for m in mounted)
    draw_all(project, say=lines.append)
    assert len(lines) == 1
    style = project / "guide_code" / "figures" / "style.py"
    style.write_text(style.read_text() + "\n# changed\n")
    draw_all(project, say=lines.append)
    assert len(lines) == 2
    assert len(list((project / ".cache" / "figures").iterdir())) == 1, "the old drawing is gone"


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("webp", b"RIFF")])
def test_a_figure_of_pixels_is_drawn_at_twice_the_density_and_the_same_each_time(project, tmp_path, suffix, start):
    script = project / "guide_code" / "figures" / "dense_vs_moe.py"
    script.write_text(script.read_text() + f"\n\nFORMAT = {suffix!r}\n")
    module = importlib.import_module("guide_code.figures.dense_vs_moe")
    with pytest.MonkeyPatch.context() as patch:  # the module that is drawn is the package's own
        patch.setattr(module, "FORMAT", suffix, raising=False)
        figures = draw_all(project, say=lambda line: None)
        assert differing_redraws(project, tmp_path / "again") == []
    variant = figures["dense_vs_moe"].variants["narrow-dark"]
    assert variant.path.suffix == f".{suffix}" and variant.path.read_bytes().startswith(start)
    with Image.open(variant.path) as image:
        assert image.size == (2 * variant.width, 2 * variant.height)
