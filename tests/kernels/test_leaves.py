"""The folder of kernels copies out as a whole: torch, triton and one another, nothing else."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import guide_code.kernels

FOLDER = Path(guide_code.kernels.__file__).parent
TOOLS = ("inspect", "tune")
LEAVES = sorted(p for p in FOLDER.glob("*.py") if p.stem not in (*TOOLS, "__init__"))


@pytest.mark.parametrize("path", LEAVES, ids=lambda path: path.stem)
def test_a_kernel_imports_only_torch_triton_and_its_folder(path):
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported += [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append("." * node.level + (node.module or "").split(".")[0])
    allowed = {"torch", "triton", *sys.stdlib_module_names, *(f".{p.stem}" for p in LEAVES)}
    assert not set(imported) - allowed
    assert "Copy alone: needs torch and triton only" in " ".join(ast.get_docstring(ast.parse(path.read_text())).split())


def test_the_folder_runs_alone(tmp_path):
    package = tmp_path / "only_kernels"
    package.mkdir()
    for path in LEAVES:
        shutil.copy(path, package)
    (package / "__init__.py").touch()
    code = """
import sys, torch
from only_kernels.ops import decode_op, experts_op
args = (torch.randn(3, 8), torch.tensor([[0], [1], [4]]), torch.ones(3, 1), torch.randn(4, 16, 8), torch.randn(4, 8, 8))
args = (*args, None, None, "silu", True, torch.float32)
torch.testing.assert_close(experts_op(*args, True)[0], decode_op(*args))
assert not [m for m in sys.modules if m.startswith("guide_code")]
"""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
