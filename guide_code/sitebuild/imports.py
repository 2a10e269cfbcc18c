"""Which files of a project a Python file uses, read from syntax trees: nothing is imported to find out.

The build keys an executed notebook by the files that it uses, and the tests use the same graph to prove the
import order.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def module_file(name: str, root: Path) -> Path | None:
    """The file below `root` that holds the module called `name`, or None where the project has no such module."""
    base = root.joinpath(*name.split("."))
    for candidate in (base.with_name(base.name + ".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def imported_files(path: Path, root: Path, *, names_in_strings: bool = False) -> set[Path]:
    """The project files that `path` itself imports, wherever in the file the import stands.

    Importing `a.b.c` also runs `a/__init__.py` and `a/b/__init__.py`; those are included. `path` never is.

    Args:
        path: A Python file; a notebook in jupytext's py:percent form counts as one.
        root: The folder that absolute imports of project modules start from.
        names_in_strings: Also count string literals that spell a project module, as in
            `subprocess.run([sys.executable, "-m", "guide_code.train"])`.

    Raises:
        SyntaxError: `path` is not valid Python; the message names the file and line.
    """
    path = path.resolve()
    return set(_imported_files(path, root.resolve(), names_in_strings, path.stat().st_mtime_ns))


@functools.cache
def _imported_files(path: Path, root: Path, names_in_strings: bool, changed: int) -> frozenset[Path]:
    """Once per state of the file: many pages and notebooks use the same files."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return frozenset(
        file
        for name in _names(tree, path, root, names_in_strings)
        for file in _with_parents(name, root)
        if file != path
    )


def import_closure(path: Path, root: Path, *, names_in_strings: bool = False) -> set[Path]:
    """The project files that running `path` can reach by imports, directly and through others, without `path`."""
    path = path.resolve()
    seen: set[Path] = set()
    queue = [path]
    while queue:
        for file in imported_files(queue.pop(), root, names_in_strings=names_in_strings):
            if file not in seen:
                seen.add(file)
                queue.append(file)
    return seen - {path}


def _names(tree: ast.AST, path: Path, root: Path, names_in_strings: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, path, root)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)  # the name may be a submodule
        elif names_in_strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _MODULE_NAME.fullmatch(node.value):
                yield node.value


def _absolute(node: ast.ImportFrom, path: Path, root: Path) -> str:
    if node.level == 0:
        return node.module or ""
    package = path.relative_to(root).parent.parts
    kept = package[: len(package) - (node.level - 1)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _with_parents(name: str, root: Path) -> Iterator[Path]:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        file = module_file(".".join(parts[:end]), root)
        if file is not None:
            yield file
