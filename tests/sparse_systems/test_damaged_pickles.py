"""A pickled plan whose file is damaged is refused when it is loaded, or its products are right: GPU kernels trust the
indices of a plan."""

import copyreg
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
from matmuls.sparse.plan import SparsePlan

SCRIPT = Path(__file__).with_name("damaged_plans.py")


@pytest.mark.exhaustive
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


CROW, COL, ORDER, SHAPE = (0, 0), (0, 1), (0, 2), (1,)


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        (ORDER, lambda p: p.order.clone().fill_(3), "an order with each value once"),
        (ORDER, lambda p: p.order[:-1].clone(), "an order of [0-9]+ values"),
        (COL, lambda p: p.col.clone().fill_(48), "columns from 0 to 47"),
        (CROW, lambda p: p.crow.flip(0), "the first offset to be 0"),
        (SHAPE, lambda p: (32, 5), "columns from 0 to 4"),
        (SHAPE, lambda p: (5, 32, 48), "161 offsets of rows"),
    ],
)
def test_the_error_says_what_is_damaged(path, value, error):
    made = csc()
    with pytest.raises(ValueError, match=f"SparsePlan: expected .*{error}"):
        damaged_plans.reloaded(made, path, value(made._pattern))


def test_the_state_of_a_plan_is_no_pickle_of_it():
    """As the first versions wrote it: its indices were not checked."""

    class Stated:
        def __reduce__(self):
            return (
                copyreg._reconstructor,
                (SparsePlan, object, None),
                vars(csc()) | {"_prepared": None, "_selector": None},
            )

    with pytest.raises(ValueError, match="SparsePlan: expected a pickle of this version"):
        pickle.loads(pickle.dumps(Stated()))


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
