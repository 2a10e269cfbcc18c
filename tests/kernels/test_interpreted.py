import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(620)
def test_kernels_compute_the_right_values_in_tritons_interpreter():
    """Triton reads TRITON_INTERPRET when a kernel is defined, so these tests have a process of their own."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "tests/kernels/interpreted", "-q", "-p", "no:cacheprovider"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
