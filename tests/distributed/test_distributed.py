"""Distributed products compared with those of one process in float64: gloo on 2 to 4 processes, NCCL on 2 and 4."""

import pytest
import torch

from common.distributed_checks import CHECKS, GPU_CHECKS, check_a_graph_network, check_values
from common.distributed_processes import LOST_SECONDS, expect_no_errors, lose_a_rank, run_checks
from matmuls.distributed.group import ANSWER_SECONDS

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(scope="module", params=[2, 3, 4])
def on_cpus(request, tmp_path_factory):
    """The errors of every check; the processes are started once for each number of them."""
    return request.param, run_checks(request.param, tmp_path_factory.mktemp("store"), CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_every_rank(on_cpus, check):
    world, answers = on_cpus
    expect_no_errors(answers, check, world)


def test_a_group_of_one(tmp_path):
    checks = [check_a_graph_network, check_values]
    answers = run_checks(1, tmp_path, checks)
    for check in checks:
        expect_no_errors(answers, check, 1)


@pytest.fixture(scope="module", params=[2, 4])
def on_gpus(request, tmp_path_factory):
    if request.param > GPUS:
        pytest.skip(f"needs {request.param} GPUs")
    checks = [*CHECKS, *GPU_CHECKS]
    return request.param, run_checks(request.param, tmp_path_factory.mktemp("store"), checks, "nccl", "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("check", [*CHECKS, *GPU_CHECKS], ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_gpus(on_gpus, check):
    world, answers = on_gpus
    expect_no_errors(answers, check, world)


@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_a_lost_rank_is_named_in_time(tmp_path, how):
    found = lose_a_rank(3, tmp_path, how)
    assert set(found) == {0, 2}
    for rank, (error, seconds) in found.items():
        assert f"distributed.plan on rank {rank} of 3" in error
        assert "no answer of rank 1 " in error
        assert seconds < LOST_SECONDS + ANSWER_SECONDS + 5
