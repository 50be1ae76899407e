"""`torchrun -m matmuls spmm --distributed` and benchmarks/scripts/distributed_models.py on two gloo processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from matmuls_bench.matrices import Matrix
from matmuls_bench.spmm import distributed
from matmuls_cli.app import app

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments, program=("-m", "matmuls")):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=200)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.exhaustive
def test_both_scalings_are_measured_and_written(tmp_path):
    out = str(tmp_path)
    shown = torchrun(
        "spmm", "grid:24", "--distributed", "--weak", "-n", "4", "--device", "cpu", "--backward", "--out", out
    )
    assert "A model, not a measurement" in shown
    assert "weak scaling efficiency" in shown
    result = json.loads((tmp_path / "spmm-distributed-cpu-2-weak.json").read_text())
    (case,) = result["cases"]
    assert case["matrix"] == "grid:34"
    assert case["sent"] == case["halo"] == [34 * 4 * 4] * 2
    assert case["gathered"] == 578 * 4 * 4
    names = {"distributed plan", "all-gather + plan", "all-gather + torch.sparse", "one process, plan"}
    assert set(case["wall_backward"]) == names
    assert set(case["wall"]) == names | {"exchange alone", "own columns alone", "halo alone"}
    assert case["efficiency"] == case["wall"]["one process, plan"] / case["wall"]["distributed plan"]
    assert case["error"] < 1e-6
    (model,) = result["models"]
    assert [row["gpus"] for row in model["predicted"]][:3] == [4, 8, 16]
    assert result["environment"]["torch"]


@pytest.mark.exhaustive
def test_divided_models_agree_with_those_of_one_process(tmp_path):
    torchrun(str(tmp_path), "--small", program=(str(ROOT / "benchmarks/scripts/distributed_models.py"),))
    rows = json.loads((tmp_path / "cpu/distributed-models-2.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["GCN"] * 4 + ["MaskedLinear"] * 2 + ["SparseLinear", "InplaceLinear"]
    assert all(row["right"] for row in rows), rows


def test_a_shuffled_path_is_put_in_order():
    """Neighbours of a path with its vertices in a random order: each half then needs one row of the other."""
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    place = order.argsort()
    dense = torch.zeros(200, 200, dtype=torch.float64)
    dense[place[:-1], place[1:]] = torch.arange(1.0, 200.0, dtype=torch.float64)
    a = (dense + dense.T).to_sparse_csr()
    given = Matrix("path", a.crow_indices(), a.col_indices(), a.values(), (200, 200))
    made, sizes = distributed.reordered(given, 2, "rows", "rcm")
    assert (made.name, sizes) == ("path (rcm)", (100, 100))
    matrix = torch.sparse_csr_tensor(made.crow, made.col, made.values, made.shape).to_dense()
    assert matrix[:100, 100:].count_nonzero() == matrix[100:, :100].count_nonzero() == 1
    assert torch.equal(matrix.sum(0).sort().values, (dense + dense.T).sum(0).sort().values)
    assert distributed.reordered(given, 2, "rows", None) == (given, (100, 100))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--distributed"], "torchrun"),
        (["--distributed", "--split", "columns"], "--split is nonzeros or rows"),
        (["--distributed", "--reorder", "amd"], "--reorder is rcm or metis, got amd"),
    ],
)
def test_wrong_usage(monkeypatch, arguments, said):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if len(arguments) > 1:
        monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["spmm", "grid:8", *arguments])
    assert result.exit_code == 2
    assert said in result.output
