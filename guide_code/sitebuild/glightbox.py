"""GLightbox, which shows a figure large on a click, from the site itself: files of a package on PyPI.

Of `mkdocs-glightbox` only the script, the style sheet and their licence are used. The plugin itself would put a link
between `<picture>` and `<img>`, where `<source>` no longer counts, so that phones would get the wide layout; and it
would load the script on every page. `docs/assets/javascripts/zoom.js` loads it on the first click.
"""

import importlib.util
from pathlib import Path

from guide_code.sitebuild.mounted import Mounted

_PARTS = ("glightbox.min.js", "glightbox.min.css", "LICENSE.md")


def mount_glightbox() -> list[Mounted]:
    """The script, its style sheet and the licence, below `assets/glightbox/`.

    Raises:
        FileNotFoundError: The package `mkdocs-glightbox` (extra `docs`) is not installed or has changed.
    """
    spec = importlib.util.find_spec("mkdocs_glightbox")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("GLightbox is missing. Install the extra: pip install 'moe-guide[docs]'")
    folder = Path(spec.origin).parent / "glightbox"
    missing = [part for part in _PARTS if not (folder / part).is_file()]
    if missing:
        raise FileNotFoundError(f"the installed mkdocs-glightbox holds no {', '.join(missing)}: the pin has changed")
    # A Markdown file among the docs would become a page.
    return [Mounted(f"assets/glightbox/{part.removesuffix('.md')}", folder / part) for part in _PARTS]
