"""Runs the notebooks, once per version of the code that they use.

A notebook is a script in jupytext's py:percent form; that file is the only source. Its executed form lies in
`.cache/notebooks/<key>.ipynb`, where the key covers the notebook's bytes, the project files that it imports
(directly or through others), the pinned versions and Python's version: what a key names never changes, so nothing
on the site is stale and nothing runs twice.

Two things an author writes for the build:

- a time limit for the whole notebook, in seconds, in the header: `guide: {timeout: 150}` under `jupyter:`;
- the alternative text of a figure, on the cell that draws it: `# %% alt="Validation loss falls from ..."`
  (a list of texts when the cell draws several).
"""

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import jupytext
import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.validator import NotebookValidationError
from yaml import YAMLError

from guide_code.sitebuild.imports import import_closure
from guide_code.sitebuild.keys import cache_key

DEFAULT_TIMEOUT = 120
KEPT_PER_NOTEBOOK = 3  # executed versions to keep, so that switching between branches runs nothing
_FORM = "notebook 1"  # change it when this file changes what an executed notebook holds
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
IMAGE_TYPES = ("image/png", "image/svg+xml", "image/jpeg")


class NotebookError(Exception):
    """A notebook that cannot become a page; the message names notebook, cell and cause."""


@dataclass(frozen=True)
class Executed:
    """One notebook with its outputs.

    Attributes:
        source: The py:percent script.
        path: The executed notebook in the cache.
        seconds: How long it ran when it was executed.
        ran: True if it was executed by this call, False if the cache had it.
        stale: True if the outputs come from an earlier version of the code that it imports.
    """

    source: Path
    path: Path
    seconds: float
    ran: bool
    stale: bool = False


def notebook_sources(root: Path) -> list[Path]:
    """The notebooks of the project, in reading order."""
    return sorted((root / "notebooks").glob("*.py"))


def notebook_key(source: Path, root: Path) -> str:
    """Names the executed form of `source`; differs whenever anything that could change its outputs differs."""
    files = {source, *import_closure(source, root, names_in_strings=True)}
    return cache_key(source.stem, root, files, form=_FORM)


def execute_all(root: Path, *, allow_stale: bool = False, say: Callable[[str], None] = print) -> list[Executed]:
    """Brings every notebook of the project up to date in the cache.

    Args:
        root: The project's folder.
        allow_stale: Keep the outputs of a notebook whose own text has not changed although code that it imports
            has. For previews: the page says so.
        say: Gets one line for each notebook that is executed.

    Raises:
        NotebookError: The first notebook that fails; earlier ones stay in the cache.
    """
    cache = root / ".cache" / "notebooks"
    done = []
    for source in notebook_sources(root):
        path = cache / f"{notebook_key(source, root)}.ipynb"
        earlier = _latest_of_same_text(source, cache) if allow_stale and not path.is_file() else None
        if path.is_file():
            os.utime(path)  # "recently used", for the collection below
            done.append(Executed(source, path, _seconds(path), ran=False))
        elif earlier is not None:
            say(f"notebook {source.name}: code that it uses has changed; earlier outputs kept for the preview")
            done.append(Executed(source, earlier, _seconds(earlier), ran=False, stale=True))
        else:
            say(f"notebook {source.name}: running ...")
            seconds = _execute_into(path, source, root)
            say(f"notebook {source.name}: ran in {seconds:.1f} s")
            done.append(Executed(source, path, seconds, ran=True))
    _collect(cache, done)
    for item in done:
        for cell, text in nbformat.read(item.path, as_version=4).metadata["guide"]["stderr"]:
            say(f"notebook {item.source.name}, cell {cell}, wrote to stderr (left out of the page): {text}")
    return done


def _execute_into(path: Path, source: Path, root: Path) -> float:
    notebook = read_notebook(source)
    start = time.monotonic()
    work = root / ".cache" / "notebooks" / "work" / source.stem  # what a notebook writes never lands in the tree
    work.mkdir(parents=True, exist_ok=True)
    run_notebook(notebook, source.name, cwd=work, root=root)
    seconds = time.monotonic() - start
    _check_alternative_texts(notebook, source.name)
    notebook.metadata["guide"] = {
        "source": source.name,
        "source_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "seconds": round(seconds, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "stderr": _take_stderr(notebook),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    nbformat.write(notebook, temporary)
    temporary.replace(path)
    return seconds


def read_notebook(source: Path) -> NotebookNode:
    """Reads a py:percent script as a notebook for the running interpreter, whatever kernel its header names."""
    try:
        notebook = jupytext.read(source, fmt="py:percent")
    except (NotebookValidationError, YAMLError) as error:
        raise NotebookError(f"{source.name}: its header is not valid notebook metadata: {error}") from None
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata.pop("jupytext", None)
    for number, cell in enumerate(notebook.cells, 1):
        cell["id"] = f"cell-{number}"
    return notebook


def run_notebook(notebook: NotebookNode, name: str, *, cwd: Path, root: Path) -> None:
    """Runs all cells in a kernel of the running interpreter and stores their outputs in `notebook`.

    The kernel starts in `cwd` and imports project modules from `root`.

    Raises:
        NotebookError: A cell raised, the kernel died, or the time limit of the notebook passed.
    """
    limit = notebook.metadata.get("guide", {}).get("timeout", DEFAULT_TIMEOUT)
    if not isinstance(limit, (int, float)) or limit <= 0:
        raise NotebookError(f"{name}: the header's guide.timeout is {limit!r}; give a number of seconds above 0")
    if not any(cell.cell_type == "code" for cell in notebook.cells):
        return  # prose only: no kernel is needed
    deadline: list[float] = []
    current = [0]

    def time_left(cell: NotebookNode) -> float:
        if not deadline:  # the first cell: the start of the kernel does not count
            deadline.append(time.monotonic() + limit)
        return max(0.1, deadline[0] - time.monotonic())

    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_spec_manager=_OwnInterpreter()),
        timeout_func=time_left,
        startup_timeout=max(60, int(limit)),
        record_timing=False,
        shutdown_kernel="immediate",
        resources={"metadata": {"path": str(cwd)}},
        on_cell_execute=lambda cell, cell_index: current.__setitem__(0, cell_index),
        extra_arguments=[
            "--InlineBackend.figure_formats=retina",
            "--HistoryManager.enabled=False",
            "--IPKernelApp.log_level=ERROR",
        ],
    )
    try:
        client.execute(cleanup_kc=True, env=_environment(root))
    except CellTimeoutError:
        raise NotebookError(
            f"{_where(notebook, name, current[0])} was running when the notebook's limit of {limit:g} s passed. "
            f"Make it faster, or raise guide.timeout in the notebook's header"
        ) from None
    except CellExecutionError as error:
        trace = _ANSI.sub("", error.traceback)
        raise NotebookError(f"{_where(notebook, name, current[0])} raised {error.ename}:\n{trace}") from None
    except DeadKernelError:
        raise NotebookError(
            f"{_where(notebook, name, current[0])}: the kernel died. "
            f"Most often it ran out of memory or the process was killed"
        ) from None


def _environment(root: Path) -> dict[str, str]:
    paths = [str(root.resolve()), os.environ.get("PYTHONPATH", "")]
    # By default a thread that waits for another spins. When others use the cores too, all wait for a thread that does
    # not run: on two busy cores the tiny preset trained at 1,400 tokens/s, against 3,000 without spinning.
    return {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class _OwnInterpreter(KernelSpecManager):
    """Answers every kernel name with the interpreter that runs the build: no kernel has to be registered."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


def _where(notebook: NotebookNode, name: str, index: int) -> str:
    first = notebook.cells[index].source.strip().splitlines()
    return f"{name}, cell {index + 1} ({first[0] if first else 'empty'})"


def alternative_texts(cell: NotebookNode, name: str, number: int) -> list[str]:
    """One text for each image that the cell shows, in order; raises NotebookError where one is missing."""
    images = [
        output for output in cell.get("outputs", []) if any(mime in output.get("data", {}) for mime in IMAGE_TYPES)
    ]
    given = cell.metadata.get("alt", [])
    texts = [given] if isinstance(given, str) else list(given)
    if len(texts) != len(images) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise NotebookError(
            f"{name}, cell {number}: it shows {len(images)} image(s) and has {len(texts)} alternative text(s). "
            f'Say what each image shows on the line that opens the cell: # %% alt="..." '
            f'(several: # %% alt=["...", "..."])'
        )
    return texts


def _check_alternative_texts(notebook: NotebookNode, name: str) -> None:
    for number, cell in enumerate(notebook.cells, 1):
        alternative_texts(cell, name, number)


def _take_stderr(notebook: NotebookNode) -> list[list[object]]:
    """Removes warnings and progress bars from the outputs, unless the cell is tagged `keep-stderr`."""
    taken: list[list[object]] = []
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code" or "keep-stderr" in cell.metadata.get("tags", []):
            continue
        text = "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stderr").strip()
        if text:
            taken.append([number, _ANSI.sub("", text)[-500:]])
            cell.outputs = [o for o in cell.outputs if not (o.output_type == "stream" and o.name == "stderr")]
    return taken


def hardware() -> str:
    """The machine in words: usable CPU cores, and the GPUs that the driver reports."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = f"{cores} CPU core{'s' if cores > 1 else ''}"
    smi = shutil.which("nvidia-smi")
    if smi:
        query = [smi, "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")
        words += "".join(f", {name.strip()}" for name in names if name.strip())
    return words


def _seconds(path: Path) -> float:
    return float(nbformat.read(path, as_version=4).metadata["guide"]["seconds"])


def _latest_of_same_text(source: Path, cache: Path) -> Path | None:
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    for path in _newest_first(_versions(source.stem, cache)):
        if nbformat.read(path, as_version=4).metadata["guide"]["source_sha256"] == sha256:
            return path
    return None


def _versions(stem: str, cache: Path) -> list[Path]:
    return [path for path in cache.glob("*.ipynb") if path.stem.rpartition("-")[0] == stem]


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _collect(cache: Path, done: list[Executed]) -> None:
    """Drops executed notebooks whose source is gone, and all but the few used last of each other one."""
    keep = {item.path for item in done}
    for item in done:
        keep.update(_newest_first(_versions(item.source.stem, cache))[:KEPT_PER_NOTEBOOK])
    for path in cache.glob("*.ipynb"):
        if path not in keep:
            path.unlink()
