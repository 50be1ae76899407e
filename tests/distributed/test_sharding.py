"""The operators on DTensors, and models that parallelize_module, fully_shard and DDP divide, on gloo processes."""

import subprocess
import sys

import pytest

from common import parallel_checks, sharding_checks
from common.distributed_processes import expect_no_errors, once, run_checks

CHECKS = [*sharding_checks.CHECKS, *parallel_checks.CHECKS]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)])
def on_cpus(request, tmp_path_factory):
    """The errors of every check; the processes are started once for each number of them."""
    world = request.param
    return world, once(tmp_path_factory, f"sharding{world}", lambda: run_checks(world, CHECKS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_every_rank(on_cpus, check):
    world, answers = on_cpus
    expect_no_errors(answers, check, world)


def test_importing_matmuls_leaves_dtensor_alone():
    code = "import sys, matmuls, matmuls.nn; sys.exit('matmuls.distributed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
