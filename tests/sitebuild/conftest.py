"""A small project to build, new for each test or shared where a test only reads."""

import shutil

import pytest
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
