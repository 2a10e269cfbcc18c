"""Which images the site shows: the published ones at the locked commit, or, where they cannot be had, fresh drawings.

`extra.images.mode` in `mkdocs.yml` says how:

- `vendored`: pulled when the site is built and served by the site itself, so that readers contact no other host;
- `remote`: readers take them from the hub, at the locked commit;
- `local`: drawn when the site is built.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mkdocs.utils.yaml import yaml_load

from guide_code.sitebuild.figure_html import figure_uri
from guide_code.sitebuild.figures import Figure, Variant, draw_all, figure_sources, source_hash
from guide_code.sitebuild.image_cache import CACHE, Pulled
from guide_code.sitebuild.image_lock import LOCK_FILE, Lock, LockedFile, read_lock
from guide_code.sitebuild.image_pull import pull

MODES = ("vendored", "remote", "local")
_NOT_LOCKED = (
    f". The site shows the figures that {LOCK_FILE} lists: `moe-guide images publish` adds a new one; until then build "
    "with GUIDE_IMAGES=local"
)


@dataclass(frozen=True)
class Settings:
    """The part `extra.images` of `mkdocs.yml`.

    Attributes:
        mode: One of `MODES`.
        dataset: Where `moe-guide images publish` publishes, `OWNER/NAME`; None until the maintainer has chosen.
    """

    mode: str = "vendored"
    dataset: str | None = None


@dataclass
class SiteImages:
    """The images of one build.

    Attributes:
        figures: By the name that pages use.
        why_drawn: Why some were drawn by this machine; empty if none was.
        remote: The address that all links to the hub begin with; empty if there are none.
        lock: What is published.
        advice: What to do about a figure that a page names and that is not here.
        used: Names that pages have asked for so far.
    """

    figures: dict[str, Figure] = field(default_factory=dict)
    why_drawn: str = ""
    remote: str = ""
    lock: Lock = field(default_factory=Lock)
    advice: str = ""
    used: set[str] = field(default_factory=set)

    def wrong_files(self, site: Path) -> list[str]:
        """Published images whose bytes in the built site are not the locked ones, in words."""
        problems = []
        for name, figure in self.figures.items():
            for variant, file in self.lock.figures().get(name, {}).items() if not figure.drawn else ():
                uri = figure_uri(name, variant, file.suffix)
                if not self.remote and not file.matches(site / uri):
                    problems.append(f"{uri} is not the locked file")
        return problems

    def unused(self) -> list[str]:
        """Published figures that no page has asked for."""
        return sorted(self.lock.figures().keys() - self.used)


def read_settings(root: Path) -> Settings:
    """Reads `mkdocs.yml`, where `!ENV` may take the mode from the environment.

    Raises:
        ValueError: The mode is unknown.
    """
    with (root / "mkdocs.yml").open("rb") as stream:
        config = yaml_load(stream)
    images = (config.get("extra") or {}).get("images") or {}
    settings = Settings(images.get("mode") or "vendored", images.get("dataset") or None)
    if settings.mode not in MODES:
        raise ValueError(f"extra.images.mode {settings.mode!r} in mkdocs.yml: use {', '.join(MODES)}")
    return settings


def site_images(root: Path, *, say: Callable[[str], None] = print) -> SiteImages:
    """Brings the images of the site, in the way that the settings say.

    Nothing here fails for lack of a network: the build then draws, and says so. A drawn image is never taken for a
    published one.

    Args:
        root: The project's folder.
        say: Gets progress lines.
    """
    settings, lock = read_settings(root), read_lock(root)
    if settings.mode == "local":
        return _drawn(root, lock, "the site is set to draw its images itself", say)
    if lock.dataset is None:
        return _drawn(root, lock, "no dataset of images is published yet", say)
    _tell_changes(root, lock, say)
    if settings.mode == "remote":
        return _remote(lock)
    start = time.monotonic()
    pulled = pull(lock, root / CACHE)
    if pulled.removed:
        say(f"images: {len(pulled.removed)} files of the cache had wrong bytes and were deleted")
    if pulled.downloaded:
        say(f"images: {pulled.downloaded} from {lock.dataset} in {time.monotonic() - start:.1f} s")
    return _vendored(root, lock, pulled, say)


def locked_figure(files: dict[str, LockedFile], paths: dict[str, Path], prefix: str = "") -> Figure:
    """A published figure, its bytes in the cache or, with `prefix`, at the hub."""
    variants = {
        key: Variant(file.width, file.height, file.suffix, paths.get(file.path), prefix and prefix + file.path)
        for key, file in files.items()
    }
    return Figure(files["wide-light"].alt, variants, drawn=False)


def _drawn(root: Path, lock: Lock, why: str, say: Callable[[str], None]) -> SiteImages:
    say(f"images: drawn here, because {why}")
    return SiteImages(draw_all(root, say=say), why, lock=lock)


def _remote(lock: Lock) -> SiteImages:
    from huggingface_hub import hf_hub_url

    assert lock.dataset and lock.commit
    prefix = hf_hub_url(lock.dataset, "x.svg", repo_type="dataset", revision=lock.commit).removesuffix("x.svg")
    figures = {name: locked_figure(files, {}, prefix) for name, files in lock.figures().items()}
    return SiteImages(figures, remote=prefix, lock=lock, advice=_NOT_LOCKED)


def _vendored(root: Path, lock: Lock, pulled: Pulled, say: Callable[[str], None]) -> SiteImages:
    """Figures with all files in the cache as published; the others drawn, if their code is still there."""
    figures, missing = {}, []
    for name, files in lock.figures().items():
        if all(file.path in pulled.paths for file in files.values()):
            figures[name] = locked_figure(files, pulled.paths)
        else:
            missing.append(name)
    if not missing:
        return SiteImages(figures, lock=lock, advice=_NOT_LOCKED)
    reasons = list(dict.fromkeys(pulled.failures.values()))
    why = f"{lock.dataset} could not be reached or did not hold the locked files"
    say(f"images: {', '.join(missing)} drawn here, because {why}:")
    for reason in reasons[:3]:
        say(f"  {reason}")
    gone = [name for name in missing if name not in figure_sources(root / "guide_code")]
    if gone:
        say(f"images: {', '.join(gone)} cannot be drawn: their code is gone")
    figures |= draw_all(root, [name for name in missing if name not in gone], say=say)
    return SiteImages(figures, why, lock=lock, advice=_NOT_LOCKED)


def changed_figures(root: Path, lock: Lock) -> list[str]:
    """Published figures whose code or data is not what it was when they were published."""
    sources, published = figure_sources(root / "guide_code"), lock.figures()
    return sorted(
        name
        for name in sources.keys() & published.keys()
        if any(file.source != source_hash(sources[name], root) for file in published[name].values())
    )


def _tell_changes(root: Path, lock: Lock, say: Callable[[str], None]) -> None:
    changed = changed_figures(root, lock)
    if changed:
        say(f"images: the code of {', '.join(changed)} has changed since {LOCK_FILE}; the site shows the published")
