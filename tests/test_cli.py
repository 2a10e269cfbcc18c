import subprocess
import sys

import pytest
from typer.testing import CliRunner

from guide_code.cli import app


def test_help_lists_the_commands_without_importing_torch():
    code = (
        "import sys; from guide_code.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert all(
        name in done.stdout for name in ("train", "generate", "conventions", "images", "convert", "verify", "bench")
    )
    assert done.stdout.strip().endswith("False"), done.stderr


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("train", "--preset"),
        ("generate", "--prompt"),
        ("conventions", "--preset"),
        ("models", "--context"),
        ("images", "publish"),
        ("convert", "--to"),
        ("verify", "--tolerance"),
        ("plan", "--suggest"),
    ],
)
def test_commands_have_their_own_help(command, option, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0 and option in result.output and f"moe-guide {command}" in result.output


def test_exit_status_and_message_come_through(tmp_path):
    result = CliRunner().invoke(app, ["generate", str(tmp_path)])
    assert result.exit_code == 1 and "no checkpoint in" in result.output
    assert "Did you mean 'train'" in CliRunner().invoke(app, ["trian"]).output
