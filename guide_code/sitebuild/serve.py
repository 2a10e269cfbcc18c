"""Preview with live reload. Every rebuild is a fresh process, so that no imported module is ever stale."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mkdocs.livereload import LiveReloadServer


def serve_site(root: Path, *, port: int, execute: bool, say: Callable[[str], None]) -> None:
    """Serves the site on loopback and rebuilds it when docs, notebooks, code or the configuration change.

    A failed rebuild leaves the last good site in the browser and the cause on the terminal.

    Args:
        root: The project's folder.
        port: The port on 127.0.0.1.
        execute: Run a notebook again also when only code that it imports has changed. Otherwise its page keeps the
            earlier outputs and says so; a notebook whose own text changes is always run.
        say: Gets progress lines.
    """
    with tempfile.TemporaryDirectory(prefix="guide-preview-") as name:
        site = Path(name) / "site"
        command = [sys.executable, "-m", "guide_code.sitebuild", "build", "--into", str(site)]
        command += [] if execute else ["--allow-stale"]
        environment = os.environ | {"GUIDE_SITE_URL": f"http://127.0.0.1:{port}/"}

        def build() -> None:
            if subprocess.run(command, cwd=root, env=environment).returncode and not site.is_dir():
                raise SystemExit("the first build failed; see above")

        build()
        server = LiveReloadServer(build, host="127.0.0.1", port=port, root=str(site))
        for part in ("docs", "notebooks", "guide_code", "mkdocs.yml"):
            server.watch(str(root / part))
        say(f"http://127.0.0.1:{port}/ (Ctrl-C stops)")
        try:
            server.serve()
        except KeyboardInterrupt:
            say("stopped")
        finally:
            server.shutdown()
