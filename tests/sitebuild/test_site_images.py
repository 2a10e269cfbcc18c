"""Where the images of a build come from, what the page says about it, and what must stop the build."""

import shutil
from functools import partial

import pytest
from bs4 import BeautifulSoup
from hub import WRITER
from site_project import ROOT

from guide_code.sitebuild import image_download
from guide_code.sitebuild.build import SiteError, build_site
from guide_code.sitebuild.figures import figure_sources
from guide_code.sitebuild.image_cache import CACHE, cached_path
from guide_code.sitebuild.image_lock import Lock, write_lock
from guide_code.sitebuild.image_publish import publish
from guide_code.sitebuild.images import read_settings, site_images

FIGURE = "figures/dense_vs_moe-wide-light.svg"


@pytest.fixture
def project(drawn_project):
    return drawn_project


@pytest.fixture
def lock(hub, project):
    """The project's figure is published, and this machine has not pulled it."""
    return publish(project, "owner/images", token=WRITER, say=lambda line: None)


def built(project):
    lines = []
    site = build_site(project, say=lines.append)
    return site, "\n".join(lines), BeautifulSoup((site / "index.html").read_text(), "html.parser")


@pytest.mark.fault
def test_with_wrong_bytes_at_the_hub_the_page_shows_a_drawing_and_says_so(hub, project, lock, monkeypatch):
    tree = hub.datasets["owner/images"].commits[-1][1]
    tree[FIGURE] = bytes(len(tree[FIGURE]))
    monkeypatch.setattr(image_download, "Patience", partial(image_download.Patience, pause=0.01))
    site, said, page = built(project)
    assert "dense_vs_moe drawn here, because owner/images could not be reached or did not hold" in said
    assert "the right size, but another sha256" in said
    note = page.select_one("article .guide-drawn")
    assert note and note.get_text().startswith("The figures of this page were drawn when the site was built")
    assert (site / "assets" / FIGURE).read_bytes().rstrip().endswith(b"</svg>")
    assert not cached_path(project / CACHE, lock.files[FIGURE]).exists()


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["no network", "gone"])
def test_what_cannot_be_had_is_drawn_and_marked(hub, project, lock, monkeypatch, fault):
    if fault == "no network":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        del hub.datasets["owner/images"].commits[-1][1][FIGURE]
    lines = []
    images = site_images(project, say=lines.append)
    assert images.figures["dense_vs_moe"].drawn and "owner/images could not be reached" in images.why_drawn
    assert {"no network": "HF_HUB_OFFLINE is set", "gone": "has no such file at commit"}[fault] in "\n".join(lines)


def test_remote_images_are_pinned_links_and_no_files(hub, project, lock, monkeypatch):
    monkeypatch.setenv("GUIDE_IMAGES", "remote")
    site, said, page = built(project)
    assert not list(site.rglob("dense_vs_moe*.svg")) and "drawn" not in said
    images = page.select("figure img")
    prefix = f"{hub.endpoint}/datasets/owner/images/resolve/{lock.commit}/figures/dense_vs_moe-wide-"
    assert [image["src"] for image in images] == [f"{prefix}light.svg", f"{prefix}dark.svg"]
    for image in images:
        assert (image["referrerpolicy"], image["loading"]) == ("no-referrer", "lazy")
        assert int(image["width"]) > 0 and int(image["height"]) > 0 and len(image["alt"]) > 20
    assert hub.images_asked_for() == [], "the build itself asks for none"


def test_local_images_are_drawn_without_a_request(hub, project, lock, monkeypatch):
    monkeypatch.setenv("GUIDE_IMAGES", "local")
    asked, lines = len(hub.requests), []
    images = site_images(project, say=lines.append)
    assert images.figures["dense_vs_moe"].drawn and len(hub.requests) == asked
    assert lines == ["images: drawn here, because the site is set to draw its images itself"]


def test_an_image_that_the_lock_lacks_stops_the_build(project, lock, caplog):
    shutil.copyfile(ROOT / "guide_code/figures/router_anatomy.py", project / "guide_code/figures/router_anatomy.py")
    (project / "docs/index.md").write_text("# Home\n\n![](figure:router_anatomy)\n\n[n](tutorials/hello.ipynb)\n")
    with pytest.raises(SiteError):
        build_site(project, say=lambda line: None)
    assert "there is no figure 'router_anatomy'" in caplog.text and "`moe-guide images publish` adds" in caplog.text


def test_an_image_that_no_page_shows_is_reported(project, lock):
    (project / "docs/index.md").write_text("# Home\n\n[n](tutorials/hello.ipynb)\n")
    assert "images: no page shows dense_vs_moe" in built(project)[1]


def test_a_change_since_the_lock_is_told_and_the_published_image_stays(project, lock):
    source = project / "guide_code/figures/dense_vs_moe.py"
    source.write_text(source.read_text() + "\n# another version\n")
    lines = []
    images = site_images(project, say=lines.append)
    assert "the code of dense_vs_moe has changed since docs/data/images.lock" in lines[0]
    assert not images.figures["dense_vs_moe"].drawn


@pytest.mark.fault
def test_a_figure_that_can_neither_be_had_nor_drawn_is_named(hub, project, lock):
    del hub.datasets["owner/images"]
    figure_sources(project / "guide_code")["dense_vs_moe"].unlink()
    lines = []
    assert site_images(project, say=lines.append).figures == {}
    assert "images: dense_vs_moe cannot be drawn: their code is gone" in lines


@pytest.mark.fault
def test_a_published_image_that_changes_on_its_way_into_the_site_is_found(project, lock, tmp_path):
    images = site_images(project, say=lambda line: None)
    site = tmp_path / "site"
    for file in lock.files.values():
        (site / "assets" / file.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(cached_path(project / CACHE, file), site / "assets" / file.path)
    assert images.wrong_files(site) == []
    (site / "assets" / FIGURE).write_bytes(b"changed")
    assert images.wrong_files(site) == [f"assets/{FIGURE} is not the locked file"]


def test_until_a_dataset_is_published_the_build_draws(project):
    write_lock(project, Lock())
    lines = []
    images = site_images(project, say=lines.append)
    assert images.figures["dense_vs_moe"].drawn and "no dataset of images is published yet" in lines[0]


def test_an_unknown_mode_is_named_with_the_known(project, monkeypatch):
    monkeypatch.setenv("GUIDE_IMAGES", "vendor")
    with pytest.raises(ValueError, match=r"'vendor' in mkdocs\.yml: use vendored, remote, local"):
        read_settings(project)
