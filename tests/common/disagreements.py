"""Checks that every rank runs of products on which the ranks differ, and of complex numbers."""

import time

import torch

from common.distributed_processes import SECONDS, close, dense, drawn, mine, raises, sparse
from matmuls import distributed


def _made(rank, world, device, **options):
    """A plan in which every rank needs rows of all others, its rows of x, and the product."""
    sizes = [5] * world
    a = drawn(5 * world, 5 * world, 0.9)
    x = dense(5 * world, 3, device)
    plan = distributed.plan(sparse(mine(a, rank, sizes), device), **options)
    return plan, mine(x, rank, sizes), mine(a.to(device) @ x, rank, sizes)


def _expect_errors(rank, plan, x, wrong, *parts, odd=0):
    """One rank multiplies `wrong` and all raise in time; the next product is right. parts: of the error of rank `odd`,
    and of the others."""
    begin = time.monotonic()
    with raises((RuntimeError, TypeError, ValueError), "distributed.plan", parts[rank != odd]):
        plan @ (wrong if rank == odd else x)
    assert time.monotonic() - begin < SECONDS["cpu"] / 2


def check_products_that_one_rank_does_not_know(rank, world, device):
    """One rank alone requires a gradient, or multiplies other columns or what does not fit, after equal products that
    the others repeat: every rank raises an error in time, and the plan works on."""
    for options in ({}, {"constant": True}, {"gather": True}, {"gather": False}):
        plan, x, truth = _made(rank, world, device, **options)
        for _ in range(3):
            close(plan @ x, truth)
        waits = "a product of 3 columns that it had made before"
        with_gradient = x.clone().requires_grad_()
        for odd in (0, world - 1):
            _expect_errors(rank, plan, x, with_gradient, waits, "with a gradient on rank", odd=odd)
            close(plan @ x, truth)
            _expect_errors(rank, plan, x, x[:, :2], waits, "[5, 2]", odd=odd)
            _expect_errors(rank, plan, x, x[1:], "got [4, 3]", "[4, 3]", odd=odd)
            _expect_errors(rank, plan, x, x.float(), "torch.float32", "torch.float32", odd=odd)
            _expect_errors(rank, plan, x, [1.0], "dense", "expected the same call", odd=odd)
            close(plan @ x, truth)
        y = plan @ with_gradient  # all of them do: agreed on now
        y.sum().backward()
        close(plan @ x, truth)


def check_a_backward_pass_of_some_ranks(rank, world, device):
    """The last rank multiplies something new while the others go backward."""
    plan, x, truth = _made(rank, world, device)
    leaf = x.clone().requires_grad_()
    for _ in range(2):
        (plan @ leaf).sum().backward()
    y = plan @ leaf
    last = rank == world - 1
    with raises(RuntimeError, "distributed.plan", "a gradient of 3 columns" if last else "[5, 2]"):
        if last:
            plan @ x[:, :2]
        else:
            y.sum().backward()
    close(plan @ leaf, truth)


def check_indices_written_over_on_one_rank(rank, world, device):
    sizes = [5] * world
    a = drawn(5 * world, 5 * world, 0.9)
    own = sparse(mine(a, rank, sizes), device)
    plan, x = distributed.plan(own), dense(5, 3, device)
    for _ in range(2):
        plan @ x
    if rank == 0:
        own.col_indices()[:2] = own.col_indices()[:2].flip(0)
    with raises((RuntimeError, ValueError), "distributed.plan", "indices" if rank == 0 else "expected the same call"):
        plan @ x


def check_slow_ranks(rank, world, device):
    """A rank that comes late to a product that all know is waited for."""
    plan, x, truth = _made(rank, world, device)
    for _ in range(3):
        if rank == 0:
            time.sleep(1)
        close(plan @ x, truth)


def check_complex(rank, world, device):
    sizes = [7] * world
    for dtype in (torch.complex64, torch.complex128):
        real = torch.float32 if dtype == torch.complex64 else torch.float64
        a = torch.complex(drawn(7 * world, 7 * world, 0.5, real), drawn(7 * world, 7 * world, 0.5, real).flip(0))
        for options in ({}, {"constant": True}, {"gather": True}, {"gather": False}):
            own = sparse(mine(a, rank, sizes), device)
            own.requires_grad_("constant" not in options)
            plan = distributed.plan(own, **options)
            x = torch.complex(dense(7 * world, 3, device, real), dense(7 * world, 3, device, real).flip(0))
            grad = torch.complex(dense(7 * world, 3, device, real).flip(1), dense(7 * world, 3, device, real))
            for _ in range(3):
                leaf = mine(x, rank, sizes).clone().requires_grad_()
                own.grad = None
                y = plan @ leaf
                _near(y, mine(a.to(device) @ x, rank, sizes), real)
                y.backward(mine(grad, rank, sizes))
                _near(leaf.grad, mine(a.to(device).mH @ grad, rank, sizes), real)
                if own.requires_grad:
                    pattern = mine(a, rank, sizes).to(device) != 0
                    _near(own.grad.to_dense(), mine(grad, rank, sizes) @ x.mH * pattern, real)
            conjugate = mine(x, rank, sizes).conj()
            _near(plan @ conjugate, mine(a.to(device) @ x.conj(), rank, sizes), real)


def _near(x, y, real):
    within = 64 * torch.finfo(real).eps
    torch.testing.assert_close(x, y, rtol=within, atol=within)


CHECKS = [
    check_products_that_one_rank_does_not_know,
    check_a_backward_pass_of_some_ranks,
    check_indices_written_over_on_one_rank,
    check_slow_ranks,
    check_complex,
]
