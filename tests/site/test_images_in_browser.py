"""Published images as readers see them: from the site itself, from a slow hub, and with the hub out of reach."""

import time

import pytest
from browser import Visit, served
from hub import WRITER
from hub_client import stand_in
from site_project import write_project

from guide_code.sitebuild.build import build_site
from guide_code.sitebuild.image_publish import publish

pytestmark = pytest.mark.browser
PAGE = "# Home\n\n![The first.](figure:dense_vs_moe)\n\n" + "Words.\n\n" * 20
PAGE += "![The second.](figure:dense_vs_moe)\n\n" + "Words.\n\n" * 20

# The sum of all layout shifts, those after a click or a key included, from the first paint on.
WATCH = """() => {
  window.shifts = 0
  new PerformanceObserver((list) => list.getEntries().forEach((entry) => { window.shifts += entry.value }))
    .observe({type: "layout-shift", buffered: true})
}"""
WALK = """async () => {
  const pause = (ms) => new Promise((done) => setTimeout(done, ms))
  for (const image of document.querySelectorAll("figure img")) {
    if (!image.checkVisibility()) continue
    image.scrollIntoView()
    for (let i = 0; i < 100 && !image.complete; i++) await pause(50)
  }
  await pause(200)
  return [...document.querySelectorAll("figure img")].filter((image) => image.checkVisibility())
    .map((image) => [image.naturalWidth > 0, image.clientWidth > 100 && image.clientHeight > 50])
}"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with stand_in(tmp_path_factory.mktemp("no-token")) as hub:
        yield hub


@pytest.fixture(scope="module")
def addresses(hub, tmp_path_factory):
    """The address of one site in each of two modes, its images published."""
    root = write_project(tmp_path_factory.mktemp("images"))
    (root / "docs" / "index.md").write_text(PAGE + "[notebook](tutorials/hello.ipynb)\n")
    (root / "notebooks" / "hello.py").write_text("# %% [markdown]\n# # Hello\n")
    publish(root, "owner/images", token=WRITER, say=lambda line: None)
    sites = {}
    for mode in ("vendored", "remote"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GUIDE_IMAGES", mode)
            sites[mode] = build_site(root, into=root / mode, say=lambda line: None)
    with served(sites["vendored"]) as vendored, served(sites["remote"]) as remote:
        yield {"vendored": vendored, "remote": remote}


@pytest.fixture(params=[("light", 1280), ("dark", 360)], ids=["light-wide", "dark-phone"])
def visit(request, browser):
    visits = []

    def open_at(address, *, only_the_site):
        visit = Visit(browser, address, *request.param)
        visits.append(visit)
        if only_the_site:
            visit.context.route(lambda url: not url.startswith(address), lambda route: route.abort())
        visit.context.add_init_script(f"({WATCH})()")
        visit.open("")
        return visit, visit.page.evaluate(WALK)

    yield open_at
    for visit in visits:
        visit.close()


def test_vendored_pages_show_every_image_with_all_other_hosts_blocked(hub, addresses, visit):
    asked = len(hub.requests)
    tab, images = visit(addresses["vendored"], only_the_site=True)
    assert images == [[True, True]] * 2
    assert tab.page.evaluate("window.shifts") == 0
    assert tab.problems() == [] and len(hub.requests) == asked, "no other host is asked, not even in vain"


def test_images_that_come_late_move_nothing(hub, addresses, visit):
    hub.fault = lambda handler, path: time.sleep(0.3)
    tab, images = visit(addresses["remote"], only_the_site=False)
    hub.fault = lambda handler, path: False
    assert images == [[True, True]] * 2
    assert tab.page.evaluate("window.shifts") == 0
    seen = [request for request in hub.requests if request.method == "GET" and "/resolve/" in request.path]
    assert seen and not [request for request in seen if "referer" in request.headers], "the hub learns no page"


def test_without_the_hub_the_text_stands_and_says_what_the_image_shows(addresses, visit):
    tab, images = visit(addresses["remote"], only_the_site=True)
    assert images == [[False, True]] * 2
    assert tab.page.evaluate("window.shifts") == 0
    image = tab.page.locator("figure img:visible").first
    told = image.screenshot()
    image.evaluate("(image) => { image.alt = '' }")
    assert image.screenshot() != told, "the alternative text was to be seen"
    assert tab.page.locator("figcaption:visible").first.inner_text() == "The first."


def test_a_shift_is_measured(browser, addresses):
    """The measure itself: a page that moves is seen to move."""
    tab = Visit(browser, addresses["vendored"], "light")
    try:
        tab.context.add_init_script(f"({WATCH})()")
        tab.open("")
        tab.page.evaluate("document.querySelector('figure').style.paddingTop = '200px'")
        tab.page.wait_for_function("window.shifts > 0", timeout=5000)
    finally:
        tab.close()


def test_a_click_shows_the_image_large_and_escape_goes_back(visit, addresses):
    tab, _ = visit(addresses["vendored"], only_the_site=True)
    tab.page.locator("a.guide-zoom:visible").first.click()
    large = tab.page.locator(".gslide.current img")
    large.wait_for(timeout=5000)
    tab.page.wait_for_function("document.querySelector('.gslide.current img').naturalWidth > 0", timeout=5000)
    assert large.get_attribute("src").endswith(".svg") and len(large.get_attribute("alt")) > 20
    tab.page.keyboard.press("Escape")
    tab.page.wait_for_selector(".glightbox-container", state="detached", timeout=5000)
    assert tab.page.evaluate("document.activeElement.className").startswith("guide-zoom")
    assert tab.errors == []
