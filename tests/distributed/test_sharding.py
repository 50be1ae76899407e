"""The operators on DTensors, and models that parallelize_module, fully_shard and DDP divide, on gloo processes."""

import pytest

from common.distributed_processes import expect_no_errors, run_checks
from common.sharding_checks import CHECKS


@pytest.fixture(scope="module", params=[2, 4])
def on_cpus(request, tmp_path_factory):
    """The errors of every check; the processes are started once for each number of them."""
    return request.param, run_checks(request.param, tmp_path_factory.mktemp("store"), CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_every_rank(on_cpus, check):
    world, answers = on_cpus
    expect_no_errors(answers, check, world)
