"""A small project to build, new for each test or shared where a test only reads."""

import shutil

import pytest
from hub import Hub, published
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
def hub(monkeypatch, tmp_path):
    """A stand-in hub that the real client talks to, and no token but what a test gives."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with Hub() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
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
