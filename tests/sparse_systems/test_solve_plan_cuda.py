"""plan_solve on a GPU: streams, waiting, captured graphs, forked processes, memory."""

import gc
import os
import time

import pytest
import torch

import custom_mm
from common.triangle_cases import by_torch, drawn, every_transpose, every_unit, square
from custom_mm import _C
from matmuls import plan_solve

pytestmark = pytest.mark.cuda


def test_streams_take_turns():
    """Solves on two streams, with values that change, share one analysis."""
    dense = square(3000, 0.01, device="cuda")
    made = plan_solve(dense.to_sparse_csr(), upper=False)
    values = [made.a.values * factor for factor in (1, 2)]
    bs = [drawn(3000, 4, device="cuda", seed=seed) for seed in range(2)]
    expected = [by_torch(dense * (i + 1), b, False, False, False) for i, b in enumerate(bs)]
    made(bs[0])
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            found.append(made(bs[i % 2], values[i % 2]))
    torch.cuda.synchronize()
    for i, x in enumerate(found):
        torch.testing.assert_close(x, expected[i % 2])
    assert len(_C.kept_solves(made._state)) == 1


def test_a_repeated_solve_does_not_wait():
    dense = square(500, 0.02, device="cuda")
    a = dense.to_sparse_csr()
    for made in (plan_solve(a, upper=True), plan_solve(a.clone().requires_grad_(), upper=True)):
        for columns in ((), (3,)):
            b = drawn(500, *columns, device="cuda").requires_grad_()
            torch.autograd.grad(made(b).sum(), b)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
                    x = made(b)
                    torch.autograd.grad(x.sum(), b)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.testing.assert_close(x, by_torch(dense, b, True, False, False))
            names = [event.name for event in profiled.events()]
            assert not any("DtoH" in name or "diagonal_kernel" in name for name in names), names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        plan_solve(a.clone(), upper=True)(b.detach())
    assert any("diagonal_kernel" in event.name for event in profiled.events())


def test_analyses_of_graphs_that_are_gone_are_freed():
    dense, b = square(30, device="cuda"), drawn(30, 2, device="cuda")
    made = plan_solve(dense.to_sparse_csr(), upper=True)
    for _ in range(30):
        x = made(b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made(b)
        graph.replay()
        torch.testing.assert_close(y, x)
        torch.cuda.synchronize()
        del graph, y
    for _ in range(500):  # CUDA tells of the end on a thread of its own
        time.sleep(0.02)
        made(b)
        if len(_C.kept_solves(made._state)) <= 2:
            break
    assert len(_C.kept_solves(made._state)) <= 2


def captured(step):
    """The results of a step captured after one call of it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@every_transpose
@every_unit
@pytest.mark.parametrize("columns", [(), (7,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_captured_graph_reads_values_and_b_anew(transpose, unit, columns, dtype):
    dense = square(50, 0.05, device="cuda")
    a = dense.to(dtype).to_sparse_csr()
    made = plan_solve(a, upper=True, transpose=transpose, unit_diagonal=unit)
    b = drawn(50, *columns, dtype=dtype, device="cuda").requires_grad_()

    def step():
        x = made(b)
        (found,) = torch.autograd.grad(made(x), b, torch.ones_like(x))
        return x.detach(), found

    def check(results):
        current, ones = a.to_dense().double(), torch.ones_like(b).double()
        x = by_torch(current, b.double(), True, transpose, unit)
        found = by_torch(current, by_torch(current, ones, True, not transpose, unit), True, not transpose, unit)
        close = {} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
        for got, wanted in zip(results, (x, found), strict=True):
            torch.testing.assert_close(got.double(), wanted, **close)

    first = captured(step)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="before each capture of a CUDA"):
        step()
    second = captured(step)  # with analyses of its own
    for factor in (1, 2, 0.5):
        with torch.no_grad():
            a.values().mul_(factor)
            b.mul_(-1)
        check(step())  # solves that are not captured are apart
        for graph, results in (first, second):
            graph.replay()
            check(results)
    kept = _C.kept_solves(made._state)
    assert sum(one[3] for one in kept) == 4
    assert made.explain().count("captured graph") == 4


def test_a_graph_of_given_values_leaves_those_of_others():
    dense = square(40, 0.2, device="cuda")
    made, b = plan_solve(dense.to_sparse_csr(), upper=False), drawn(40, 2, device="cuda")
    values = 2 * made.a.values
    graph, x = captured(lambda: made(b, values))
    made(b)
    graph.replay()
    torch.testing.assert_close(x, by_torch(2 * dense, b, False, False, False))
    torch.testing.assert_close(made(b), by_torch(dense, b, False, False, False))


def test_a_plan_in_a_forked_process_is_freed_quietly():
    made, b = plan_solve(square(9, device="cuda").to_sparse_csr(), upper=False), drawn(9, device="cuda")
    made(b)
    torch.cuda.synchronize()
    read, write = os.pipe()
    if not (child := os.fork()):
        os.dup2(write, 2)
        del made
        gc.collect()
        os._exit(0)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(read) as said:
        assert said.read() == ""
    torch.testing.assert_close(made(b), made(b))


def test_handles_may_be_destroyed_between_solves():
    dense = square(30, device="cuda")
    made = plan_solve(dense.to_sparse_csr(), upper=False)
    for columns in ((), (3,)):
        b = drawn(30, *columns, device="cuda")
        expected = made(b)
        custom_mm.destroy_cusparse()
        torch.testing.assert_close(made(b), expected)
        torch.testing.assert_close(made(b, 2 * made.a.values), expected / 2)


def test_the_memory_of_analyses_goes_with_the_plan():
    def free():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    a, b = square(2000, 0.05, device="cuda").to_sparse_csr(), drawn(2000, 8, device="cuda")

    def lost():
        before = free()
        for _ in range(20):
            made = plan_solve(a, upper=False)
            assert made(b).isfinite().all()
            assert made.nbytes > a.values().nbytes
            del made
        return before - free()

    plan_solve(a, upper=False)(b)
    # Other processes take memory of the same GPU, in some rounds; a leak would take it in every one.
    assert min(lost() for _ in range(5)) <= 2**23
