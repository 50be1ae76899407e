"""The build and the import of what was built: versions, requirements, and what is said where they do not fit."""

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

import custom_mm

ROOT = Path(__file__).resolve().parents[2]
RUN = {"capture_output": True, "text": True, "check": False}


def import_beside(folder, torch_version, cuda, module=True, build=None, source=False):
    """`import custom_mm.compiled` next to a module that says it is such a torch; the line of what it raises."""
    package = folder / "custom_mm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(ROOT / "custom_mm/compiled.py", package)
    if module:
        (package / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    if build:
        (package / "_build.py").write_text("TORCH, CUDA = {!r}, {!r}\n".format(*build))
    if source:
        (folder / "setup.py").touch()
    (folder / "torch.py").write_text(f"class version: cuda = {cuda!r}\n__version__ = {torch_version!r}\n")
    loaded = "import sys; sys.modules['custom_mm._C'] = sys; import custom_mm.compiled"
    run = subprocess.run([sys.executable, "-c", loaded], cwd=folder, **RUN)
    return run.stderr.splitlines()[-1] if run.returncode else ""


@pytest.mark.parametrize(
    ("build", "beside"),
    [
        (("2.13.0+cpu", None), ("2.13.1+cpu", None)),
        (("2.13.0+cpu", None), ("2.13.0", "13.0")),  # the CPU's operators run with a CUDA torch too
        (("2.13.0", "13.0"), ("2.13.1", "13.2")),
        (None, ("2.13.0+cpu", None)),
    ],
)
def test_what_fits_is_loaded(tmp_path, build, beside):
    assert import_beside(tmp_path, *beside, build=build) == ""


@pytest.mark.parametrize(
    ("build", "beside", "remedy"),
    [
        (("2.13.0+cpu", None), ("2.11.0+cu130", "13.0"), "the wheel of matmuls for torch 2.11 and CUDA 13.0"),
        (("2.1.0", None), ("2.13.0", None), "the wheel of matmuls for torch 2.13 and the CPU"),
        (("2.13.0", "13.0"), ("2.13.0+cpu", None), "the wheel of matmuls for torch 2.13 and the CPU"),
        (("2.13.0", "13.0"), ("2.13.0", "12.9"), "the wheel of matmuls for torch 2.13 and CUDA 12.9"),
    ],
)
def test_another_torch_is_named_with_the_remedy(tmp_path, build, beside, remedy):
    said = import_beside(tmp_path / "installed", *beside, build=build)
    assert said.startswith("ImportError: custom_mm: this matmuls was built with torch 2.")
    assert said.endswith(f"install {remedy}")
    assert f"torch {beside[0]} for" in said
    said = import_beside(tmp_path / "source", *beside, build=build, source=True)
    assert said.endswith(f"-m pip install --no-build-isolation -e .` in {tmp_path / 'source'}")


def test_a_folder_without_an_extension_says_what_to_do(tmp_path):
    said = import_beside(tmp_path / "source", "2.13.0", None, module=False, source=True)
    assert "is the source folder of matmuls, and its extension is not built for Python 3." in said
    assert "run ./install_deps.sh or" in said
    assert "circular" not in said
    said = import_beside(tmp_path / "installed", "2.13.0", None, module=False)
    assert "has no extension for Python 3." in said


def test_what_was_built_is_recorded():
    modules = [p for suffix in EXTENSION_SUFFIXES for p in (ROOT / "custom_mm").glob(f"_C{suffix}")]
    if not (modules and (ROOT / "custom_mm/_build.py").is_file()):
        pytest.skip("the extension was copied here or is installed elsewhere")
    import custom_mm
    from custom_mm import _build

    assert _build.TORCH.split("+")[0] == custom_mm.build_info()["torch"]
    assert (_build.CUDA is None) == (custom_mm.build_info()["cuda"] is None)


def run_setup(*arguments, **environment):
    command = [sys.executable, "setup.py", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, **RUN)


def test_the_version_says_which_torch():
    run = run_setup("--version", MATMULS_CUDA="0")
    assert run.returncode == 0, run.stderr
    minor = ".".join(torch.__version__.split(".")[:2])
    assert re.fullmatch(rf"\d+\.\d+\.\d+\+torch{minor}\.cpu", run.stdout.splitlines()[-1])


@pytest.mark.parametrize("isolated", [True, False])
def test_without_torch_the_build_says_why_and_a_source_archive_is_made(tmp_path, isolated):
    hidden = tmp_path / ("pip-build-env-x" if isolated else "other")
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise ImportError('hidden')\n")
    run = run_setup("bdist_wheel", PYTHONPATH=str(hidden))
    assert run.returncode != 0
    assert ("an empty environment for a build, which hides" in run.stderr) == isolated
    assert "pip install --no-build-isolation ." in run.stderr
    assert "python -m build --no-isolation" in run.stderr

    run = run_setup("sdist", "--dist-dir", str(tmp_path), PYTHONPATH=str(hidden))
    assert run.returncode == 0, run.stderr
    archive = next(tmp_path.glob("*.tar.gz"))
    assert "+" not in archive.name
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"setup.py", "install_deps.sh", "tools/build_wheels.sh", "src/glue/operator.h"} <= names
    assert not names & {"custom_mm/_build.py"}


def test_edited_files_keep_objects_of_their_own(tmp_path):
    """A .cpp and a .cu file of one name would be compiled to one object."""
    for folder in ("src/rows", "matmuls"):
        (tmp_path / folder).mkdir(parents=True)
    for path in ("setup.py", "matmuls/__init__.py"):
        shutil.copy(ROOT / path, tmp_path / path)
    for name in ("norm.cpp", "norm.cu", "softmax.cpp", "softmax_cpu.cpp"):
        (tmp_path / "src/rows" / name).touch()
    spec = importlib.util.spec_from_file_location("setup_of_a_copy", tmp_path / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    assert tmp_path == setup.ROOT
    files = sorted(str(p.relative_to(tmp_path / "src")) for p in tmp_path.glob("src/rows/*"))
    counts = []
    for edited in ([], [], ["norm.cpp", "softmax_cpu.cpp"]):
        for path in tmp_path.glob("src/rows/*"):  # as in a copy of the checkout: later than what was compiled
            os.utime(path, (path.stat().st_mtime + 60,) * 2)
        for name in edited:
            (tmp_path / "src/rows" / name).write_text("// edited\n")
        units = setup.units(tmp_path / "build/cuda")
        assert "src/rows/norm" not in [os.path.splitext(unit)[0] for unit in units]
        included = re.findall("<(.*)>", "".join((tmp_path / unit).read_text() for unit in units))
        assert sorted(included) == files
        counts.append(len(units))
    assert counts == [2, 2, 3]


def test_the_extension_is_hardened():
    """Addresses of functions are read-only after the import, by RELRO and BIND_NOW; the stack is checked."""
    relro, dynamic, flags, bind_now = 0x6474E552, 2, 30, 8
    library = Path(custom_mm._C.__file__).read_bytes()
    start, (entry, count) = *struct.unpack_from("<Q", library, 32), struct.unpack_from("<HH", library, 54)
    headers = [struct.unpack_from("<IIQQQQ", library, start + i * entry) for i in range(count)]
    offset, size = next((offset, size) for kind, _, offset, _, _, size in headers if kind == dynamic)
    tags = dict(struct.iter_unpack("<QQ", library[offset : offset + size]))
    assert relro in [kind for kind, *_ in headers]
    assert tags.get(flags, 0) & bind_now
    assert b"__stack_chk_fail" in library  # -fstack-protector-strong
