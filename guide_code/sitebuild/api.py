"""The API reference: one page for each public module, made from the package tree."""

import ast
from dataclasses import dataclass
from pathlib import Path

from guide_code.sitebuild.mounted import Mounted

API_URI = "reference/api"
SOURCE_URI = "source"
_TOOLS = ("figures", "sitebuild")


@dataclass(frozen=True)
class Module:
    """A public module.

    Attributes:
        name: Dotted, from the package on.
        path: Its file.
        summary: The first line of its docstring.
    """

    name: str
    path: Path
    summary: str


def public_modules(package: Path) -> list[Module]:
    """Every module of the package whose name, and whose packages' names, start with a letter.

    A package counts through its `__init__.py` only where that file has code of its own besides a docstring.

    Raises:
        ValueError: A module has no docstring; the reference would have nothing to say about it.
    """
    modules = []
    for path in sorted(package.rglob("*.py"), key=lambda path: _reading_order(path.relative_to(package))):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if any(part.startswith("_") for part in parts):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        if path.name == "__init__.py" and len(tree.body) <= 1:
            continue
        docstring = ast.get_docstring(tree)
        if not docstring:
            raise ValueError(f"{path} has no docstring; write its first line: it is shown in the API reference")
        modules.append(Module(".".join(parts), path, docstring.splitlines()[0].strip()))
    return modules


def _page(module: Module, uri: str) -> str:
    """The docstrings, and the file itself to take along; sources laid out in colour would be most of the site.

    What builds the site is described, but not found when a reader searches for MoE words. A package that re-exports
    names lists none of them: each has its place on the page of its own file.
    """
    short = module.name.partition(".")[2]
    search = "search:\n  exclude: true\n" if short.split(".")[0] in _TOOLS else ""
    members = "      members: false\n" if module.path.name == "__init__.py" else ""
    lines = len(module.path.read_text(encoding="utf-8").splitlines())
    return (
        f"---\ntitle: {short}\n{search}---\n\n# `{module.name}`\n\n"
        f"[{module.path.name}](../../{uri}){{ download }}, {lines} lines\n\n"
        f"::: {module.name}\n    options:\n      show_source: false\n{members}"
    )


def _reading_order(path: Path) -> tuple:
    """The layer and the model first, then what tests them, then what builds the site."""
    last = ("testing", *_TOOLS)
    return last.index(path.parts[0]) + 1 if path.parts[0] in last else 0, path.parts


def write_api_pages(package: Path, workspace: Path) -> list[Mounted]:
    """Writes the page of each module, and the table of all, below `workspace`, and mounts the files themselves."""
    modules = public_modules(package)
    pages, sources, mounted = {"index": _index(modules)}, [], []
    for module in modules:
        uri = f"{SOURCE_URI}/{module.path.relative_to(package.parent).as_posix()}"
        sources.append(Mounted(uri, module.path))
        pages[module.name] = _page(module, uri)
    for stem, text in pages.items():
        path = workspace / "api" / f"{stem}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        mounted.append(Mounted(f"{API_URI}/{stem}.md", path, page=True))
    return mounted + sources


def _index(modules: list[Module]) -> str:
    rows = "\n".join(
        f"| [`{module.name.partition('.')[2]}`]({module.name}.md) | {module.summary} |" for module in modules
    )
    return (
        "# API\n\nEvery public module, from its docstrings, with its file to download. "
        f"Names are relative to `{modules[0].name.partition('.')[0]}`.\n\n| Module | What it is |\n|---|---|\n{rows}\n"
    )
