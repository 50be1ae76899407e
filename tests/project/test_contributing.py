"""The examples of CONTRIBUTING.md, compiled and run as printed, and its walks from a call to a kernel's file."""

import math
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import custom_mm
import matmuls
from matmuls.sparse import costs, layouts, select

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', TEXT, re.M | re.S))
CUDA_BUILD = custom_mm.build_info()["cuda"] is not None

CHECK_THE_ROW = """
import math, sys
import torch
torch.ops.load_library(sys.argv[1])
from matmuls_bench.table.spec import *
exec(open(sys.argv[2]).read())
exec(open(sys.argv[3]).read())
import pytest
from common import table_cases as table
spec = next(value for value in list(globals().values()) if isinstance(value, Spec) and value.name == sys.argv[4])
for dtype in spec.dtypes:
    for call in spec.samples(Draw(dtype)):
        table.assert_close_as_torch(spec, call)
draw = Draw(torch.float32)
for bad in spec.bad(draw):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=bad.match):
        spec.call(*bad.call.args, **bad.call.kwargs)
for call in spec.empty(draw):
    spec.call(*call.args, **call.kwargs)
call = next(spec.samples(draw))
torch.library.opcheck(spec.operators[0], call.args, call.kwargs)
print("checked", spec.name)
"""


def compiled(source: Path, folder: Path) -> Path:
    """A library of the example and the functions of src/glue that it calls."""
    library, stub = folder / "example.so", folder / "example.cpp"
    stub.write_text(f'#include "{source}"\n')
    includes = [f"-I{path}" for path in (ROOT / "src", *cpp_extension.include_paths())]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    flags = ["-shared", "-fPIC", "-O1", "-g0", "-std=c++20", "-fopenmp", "-DAT_PER_OPERATOR_HEADERS"]
    subprocess.run(
        [
            "g++",
            *flags,
            *includes,
            stub,
            ROOT / "src/glue/checks.cpp",
            "-o",
            library,
            *libraries,
            "-ltorch_cpu",
            "-lc10",
        ],
        check=True,
    )
    return library


@pytest.mark.exhaustive  # compiles it
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_operation_is_complete(tmp_path):
    for title in ("src/dense/scale.cu", "matmuls/dense.py", "benchmarks/matmuls_bench/table/dense.py"):
        file = tmp_path / title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(BLOCKS[title])
    library = compiled(tmp_path / "src/dense/scale.cu", tmp_path)
    files = [library, tmp_path / "matmuls/dense.py", tmp_path / "benchmarks/matmuls_bench/table/dense.py"]
    command = [sys.executable, "-c", CHECK_THE_ROW, *map(str, files), "scale_"]
    run = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert run.stdout.strip().endswith("checked scale_"), run.stderr


def compile_with_nvcc(source: Path, folder: Path) -> None:
    includes = [f"-I{path}" for path in (ROOT / "src", folder, *cpp_extension.include_paths("cuda"))]
    wheels = Path(torch.__file__).parents[1] / "nvidia"  # torch's wheels have the headers of the libraries
    includes += [f"-I{path}" for path in sorted(wheels.glob("*/include"))]
    nvcc = Path(cpp_extension.CUDA_HOME or "/usr/local/cuda") / "bin/nvcc"
    flags = [
        "-c",
        "-arch=sm_90a",
        "-std=c++20",
        "--expt-relaxed-constexpr",
        "-DMATMULS_CUDA",
        "-DAT_PER_OPERATOR_HEADERS",
    ]
    subprocess.run([nvcc, *flags, *includes, source, "-o", folder / "example.o"], check=True)


@pytest.mark.skipif(not CUDA_BUILD, reason="needs a CUDA build and its nvcc")
def test_the_kernel_of_the_operation_compiles(tmp_path):
    source = tmp_path / "scale.cu"
    source.write_text(BLOCKS["src/dense/scale.cu"])
    compile_with_nvcc(source, tmp_path)


@pytest.mark.skipif(not CUDA_BUILD, reason="needs a CUDA build and its nvcc")
def test_the_row_kernel_compiles_for_softmax(tmp_path):
    (tmp_path / "thread_per_row.cuh").write_text(BLOCKS["src/rows/kernels/thread_per_row.cuh"])
    source = tmp_path / "example.cu"
    source.write_text(
        '#include "rows/softmax_math.cuh"\n#include "thread_per_row.cuh"\n'
        "template __global__ void matmuls::thread_per_row_kernel<matmuls::Softmax<float, matmuls::NoMask, true>, 4, 4>("
        "const __grid_constant__ matmuls::Softmax<float, matmuls::NoMask, true> op, const matmuls::RowShape shape);\n"
    )
    compile_with_nvcc(source, tmp_path)


WALKS = re.findall(r"^<!-- walk: ([^>]+) -->\n((?:\d\. .*\n)+)", TEXT, re.M)


@pytest.mark.parametrize(("call", "lines"), WALKS, ids=[call for call, _ in WALKS])
def test_each_file_of_a_walk_names_the_next(call, lines):
    files = [ROOT / name for name in re.findall(r"^\d\. `([^`]+)`", lines, re.M)]
    assert 2 <= len(files) <= 4
    name = call.split(".")[-1].split(" ")[0]
    assert name in files[0].read_text()
    for file, following in pairwise(files):
        words = {following.name, following.stem, following.parent.name} - {"kernel_sm90", "sparse", "rows", "kernels"}
        assert any(re.search(rf"\b{word}\b", file.read_text()) for word in words), (file, following)


def test_two_calls_are_walked_and_the_glossary_is_short():
    assert [call for call, _ in WALKS] == ["matmuls.softmax_", "plan @ b"]
    terms = re.findall(r"^\| ([^|]+) \| ", TEXT[TEXT.index("# Glossary") :], re.M)[1:]
    assert 10 <= len(terms) <= 15


def test_the_sparse_layout_multiplies(monkeypatch):
    names = {**vars(layouts), **vars(costs), **vars(select), "torch": torch, "math": math}
    exec(BLOCKS["matmuls/sparse/layouts.py"], names)
    exec(BLOCKS["matmuls/sparse/select.py"], names)
    candidate = names["TRANSPOSED_DENSE"]
    monkeypatch.setattr(select, "CANDIDATES", (*select.CANDIDATES, candidate))
    monkeypatch.setitem(select.BY_NAME, candidate.name, candidate)
    torch.manual_seed(0)
    a, b = torch.randn(48, 32).relu(), torch.randn(32, 8)
    made = matmuls.plan(a.to_sparse_csr(), constant=True)
    facts = select.Facts(made._pattern, 8, torch.float32, torch.device("cpu"))
    assert candidate.may_run(facts)
    op = candidate.layout(made._pattern).call(made.values, b, torch.float32)
    assert op.operator == candidate.operator.default
    assert op.arguments[op.b_index] is b
    torch.testing.assert_close(op.run(), a @ b)
    assert candidate.is_copy
    assert math.isinf(candidate.microseconds(facts))
