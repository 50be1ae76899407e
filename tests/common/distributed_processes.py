"""Processes that run checks of distributed products on every rank of a group, and what the checks are made of.

Each check is announced on standard error with its seconds, so that a run that is killed has said where it was. It has a
limit of its own: then each rank writes the stacks of its threads, the processes are killed, and the check fails with
the stacks.
"""

import datetime
import faulthandler
import fcntl
import json
import os
import queue
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from matmuls import distributed

SECONDS = {"cpu": 20, "cuda": 40}  # of a collective
CHECK_SECONDS = {"cpu": 120, "cuda": 60}  # of one check, and of the start, on cores that others share
STACKS_SECONDS = 5  # before that limit, in which the ranks write their stacks
LOST_SECONDS = 4  # of a collective where a rank is lost
shown = nullcontext  # a context in which pytest captures no output


@contextmanager
def only_one(name):
    """One process of this machine at a time: kernels that wait for other ranks would take turns with those of others
    on one GPU, each for milliseconds."""
    with (Path(tempfile.gettempdir()) / f"matmuls-{os.getuid()}-{name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def once(folders, name, make):
    """make(), a dictionary for JSON, once for all workers of a pytest run. folders: tmp_path_factory."""
    root = folders.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = root / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(make()))
        return {check: {int(rank): error for rank, error in ranks.items()} for check, ranks in read(path).items()}


def read(path):
    return json.loads(path.read_text())


def start(rank, world, port, backend, device, seconds=None):
    """Join the group, whose store the parent keeps. seconds: of a collective."""
    warnings.filterwarnings("ignore", "Sparse CSR tensor support")
    torch.set_num_threads(1)
    if device == "cuda":
        if world == 1:  # ranks are streams, which must not wait for each other in one queue of the hardware
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        torch.cuda.set_device(rank)
    seconds = datetime.timedelta(seconds=seconds or SECONDS[device])
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=datetime.timedelta(seconds=CHECK_SECONDS[device]))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=seconds)


def _run(rank, world, port, backend, device, checks, answers, folder):
    stacks = (Path(folder) / str(rank)).open("w")
    faulthandler.dump_traceback_later(CHECK_SECONDS[device] - STACKS_SECONDS, file=stacks)
    start(rank, world, port, backend, device)
    for check in checks:
        found, begin = "", time.monotonic()
        answers.put((check.__name__, rank, None, 0.0))
        faulthandler.dump_traceback_later(CHECK_SECONDS[device] - STACKS_SECONDS, file=stacks)
        try:
            check(rank, world, device)
        except Exception:
            found = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        answers.put((check.__name__, rank, found, time.monotonic() - begin))
        if found:
            break  # this rank may be out of step now
    else:
        dist.destroy_process_group()
    answers.close()
    answers.join_thread()
    os._exit(0)  # a GPU after an error, or NCCL after a lost rank, may not let the process end


def _say(what):
    with shown():
        print(f"[distributed] {what}", file=sys.stderr, flush=True)


def run_checks(world, checks, backend="gloo", device="cpu"):
    """Run the checks on as many processes; the errors of each by its name, or that it was not reached."""
    with only_one("gpus") if device == "cuda" else nullcontext(), tempfile.TemporaryDirectory() as folder:
        return _run_checks(world, checks, backend, device, folder)


def _run_checks(world, checks, backend, device, folder):
    context = mp.get_context("spawn")
    answers = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    arguments = world, store.port, backend, device, checks, answers, folder
    processes = [context.Process(target=_run, args=(rank, *arguments), daemon=True) for rank in range(world)]
    _say(f"{world} ranks of {backend} on {device}")
    for process in processes:
        process.start()
    found, running, limit = {}, "start", CHECK_SECONDS[device]
    deadline = time.monotonic() + limit
    while any(p.is_alive() for p in processes) or not answers.empty():
        while not answers.empty():
            name, rank, error, seconds = answers.get()
            if error is None:
                if running != name:
                    running, deadline = name, time.monotonic() + limit
                    _say(f"{world} ranks: {name} ...")
                continue
            found.setdefault(name, {})[rank] = error
            if error or rank == 0:
                _say(f"{world} ranks: {name} on rank {rank}: {'failed' if error else 'passed'} in {seconds:.1f} s")
            if error:  # the others may wait for this rank
                deadline = min(deadline, time.monotonic() + STACKS_SECONDS)
        if time.monotonic() > deadline:
            ranks = found.setdefault(running, {})
            for rank in set(range(world)) - set(ranks):
                stacks = Path(folder) / str(rank)
                written = stacks.read_text() if stacks.exists() else ""
                ranks[rank] = f"{running} on rank {rank} did not end in time\n{written}"
                _say(f"{world} ranks: {ranks[rank]}")
            break
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join(10)
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


def _lose_a_rank(rank, world, port, answers, how, backend, device):
    start(rank, world, port, backend, device, LOST_SECONDS)
    sizes = [8] * world
    rows = sparse(mine(drawn(8 * world, 8 * world), rank, sizes), device)
    plan = distributed.plan(rows, constant=how == "killed", gather=False)  # by C++, if constant
    x = mine(dense(8 * world, 3, device), rank, sizes)
    for _ in range(2):
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


def lose_a_rank(world, how, backend="gloo", device="cpu"):
    """Rank 1 ends, or stops answering; what the other ranks raise and after how many seconds."""
    with only_one("gpus") if device == "cuda" else nullcontext():
        return _lose_one(world, how, backend, device)


def _lose_one(world, how, backend, device):
    context = mp.get_context("spawn")
    answers = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    arguments = world, store.port, answers, how, backend, device
    processes = [context.Process(target=_lose_a_rank, args=(rank, *arguments), daemon=True) for rank in range(world)]
    _say(f"{world} ranks of {backend} on {device}: rank 1 is {how} ...")
    begin, found = time.monotonic(), {}
    for process in processes:
        process.start()
    try:
        for _ in range(world - 1):
            rank, error, seconds = answers.get(timeout=max(0.1, begin + CHECK_SECONDS[device] - time.monotonic()))
            found[rank] = error, seconds
    except queue.Empty:
        _say(f"{world} ranks: no answer of {world - 1 - len(found)} ranks, killed")
    _say(f"{world} ranks: rank 1 is {how}: {time.monotonic() - begin:.1f} s")
    for process in processes:
        process.kill()
        process.join(10)
    return found
