import pytest
from bs4 import BeautifulSoup

from guide_code.sitebuild.figures import FigureError, draw_all, expand_figures, mount_figures

RECORDS = {
    "flow": {
        "alt": 'Says "a" < b',
        "files": {
            f"{layout}-{palette}": {"width": width, "height": 90, "path": None}
            for layout, width in (("wide", 700), ("narrow", 340))
            for palette in ("light", "dark")
        },
    }
}


def test_a_reference_becomes_a_figure_for_both_palettes_and_widths():
    html = expand_figures("Text\n\n![The *path* of $x$](figure:flow)\n\nmore", "learn/page/", "learn/page.md", RECORDS)
    soup = BeautifulSoup(html, "html.parser")
    assert [p["class"] for p in soup.select("figure > picture")] == [["only-light"], ["only-dark"]]
    image = soup.select_one(".only-dark img")
    assert image and image["src"] == "../../assets/figures/flow-wide-dark.svg"
    assert (image["alt"], image["width"], image["height"]) == ('Says "a" < b', "700", "90")
    assert (image["loading"], image["decoding"]) == ("lazy", "async")
    source = soup.select_one(".only-dark source")
    assert source and source["srcset"].endswith("flow-narrow-dark.svg") and "max-width" in source["media"]
    caption = soup.figcaption
    assert caption and caption.em and caption.select_one(".arithmatex")


def test_without_a_caption_there_is_none():
    assert "figcaption" not in expand_figures("![](figure:flow)", "", "index.md", RECORDS)


def test_an_unknown_figure_is_an_error_with_the_names_that_exist():
    with pytest.raises(FigureError, match=r"index.md: there is no figure 'flo'. Figures: flow"):
        expand_figures("![](figure:flo)", "", "index.md", RECORDS)


def test_a_figure_within_a_line_is_refused():
    with pytest.raises(FigureError, match="a line of its own"):
        expand_figures("See ![](figure:flow) here", "", "index.md", RECORDS)


@pytest.mark.parametrize("text", ["```\n![](figure:flow)\n```", "Write `![](figure:flow)`."])
def test_code_that_shows_the_syntax_is_left_alone(text):
    assert expand_figures(text, "", "index.md", RECORDS) == text


def test_drawing_happens_once_and_again_when_the_code_changes(project):
    lines = []
    records = draw_all(project, say=lines.append)
    assert lines == ["figure dense_vs_moe: drawing"] and set(records) == {"dense_vs_moe"}
    assert all(item.path.is_file() for item in mount_figures(records))
    draw_all(project, say=lines.append)
    assert len(lines) == 1
    style = project / "guide_code" / "figures" / "style.py"
    style.write_text(style.read_text() + "\n# changed\n")
    draw_all(project, say=lines.append)
    assert len(lines) == 2
    assert len(list((project / ".cache" / "figures").iterdir())) == 1, "the old drawing is gone"
