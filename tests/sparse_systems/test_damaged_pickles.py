"""A pickled plan whose file is damaged is refused when it is loaded, or its products are right: GPU kernels trust the
indices of a plan."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import damaged_plans
import pytest
import torch

from matmuls import plan, plan_spgemm
from matmuls.sparse.csr_pattern import CsrPattern

SCRIPT = Path(__file__).with_name("damaged_plans.py")


def test_damaged_pickles_are_refused_or_right(tmp_path):
    log = tmp_path / "log"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(log)], capture_output=True, text=True, timeout=600, env=environment
    )
    last = log.read_text().splitlines()[-1]
    assert run.returncode == 0, f"exit status {run.returncode} at {last}\n{run.stderr[-3000:]}"
    refused, right = map(int, re.findall(r"\d+", run.stdout))
    assert refused > 500
    assert right > 100


def csc():
    return plan(damaged_plans.matrix().to_sparse_csc())


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("order", lambda p: p.order.clone().fill_(3), "an order that names each of"),
        ("order", lambda p: p.order[:-1], "an order of [0-9]+ values"),
        ("col", lambda p: p.col.clone().fill_(48), "columns from 0 to 47"),
        ("crow", lambda p: p.crow.flip(0), "the first offset to be 0"),
        ("columns", lambda p: 5, "columns from 0 to 4"),
        ("batch", lambda p: 5, "a batch that 32 x 48 can be cut into"),
    ],
)
def test_the_error_says_what_is_damaged(name, value, error):
    made = csc()
    with pytest.raises(ValueError, match=f"SparsePlan: expected .*{error}"):
        damaged_plans.reloaded(made, CsrPattern, name, value(made._pattern))


def test_a_damaged_transposed_matrix_is_made_again():
    """It was kept in pickles, and read by products with a gradient."""
    made, b = csc(), torch.randn(48, 3, dtype=torch.float64, requires_grad=True)
    assert made.mT.nnz == made.nnz
    crow, col, order = made._pattern.transposed()
    again = damaged_plans.reloaded(made, CsrPattern, "_transposed", (crow, col + 10**6, order))
    (again @ b).sum().backward()
    torch.testing.assert_close(b.grad, damaged_plans.matrix().sum(0)[:, None].expand(48, 3))


def test_damaged_blocks_are_refused():
    made = damaged_plans.plans()["bsr"]
    made._pattern.blocks.pattern.col[0] = (made._pattern.blocks.pattern.col[0] + 1) % 3
    kept = pickle.dumps(made)
    with pytest.raises(ValueError, match="blocks of the plan's matrix"):
        pickle.loads(kept)


def test_a_damaged_pattern_of_a_sparse_product_is_computed_again():
    a = damaged_plans.matrix()
    made = plan_spgemm(a.to_sparse_csr(), a.mT.to_sparse_csr())
    made._c[1].fill_(31)
    torch.testing.assert_close(pickle.loads(pickle.dumps(made))().to_dense(), a @ a.mT)
