"""Distributed products compared with those of one process in float64: gloo on 2 to 4 processes, NCCL and
writes into each other's memory on two and four GPUs."""

import copy
import pickle

import pytest
import torch

from common import disagreements, peer_checks
from common.distributed_checks import CHECKS, GPU_CHECKS, check_a_graph_network, check_values
from common.distributed_processes import (
    LOST_SECONDS,
    close,
    dense,
    drawn,
    expect_no_errors,
    lose_a_rank,
    once,
    run_checks,
)
from matmuls import distributed
from matmuls.distributed.group import ANSWER_SECONDS
from matmuls.distributed.peers import SHARES

EXHAUSTIVE = pytest.mark.exhaustive  # 10 to 30 s, for the processes of all checks
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


ON_CPUS = [*CHECKS, *disagreements.CHECKS]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=EXHAUSTIVE), pytest.param(4, marks=EXHAUSTIVE)])
def on_cpus(request, tmp_path_factory):
    """The errors of every check; the processes are started once for each number of them."""
    world = request.param
    return world, once(tmp_path_factory, f"gloo{world}", lambda: run_checks(world, ON_CPUS))


@pytest.mark.parametrize("check", ON_CPUS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_every_rank(on_cpus, check):
    world, answers = on_cpus
    expect_no_errors(answers, check, world)


def test_a_group_of_one():
    checks = [check_a_graph_network, check_values]
    answers = run_checks(1, checks)
    for check in checks:
        expect_no_errors(answers, check, 1)


def repeated_plan():
    """A constant plan of one process whose products C++ repeats, and its matrix."""
    a = drawn(9, 9).to_sparse_csr()
    plan = distributed.plan(a, constant=True)
    for _ in range(3):
        plan @ dense(9, 4).requires_grad_()
    return plan, a


@pytest.mark.parametrize("again", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_plan_is_copied_after_products(again):
    plan, a = repeated_plan()
    x = dense(9, 4)
    for _ in range(3):
        close(again(plan) @ x, a.to_dense() @ x)


def test_a_backward_pass_after_other_values_is_refused():
    plan, a = repeated_plan()
    x = dense(9, 4).requires_grad_()
    y = plan @ x
    plan.update(2 * a.values())
    with pytest.raises(
        RuntimeError, match=r"distributed\.plan: expected the values of the product in its backward pass"
    ):
        y.sum().backward()
    before = plan @ x
    for n in range(1, 20):  # so many that the first product is kept no more
        plan @ dense(9, n)
    plan.update(2 * a.values())
    with pytest.raises(RuntimeError, match="got others by update"):
        before.sum().backward()
    (plan @ x).sum().backward()
    close(x.grad, 2 * a.to_dense().T @ torch.ones(9, 4, dtype=torch.float64))


ON_GPUS = [*CHECKS, disagreements.check_complex, *GPU_CHECKS, *peer_checks.CHECKS]


@pytest.fixture(scope="module", params=[2, 4])
def on_gpus(request, tmp_path_factory):
    if request.param > GPUS:
        pytest.skip(f"needs {request.param} GPUs")
    world = request.param
    return world, once(tmp_path_factory, f"nccl{world}", lambda: run_checks(world, ON_GPUS, "nccl", "cuda"))


@pytest.mark.cuda
@pytest.mark.parametrize("check", ON_GPUS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_every_gpu(on_gpus, check):
    world, answers = on_gpus
    expect_no_errors(answers, check, world)


@pytest.mark.cuda
def test_written_rows_on_one_gpu():
    answers = run_checks(1, peer_checks.ALONE, "gloo", "cuda")
    for check in peer_checks.ALONE:
        expect_no_errors(answers, check, 1)


def expect_that_rank_1_is_named(found, ranks):
    assert set(found) == {rank for rank in range(ranks) if rank != 1}
    for rank, (error, seconds) in found.items():
        assert f"distributed.plan on rank {rank} of {ranks}" in error
        assert "no answer of rank 1 " in error
        assert seconds < LOST_SECONDS + ANSWER_SECONDS + 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_a_lost_rank_is_named_in_time(how):
    expect_that_rank_1_is_named(lose_a_rank(3, how), 3)


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_a_lost_gpu_is_named_in_time(how, monkeypatch):
    monkeypatch.delenv(SHARES, raising=False)
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    expect_that_rank_1_is_named(lose_a_rank(2, how, "nccl", "cuda"), 2)
