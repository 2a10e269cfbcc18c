from bs4 import BeautifulSoup

from guide_code.sitebuild.notebook_html import rebuild

RENDERED = """
<script src="https://cdn.example/mathjax.js"></script><style>.jp { color: black }</style>
<div class="jupyter-wrapper"><div class="jp-Notebook">
<div class="jp-Cell jp-MarkdownCell"><div class="jp-RenderedHTMLCommon jp-RenderedMarkdown">
<h1 id="a">Title<a class="anchor-link" href="#a">x</a></h1><p>$x$ <a href="../b.md">b</a></p>
<h3 id="b">Deep</h3><h2 id="c">Next $y$</h2>
<div class="highlight"><pre><span></span><span class="n">x</span></pre></div>
</div></div>
<div class="jp-Cell jp-CodeCell"><div class="jp-Cell jp-CodeCell">
<div class="celltoolbar"><span class="cell-tag">hide-input</span></div>
<clipboard-copy for="cell-1"></clipboard-copy>
<div class="highlight-ipynb hl-python"><pre><span></span>x &lt; 1
</pre></div><div class="clipboard-copy-txt" id="cell-1">x &lt; 1</div>
<div class="jp-OutputArea-child"><div class="jp-OutputPrompt">Out[1]:</div>
<div class="jp-RenderedText jp-OutputArea-output" data-mime-type="text/plain"><pre>True</pre></div></div>
<div class="jp-OutputArea-output" data-mime-type="text/html"><style scoped>td { color: red }</style>
<table border="1" class="dataframe"><tr><td style="color: red">1</td></tr></table></div>
</div></div></div></div>
"""


def page():
    html, headings = rebuild(RENDERED, lambda url: url.replace("../b.md", "../b/"))
    return BeautifulSoup(html, "html.parser"), headings


def test_only_content_is_left():
    soup, _ = page()
    assert not soup.select("script, style, clipboard-copy, .clipboard-copy-txt, [class^=jp-]")
    assert soup.get_text().count("x < 1") == 1


def test_code_has_the_markup_of_the_theme():
    soup, _ = page()
    assert [code.get_text().strip() for code in soup.select("div.highlight > pre > code")] == ["x", "x < 1"]


def test_links_are_resolved_and_those_within_the_page_kept():
    soup, _ = page()
    assert [a["href"] for a in soup.select("a")] == ["#a", "../b/"]


def test_prose_with_mathematics_is_marked():
    soup, _ = page()
    assert len(soup.select(".nb-prose.nb-math")) == 1


def test_headings_nest_by_level():
    _, headings = page()
    (title,) = headings
    assert (title.id, title.name) == ("a", "Title")
    assert [child.name for child in title.children] == ["Deep", "Next $y$"]


def test_outputs_stay_out_of_the_search_and_tables_lose_their_colours():
    soup, _ = page()
    outputs = soup.select(".nb-output")
    assert len(outputs) == 2 and all(output.has_attr("data-search-exclude") for output in outputs)
    assert soup.table and soup.table.attrs == {}


def test_a_tag_folds_the_code():
    soup, _ = page()
    assert soup.select_one("details.nb-folded > summary") and soup.select_one("details.nb-folded code")
