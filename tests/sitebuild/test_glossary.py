from pathlib import Path

import pytest

from guide_code.sitebuild.glossary import GLOSSARY, link_terms, load_terms

ROOT = Path(__file__).parents[2]
SOME = """
**Expert**{ #expert }
:   One of the networks ([@a2020]) of a
    [layer](x.md) with `K` "choices".

**Shared expert, common expert**{ #shared-expert }
:   Passed by every token.
"""


@pytest.fixture
def terms(tmp_path):
    (tmp_path / "glossary.md").write_text(SOME)
    return load_terms(tmp_path / "glossary.md")


def test_the_guides_own_glossary_loads():
    assert len(load_terms(ROOT / GLOSSARY)) > 20


def test_definitions_are_plain_text(terms):
    assert terms[0].text == 'One of the networks of a layer with K "choices".'


def test_only_the_first_use_is_linked_and_the_longer_term_wins(terms):
    html = link_terms("<p>A common expert, then Experts and an expert; a Shared expert.</p>", terms, "g/")
    assert html.count("<a ") == 2
    assert '<a class="guide-term" href="g/#shared-expert" title="Passed by every token.">common expert</a>' in html
    assert 'title="One of the networks of a layer with K &quot;choices&quot;.">Experts</a>' in html


@pytest.mark.parametrize(
    "html",
    [
        "<h2>The expert</h2>",
        "<p><code>expert</code></p>",
        '<p><a href="x">the <em>expert</em></a></p>',
        '<span class="arithmatex">expert</span>',
        "<p>non-expert, expertise, expert_id</p>",
        '<img alt="expert">',
        "<!-- expert -->",
    ],
)
def test_headings_code_links_and_parts_of_words_stay(terms, html):
    assert link_terms(html, terms, "g/") == html


def test_text_after_a_skipped_element_is_linked(terms):
    html = link_terms("<pre><code>expert<br></code></pre><p>line<br>expert</p>", terms, "g/")
    assert html.endswith(">expert</a></p>") and html.startswith("<pre><code>expert<br></code></pre>")


@pytest.mark.parametrize(
    ("text", "words"),
    [("**Token**\n:   One position.\n", "Token.*no anchor"), (SOME + SOME, "Expert is defined twice")],
)
def test_a_glossary_that_cannot_be_linked_is_refused(tmp_path, text, words):
    (tmp_path / "glossary.md").write_text(text)
    with pytest.raises(ValueError, match=words):
        load_terms(tmp_path / "glossary.md")
