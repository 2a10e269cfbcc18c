"""The step before MkDocs: runs notebooks, draws figures, writes reference pages, and lists what is to be mounted."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from guide_code.sitebuild.api import write_api_pages
from guide_code.sitebuild.figures import draw_all, mount_figures
from guide_code.sitebuild.mathjax import mount_mathjax
from guide_code.sitebuild.mounted import Mounted
from guide_code.sitebuild.notebook_pages import mount_notebook
from guide_code.sitebuild.notebooks import execute_all


@dataclass
class Prepared:
    """Everything that the site takes from outside `docs/`.

    Attributes:
        mounted: The files and their places.
        figures: The record of each figure, by name.
        timings: Seconds taken by each part.
    """

    mounted: list[Mounted] = field(default_factory=list)
    figures: dict[str, dict] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)


def prepare(root: Path, workspace: Path, *, allow_stale: bool = False, say: Callable[[str], None] = print) -> Prepared:
    """Brings the caches below `root/.cache` up to date and writes generated pages into `workspace`.

    Args:
        root: The project's folder, with `guide_code/`, `notebooks/` and `docs/`.
        workspace: An empty folder that must live until MkDocs is done.
        allow_stale: See `notebooks.execute_all`.
        say: Gets progress lines.
    """
    result = Prepared()

    start = time.monotonic()
    for executed in execute_all(root, allow_stale=allow_stale, say=say):
        result.mounted += mount_notebook(executed, workspace)
    result.timings["notebooks"] = time.monotonic() - start

    start = time.monotonic()
    result.figures = draw_all(root, say=say)
    result.mounted += mount_figures(result.figures)
    result.timings["figures"] = time.monotonic() - start

    result.mounted += write_api_pages(root / "guide_code", workspace)
    result.mounted += mount_mathjax()
    return result
