"""The step before MkDocs: runs notebooks, brings images, writes reference pages, and lists what is to be mounted."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from guide_code.sitebuild.api import write_api_pages
from guide_code.sitebuild.citations import BIBLIOGRAPHY, Work, bibtex_file, load_works
from guide_code.sitebuild.figure_html import mount_figures
from guide_code.sitebuild.glightbox import mount_glightbox
from guide_code.sitebuild.glossary import GLOSSARY, Term, load_terms
from guide_code.sitebuild.images import SiteImages, site_images
from guide_code.sitebuild.mathjax import mount_mathjax
from guide_code.sitebuild.mounted import Mounted
from guide_code.sitebuild.notebook_pages import mount_notebook
from guide_code.sitebuild.notebooks import execute_all
from guide_code.sitebuild.page_cache import PageCache


@dataclass
class Prepared:
    """Everything that the site takes from outside `docs/`.

    Attributes:
        mounted: The files and their places.
        images: The figures, and where they come from.
        pages: The pages rendered before; None renders every page.
        works: The bibliography, by key.
        terms: The glossary.
        timings: Seconds taken by each part.
    """

    mounted: list[Mounted] = field(default_factory=list)
    images: SiteImages = field(default_factory=SiteImages)
    pages: PageCache | None = None
    works: dict[str, Work] = field(default_factory=dict)
    terms: list[Term] = field(default_factory=list)
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
    result.images = site_images(root, say=say)
    result.mounted += mount_figures(result.images.figures)
    result.timings["images"] = time.monotonic() - start

    result.mounted += write_api_pages(root / "guide_code", workspace)
    if (root / BIBLIOGRAPHY).is_file():
        result.works = load_works(root / BIBLIOGRAPHY)
        (workspace / "bibliography.bib").write_text(bibtex_file(result.works), encoding="utf-8")
        result.mounted.append(Mounted("reference/bibliography.bib", workspace / "bibliography.bib"))
    if (root / GLOSSARY).is_file():
        result.terms = load_terms(root / GLOSSARY)
    result.mounted += mount_mathjax() + mount_glightbox()
    return result
