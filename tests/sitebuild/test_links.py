import pytest

from guide_code.sitebuild.links import check_site

PAGE = '<html><body><h1 id="top">Title</h1><a href="#top">up</a>{}</body></html>'


@pytest.fixture
def site(tmp_path):
    for name in ("index.html", "a/index.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PAGE.format(""))
    (tmp_path / "x y.png").write_bytes(b"png")
    (tmp_path / "style.css").write_text('@import "more.css"; b { background: url("x y.png") }')
    (tmp_path / "more.css").write_text("")
    return tmp_path


def problems(site, html, **options):
    (site / "a" / "index.html").write_text(PAGE.format(html))
    return check_site(site, **options)


@pytest.mark.parametrize(
    "html",
    [
        '<a href="../">home</a><a href="../index.html#top">home</a><a href="?q=1">here</a>',
        '<img src="../x%20y.png" srcset="../x%20y.png 2x"><link rel="stylesheet" href="../style.css">',
        '<a href="https://example.org/a#b">elsewhere</a><a href="mailto:a@example.org">mail</a>',
        '<link rel="canonical" href="https://example.org/guide/a/">',
        '<img src="data:image/png;base64,AAAA">',
    ],
)
def test_what_resolves_passes(site, html):
    assert problems(site, html) == []


@pytest.mark.parametrize(
    ("html", "words"),
    [
        ('<a href="missing/">x</a>', "missing/ does not exist"),
        ('<a href="../../outside.html">x</a>', "outside.html does not exist"),
        ('<a href="../#nowhere">x</a>', "a place #nowhere"),
        ('<a href="../page.md">x</a>', "page.md does not exist"),
        ('<img src="missing.png">', "missing.png does not exist"),
        ('<img src="">', "an empty address"),
        ('<source srcset="../x%20y.png 1x, ../z.png 2x">', "z.png does not exist"),
        ('<p style="background: url(missing.svg)">', "missing.svg does not exist"),
        ("<style>p { background: url(gone.svg) }</style>", "gone.svg does not exist"),
        ('<script src="https://cdn.example/x.js"></script>', "cdn.example/x.js is loaded from another host"),
        ('<img src="//cdn.example/x.png">', "loaded from another host"),
        ('<link rel="stylesheet" href="https://fonts.example/css">', "loaded from another host"),
        ('<link rel="preconnect" href="https://fonts.example">', "loaded from another host"),
        ('<a href="ftp://example.org">x</a>', "odd link"),
    ],
)
def test_what_does_not_is_named_with_its_page(site, html, words):
    (found,) = problems(site, html)
    assert found.startswith("a/index.html: ") and words in found


def test_style_sheets_are_checked(site):
    (site / "style.css").write_text("a { background: url(https://cdn.example/x.png) } b { background: url(no.png) }")
    assert len(check_site(site)) == 2


def test_absolute_links_are_taken_below_the_public_address(site):
    html = '<a href="/guide/a/">x</a><a href="https://example.org/guide/#top">y</a>'
    assert problems(site, html, site_url="https://example.org/guide/") == []
    bad = '<a href="/guide/b/">x</a><a href="https://example.org/guide/c/">y</a>'
    assert len(problems(site, bad, site_url="https://example.org/guide/")) == 2
