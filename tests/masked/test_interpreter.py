"""Runs the files of Triton kernel tests in Triton's interpreter, without a GPU, each in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.exhaustive  # 30 to 40 s each
@pytest.mark.parametrize(("family", "least"), [("masked", 40), ("blocks", 60)])
def test_kernels_in_the_interpreter(family, least):
    pytest.importorskip("triton")
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", f"interpreted_{family}.py"],
        cwd=Path(__file__).parent,
        # One thread: two make these small products slower.
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert run.stdout.count(".") > least  # enough tests passed, none skipped
