"""`torchrun -m matmuls spmm --distributed` on two gloo processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from matmuls_cli.app import app

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "matmuls"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=200)
    assert run.returncode == 0, run.stderr
    return run.stdout


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--distributed"], "torchrun"), (["--distributed", "--split", "columns"], "--split is nonzeros or rows")],
)
def test_wrong_usage(monkeypatch, arguments, said):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if "--split" in arguments:
        monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["spmm", "grid:8", *arguments])
    assert result.exit_code == 2
    assert said in result.output
