"""The rules of the house: who may import whom, what importing costs, what the repository may say."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch

from matmuls_bench.table import TABLE

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = {"dense", "fused_softmax", "inplace", "masked", "rowwise", "sparse"}  # the families
# module -> what of ours it may import:
# `operations <- attention <- integrations`
MAY_IMPORT = {
    # the last five at first access
    "matmuls": OPERATIONS | {"batching"} | {"attention", "blocks", "distributed", "integrations", "nn"},
    **{family: {"custom_mm", "registration"} for family in OPERATIONS},
    "rowwise": {"custom_mm", "dense"},
    "registration": {"custom_mm", "triton"},  # triton at the first call that is recorded
    "masked": {"masked.ffn", "masked.linear", "masked.plan"},
    "masked.checks": {"registration"},
    "masked.plain": {"custom_mm", "registration"},
    "masked.plan": {"custom_mm", "masked", "registration", "triton"},
    "masked.linear": {"custom_mm", "masked", "registration", "triton"},
    "masked.ffn": {"custom_mm", "masked", "registration", "triton"},
    "triton": set(),
    "triton.tiles": set(),
    "triton.launch": {"device"},
    "triton.record": {"triton.launch"},
    "triton.configs": {"device", "files", "triton.launch"},
    "triton.mask_plan": {"triton.launch"},
    "triton.few": {"triton.launch", "triton.tiles"},
    "triton.last_wave": {"device", "triton.configs", "triton.launch", "triton.tiles"},
    "triton.masked_linear": {"device"} | {f"triton.{m}" for m in ("configs", "few", "last_wave", "launch", "tiles")},
    "triton.masked_weights": {f"triton.{m}" for m in ("configs", "few", "launch", "masked_linear")},
    "triton.masked_gradients": {
        "custom_mm",
        *(f"triton.{m}" for m in ("configs", "few", "launch", "masked_linear", "masked_weights")),
    },
    "triton.masked_ffn": {f"triton.{m}" for m in ("configs", "launch", "tiles", "masked_linear", "masked_weights")},
    "triton.blocks": {"triton.configs", "triton.launch", "triton.masked_linear"},
    "attention": {"custom_mm", "dense", "device", "fused_softmax"},
    "nn": OPERATIONS | {"custom_mm", "stacked"},
    "stacked": set(),
    "tune": {"masked", "timing", "triton"},
    "blocks": {"custom_mm", "registration", "triton"},
    "batching": {"blocks", "custom_mm", "masked", "registration"},
    "fused_softmax": {"custom_mm", "registration"},
    "sparse": {f"sparse.{m}" for m in ("ops", "pickled", "plan", "solve_plan", "spgemm", "spgemm_plan", "triangular")},
    "sparse.names": set(),
    "sparse.foreign": {"custom_mm"},
    "sparse.entries": set(),
    "sparse.tensor_pattern": {"blocks", "custom_mm", "sparse.csr_pattern", "sparse.entries"},
    "sparse.pickled": {f"sparse.{m}" for m in ("csr_pattern", "plan", "prepared", "selector")},
    "sparse.chunks": set(),
    "sparse.reordered": {"sparse.chunks"},
    "sparse.csr_pattern": {"blocks", "custom_mm", "sparse.chunks", "sparse.pickled", "sparse.reordered"},
    "sparse.prepared": {"custom_mm", "sparse.csr_pattern", "sparse.tensor_pattern"},
    "sparse.smem_tiles": {"device", "sparse.csr_pattern"},
    "sparse.packed_mma": {"sparse.csr_pattern"},
    "sparse.costs": {"custom_mm", "device"}
    | {f"sparse.{m}" for m in ("csr_pattern", "names", "packed_mma", "smem_tiles")},
    "sparse.default_spmm": {"custom_mm", "device", "registration"}
    | {f"sparse.{m}" for m in ("chunks", "costs", "csr_pattern", "names", "prepared")},
    "sparse.layouts": {"custom_mm", "device"}
    | {f"sparse.{m}" for m in ("csr_pattern", "default_spmm", "packed_mma", "prepared", "reordered", "smem_tiles")},
    "sparse.race": {"sparse.names", "timing"},
    "sparse.select": {"custom_mm", "device", "sparse.smem_tiles"}
    | {f"sparse.{m}" for m in ("costs", "csr_pattern", "default_spmm", "layouts", "names")},
    "sparse.selector": {"custom_mm", "registration"}
    | {f"sparse.{m}" for m in ("csr_pattern", "default_spmm", "layouts", "names", "prepared", "race", "select")}
    | {"sparse.smem_tiles"},
    "sparse.dtensor": {"sparse.plan"},  # to type checkers
    "sparse.spgemm": {"custom_mm", "sparse.csr_pattern", "sparse.foreign", "sparse.tensor_pattern"},
    "sparse.plan": {"registration"}
    | {f"sparse.{m}" for m in ("csr_pattern", "default_spmm", "dtensor", "foreign", "pickled", "prepared")}
    | {f"sparse.{m}" for m in ("selector", "spgemm", "tensor_pattern")},
    "sparse.triangular": {"registration", "sparse.csr_pattern", "sparse.spgemm"},
    "sparse.solve_plan": {
        "custom_mm",
        *(f"sparse.{m}" for m in ("csr_pattern", "plan", "prepared", "spgemm", "triangular")),
    },
    "sparse.spgemm_plan": {f"sparse.{m}" for m in ("csr_pattern", "plan", "spgemm")},
    "sparse.ops": {"custom_mm", "dense", "registration"}
    | {f"sparse.{m}" for m in ("csr_pattern", "default_spmm", "foreign", "plan", "prepared", "tensor_pattern")},
    "distributed": {f"distributed.{m}" for m in ("plans", "sharding", "splits", "styles")},
    "distributed.agreement": {
        "sparse.plan",
        "distributed.exchange",
        "distributed.group",
    },  # the others to type checkers
    "distributed.group": {"distributed.agreement"},
    "distributed.part": {"custom_mm"}
    | {f"sparse.{m}" for m in ("csr_pattern", "default_spmm", "names", "plan", "selector")},
    "distributed.peers": {"custom_mm", "distributed.group"},
    "distributed.exchange": {"distributed"} | {f"distributed.{m}" for m in ("group", "part", "peers")},
    "distributed.repeat": {"custom_mm", "distributed.exchange", "distributed.part"},
    "distributed.plans": {"custom_mm", "registration", "sparse.csr_pattern", "sparse.plan"}
    | {f"distributed.{m}" for m in ("agreement", "exchange", "group", "part", "repeat")},
    "distributed.sharding": {"blocks", "masked"},
    "distributed.splits": {"distributed.group"},
    "distributed.styles": {"distributed.group", "distributed.sharding", "masked", "nn"},
    "device": {"custom_mm"},
    "files": set(),
    "timing": set(),
    "info": {"custom_mm", "device", "matmuls"},
    "bert": {"timing", "integrations.transformers"},
    "cli": set(),  # the command line is the package matmuls_cli, which may import all of it
    "__main__": set(),
    "integrations": set(),
    "integrations.pyg": {"integrations.pyg"},
    "integrations.pyg.adjacency": {"custom_mm", "sparse"},
    "integrations.pyg.supported_layers": set(),
    "integrations.pyg.patched_functions": {"custom_mm", "integrations.pyg", "sparse"},
    "integrations.pyg.edge_cache": {"custom_mm", "integrations.pyg", "sparse"},
    "integrations.pyg.statistics": {"integrations.pyg"},
    "integrations.pyg.enabled": {"integrations.pyg"},
    "embed": {"embed"},
    "embed.records": {"embed"},
    "embed.streams": set(),
    "embed.tables": {"embed"},
    "embed.columns": {"embed.streams"},
    "embed.fingerprint": set(),
    "embed.journal": set(),
    "embed.formats": set(),
    "embed.job": {"embed"},
    **{f"integrations.sentence_transformers{m}": {"integrations"} for m in ("", ".inference", ".optimized")},
    "integrations.sentence_transformers.results": {"custom_mm"},
    "integrations.sentence_transformers.support": set(),
    "integrations.sentence_transformers.tokens": set(),
    "integrations.transformers": {"integrations.transformers"},
    "integrations.transformers.registered": {
        "attention",
        "integrations.transformers.attention_in_use",
        "integrations.transformers.sdpa",
    },
    "integrations.transformers.sdpa": {"device"},
    "integrations.transformers.attention_in_use": {"integrations.transformers"},
    "integrations.transformers.families": set(),
    "integrations.transformers.rotary": set(),
    "integrations.transformers.relative": {"integrations.transformers"},
    "integrations.transformers.plan": {"custom_mm", "integrations.transformers"},
    "integrations.transformers.snapshot": {"custom_mm"},
    "integrations.transformers.quantized": {"custom_mm"},
    "integrations.transformers.graphs": {"custom_mm", "integrations.transformers"},
    "integrations.transformers.embedding_kernel": {"custom_mm", "integrations.transformers"},
    "integrations.transformers.packed_forward": {"integrations.transformers"},
    "integrations.transformers.cuda_graph_passes": {"custom_mm", "integrations.transformers"},
    "integrations.transformers.segments": {"custom_mm", "integrations.transformers"},
    "integrations.transformers.packed": {"integrations.transformers"},
    "integrations.transformers.layers": OPERATIONS | {"attention", "custom_mm", "integrations.transformers"},
    "integrations.transformers.optimized": {"integrations.transformers"},
    "integrations.transformers.verified": {"integrations.transformers"},
}


def imports_of(path: Path, package: str) -> set[str]:
    """Names of our own modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "matmuls" else [module]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "custom_mm":
                found.add("custom_mm")
            elif name.split(".")[0] == "matmuls":
                found.add(name.removeprefix("matmuls.") if name != "matmuls" else "matmuls")
    return found


def modules():
    for path in sorted((ROOT / "matmuls").rglob("*.py")):
        parts = path.relative_to(ROOT / "matmuls").with_suffix("").parts
        if parts[-1] == "__init__":
            yield path, ".".join(parts[:-1]) or "matmuls", ".".join(["matmuls", *parts[:-1]])
        else:
            yield path, ".".join(parts), ".".join(["matmuls", *parts[:-1]])


def test_import_rules():
    for path, name, package in modules():
        allowed = MAY_IMPORT[name]
        taken = {
            m for m in imports_of(path, package) if m not in allowed and not any(m.startswith(f"{a}.") for a in allowed)
        }
        assert not taken, f"{name} may not import {taken}"


def test_what_is_installed_imports_no_benchmarks():
    """matmuls-bench depends on matmuls, not the other way; the generator of pages depends on both."""
    for folder in ("custom_mm", "matmuls", "matmuls_cli", "benchmarks/matmuls_bench"):
        others = ("matmuls_report",) if folder.startswith("benchmarks") else ("matmuls_bench", "matmuls_report")
        for path in (ROOT / folder).rglob("*.py"):
            found = {module.split(".")[0] for module in imported(path)} & set(others)
            assert not found or path.name == "report.py", f"{path} imports {found}"


def imported(path: Path) -> set[str]:
    """Names of the modules that a file imports, relative ones left out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    return names


def test_both_distributions_have_one_version():
    import matmuls

    project = tomllib.loads((ROOT / "benchmarks/pyproject.toml").read_text())["project"]
    assert project["version"] == matmuls.__version__
    assert f"matmuls=={matmuls.__version__}" in project["dependencies"]


def test_all_packages_are_listed():
    """setuptools installs those of its list alone."""
    for folder in (ROOT, ROOT / "benchmarks"):
        listed = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
        tops = {name.split(".")[0] for name in listed}
        found = {path.parent for top in tops for path in (folder / top).rglob("__init__.py")}
        assert sorted(listed) == sorted(".".join(path.relative_to(folder).parts) for path in found)


def test_the_face_of_the_compiled_module_imports_nothing_of_ours():
    assert imports_of(ROOT / "custom_mm/__init__.py", "custom_mm") <= {"custom_mm"}


PRIMITIVES = {"glue", "gpu", "cpu"}  # folders of src/ that any other may include
MODULE = {"module.cpp", "python_calls.cpp", "python_calls.h"}  # what custom_mm._C has
FAMILIES = {"dense", "rows", "sparse", "attention", "masked", "distributed", "texts"}


def sources() -> dict[str, str]:
    """Path below src/ -> text, of all of it."""
    paths = [p for p in (ROOT / "src").rglob("*") if p.is_file()]
    return {str(p.relative_to(ROOT / "src")): p.read_text() for p in paths}


def may_include(path: str, header: str) -> bool:
    """The rule of CONTRIBUTING's map: families meet in ops.h alone, and the layouts of sparse products do not meet."""
    (family, *folders), (other, *others) = (p.split("/")[:-1] or [""] for p in (path, header))
    if family == "" or other in PRIMITIVES:  # MODULE binds all of them
        return True
    if family in PRIMITIVES:
        return False
    if family != other:
        return header == f"{other}/ops.h"
    if family != "sparse":
        return True
    inside = folders[: len(others)] == others  # the same folder or one around it
    return inside or (folders == ["spmm"] and others[:1] == ["spmm"])


def test_families_meet_in_their_operators_alone():
    texts = sources()
    assert {path.split("/")[0] for path in texts} == PRIMITIVES | FAMILIES | MODULE
    edges = [
        (p, h) for p, text in texts.items() for h in re.findall(r'^#(?:include|define LOOPS) "([^"]+)"', text, re.M)
    ]
    assert len(edges) > 250
    assert not [(p, h) for p, h in edges if h not in texts], "headers by their path below src/"
    assert not [(p, h) for p, h in edges if not may_include(p, h)]


@pytest.mark.parametrize(
    ("path", "header", "allowed"),
    [
        ("rows/softmax.cu", "glue/checks.h", True),
        ("rows/softmax.cu", "dense/ops.h", True),
        ("rows/softmax.cu", "dense/gemm.h", False),
        ("gpu/launch.cuh", "rows/ops.h", False),
        ("sparse/spmm/chunks/kernel.cu", "sparse/csr.cuh", True),
        ("sparse/spmm/chunks/kernel.cu", "sparse/spmm/spmm.h", True),
        ("sparse/spmm/chunks/kernel.cu", "sparse/spmm/densified/densified.h", False),
        ("sparse/spmm/chunks/kernel.cu", "sparse/cusparse/descriptors.h", False),
        ("sparse/spmm/spmm.cu", "sparse/spmm/densified/densified.h", True),
        ("sparse/sddmm.cu", "sparse/spmm/spmm.h", False),
    ],
)
def test_the_include_rule(path, header, allowed):
    assert may_include(path, header) is allowed


def test_no_threads_but_torchs():
    """A child of fork() has none of its parent's; torch's start again in it, as cpu/threads.cpp ends them before."""
    own = re.compile(r"#pragma omp|std::(jthread|thread|async)\b(?!::)|pthread_create")
    assert not [path for path, text in sources().items() if own.search(text)]


def test_what_is_launched_early_waits_first():
    """A kernel of Triton's that touches memory before it has waited races with the kernel before it."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "matmuls/triton").glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "launch"]
    launched = {c.args[0].id for c in calls} - {"kernel"}  # which is launch's own, again on another device
    kernels = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name in launched]
    assert len(kernels) >= 14
    for kernel in kernels:
        statements = [s for s in kernel.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        first = statements[0] if not ast.unparse(statements[0]).startswith("fetch_ahead(") else statements[1]
        assert ast.unparse(first) == "wait_for_earlier(EARLY)", kernel.name
        assert kernel.args.args[-1].arg == "EARLY", kernel.name


def test_a_source_archive_has_all_that_builds(tmp_path):
    folders = "custom_mm", "matmuls", "matmuls_cli", "src", "tests", "tools", "benchmarks", "examples"
    for name in folders:
        shutil.copytree(
            ROOT / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("*.so", "__pycache__", "_build.py", ".mypy_cache", "*.egg-info", "build"),
        )
    files = [p for p in ROOT.iterdir() if p.is_file() and not p.name.startswith(".")]
    for file in files:
        shutil.copy(file, tmp_path)
    command = [sys.executable, "setup.py", "-q", "sdist"]
    make = partial(subprocess.run, command, cwd=tmp_path, env=os.environ | {"MATMULS_CUDA": "0"}, capture_output=True)
    make(check=True)
    with tarfile.open(next((tmp_path / "dist").glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(p.relative_to(tmp_path)) for name in folders for p in (tmp_path / name).rglob("*") if p.is_file()}
    assert wanted | {file.name for file in files} <= packed
    for kernel in tmp_path.glob("src/**/*.cu"):
        kernel.unlink()
    assert b"expected the kernels of the source tree, src/**/*.cu, and found none" in make().stderr


def test_a_build_is_for_the_gpus_that_are_asked_for_or_visible(monkeypatch):
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="find")
    gpus = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: gpus[i])
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert setup["architectures"]() == setup["DEFAULT_ARCHS"]
    gpus += [(9, 0), (8, 9), (9, 0)]
    assert setup["architectures"]() == "8.9+PTX 9.0a"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 8.0")
    assert setup["architectures"]() == "7.5 8.0"


def test_the_installer_takes_paths_with_spaces_and_a_cdpath(tmp_path):
    """Its Python says yes to everything and makes environments of itself; those on PATH say no."""
    yes = '#!/bin/bash\n[[ "$*" == *"-m venv"* ]] && mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"\nexit 0\n'
    for name in ("no/python3", "no/python3.11", "no/python3.12", "no/python3.13", "a b/python"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/bash\nexit 1\n" if name.startswith("no") else yes)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "c d/src/glue").mkdir(parents=True)
    for name in ("matmuls", "benchmarks"):
        (tmp_path / "c d" / name).mkdir()
    shutil.copytree(ROOT / "tools/pins", tmp_path / "c d/tools/pins")
    copied = "install_deps.sh", "pyproject.toml", "setup.py", "src/glue/rows.h", "matmuls/__init__.py"
    for name in (*copied, "benchmarks/pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "c d" / name)
    env = {"CDPATH": ".", "CXX": "true", "PYTHON": str(tmp_path / "a b/python")}
    run = subprocess.run(
        ["bash", "c d/install_deps.sh", "--cpu"],
        cwd=tmp_path,
        env=os.environ | env | {"PATH": f"{tmp_path / 'no'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert f"ready: {tmp_path / 'c d/.venv'}\n" in run.stdout


@pytest.mark.parametrize("module", ["matmuls", "custom_mm", "matmuls_bench.table"])
def test_importing_is_light(module):
    """No optional package, and no CUDA context, comes with an import."""
    optional = (
        "torch_geometric",
        "transformers",
        "sentence_transformers",
        "pyarrow",
        "rich",
        "typer",
        "scipy",
        "matplotlib",
        "platformdirs",
    )  # torch itself imports triton where it is
    code = f"""
import sys, torch, {module}
print([m for m in {optional} if m in sys.modules], torch.cuda.is_initialized())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[] False"


def test_public_names_have_docstrings_and_rows():
    import custom_mm
    import matmuls

    for module in (matmuls, custom_mm):
        for name in module.__all__:
            assert getattr(module, name).__doc__, name
    rows = {spec.name for spec in TABLE} - {"attention_forward"}  # of attention.attend, which the integrations call
    lifecycle = {"handles", "handle_info", "build_info", "set_workspace_size", "workspace_size"}
    lifecycle |= {"mask_plan", "MaskPlan"}  # no operation: what one takes
    lifecycle |= {"plan_solve", "SolvePlan", "plan_spgemm", "SpgemmPlan", "spgemm_size", "SpgemmSize"}
    lifecycle |= {"plan", "SparsePlan", "cusparse_prepare", "explain", "only_kernel", "without_kernels"}
    public = {n for m in (matmuls, custom_mm) for n in m.__all__ if not n.startswith(("init_", "destroy_"))}
    assert public - lifecycle == rows
