from pathlib import Path

import pytest

from guide_code.sitebuild.citations import (
    BIBLIOGRAPHY,
    CitationError,
    bibliography_list,
    bibtex_file,
    cite,
    load_works,
)

ROOT = Path(__file__).parents[2]
SOME = """
[b2020]
authors = ["Ann Bee", "Carl Dee", "Eve Eff"]
year = 2020
title = "Sparse & small"
arxiv = "2001.00001"
venue = "Venue 2021"

[a1991]
authors = ["Ann Aye", "Bob Bee"]
year = 1991
title = "Mixtures"
url = "https://example.org/a"
"""


@pytest.fixture
def works(tmp_path):
    (tmp_path / "works.toml").write_text(SOME)
    return load_works(tmp_path / "works.toml")


def test_the_guides_own_bibliography_is_complete():
    works = load_works(ROOT / BIBLIOGRAPHY)
    assert len({work.url for work in works.values()}) == len(works) > 60
    assert len({work.title.casefold() for work in works.values()}) == len(works)


def test_every_work_has_one_anchor_and_one_bibtex_entry(works):
    assert list(works) == ["a1991", "b2020"]
    text = bibliography_list(works)
    assert [text.count(f'id="{key}"') for key in works] == [1, 1]
    assert "arXiv:2001.00001" in text and "(https://example.org/a)" in text
    assert bibtex_file(works).count("@misc{") == 2 and "author = {Ann Aye and Bob Bee}" in bibtex_file(works)


def test_citations_become_links_with_author_and_year(works):
    html = cite("<p>[@a1991, eq. 4-6] and [@b2020; @a1991]</p>", works, "../bib/", "page.md")
    assert '<a class="guide-cite" href="../bib/#a1991" title="Mixtures">Aye and Bee 1991</a>, eq. 4-6' in html
    assert 'title="Sparse &amp; small">Bee et al. 2020</a>; <a' in html
    assert "[@" not in html


@pytest.mark.parametrize(
    "html", ["<code>[@none]</code>", "<pre><span>[@</span></pre>", '<a title="[@x]">y</a>', "a@b.org [x]"]
)
def test_code_and_attributes_are_not_citations(works, html):
    assert cite(html, works, "b/", "page.md") == html


@pytest.mark.parametrize("text", ["[@none]", "[@a1991; @none]", "[@]", "[@A1991]", "[@a1991"])
def test_an_unknown_or_broken_citation_names_page_and_key(works, text):
    with pytest.raises(CitationError, match=r"page\.md: \[@"):
        cite(f"<p>see {text} there</p>", works, "b/", "page.md")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("year = 1991\n", "", "missing .*year"),
        ('title = "Mixtures"', 'title = "Mixtures"\npages = "1-2"', "unknown .*pages"),
        ('url = "https://example.org/a"', "", "either arxiv or url"),
        ('arxiv = "2001.00001"', 'arxiv = "arXiv:2001.1"', "no arXiv identifier"),
        ("year = 1991", 'year = "1991"', "whole number"),
        ("[a1991]", "[A1991]", "lower-case"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(tmp_path, old, new, words):
    assert old in SOME
    (tmp_path / "works.toml").write_text(SOME.replace(old, new))
    with pytest.raises(CitationError, match=words):
        load_works(tmp_path / "works.toml")
