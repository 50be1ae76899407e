"""Checks of rows that ranks write into each other's GPUs: every rank of a group, or one process for all, runs them."""

import gc
import time

import pytest
import torch
import torch.distributed as dist

from common.distributed_checks import SIZES
from common.distributed_processes import dense, drawn, mine, raises, sparse
from custom_mm import _C
from matmuls import distributed
from matmuls.distributed import peers

DIRECT = "by writing the needed rows"


def matrices(world):
    """By name, with the rows of each rank: some with rows for every rank, a band, one rank that sends alone, no rows
    that are sent by one of them."""
    sizes, even = SIZES[world], [40] * world
    total = sum(sizes)
    one_way = torch.block_diag(*(drawn(size, size, 0.5) for size in sizes))
    one_way[0, -1] = 1.0
    return {
        "uneven": (drawn(total, total, 0.3), sizes),
        "band": (drawn(total, total, 1.0).tril(1).triu(-1), sizes),
        "one way": (one_way, sizes),
        "even": (drawn(40 * world, 40 * world, 0.1), even),
    }


def by_nccl(plan, call):
    """The result of a call whose rows NCCL sends."""
    exchange = plan._exchange
    kept, exchange._channels = exchange._channels, {}
    plan._repeated.forget()
    found = call()
    exchange._channels = kept
    plan._repeated.forget()
    return found


def expect_same(found, wanted, what):
    for got, right in zip(found, wanted, strict=True):
        assert torch.equal(got, right), what


def check_written_rows_have_the_bits_of_nccl(rank, world, device):
    for name, (a, sizes) in matrices(world).items():
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            for constant in (False, True):
                own = sparse(mine(a, rank, sizes).to(dtype), device).requires_grad_(not constant)
                plan = distributed.plan(own, constant=constant, gather=False)
                for n in (1, 3, 32, 130):
                    x = mine(dense(a.shape[0], n, device, dtype), rank, sizes).clone().requires_grad_()
                    grad = mine(dense(a.shape[0], n, device, dtype), rank, sizes)

                    def call(plan=plan, x=x, grad=grad, own=own, constant=constant):
                        y = plan @ x
                        found = torch.autograd.grad(y, [x] if constant else [x, own], grad)
                        return [y.detach(), *(t if t.layout == torch.strided else t.values() for t in found)]

                    for _ in range(3):  # kernels are selected
                        call()
                    assert DIRECT in plan.explain(n)
                    what = name, dtype, constant, n
                    wanted = by_nccl(plan, call)
                    for _ in range(3):
                        expect_same(call(), wanted, what)


def check_no_rows_but_those_of_this_call(rank, world, device):
    """Products in turns on two streams and by a replayed graph, none of which waits on the host: each has the rows of
    its own x, and gradients to values those of theirs."""
    a, sizes = matrices(world)["even"]
    own = sparse(mine(a, rank, sizes).float(), device).requires_grad_()
    plan = distributed.plan(own, gather=False)
    xs = [mine(dense(a.shape[0], 64, device, torch.float32) * (i + 1), rank, sizes) for i in range(24)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def call(x):
        y = plan @ x
        return y, torch.autograd.grad(y, own, torch.ones_like(y), retain_graph=True)[0].values()

    for _ in range(3):
        call(xs[0])
    wanted = by_nccl(plan, lambda: [call(x) for x in xs])
    torch.cuda.synchronize()
    found = []
    for i, x in enumerate(xs):
        with torch.cuda.stream(streams[i % 2]):
            found.append(call(x))
    torch.cuda.synchronize()
    for i, (got, right) in enumerate(zip(found, wanted, strict=True)):
        expect_same(got, right, i)

    ys = [plan @ x for x in xs[:4]]  # and their gradients after the last product
    for y, (_, to_values) in zip(ys, wanted, strict=False):
        expect_same([torch.autograd.grad(y, own, torch.ones_like(y))[0].values()], [to_values], "saved rows")

    constant = distributed.plan(own.detach(), constant=True, gather=False)
    for _ in range(3):  # from the second on, C++ repeats it
        constant @ xs[0]
    wanted_of_constant = by_nccl(constant, lambda: [constant @ x for x in xs])
    torch.cuda.synchronize()
    ys = []
    for i, x in enumerate(xs):
        with torch.cuda.stream(streams[i % 2]):
            ys.append(constant @ x)
    torch.cuda.synchronize()
    expect_same(ys, wanted_of_constant, "constant")

    still, graph = xs[0].clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    with torch.no_grad():
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = plan @ still
        for i, x in enumerate(xs):
            still.copy_(x)
            graph.replay()
            other = plan @ xs[0]
            expect_same([y, other], [wanted[i][0].detach(), wanted[0][0].detach()], f"replay {i}")


def check_what_is_written_and_what_is_not(rank, world, device):
    """Memory goes with the plan; many rows, and ranks that cannot reach each other, go by NCCL."""
    col = (torch.arange(4096) + 4096 * rank - 2048) % (4096 * world)  # half of the rows of the rank before
    shape = 4096, 4096 * world
    rows = torch.sparse_csr_tensor(torch.arange(4097), col, torch.ones(4096), shape).to(device)
    x = torch.ones(4096, 1024, device=device)
    free = []
    for _ in range(3):
        gc.collect()
        torch.cuda.empty_cache()
        dist.barrier()
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
        plan = distributed.plan(rows, constant=True, gather=False)
        before = plan.nbytes
        assert torch.equal(plan @ x, x)
        assert DIRECT in plan.explain(1024)
        assert plan.nbytes - before >= 2048 * 1024 * 4
        del plan
    assert free[1] - free[2] < 2048 * 1024 * 4, "the rows that were received stay after the plan"
    most, peers.MOST_BYTES = peers.MOST_BYTES, 2048 * 1024 * 4 - 1
    plan = distributed.plan(rows, constant=True, gather=False)
    assert torch.equal(plan @ x, x)
    assert DIRECT not in plan.explain(1024)
    assert DIRECT in plan.explain(1)
    peers.MOST_BYTES = most
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(peers.SHARES, "0")
        plan = distributed.plan(rows, constant=True, gather=False)
    assert torch.equal(plan @ x, x)
    assert DIRECT not in plan.explain(1024)
    reachable, torch.cuda.can_device_access_peer = torch.cuda.can_device_access_peer, lambda i, j: rank != 1
    plan = distributed.plan(rows, constant=True, gather=False)
    torch.cuda.can_device_access_peer = reachable
    assert torch.equal(plan @ x, x)
    assert DIRECT not in plan.explain(1024)


def on_one_gpu(counts, n, dtype, seconds=20.0):
    """PeerRows of ranks whose buffers lie on one GPU, with the buffers, and the rows that each sends."""
    size, each = len(counts), n * dtype.itemsize
    nbytes = _C.PeerRows.header + each * max(map(sum, counts))
    buffers = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(size)]
    made, indices = [], []
    for rank in range(size):
        starts, slots = peers.places(counts, rank)
        indices.append(torch.randint(50, (starts[-1],), device="cuda"))
        made.append(
            _C.PeerRows(
                buffer=buffers[rank],
                addresses=[buffer.data_ptr() for buffer in buffers],
                rank=rank,
                index=indices[rank],
                starts=starts,
                slots=slots,
                sources=[other for other, count in enumerate(counts[rank]) if count],
                row_bytes=each,
                seconds=seconds,
            )
        )
    return made, buffers, indices


def check_ranks_on_one_gpu(rank, world, device):
    """The ranks are streams of this process. counts[r][o]: rows that rank r receives from rank o."""
    three = [[0, 5, 2], [40, 0, 0], [1, 300, 0]]
    for counts in (three, [[0, 0, 0], [0, 0, 1], [0, 0, 0]], [[0, 7], [9, 0]]):
        size = len(counts)
        streams = [torch.cuda.Stream() for _ in range(size)]
        for dtype, n in ((torch.float32, 128), (torch.bfloat16, 7), (torch.float64, 33), (torch.bfloat16, 2)):
            made, buffers, indices = on_one_gpu(counts, n, dtype)
            for _ in range(3):
                xs = [torch.randn(50, n, device=device).to(dtype) for _ in range(size)]
                torch.cuda.synchronize()
                for stream, one, x in zip(streams, made, xs, strict=True):
                    with torch.cuda.stream(stream):
                        one.send(x)
                for stream, one in zip(streams, made, strict=True):
                    with torch.cuda.stream(stream):
                        one.wait()
                torch.cuda.synchronize()
                parts = [xs[o][indices[o]].split([row[o] for row in counts]) for o in range(size)]
                for r in range(size):
                    wanted = torch.cat([parts[o][r] for o in range(size)])
                    bytes_found = buffers[r][_C.PeerRows.header :][: wanted.nbytes]
                    assert torch.equal(bytes_found.view(dtype).view(wanted.shape), wanted), (counts, dtype, n, r)
            assert all(one.lost == -1 for one in made)
    with raises(RuntimeError, "PeerRows", "rows of 4 bytes", "[50, 3]"):
        made[0].send(torch.zeros(50, 3, device=device))


def check_a_rank_that_does_not_answer(rank, world, device):
    """The last check of a process, whose GPU cannot be used after it."""
    (first, _), *_ = on_one_gpu([[0, 1], [1, 0]], 4, torch.float32, seconds=1.0)
    x, begin = torch.zeros(50, 4, device=device), time.monotonic()
    first.send(x)
    with raises(RuntimeError, "CUDA"):
        torch.cuda.synchronize()
    assert 0.9 < time.monotonic() - begin < 10
    assert first.lost == 1
    with raises(RuntimeError, "PeerRows", "an answer of rank 1"):
        first.send(x)


CHECKS = [
    check_written_rows_have_the_bits_of_nccl,
    check_no_rows_but_those_of_this_call,
    check_what_is_written_and_what_is_not,
]
ALONE = [check_ranks_on_one_gpu, check_a_rank_that_does_not_answer]
