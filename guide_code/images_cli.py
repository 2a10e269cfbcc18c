"""`moe-guide images`: draw the figures, look at them, publish them to a hub dataset, and check what the site uses."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from guide_code.sitebuild.image_cache import CACHE, look_up, stale_entries
from guide_code.sitebuild.image_lock import LOCK_FILE, Lock, LockError, read_lock

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Draw, publish, pull and check the images of the site. None of them is in git.",
)
_Root = Annotated[Path, typer.Option(help="The project's folder.")]
_HERE = Path()


@app.command()
def draw(
    root: _Root = _HERE, check: Annotated[bool, typer.Option(help="Draw all anew and compare byte for byte.")] = False
) -> None:
    """Draw every figure into .cache/figures, light and dark, and say where they are."""
    from guide_code.sitebuild.figures import FigureError, differing_redraws, draw_all

    try:
        figures = draw_all(root, say=typer.echo)
        if check:
            with tempfile.TemporaryDirectory() as workspace:
                differing = differing_redraws(root, Path(workspace))
            if differing:
                _fail(f"drawn twice, these files differ: {', '.join(differing)}")
    except FigureError as error:
        _fail(str(error))
    for name, figure in figures.items():
        typer.echo(f"{name}: {', '.join(str(variant.path) for variant in figure.variants.values())}")


@app.command()
def publish(
    root: _Root = _HERE,
    repo: Annotated[str | None, typer.Option(help="OWNER/NAME; by default the lock's, or mkdocs.yml's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the difference and send nothing.")] = False,
    onto: Annotated[str | None, typer.Option(help="Build on this commit and not on the lock's.")] = None,
) -> None:
    """Upload what has changed in one commit, then write the lock file."""
    from guide_code.sitebuild.image_publish import PublishError, difference, drawn_files
    from guide_code.sitebuild.image_publish import publish as publish_to_hub
    from guide_code.sitebuild.images import read_settings

    lock = _lock(root)
    repo = repo or lock.dataset or read_settings(root).dataset
    try:
        found = difference(lock, drawn_files(root, say=typer.echo))
        for line in found.lines():
            typer.echo(line)
        if dry_run:
            typer.echo(f"{len(found.lines())} files differ from {LOCK_FILE}; nothing was sent")
            return
        if not repo:
            _fail("no dataset is chosen: give --repo OWNER/NAME, or set extra.images.dataset in mkdocs.yml")
        new = publish_to_hub(root, repo, onto=onto, say=typer.echo)
    except (PublishError, LockError) as error:
        _fail(str(error))
    typer.echo(f"{new.dataset} at {new.commit}: {len(new.files)} files. Now commit {LOCK_FILE}")


@app.command()
def pull(root: _Root = _HERE) -> None:
    """Bring exactly the locked files into the cache, every byte checked."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from guide_code.sitebuild.image_pull import pull as pull_from_hub

    lock = _published(root)
    total = sum(file.size for file in lock.files.values())
    columns = ("images", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        try:
            result = pull_from_hub(lock, root / CACHE, advance=lambda size: progress.advance(task, size))
        except KeyboardInterrupt:
            _fail("interrupted; what has come stays, so the next pull goes on from here")
    for path in result.removed:
        typer.echo(f"{path}: the copy in the cache had wrong bytes and was deleted")
    if result.failures:
        _fail("\n".join(f"{path}: {reason}" for path, reason in sorted(result.failures.items())))
    typer.echo(f"{len(result.paths)} images are whole, {result.downloaded} of them new ({total / 1e6:.1f} MB in all)")


@app.command()
def verify(
    root: _Root = _HERE,
    hub: Annotated[bool, typer.Option("--hub", help="Also ask the hub whether it still holds these bytes.")] = False,
) -> None:
    """Check the size and the sha256 of every cached image; wrong ones are deleted."""
    from guide_code.sitebuild.image_publish import PublishError, compare_with_hub

    lock = _published(root)
    result = look_up(lock, root / CACHE)
    problems = [f"{path}: {reason}" for path, reason in result.failures.items()]
    if hub:
        try:
            problems += compare_with_hub(lock, result.paths)
        except PublishError as error:
            problems.append(str(error))
    if problems:
        _fail("\n".join(problems))
    typer.echo(f"{len(result.paths)} images are the locked ones")


@app.command()
def status(root: _Root = _HERE) -> None:
    """Say what is published, what the cache holds, and which figures have changed since. No request is made."""
    from guide_code.sitebuild.figures import figure_sources
    from guide_code.sitebuild.images import changed_figures, read_settings

    lock = _lock(root)
    typer.echo(f"mode: {read_settings(root).mode}")
    sources = figure_sources(root / "guide_code")
    if lock.dataset is None:
        typer.echo(f"dataset: none yet. {len(sources)} figures are drawn at every build that finds them changed")
        return
    result = look_up(lock, root / CACHE)
    typer.echo(f"dataset: {lock.dataset} at {lock.commit}")
    typer.echo(f"cache: {len(result.paths)} of {len(lock.files)} files")
    groups = {
        "changed since": changed_figures(root, lock),
        "not published": sorted(sources.keys() - lock.figures().keys()),
        "published, but their code is gone": sorted(lock.figures().keys() - sources.keys()),
    }
    for title, names in groups.items():
        if names:
            typer.echo(f"{title}: {', '.join(names)}")


@app.command()
def gc(
    root: _Root = _HERE, dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False
) -> None:
    """Delete from the cache what the lock does not name: earlier versions and unfinished downloads."""
    stale = stale_entries(_lock(root), root / CACHE)
    size = sum(path.lstat().st_size for path in stale)
    if not dry_run:
        for path in stale:
            path.unlink()
    typer.echo(f"{len(stale)} files, {size / 1e6:.1f} MB{' would go' if dry_run else ' deleted'}")


def _lock(root: Path) -> Lock:
    if not (root / "mkdocs.yml").is_file():
        _fail(f"{root.resolve()} holds no mkdocs.yml: run this in the project's folder, or give --root")
    try:
        return read_lock(root)
    except LockError as error:
        _fail(str(error))


def _published(root: Path) -> Lock:
    lock = _lock(root)
    if lock.dataset is None:
        _fail(f"{LOCK_FILE} names no dataset yet: there is nothing to pull, and the build draws the figures itself")
    return lock


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    sys.exit(1)
