"""The executed notebooks as a folder that Colab opens: each begins with a cell that installs the package."""

import re
from collections.abc import Iterable
from pathlib import Path

import nbformat

from guide_code.sitebuild.notebooks import Executed

BRANCH = "notebooks"  # where the deploy workflow puts them
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def colab_url(repository: str, stem: str) -> str:
    """Opens a notebook of the branch of executed notebooks."""
    return f"https://colab.research.google.com/github/{check_repository(repository)}/blob/{BRANCH}/{stem}.ipynb"


def check_repository(repository: str) -> str:
    """The argument, if it has the form OWNER/NAME.

    Raises:
        ValueError: It has another form.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise ValueError(f"repository = {repository!r} is not of the form OWNER/NAME")
    return repository


def write_colab(notebooks: Iterable[Executed], repository: str, revision: str, into: Path) -> list[Path]:
    """Writes each executed notebook, with its outputs and an install cell before the first code cell.

    Args:
        notebooks: What the build ran.
        repository: OWNER/NAME on GitHub, from which the package is installed.
        revision: The commit that the outputs belong to.
        into: The folder; made if it is not there.

    Raises:
        ValueError: The repository or the revision has a wrong form.
    """
    check_repository(repository)
    if not re.fullmatch(r"[\w./-]+", revision):
        raise ValueError(f"revision = {revision!r} is not the name of a commit, a branch or a tag")
    into.mkdir(parents=True, exist_ok=True)
    install = (
        "# The package at the commit whose outputs are shown; PyTorch is already here.\n"
        f'%pip install -q "moe-guide[hf] @ git+https://github.com/{repository}@{revision}"'
    )
    written = []
    for executed in notebooks:
        notebook = nbformat.read(executed.path, as_version=4)
        first = next(place for place, cell in enumerate(notebook.cells) if cell.cell_type == "code")
        notebook.cells.insert(first, nbformat.v4.new_code_cell(install, id="install"))
        path = into / f"{executed.source.stem}.ipynb"
        nbformat.write(notebook, path)
        written.append(path)
    return written
