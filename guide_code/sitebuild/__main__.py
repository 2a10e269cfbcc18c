"""`python -m guide_code.sitebuild build | serve | stage | colab`: what make and the deploy workflow call."""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from guide_code.sitebuild.build import SiteError, build_site

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line, runs one command, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m guide_code.sitebuild", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build the site, strictly")
    build.add_argument("--offline", action="store_true", help="for reading from disk, into site-offline/")
    build.add_argument("--allow-stale", action="store_true", help="keep outputs when only imported code changed")
    build.add_argument("--into", type=Path, help="the site's folder instead of site/ or site-offline/")
    serve = commands.add_parser("serve", help="preview, rebuilt on every change")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--execute", action="store_true", help="run notebooks again when imported code changes")
    stage = commands.add_parser("stage", help="write docs/ and all generated files into a folder, for other tools")
    stage.add_argument("directory", type=Path)
    colab = commands.add_parser("colab", help="write the executed notebooks, each with an install cell, for Colab")
    colab.add_argument("directory", type=Path)
    colab.add_argument("--repository", required=True, help="OWNER/NAME on GitHub, from which the cell installs")
    colab.add_argument("--revision", default="main", help="the commit that the outputs belong to")
    options = parser.parse_args(arguments)

    say = partial(print, flush=True)
    try:
        if options.command == "build":
            into = options.into.resolve() if options.into else None
            build_site(ROOT, offline=options.offline, allow_stale=options.allow_stale, into=into, say=say)
        elif options.command == "serve":
            from guide_code.sitebuild.serve import serve_site

            serve_site(ROOT, port=options.port, execute=options.execute, say=say)
        elif options.command == "colab":
            from guide_code.sitebuild.colab import write_colab
            from guide_code.sitebuild.notebooks import execute_all

            for path in write_colab(
                execute_all(ROOT, say=say), options.repository, options.revision, options.directory
            ):
                say(path)
        else:
            from guide_code.sitebuild.mounted import stage as copy
            from guide_code.sitebuild.prepare import prepare

            with tempfile.TemporaryDirectory() as workspace:
                copy(ROOT / "docs", prepare(ROOT, Path(workspace), say=say).mounted, options.directory)
    except SiteError as error:
        print(f"The site was not built. {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
