"""A small site of all that two content pipelines used to break. Known failure S-03 is here."""

import pytest
from browser import Visit

pytestmark = pytest.mark.browser
EQUATIONS = "() => document.querySelectorAll('article mjx-container').length"
PAGES = ["page/", "tutorials/hello/"]


@pytest.fixture(params=["light", "dark"])
def visit(request, browser, hostile_address):
    visit = Visit(browser, hostile_address, request.param)
    yield visit
    visit.close()


def count(visit, expected):
    visit.settle()
    visit.page.wait_for_function(f"{EQUATIONS[6:]} === {expected}", timeout=10_000)


def search(visit, word, found):
    result = f".md-search-result__item a[href*='{found}']"
    visit.page.click(".md-search__input")
    for _ in range(10):  # what is typed before the index is there may be lost
        visit.page.fill(".md-search__input", "")
        visit.page.keyboard.type(word, delay=30)
        visit.page.wait_for_timeout(500)
        if visit.page.is_visible(result):
            return
    raise AssertionError(f"no result for {word!r} leads to {found}")


def expected_equations(page):
    return {"page/": 3, "tutorials/hello/": 3}[page]


@pytest.mark.parametrize("page", PAGES)
def test_mathematics_is_set_on_a_direct_load(visit, page):
    visit.open(page)
    count(visit, expected_equations(page))
    assert visit.problems() == []


@pytest.mark.parametrize("page", PAGES)
def test_mathematics_is_set_after_a_click_and_after_going_back(visit, page):
    """Instant navigation replaces the page without a load, so nothing that runs on load runs again."""
    visit.open("")
    visit.page.evaluate("() => { window.sameDocument = true }")
    name = {"page/": "page", "tutorials/hello/": "notebook"}[page]
    visit.page.click(f"article a:text-is('{name}')")
    visit.page.wait_for_url(f"**/{page}")
    count(visit, expected_equations(page))
    assert visit.page.evaluate("() => window.sameDocument"), "the click must not have loaded the page anew"
    assert visit.problems() == []

    visit.page.click("article a:text-is('home')")
    visit.page.wait_for_selector("h1:has-text('Start')")
    visit.page.click(f"article a:text-is('{name}')")
    visit.page.wait_for_selector("article mjx-container")
    count(visit, expected_equations(page))
    assert visit.problems() == []


@pytest.mark.parametrize("page", PAGES)
def test_the_palette_can_be_switched_both_ways(visit, page):
    visit.open(page)
    schemes = []
    for _ in range(3):
        visit.page.click("label.md-header__button[for^=__palette]:not([hidden])")
        visit.page.wait_for_timeout(300)  # the colours fade
        schemes.append(visit.page.evaluate("() => document.body.dataset.mdColorScheme"))
        assert visit.problems() == []
    assert {"default", "slate"} <= set(schemes)


def test_a_page_without_mathematics_loads_no_mathjax(visit):
    urls = []
    visit.page.on("request", lambda request: urls.append(request.url))
    visit.open("")
    visit.page.wait_for_load_state("networkidle")
    assert urls and not [url for url in urls if "mathjax" in url]


def test_code_of_a_notebook_can_be_copied(visit):
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.open("tutorials/hello/")
    visit.page.hover("article .highlight >> nth=0")
    visit.page.click("article .md-code__button >> nth=0")
    visit.page.wait_for_function("() => navigator.clipboard.readText().then((text) => text.includes('demo.answer()'))")


def test_the_search_finds_words_of_notebooks(visit):
    visit.open("")
    search(visit, "notebook", "tutorials/hello/")
    assert visit.errors == []


def test_read_from_disk_the_site_has_mathematics_and_search(browser, hostile_project):
    from guide_code.sitebuild.build import build_site

    site = build_site(hostile_project, offline=True, say=lambda line: None)
    visit = Visit(browser, site.as_uri() + "/", "light")
    try:
        visit.open("tutorials/hello.html")
        count(visit, 3)
        search(visit, "picture", "tutorials/hello.html")
        assert visit.errors == []
    finally:
        visit.close()


def test_the_checks_see_what_is_wrong(browser, hostile_site, hostile_address):
    """Each check of a page fails on a page that has the fault."""
    faults = """<!doctype html><html><head><title>x</title><link rel="icon" href="data:,"></head>
      <body style="background: #fff"><p style="color: #999">pale</p><p>raw $x_i$ and \\\\(y\\\\)</p>
      <img src="no.png" alt="x" width="1" height="1"><img src="assets/images/favicon.png">
      <div style="width: 900px">wide</div>
      <script>
        console.error("said")
        fetch("http://127.0.0.2:9/x").catch(() => {})
        setTimeout(() => { throw new Error("thrown") })
      </script>
      </body></html>"""
    (hostile_site / "faults.html").write_text(faults)
    visit = Visit(browser, hostile_address, "light")
    try:
        visit.page.goto(hostile_address + "faults.html")
        visit.page.wait_for_timeout(500)
        found = "\n".join(visit.problems())
    finally:
        visit.close()
        (hostile_site / "faults.html").unlink()
    for words in (
        "low contrast: 2.85:1", "raw LaTeX: raw $x_i$", "nothing to see", "no alternative text", "no size",
        "too wide for a phone", "console error: said", "script error: thrown", "HTTP 404", "another host: http://127.0.0.2",
        "request failed",
    ):  # fmt: skip
        assert words in found, words
