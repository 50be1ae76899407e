"""`pytest` alone leaves out some tests of a suite, and a run that names tests none of them (tests/conftest.py)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = """
import pytest

@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("operation", ["softmax", {"of": "norm"}])
def test_each(operation, dtype):
    pass

@pytest.mark.exhaustive
def test_long():
    pass

def test_plain():
    pass
"""
EACH = [f"test_each[{o}-{d}]" for o in ("softmax", "operation1") for d in ("float32", "bfloat16", "float16")]


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "tests/common").mkdir(parents=True)
    for name in ("conftest.py", "common/gpu_share.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    (folder / "tests/test_suite.py").write_text(SUITE)
    return folder


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize(
    ("arguments", "ran"),
    [
        ("", [EACH[0], EACH[4], EACH[2], "test_plain"]),  # each operation and each dtype, by turns
        ("tests/test_suite.py::test_long", ["test_long"]),
        pytest.param("-k long", ["test_long"], marks=pytest.mark.exhaustive),
        pytest.param("-m exhaustive", ["test_long"], marks=pytest.mark.exhaustive),
        pytest.param("-n 2 tests", [*EACH, "test_long", "test_plain"], marks=pytest.mark.exhaustive),
        pytest.param("--exhaustive", [*EACH, "test_long", "test_plain"], marks=pytest.mark.exhaustive),
    ],
)
def test_a_short_run_takes_each_value_and_a_run_that_names_tests_all(suite, arguments, ran):
    command = [sys.executable, "-m", "pytest", "-rp", "-p", "no:cacheprovider", *arguments.split()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    passed = [line.split("::")[1] for line in run.stdout.splitlines() if line.startswith("PASSED ")]
    assert sorted(passed) == sorted(ran)
    assert ("4 of 8 tests were left out" in run.stdout) is (arguments == "")
