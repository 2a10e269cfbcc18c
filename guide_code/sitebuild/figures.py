"""Draws the figures of `guide_code.figures`, once per version of their code and data.

A figure module has the names that `guide_code.figures.style` lists, and may have

- `FORMAT`: "svg" (lines, the default), "png" or "webp" (pixels, drawn at twice the density);
- `DATA`: a tuple of JSON files below `docs/data`, such as measured results; `draw` gets their contents as further
  arguments.
"""

import ast
import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from guide_code.sitebuild.imports import import_closure
from guide_code.sitebuild.keys import cache_key

_NOT_FIGURES = {"__init__", "style", "shapes"}
_FORM = "figure 2"
_DENSITY = 2 * 72  # pixels per inch of a PNG or WebP file: two for each CSS pixel


class FigureError(Exception):
    """A page names a figure that does not exist, or a figure module breaks its contract."""


@dataclass(frozen=True)
class Variant:
    """One file of a figure.

    Attributes:
        width: In CSS pixels.
        height: In CSS pixels.
        suffix: `.svg`, `.png` or `.webp`.
        path: The file that holds the bytes; None where readers take them from the hub.
        url: The public address, where readers take the bytes from the hub.
    """

    width: int
    height: int
    suffix: str = ".svg"
    path: Path | None = None
    url: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure as pages use it.

    Attributes:
        alt: What it shows, for readers who do not see it.
        variants: By layout and palette, such as `wide-light`.
        drawn: True if this machine drew it, False if the bytes are the published ones.
    """

    alt: str
    variants: dict[str, Variant]
    drawn: bool = True


def figure_sources(package: Path) -> dict[str, Path]:
    """Name and module of every figure below the package folder `guide_code`."""
    return {path.stem: path for path in sorted((package / "figures").glob("*.py")) if path.stem not in _NOT_FIGURES}


def data_files(source: Path, root: Path) -> list[Path]:
    """The files below `root/docs/data` that a figure module names in `DATA`, read without importing it.

    Raises:
        FigureError: One of them does not exist.
    """
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["DATA"]:
            files = [root / "docs" / "data" / name for name in ast.literal_eval(node.value)]
            missing = [file.relative_to(root).as_posix() for file in files if not file.is_file()]
            if missing:
                raise FigureError(f"DATA of {source.name} names {', '.join(missing)}, which do not exist")
            return files
    return []


def source_hash(source: Path, root: Path) -> str:
    """A hash of a figure's code and data that is the same on every machine."""
    root = root.resolve()
    digest = hashlib.sha256()
    for file in sorted({source.resolve(), *import_closure(source, root), *data_files(source, root)}):
        digest.update(f"{file.resolve().relative_to(root).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def draw_all(
    root: Path, names: Iterable[str] | None = None, *, say: Callable[[str], None] = print
) -> dict[str, Figure]:
    """Brings figures up to date in `.cache/figures`.

    Args:
        root: The project's folder.
        names: The figures to draw; None for all, which also removes earlier drawings.
        say: Gets a line for each figure that is drawn and not taken from the cache.
    """
    sources = figure_sources(root / "guide_code")
    cache = root / ".cache" / "figures"
    figures, kept = {}, set()
    for name in sources if names is None else names:
        folder = cache / _key(name, sources[name], root)
        if not (folder / "figure.json").is_file():
            say(f"figure {name}: drawing")
            _draw_into(folder, name, sources[name], root)
        figures[name] = _load(folder, name)
        kept.add(folder)
    if names is None:
        for folder in cache.glob("*"):
            if folder not in kept and not folder.name.startswith("."):  # hidden: another build is drawing into it
                shutil.rmtree(folder)
    return figures


def differing_redraws(root: Path, workspace: Path) -> list[str]:
    """Draws everything anew into `workspace` and names the files that are not equal, byte for byte, to the cached."""
    differing = []
    for name, figure in draw_all(root, say=lambda line: None).items():
        _draw_into(workspace / name, name, figure_sources(root / "guide_code")[name], root)
        again = _load(workspace / name, name)
        for variant, file in figure.variants.items():
            other = again.variants[variant].path
            assert file.path is not None and other is not None
            if file.path.read_bytes() != other.read_bytes():
                differing.append(file.path.name)
    return differing


def _key(name: str, source: Path, root: Path) -> str:
    files = {source, *import_closure(source, root), *data_files(source, root)}
    return cache_key(name, root, files, form=_FORM)


def _load(folder: Path, name: str) -> Figure:
    record = json.loads((folder / "figure.json").read_text(encoding="utf-8"))
    variants = {
        variant: Variant(file["width"], file["height"], file["suffix"], folder / f"{name}-{variant}{file['suffix']}")
        for variant, file in record["files"].items()
    }
    return Figure(record["alt"], variants)


def _draw_into(folder: Path, name: str, source: Path, root: Path) -> None:
    from guide_code.figures import style  # matplotlib takes a second to import: only when something is drawn

    module = importlib.import_module(f"guide_code.figures.{name}")
    data = [json.loads(file.read_text(encoding="utf-8")) for file in data_files(source, root)]
    suffix = "." + getattr(module, "FORMAT", "svg")
    if suffix not in (".svg", ".png", ".webp"):
        raise FigureError(f"FORMAT {suffix[1:]!r} of figure {name}: use svg for lines, png or webp for pixels")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True, exist_ok=True)
    files = {}
    for layout in module.LAYOUTS:
        for palette in (style.LIGHT, style.DARK):
            variant = f"{layout}-{palette.name}"
            path = temporary / f"{name}-{variant}{suffix}"
            with style.consistent():
                figure = module.draw(palette, layout, *data)
                if suffix == ".svg":
                    width, height = style.save(figure, path)
                else:
                    width, height = _save_pixels(figure, path)
            files[variant] = {"width": width, "height": height, "suffix": suffix}
    record = {"alt": module.ALT, "files": files}
    (temporary / "figure.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)


def _save_pixels(figure, path: Path) -> tuple[int, int]:
    """Writes a PNG or WebP file without date and program, lossless; returns its size in CSS pixels."""
    metadata = {"Software": None} if path.suffix == ".png" else None
    options = {} if path.suffix == ".png" else {"lossless": True}
    figure.savefig(path, format=path.suffix[1:], dpi=_DENSITY, metadata=metadata, pil_kwargs=options)
    width, height = figure.get_size_inches() * (_DENSITY / 2)
    return round(width), round(height)
