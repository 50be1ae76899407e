"""Distributed products are compared with those of one process in float64: gloo on 2 to 4 processes, NCCL on two GPUs."""

import pytest
import torch

from common.distributed_checks import CHECKS, LOST_SECONDS, lose_a_rank, run_checks
from matmuls.distributed.group import ANSWER_SECONDS

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NCCL = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


@pytest.fixture(
    scope="module",
    params=[("gloo", 2), ("gloo", 3), ("gloo", 4), pytest.param(("nccl", 2), marks=[pytest.mark.cuda, NCCL])],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def found(request, tmp_path_factory):
    """The errors of every check; the processes are started once for each number of them."""
    backend, world = request.param
    device = "cuda" if backend == "nccl" else "cpu"
    return world, run_checks(world, tmp_path_factory.mktemp("store"), CHECKS, backend, device)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_every_rank(found, check):
    world, answers = found
    ranks = answers.get(check.__name__, {})
    assert not {rank: error for rank, error in ranks.items() if error}, "\n".join(ranks.values())
    assert len(ranks) == world, "a rank ended before"


@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_a_lost_rank_is_named_in_time(tmp_path, how):
    found = lose_a_rank(3, tmp_path, how)
    assert set(found) == {0, 2}
    for rank, (error, seconds) in found.items():
        assert f"distributed.plan on rank {rank} of 3" in error
        assert "no answer of rank 1 " in error
        assert seconds < LOST_SECONDS + ANSWER_SECONDS + 5
