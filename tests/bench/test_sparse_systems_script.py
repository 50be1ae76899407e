"""benchmarks/scripts/sparse_systems.py on a CPU: its rows, and a way that fails."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common import in_process

SCRIPT = Path(__file__).parents[2] / "benchmarks/scripts/sparse_systems.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("sparse_systems", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_writes_a_row_for_each_case(tmp_path):
    threads = torch.get_num_threads()
    try:
        run = in_process.script(SCRIPT, tmp_path, "grid:8", "pruned:6x9:0.5", "--device", "cpu")
    finally:
        torch.set_num_threads(threads)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "cpu/sparse-systems-1.json").read_text(encoding="utf-8"))
    assert found["environment"]["threads"] == 1
    assert found["environment"]["command"].endswith("grid:8 pruned:6x9:0.5 --device cpu")
    assert [(r["matrix"], r.get("right_hand_sides")) for r in found["rows"]] == [
        ("grid:8", None),
        ("grid:8", 1),
        ("grid:8", 16),
        ("grid:8", 64),
        ("pruned:6x9:0.5", None),  # not square: no system
    ]
    for row in found["rows"]:
        ours = {"spgemm", "prepared"}
        if "right_hand_sides" in row:
            ours = {"solve_triangular", "prepared", "prepared, other values"}
        assert ours <= row["errors"].keys()
        assert all(row["errors"][name] < 1e-5 for name in ours)
        timed = row["least_seconds"].keys()
        assert timed == row["median_seconds"].keys()
        assert timed | row["failed"].keys() >= row["errors"].keys() | ours
        assert all(0 < row["least_seconds"][name] <= row["median_seconds"][name] for name in timed)


def test_a_way_that_fails_is_noted_and_the_others_go_on(script):
    calls = []

    def fails_later():
        calls.append(0)
        if len(calls) == 3:
            raise MemoryError("no more")
        return np.ones(2)

    def cannot_be_made():
        raise ImportError("no module named cupy")

    ways = {
        "good": lambda: np.array([1, 1 + 1e-3]),
        "absent": script.late(cannot_be_made),
        "fails later": fails_later,
    }
    row = script.case(ways, np.ones(2), "cpu")
    assert row["failed"] == {"absent": "ImportError: no module named cupy", "fails later": "MemoryError: no more"}
    assert row["least_seconds"].keys() == {"good"}
    assert row["errors"]["good"] == pytest.approx(1e-3 / 2**0.5)
    assert len(calls) == 3
