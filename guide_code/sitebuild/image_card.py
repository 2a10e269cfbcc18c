"""The dataset's card: what the images are, where they come from, under which licence, and how they look."""

from collections.abc import Iterable

from guide_code.sitebuild.image_lock import LockedFile

LICENSE = "Apache-2.0"
PROJECT = "moe-guide"

_HEAD = """---
license: {tag}
pretty_name: Images of {project}
tags: [documentation, mixture-of-experts]
viewer: false
---

# Images of {project}

The figures of the documentation of `{project}`, a guide to Mixture-of-Experts Transformers: {figures} figures in
{files} files, for light and dark pages, and for wide and narrow windows.

**Licence.** {license}, as the code that draws them.

**Provenance.** Nothing here is drawn by hand or taken from elsewhere. Each file is the output of one function of the
project, named below, and `moe-guide images draw` draws it again. `moe-guide images publish` uploads what has changed in
one commit and writes that commit, with the sha256 of every file, into `docs/data/images.lock` of the project. The
documentation uses exactly that commit. Change the code, not these files.

## Gallery
"""


def dataset_card(files: Iterable[LockedFile]) -> str:
    """The text of the dataset's `README.md`; equal for equal files, so that it never makes a commit of its own."""
    ordered = sorted(files, key=lambda file: file.path)
    figures: dict[str, list[LockedFile]] = {}
    for file in ordered:
        figures.setdefault(file.figure, []).append(file)
    text = _HEAD.format(tag=LICENSE.lower(), license=LICENSE, project=PROJECT, figures=len(figures), files=len(ordered))
    for name, variants in figures.items():
        shown = next((file for file in variants if file.variant == "wide-light"), variants[0])
        others = ", ".join(f"[{file.variant}]({file.path})" for file in variants)
        text += (
            f"\n### {name}\n\n![{shown.alt}]({shown.path})\n\n"
            f"Drawn by `{shown.drawn_by}.draw`, {shown.width} x {shown.height} pixels. Variants: {others}.\n"
        )
    return text
