"""Processes that run checks of distributed products on every rank of a group, and what the checks are made of."""

import datetime
import os
import time
import traceback
import warnings
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from matmuls import distributed

SECONDS = 20
LOST_SECONDS = 4  # where a rank is lost


def start(rank, world, store, backend, device, seconds=SECONDS):
    """Join the group. seconds: of a collective."""
    warnings.filterwarnings("ignore", "Sparse CSR tensor support")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    seconds = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=seconds)


def _run(rank, world, store, backend, device, checks, answers):
    start(rank, world, store, backend, device, SECONDS if device == "cpu" else 3 * SECONDS)
    for check in checks:
        found = ""
        try:
            check(rank, world, device)
        except Exception:
            found = traceback.format_exc()
        answers.put((check.__name__, rank, found))
        if found:
            break  # this rank may be out of step now
    dist.destroy_process_group()


def run_checks(world, folder, checks, backend="gloo", device="cpu"):
    """Run the checks on as many processes; the errors of each by its name, or that it was not reached."""
    context = mp.get_context("spawn")
    answers = context.Queue()
    store = folder / f"store{world}{device}"
    arguments = world, store, backend, device, checks, answers
    processes = [context.Process(target=_run, args=(rank, *arguments), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    found = {}
    deadline = time.monotonic() + (240 if device == "cpu" else 400)
    while any(p.is_alive() for p in processes) or not answers.empty():
        while not answers.empty():
            name, rank, error = answers.get()
            found.setdefault(name, {})[rank] = error
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()
    return found


def expect_no_errors(answers, check, world):
    ranks = answers.get(check.__name__, {})
    assert not {rank: error for rank, error in ranks.items() if error}, "\n".join(ranks.values())
    assert len(ranks) == world, "a rank ended before"


def drawn(rows, columns, share=0.2, dtype=torch.float64):
    """The same matrix on every rank, with zeros."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    a = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return (a * (torch.rand(rows, columns, generator=generator) < share)).to(dtype)


def dense(rows, n, device="cpu", dtype=torch.float64):
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(rows * 100 + n)
    return torch.randn(rows, n, generator=generator, dtype=torch.float64).to(device, dtype)


def mine(x, rank, sizes):
    """This rank's rows."""
    return x.split(list(sizes))[rank]


def sparse(a, device="cpu"):
    return a.to(device).to_sparse_csr()


def close(x, y, dtype=torch.float64):
    within = (8 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps
    torch.testing.assert_close(x.double(), y.double(), rtol=within, atol=within)


@contextmanager
def raises(kind, *parts):
    """Expect an error that says all of the parts."""
    with pytest.raises(kind) as found:
        yield
    missing = [part for part in parts if part not in str(found.value)]
    assert not missing, f"{missing} in {found.value}"


def _lose_a_rank(rank, world, store, answers, how, backend, device):
    start(rank, world, store, backend, device, LOST_SECONDS)
    sizes = [8] * world
    plan = distributed.plan(sparse(mine(drawn(8 * world, 8 * world), rank, sizes), device), gather=False)
    x = mine(dense(8 * world, 3, device), rank, sizes)
    plan @ x
    if device == "cuda":
        assert "memory of the other GPUs" in plan.explain(3)
        torch.cuda.synchronize()
    if rank == 1:
        if how == "killed":
            os._exit(0)
        time.sleep(60)  # the test ends it
    begin = time.monotonic()
    try:
        for _ in range(1000):
            plan @ x
        if device == "cuda":  # they were launched, and did not end
            with suppress(RuntimeError):
                torch.cuda.synchronize()
            plan @ x
    except RuntimeError as error:
        answers.put((rank, str(error), time.monotonic() - begin))
        answers.close()
        answers.join_thread()
    os._exit(0)


def lose_a_rank(world, folder, how, backend="gloo", device="cpu"):
    """Rank 1 ends, or stops answering; what the other ranks raise and after how many seconds."""
    context = mp.get_context("spawn")
    answers = context.Queue()
    arguments = world, folder / f"store-{how}", answers, how, backend, device
    processes = [context.Process(target=_lose_a_rank, args=(rank, *arguments), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    found = {}
    for _ in range(world - 1):
        rank, error, seconds = answers.get(timeout=90)
        found[rank] = error, seconds
    for process in processes:
        process.kill()
        process.join()
    return found
