"""The whole build on a small project: what comes out, and what must stop it. Known failure S-01 is here."""

import json
import re

import pytest
from bs4 import BeautifulSoup
from site_project import HELLO, ROOT

from guide_code.sitebuild.__main__ import main
from guide_code.sitebuild.build import SiteError, build_site
from guide_code.sitebuild.mounted import stage
from guide_code.sitebuild.prepare import prepare


def failure(project):
    lines = []
    with pytest.raises(SiteError) as error:
        build_site(project, say=lines.append)
    return "\n".join([*lines, str(error.value)])


@pytest.fixture
def project(drawn_project):
    return drawn_project


def set_text(project, text):
    """Gives the notebook one Markdown cell and nothing to run."""
    commented = "\n".join(f"# {line}" for line in f"# Hello\n\n{text}".splitlines())
    (project / "notebooks" / "hello.py").write_text(f"# %% [markdown]\n{commented}\n")


def test_nothing_in_the_site_names_a_host_that_it_loads_from(small_site):
    page = (small_site / "tutorials" / "hello" / "index.html").read_text()
    hosts = set(re.findall(r"https?://([^/\"'\s]+)", page))
    assert hosts <= {"www.w3.org", "127.0.0.1:8000"}, "the SVG namespace and the site's own address"
    assert "cdn" not in page.lower() and "unpkg" not in page


def test_a_notebook_page_is_small_and_carries_its_facts_and_downloads(small_site):
    path = small_site / "tutorials" / "hello" / "index.html"
    assert path.stat().st_size < 60_000
    soup = BeautifulSoup(path.read_text(), "html.parser")
    bar = soup.select_one("h1 + .nb-bar")
    assert bar and re.search(r"Ran in \d+ s on .*CPU core", bar.get_text())
    for link in bar.select("a"):
        assert (path.parent / str(link["href"])).resolve().is_file()
    notebook = json.loads((small_site / "assets/notebooks/hello/hello.ipynb").read_text())
    assert any(cell.get("outputs") for cell in notebook["cells"])
    assert (small_site / "assets/notebooks/hello/hello.py").read_text() == HELLO


def test_images_of_a_notebook_are_files_with_text_and_size(small_site):
    soup = BeautifulSoup((small_site / "tutorials" / "hello" / "index.html").read_text(), "html.parser")
    (image,) = soup.select("article img")
    assert image["alt"] == "A straight line from the origin to (2, 2)"
    assert int(str(image["width"])) > 100 and image["loading"] == "lazy"


def test_the_table_of_contents_leads_to_the_headings(small_site):
    soup = BeautifulSoup((small_site / "tutorials" / "hello" / "index.html").read_text(), "html.parser")
    targets = [str(link["href"]) for link in soup.select(".md-nav--secondary a")]
    assert targets == ["#a-picture-of-x"] * len(targets) and targets
    assert soup.find(id="a-picture-of-x")


def test_the_search_index_holds_prose_once_and_no_outputs(small_site):
    entries = json.loads((small_site / "search" / "search_index.json").read_text())["docs"]
    text = " ".join(entry["text"] for entry in entries if entry["location"].startswith("tutorials/"))
    assert text.count("demo.answer") == 1 and "answer 42" not in text


def test_mathjax_comes_with_its_licence_and_fonts(small_site):
    folder = small_site / "assets" / "mathjax"
    assert (folder / "tex-mml-chtml.js").stat().st_size > 1_000_000
    assert "Apache" in (folder / "LICENSE").read_text()
    assert len(list((folder / "output/chtml/fonts/woff-v2").glob("*.woff"))) > 20


@pytest.mark.parametrize("target", ["../docs/index.md", "../index.md", "../index.md#home"])
def test_links_of_a_notebook_may_follow_the_repository_or_the_site(project, target):
    set_text(project, f"[there]({target})")
    site = build_site(project, say=lambda line: None)
    soup = BeautifulSoup((site / "tutorials" / "hello" / "index.html").read_text(), "html.parser")
    assert str(soup.find("a", string="there")["href"]) in ("../..", "../../", "../../#home")


def test_hostile_links_and_images_of_a_notebook_resolve(project):
    """S-01: a relative image both ways, a link to another notebook, to a page, and to elsewhere."""
    (project / "docs" / "img").mkdir()
    (project / "docs" / "img" / "p.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (project / "notebooks" / "other.py").write_text("# %% [markdown]\n# # Other\n")
    set_text(
        project,
        '![a picture](../docs/img/p.png)\n\n<img src="../img/p.png" alt="the same" width="1" height="1">\n\n'
        "[script](other.py) [notebook](other.ipynb) [home](../index.md) [out](https://example.org/x)",
    )
    site = build_site(project, say=lambda line: None)
    soup = BeautifulSoup((site / "tutorials" / "hello" / "index.html").read_text(), "html.parser")
    images = [str(image["src"]) for image in soup.select("article img")]
    assert images.count("../../img/p.png") == 2
    links = {link.get_text(): str(link["href"]) for link in soup.select("article p a")}
    assert links["script"] == links["notebook"] == "../other/"
    assert links["out"] == "https://example.org/x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gone](missing.md)", "links to 'missing.md'"),
        ("![gone](../docs/img/missing.png)", "missing.png"),
        ('<img src="https://example.org/hub.png" alt="x">', "https://example.org/hub.png is loaded from another host"),
        ("[nowhere](../index.md#nowhere)", "#nowhere"),
    ],
)
def test_dead_links_and_foreign_images_of_a_notebook_stop_the_build(project, text, words):
    """S-01: what does not resolve is an error, not a page with holes."""
    set_text(project, text)
    assert words in failure(project)


def test_a_page_with_the_stem_of_a_notebook_stops_the_build(project):
    """S-01: the plugin alone would lose one of the two without a word."""
    (project / "docs" / "tutorials").mkdir()
    (project / "docs" / "tutorials" / "hello.md").write_text("# Mine\n")
    message = failure(project)
    assert "tutorials/hello.md" in message and "tutorials/hello.ipynb" in message


def test_a_generated_file_never_replaces_one_of_the_docs(project):
    (project / "docs" / "reference" / "api").mkdir(parents=True)
    (project / "docs" / "reference" / "api" / "index.md").write_text("# Mine\n")
    assert "reference/api/index.md is generated, but" in failure(project)


def test_a_script_in_the_docs_is_a_file_and_never_run(project):
    """S-01: the plugin alone would make a page of it, and run it."""
    (project / "docs" / "helper.py").write_text("raise SystemExit('ran')\n")
    site = build_site(project, say=lambda line: None)
    assert (site / "helper.py").is_file() and not (site / "helper").exists()


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("[gone](missing.md)", "missing.md"),
        ("[gone](tutorials/missing.ipynb)", "missing.ipynb"),
        ("[gone](#nowhere)", "nowhere"),
        ("![](figure:no_such)", "there is no figure 'no_such'"),
        ('<img src="gone.png" alt="x">', "gone.png does not exist"),
        ('<script src="https://cdn.example/x.js"></script>', "loaded from another host"),
        ("::: guide_code.no_such", "guide_code.no_such"),
        ('```python exec="true"\nraise RuntimeError("in prose")\n```', "in prose"),
    ],
)
def test_a_broken_page_stops_the_build_and_the_last_site_stays(project, page, words):
    site = project / "site"
    site.mkdir()
    (site / "kept.html").write_text("the last good site")
    (project / "docs" / "index.md").write_text(f"# Home\n\n{page}\n")
    (project / "notebooks" / "hello.py").unlink()
    assert words in failure(project)
    assert [path.name for path in site.iterdir()] == ["kept.html"]
    assert not list((project / ".cache").glob("build-*")), "no half a site is left"


def test_a_failing_notebook_stops_the_build(project):
    (project / "notebooks" / "hello.py").write_text("# %%\n1 / 0\n")
    assert "hello.py, cell 1 (1 / 0) raised ZeroDivisionError" in failure(project)


def test_a_notebook_without_a_title_stops_the_build(project):
    (project / "notebooks" / "hello.py").write_text("# %%\n1\n")
    assert "has no title" in failure(project)


def test_a_second_build_runs_and_draws_nothing(project):
    build_site(project, say=lambda line: None)
    lines = []
    site = build_site(project, say=lines.append)
    drawn, built = lines
    assert drawn == "images: drawn here, because no dataset of images is published yet"
    assert built.startswith(f"{site} is built in")


def test_an_offline_build_needs_no_server(project):
    site = build_site(project, offline=True, say=lambda line: None)
    assert site == project / "site-offline"
    home = (site / "index.html").read_text()
    assert 'href="tutorials/hello.html"' in home and "iframe-worker.js" in home
    assert "navigation.instant" not in home
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")


def test_a_module_without_a_docstring_stops_the_build(project):
    (project / "guide_code" / "silent.py").write_text("x = 1\n")
    assert "silent.py has no docstring" in failure(project)


def test_the_sources_can_be_staged_for_a_tool_without_hooks(project, tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    mounted = prepare(project, workspace, say=lambda line: None).mounted
    stage(project / "docs", mounted, tmp_path / "staged")
    for name in ("index.md", "tutorials/hello.ipynb", "assets/mathjax/LICENSE", "reference/api/guide_code.demo.md"):
        assert (tmp_path / "staged" / name).is_file(), name


def test_the_command_line_names_its_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert {"build", "serve", "stage"} <= set(re.findall(r"\w+", capsys.readouterr().out))
    assert (ROOT / "guide_code" / "sitebuild" / "__main__.py").is_file()
