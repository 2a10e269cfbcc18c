"""Pages that have not changed are taken as they are: with everything that rendering left in other places."""

import pytest
from bs4 import BeautifulSoup

from guide_code.sitebuild.build import SiteError, build_site

PAGE = """# Home

The [answer][guide_code.demo.answer], from code:

```python exec="true"
from pathlib import Path

log = Path(r"LOG")  # as if it imported guide_code.demo
log.write_text(log.read_text() + "ran ")
print(f"It is {40 + 2}.")
```

## A heading

[below](#a-heading), and [what builds the figure](reference/api/guide_code.figures.dense_vs_moe.md)
"""


@pytest.fixture
def project(drawn_project):
    (drawn_project / "ran.txt").write_text("")
    (drawn_project / "docs/index.md").write_text(PAGE.replace("LOG", str(drawn_project / "ran.txt")))
    return drawn_project


def build(project):
    site = build_site(project, say=lambda line: None)
    pages = {
        path.relative_to(site).as_posix(): path.read_bytes()
        for path in site.rglob("*")
        if path.is_file() and (path.suffix == ".html" or path.name in ("search_index.json", "objects.inv"))
    }
    return pages, (project / "ran.txt").read_text().count("ran")


def test_a_second_build_renders_nothing_and_gives_the_same_bytes(project):
    first, ran = build(project)
    assert ran == 1
    second, ran = build(project)
    assert ran == 1 and second == first
    soup = BeautifulSoup(second["index.html"], "html.parser")
    link = soup.select_one("article a.autorefs")
    assert link and link["href"] == "reference/api/guide_code.demo/#guide_code.demo.answer"
    assert (project / "site/assets/_mkdocstrings.css").is_file()


def test_a_change_of_the_code_that_a_page_runs_renders_it_anew(project):
    build(project)
    demo = project / "guide_code/demo.py"
    demo.write_text(demo.read_text() + "\n# changed\n")
    assert build(project)[1] == 2
    (project / "docs/data").mkdir()
    (project / "docs/data/results.json").write_text("{}")
    assert build(project)[1] == 3


def test_a_change_of_the_navigation_keeps_pages(project):
    build(project)
    settings = project / "mkdocs.yml"
    settings.write_text(settings.read_text().replace("- Home: index.md", "- Start: index.md"))
    pages, ran = build(project)
    assert ran == 1 and b"Start" in pages["index.html"]
    settings.write_text(settings.read_text().replace("toc: { permalink: true }", "toc: { permalink: false }"))
    assert build(project)[1] == 2


def test_a_page_that_goes_wrong_is_not_kept(project):
    page = project / "docs/index.md"
    page.write_text(page.read_text().replace("40 + 2}", "40 / 0}"))
    for _ in range(2):
        with pytest.raises(SiteError):
            build(project)


def test_entries_that_no_page_uses_are_removed(project):
    build(project)
    kept = {path.name for path in (project / ".cache/pages/site").iterdir()}
    page = project / "docs/index.md"
    page.write_text(page.read_text() + "\nMore.\n")
    build(project)
    now = {path.name for path in (project / ".cache/pages/site").iterdir()}
    assert len(now) == len(kept) and len(now - kept) == 1
