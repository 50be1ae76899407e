"""Plans that earlier versions pickled still load and multiply, and names in earlier results are known.

tests/data/plans.pickle.gz was written by commit 96776c5, whose modules were matmuls/{sparse,structure,choice,chunks,
reorder}.py: {"plans": {name: SparsePlan}, "layer": a frozen SparseLinear, "truths": {name: tensor}}.
"""

import gzip
import importlib
import json
import pickle
from pathlib import Path

import pytest
import torch

from matmuls.sparse import select
from matmuls_bench import spmm as products

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stored():
    return pickle.loads(gzip.decompress((ROOT / "tests/data/plans.pickle.gz").read_bytes()))


def test_plans_of_older_pickles_multiply(stored):
    plans, dense, b = stored["plans"], stored["truths"]["dense"], stored["truths"]["b"]
    assert set(plans) == {"csr", "csc", "coo", "bsr", "trained", "batch", "mesh"}
    truths = {
        "bsr": torch.cat([dense, dense[:8]]) @ b,
        "batch": torch.stack([dense @ b, dense @ b]),
        "mesh": stored["truths"]["mesh"] @ torch.ones(144, 8),
    }
    for name, made in plans.items():
        side = torch.ones(144, 8) if name == "mesh" else b
        for _ in range(2):  # the second time by a prepared call
            torch.testing.assert_close(made @ side, truths.get(name, dense @ b))
        again = pickle.loads(pickle.dumps(made))
        torch.testing.assert_close(again @ side, made @ side)
        assert name in ("trained", "batch") or made._again(side) is not None
        assert made.nbytes > 0
        assert made.explain()


def test_what_older_pickles_knew_is_kept(stored):
    plans, dense, b = stored["plans"], stored["truths"]["dense"], stored["truths"]["b"]
    assert plans["csc"]._selector.constant
    assert plans["csc"]._selector.products == 7
    assert plans["csr"]._pattern.chunks(32, 64).begins.dtype == torch.int32
    assert not plans["mesh"]._pattern._reordered  # a layout of a pickle is not trusted
    assert (plans["bsr"]._pattern.blocks.height, plans["bsr"]._pattern.blocks.pattern.rows) == (16, 2)
    plans["csr"].update(2 * plans["csr"].values)
    torch.testing.assert_close(plans["csr"] @ b, 2 * dense @ b)
    leaf = b.clone().requires_grad_()
    (plans["trained"] @ leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, dense.sum(0)[:, None].expand(b.shape))
    torch.testing.assert_close(stored["layer"](b.mT), stored["truths"]["linear"])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("structure", "Structure"),
        ("structure", "Blocks"),
        ("choice", "Choice"),
        ("choice", "Measurement"),
        ("forms", "Full"),
        ("chunks", "Chunks"),
        ("reorder", "Reordered"),
        ("sparse", "SparsePlan"),
    ],
)
def test_old_names_of_modules(module, name):
    found = getattr(importlib.import_module(f"matmuls.{module}"), name)
    assert found.__module__.startswith("matmuls.sparse.")


def test_kernels_in_older_results_are_known():
    known = {select.DEFAULT, *select.BY_NAME}
    assert set(select.OLD_NAMES.values()) <= known
    for path in (ROOT / "benchmarks/results").glob("spmm-*.json"):
        stored = {c["chosen"] for c in json.loads(path.read_text())["cases"]}
        assert {c.chosen for c in products.load(path)} <= known, path.name
        assert stored <= known | set(select.OLD_NAMES), path.name
