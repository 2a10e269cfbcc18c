"""Turns executed notebooks into what the site shows: a page, its images as files, and the downloads."""

import base64
import hashlib
import html
import struct
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from guide_code.sitebuild.mounted import Mounted
from guide_code.sitebuild.notebooks import IMAGE_TYPES, Executed, alternative_texts

_SUFFIX = {"image/png": ".png", "image/svg+xml": ".svg", "image/jpeg": ".jpg"}


def mount_notebook(executed: Executed, workspace: Path) -> list[Mounted]:
    """The files that one notebook adds to the site.

    They are the page `tutorials/<stem>.ipynb`, its images, the script and the executed notebook for download.

    Args:
        executed: A notebook with its outputs.
        workspace: Gets the page, at its URI, and the images.
    """
    stem = executed.source.stem
    notebook = nbformat.read(executed.path, as_version=4)
    folder = workspace / "images" / stem
    folder.mkdir(parents=True, exist_ok=True)
    page = workspace / "tutorials" / f"{stem}.ipynb"
    page.parent.mkdir(parents=True, exist_ok=True)
    _join_streams(notebook)
    images = _take_images(notebook, stem, folder)
    notebook.metadata["guide"]["stale"] = executed.stale
    nbformat.write(notebook, page)
    downloads = [
        Mounted(f"{download_uri(stem)}.ipynb", executed.path),
        Mounted(f"{download_uri(stem)}.py", executed.source),
    ]
    return [Mounted(f"tutorials/{stem}.ipynb", page, page=True), *images, *downloads]


def _join_streams(notebook: NotebookNode) -> None:
    """Makes one block of what a cell printed in several messages: their borders depend on timing alone."""
    for cell in notebook.cells:
        joined: list[NotebookNode] = []
        for output in cell.get("outputs", []):
            before = joined[-1] if joined else None
            if output.output_type == "stream" and before is not None and before.get("name") == output.name:
                before.text += output.text
            else:
                joined.append(output)
        if "outputs" in cell:
            cell.outputs = joined


def download_uri(stem: str) -> str:
    """Where the downloads of a notebook lie, without the suffix `.py` or `.ipynb`."""
    return f"assets/notebooks/{stem}/{stem}"


def _take_images(notebook: NotebookNode, stem: str, folder: Path) -> list[Mounted]:
    """Replaces each image in the outputs by a reference to a file, with alternative text and size."""
    images = []
    for number, cell in enumerate(notebook.cells, 1):
        texts = iter(alternative_texts(cell, stem, number))
        for output in cell.get("outputs", []):
            mime = next((mime for mime in IMAGE_TYPES if mime in output.get("data", {})), None)
            if mime is None:
                continue
            source = output.data[mime]
            data = source.encode() if mime == "image/svg+xml" else base64.b64decode(source)
            name = f"{len(images) + 1}-{hashlib.sha256(data).hexdigest()[:10]}{_SUFFIX[mime]}"
            (folder / name).write_bytes(data)
            images.append(Mounted(f"assets/notebooks/{stem}/{name}", folder / name))
            size = _size(output.get("metadata", {}).get(mime, {}), mime, data)
            tag = (
                f'<img src="../{images[-1].uri}" alt="{html.escape(next(texts))}"{size} '
                f'loading="lazy" decoding="async">'
            )
            output["data"] = {"text/html": tag}
            output["metadata"] = {}
    return images


def _size(metadata: dict, mime: str, data: bytes) -> str:
    width, height = metadata.get("width"), metadata.get("height")
    if width is None and mime == "image/png":
        width, height = struct.unpack(">II", data[16:24])
    return f' width="{width}" height="{height}"' if width and height else ""
