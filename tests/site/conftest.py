"""The real site, built as `make site` builds it, and a browser."""

import pytest
from browser import chromium, served
from site_project import HELLO, HOME, ROOT, write_project

from guide_code.sitebuild.build import build_site


def built_where_it_is_served(root, folder, say):
    """Builds for the address at which the site is served: instant navigation compares addresses, ports included."""
    with served(folder) as address:
        with pytest.MonkeyPatch.context() as patch:  # for the build alone: other tests look at the address too
            patch.setenv("GUIDE_SITE_URL", address)
            build_site(root, into=folder, say=say)
        yield address


@pytest.fixture(scope="session")
def real_site(tmp_path_factory):
    """The folder of the real site."""
    return tmp_path_factory.mktemp("real") / "site"


@pytest.fixture(scope="session")
def real_address(real_site):
    """Builds and serves the real site. Notebooks that `make site` has run are not run again."""
    yield from built_where_it_is_served(ROOT, real_site, print)


# Each page has what the two renderers once disagreed on: inline and display mathematics, a table, a picture, code.
NOTEBOOK = HELLO.replace(
    "# ## A picture of $x$", "# ## A picture of $x$\n#\n# Back [home](../docs/index.md), or to [page](../docs/page.md)."
)


@pytest.fixture(scope="session")
def hostile_project(tmp_path_factory):
    root = write_project(tmp_path_factory.mktemp("hostile"))
    (root / "notebooks" / "hello.py").write_text(NOTEBOOK)
    (root / "docs" / "page.md").write_text(
        HOME.replace("# Home", "# A page\n\n## Of $z$") + "\nBack [home](index.md).\n"
    )
    (root / "docs" / "index.md").write_text(
        "# Start\n\nNo mathematics. [page](page.md), [notebook](tutorials/hello.ipynb)\n"
    )
    configuration = (root / "mkdocs.yml").read_text().replace("  - Tutorials:", "  - page.md\n  - Tutorials:")
    (root / "mkdocs.yml").write_text(configuration)
    return root


@pytest.fixture(scope="session")
def hostile_site(tmp_path_factory):
    return tmp_path_factory.mktemp("served") / "site"


@pytest.fixture(scope="session")
def hostile_address(hostile_project, hostile_site):
    yield from built_where_it_is_served(hostile_project, hostile_site, lambda line: None)


@pytest.fixture(scope="session")
def browser():
    with chromium() as browser:
        yield browser
