"""A small project to build, new for each test or shared where a test only reads."""

import shutil

import pytest
from hub import published
from hub_client import stand_in
from pull_faults import IMAGES
from site_project import write_project

from guide_code.sitebuild.build import build_site


@pytest.fixture(scope="session")
def small_site(tmp_path_factory):
    """The small project, built once: read it, do not change it."""
    root = write_project(tmp_path_factory.mktemp("small"))
    return build_site(root, say=lambda line: None)


@pytest.fixture
def project(tmp_path):
    return write_project(tmp_path / "project")


@pytest.fixture
def drawn_project(project, small_site):
    """A new project whose figures are drawn and whose notebook has run."""
    shutil.copytree(small_site.parent / ".cache", project / ".cache")
    return project


@pytest.fixture
def hub(tmp_path):
    with stand_in(tmp_path) as hub:
        yield hub


@pytest.fixture
def lock(hub):
    """The lock of a few published images."""
    return published(hub, IMAGES)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def pytest_configure(config):
    config.addinivalue_line("markers", "fault: does something wrong to images or a hub; counted at the end of the run")


def pytest_terminal_summary(terminalreporter):
    """Says how many faults were tried and survived."""
    passed, failed = (
        sum("fault" in getattr(report, "keywords", ()) for report in terminalreporter.stats.get(outcome, ()))
        for outcome in ("passed", "failed")
    )
    if passed + failed:
        terminalreporter.write_line(f"images: {passed + failed} faults tried, {passed} survived")
