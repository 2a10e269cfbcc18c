"""MathJax from the site itself: the files of a package on PyPI, with their licence."""

import importlib.util
from pathlib import Path

from guide_code.sitebuild.mounted import Mounted

_PARTS = ("es5/tex-mml-chtml.js", "es5/output/chtml/fonts/woff-v2/*.woff", "LICENSE")


def mount_mathjax() -> list[Mounted]:
    """The script, its fonts and the licence, below `assets/mathjax/`.

    Raises:
        FileNotFoundError: The package `django-static-mathjax` (extra `docs`) is not installed or has changed.
    """
    spec = importlib.util.find_spec("mathjax")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("MathJax is missing. Install the extra: pip install 'moe-guide[docs]'")
    folder = Path(spec.origin).parent / "static" / "mathjax"
    mounted = []
    for pattern in _PARTS:
        files = sorted(folder.glob(pattern))
        if not files:
            raise FileNotFoundError(f"the installed MathJax package holds no {pattern}: the pin has changed")
        for file in files:
            uri = file.relative_to(folder).as_posix().removeprefix("es5/")
            mounted.append(Mounted(f"assets/mathjax/{uri}", file))
    return mounted
