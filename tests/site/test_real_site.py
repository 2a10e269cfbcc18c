"""The site that `make site` builds, opened page by page as readers do."""

import re
from pathlib import Path

import pytest
from browser import Visit
from bs4 import BeautifulSoup
from site_project import ROOT

from guide_code.sitebuild.api import public_modules
from guide_code.sitebuild.links import check_site

# The first test may have to run notebooks.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("real_address")]


def pages(site: Path) -> list[str]:
    folders = (path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    return [*sorted("" if folder == "." else f"{folder}/" for folder in folders), "404.html"]


def soup(site: Path, page: str) -> BeautifulSoup:
    return BeautifulSoup((site / page / "index.html").read_text(encoding="utf-8"), "html.parser")


def test_the_parts_of_the_site_are_there(real_site):
    there = set(pages(real_site))
    assert {"", "learn/moe_layer/", "reference/glossary/", "reference/api/"} <= there
    for notebook in (ROOT / "notebooks").glob("*.py"):
        assert f"tutorials/{notebook.stem}/" in there
    for module in public_modules(ROOT / "guide_code"):
        assert f"reference/api/{module.name}/" in there


def test_every_link_of_the_site_resolves(real_site, real_address):
    assert check_site(real_site, real_address) == []


def test_lessons_show_figures_computed_numbers_and_source(real_site):
    lesson = soup(real_site, "learn/moe_layer")
    assert len(lesson.select("article figure.guide-figure")) == 2
    text = lesson.get_text()
    assert "token 0: 0.7 x expert 0 + 0.3 x expert 2" in text and "rows per expert: [3, 1, 3, 1]" in text
    assert "the same up to rounding: True" in text
    source = lesson.select("details.mkdocstrings-source[open]")
    assert len(source) == 2 and "routing = self.router(" in source[0].get_text()
    assert len(lesson.select("details.question")) >= 3, "exercises with folded answers"


def test_the_tutorial_shows_its_curves(real_site):
    tutorial = soup(real_site, "tutorials/01_first_moe")
    images = tutorial.select("article img")
    assert len(images) >= 3 and all(str(image["alt"]).strip() for image in images)
    for image in images:
        assert (real_site / "tutorials/01_first_moe" / str(image["src"])).resolve().stat().st_size > 5_000
    assert "validation loss" in tutorial.get_text()


def test_the_reference_links_parts_of_the_code_to_each_other(real_site):
    page = soup(real_site, "reference/api/guide_code.moe")
    assert page.find(id="guide_code.moe.MoE.forward")
    for code in page.select("pre"):
        code.decompose()
    assert not re.search(r":(func|class|meth):", page.get_text())


@pytest.mark.browser
def test_every_page_is_whole_in_both_palettes(browser, real_site, real_address):
    """No error, no failed or foreign request, no raw LaTeX, no bad image, enough contrast, no sideways scroll."""
    visit = Visit(browser, real_address, "light")
    found = {}
    try:
        for page in pages(real_site):
            found[page, "light"] = visit.switch("light").open(page).problems()
            found[page, "dark"] = visit.switch("dark").problems(phone=False)
    finally:
        visit.close()
    assert {place: problems for place, problems in found.items() if problems} == {}
