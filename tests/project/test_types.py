"""Type checkers accept a client of the package, in strict mode, and refuse wrong calls, each at its line.

They look for the package where it is installed, not in this folder: the client is checked from another one.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import custom_mm

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[1]


def mypy(folder: Path, file: str) -> set[int]:
    """The lines that mypy refuses."""
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder.parent / "cache"), file]
    environment = os.environ | {"MYPYPATH": os.environ.get("PYTHONPATH", "")}
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert run.returncode in (0, 1), run.stderr
    found = [re.match(r"(.*?):(\d+): error: ", line) for line in run.stdout.splitlines()]
    lines = {(error[1], int(error[2])) for error in found if error}
    assert {where for where, _ in lines} <= {file}, run.stdout
    return {line for _, line in lines}


def pyright(folder: Path, file: str) -> set[int]:
    """The lines that pyright refuses."""
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": paths}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, file]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = json.loads(run.stdout)["generalDiagnostics"]
    return {d["range"]["start"]["line"] + 1 for d in found if d["severity"] == "error"}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder with the clients and without the package."""
    folder = tmp_path_factory.mktemp("client") / "files"
    folder.mkdir()
    for name in ("typed_client.py", "typed_errors.py"):
        shutil.copy(TESTS / name, folder)
    return folder


CHECKERS = [mypy, pyright]


def run_or_skip(check, folder, file):
    pytest.importorskip(check.__name__)
    return check(folder, file)


@pytest.mark.exhaustive  # .ci/run runs the type checkers too
@pytest.mark.parametrize("check", CHECKERS)
def test_a_client_is_accepted(check, elsewhere):
    assert run_or_skip(check, elsewhere, "typed_client.py") == set()


@pytest.mark.exhaustive  # .ci/run runs the type checkers too
@pytest.mark.parametrize("check", CHECKERS)
def test_wrong_calls_are_refused(check, elsewhere):
    """At the marked lines, and at no other."""
    lines = (TESTS / "typed_errors.py").read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    assert len(marked) > 20
    assert run_or_skip(check, elsewhere, "typed_errors.py") == marked


@pytest.mark.exhaustive
def test_an_editable_install_is_a_path(tmp_path):
    """Type checkers run no import hook. Without the extension: nothing is compiled."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for name in {package.split(".")[0] for package in project["tool"]["setuptools"]["packages"]}:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "setup.py").write_text("from setuptools import setup\n\nsetup()\n")
    build = "from setuptools import build_meta; build_meta.build_editable('wheel')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        installed = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert len(installed) == 1
        assert archive.read(installed[0]).decode().strip() == str(tmp_path)


def test_stubs_of_the_extension_are_complete():
    stub = (ROOT / "custom_mm/_C.pyi").read_text()
    known = set(re.findall(r"^(?:def |class )?(\w+)(?:[:(]| =)", stub, re.M)) - {"Answer", "Gpu", "Handle", "Workspace"}
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*") if path.suffix in (".cpp", ".cu", ".h"))
    # From the sources, because a CPU build lacks what only a CUDA build defines.
    bound = {function or class_ for class_, function in re.findall(r'\(m, "(\w+)"|\bm\.def\(\s*"(\w+)"', sources)}
    names = {name for name in dir(custom_mm._C) if not name.startswith("_")}
    assert bound | names == known
