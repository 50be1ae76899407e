"""CPU operations use torch's number of threads. In a child of fork() they return, at first with one thread."""

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import matmuls.nn
from matmuls.sparse import layouts
from matmuls_bench.table import TABLE

# With a visible GPU, torch rejects autograd in a forked child whose parent has used it.
ON_A_CPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
OPERATIONS = """
import os, signal, numpy, torch, custom_mm

def tensor(array):  # torch's own operations on as much would wake its threads
    return torch.from_numpy(numpy.ascontiguousarray(array))

ops, rows, columns, each = torch.ops.custom_mm, 4096, 64, 32
numbers = numpy.random.default_rng(0)
x, grad = (tensor(numbers.standard_normal((rows, columns), "float32")) for _ in range(2))
dense = tensor(numbers.standard_normal((each, columns), "float32"))
values, rstd = tensor(numbers.standard_normal(rows * each, "float32")), tensor(numpy.ones(rows, "float32"))
pattern = tensor(numpy.arange(0, rows * each + 1, each)), tensor(numpy.tile(numpy.arange(each), rows))

calls = {
    "softmax": lambda: ops.softmax(x),
    "softmax_backward": lambda: ops.softmax_backward(x, grad),
    "norm_keep_": lambda: ops.norm_keep_(tensor(x.numpy().copy()), None, None, 1e-5, None, False)[1],
    "norm_backward": lambda: ops.norm_backward(grad, x, rstd, None, False, True, False)[0],
    "csr_spmm": lambda: ops.csr_spmm(*pattern, values, dense, each),
    "csr_spmm, max": lambda: ops.csr_spmm(*pattern, values, dense, each, "max"),
    "csr_sddmm": lambda: ops.csr_sddmm(*pattern, x, dense, each),
    "csr_softmax": lambda: ops.csr_softmax(pattern[0], values),
    "csr_check": lambda: ops.csr_check(*pattern, each),
    "csr_transpose": lambda: ops.csr_transpose(*pattern, each)[2],
}
"""


def python(code, operations=OPERATIONS):
    return subprocess.run(
        [sys.executable, "-c", operations + dedent(code)], capture_output=True, text=True, timeout=300, env=ON_A_CPU
    )


def test_every_operation_uses_torchs_number_of_threads():
    """Each runs with one thread more than the one before: OpenMP creates it only if the operation uses all threads."""
    run = python(
        """
        def alive():
            return len(os.listdir("/proc/self/task"))

        several = []
        for n, (name, call) in enumerate(calls.items()):
            torch.set_num_threads(n + 2)
            before = alive()
            several.append(call())
            assert alive() == before + 1, (name, before, alive())
        torch.set_num_threads(1)
        for (name, call), expected in zip(calls.items(), several):
            assert torch.equal(call(), expected), name
        """
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr


def test_a_forked_child_does_not_wait_for_its_parents_threads():
    run = python(
        """
        torch.set_num_threads(2)
        expected = [call() for call in calls.values()]
        if os.fork() == 0:
            signal.alarm(60)
            same = [call().numpy().tobytes() for call in calls.values()] == [e.numpy().tobytes() for e in expected]
            os._exit(0 if same else 1)
        assert os.wait()[1] == 0
        """
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr


def test_the_first_vector_call_of_a_process_is_complete_after_the_import():
    """MKL keeps the processor's type, -1 before that call. Where threads race for it, some compute with 11 bits."""
    run = python(
        """
        import ctypes, torch

        detect = getattr(ctypes.CDLL(f"{torch.__path__[0]}/lib/libtorch_cpu.so"), "mkl_vml_serv_cpu_detect", None)
        start = ctypes.cast(detect, ctypes.c_void_p).value or 0
        code = ctypes.string_at(start, 6) if detect else b""
        if code[:2] != bytes([0x8B, 0x05]):  # mov the kept type, at an offset from the next instruction, to eax
            print("another MKL")
            raise SystemExit
        kept = ctypes.c_int.from_address(start + 6 + int.from_bytes(code[2:], "little", signed=True))
        before = kept.value
        import custom_mm
        print(before, kept.value >= 0)
        """,
        "",
    )
    if run.stdout == "another MKL\n":
        pytest.skip("torch was not built with this MKL")
    assert (run.returncode, run.stdout) == (0, "-1 True\n"), run.stderr


MODULES = [
    f"nn.{name}"
    for name, kind in vars(matmuls.nn).items()
    if isinstance(kind, type) and issubclass(kind, torch.nn.Module) and kind.__module__ == "matmuls.nn"
]
MORE = [
    "nn.SparseLinear, frozen",
    "plan",
    "plan, constant",
    "plan, ready",
    "mask_plan",
    "attend",
    "compose",
    "spmm max",
    "16 bits",
    "autocast",
    "torch",
]


every_operation = pytest.mark.parametrize("name", [*(spec.name for spec in TABLE), *MODULES, *MORE])


@functools.cache
def strained(mode):
    script = Path(__file__).with_name("strained_operations.py")
    # large tensors come from mmap and are returned at once, so that free heap memory does not hide a shortage
    environment = ON_A_CPU | ({"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"} if mode == "starve" else {})
    return subprocess.run([sys.executable, script, mode], capture_output=True, text=True, env=environment)


def became_of(name, mode):
    """ "right", or the description of the failure."""
    run = strained(mode)
    assert run.returncode == 0, run.stderr
    return dict(line.split("\t") for line in run.stdout.splitlines())[name]


@pytest.mark.exhaustive(keep=1)
@every_operation
def test_every_operation_returns_in_a_forked_child(name):
    assert became_of(name, "fork") == "right"


@pytest.mark.exhaustive
@every_operation
def test_every_operation_raises_without_memory_and_works_afterwards(name):
    assert became_of(name, "starve") == "right"


@pytest.mark.exhaustive(keep=1)
@every_operation
def test_every_operation_runs_in_several_threads_at_once(name):
    assert became_of(name, "threads") == "right"


FORKS = """
import os, signal, threading, traceback, torch, matmuls
torch.set_num_threads(1)
x = torch.rand(512, 512)
matrix = x.where(x > 0.9, 0.0).to_sparse_coo()

def work():
    plan = matmuls.plan(matrix)
    return matmuls.matmul(x, x), matmuls.softmax_(x.clone()), plan @ x, torch.exp(x)

def alive():
    return len(os.listdir("/proc/self/task"))

def fork(in_child):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            in_child()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0

def check(threads):
    for ours, theirs in zip(work(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert (torch.get_num_threads(), alive()) == (threads, threads), alive()
"""


def test_a_child_has_one_thread_until_it_sets_more_and_the_parent_keeps_its_own():
    run = python(
        """
        torch.set_num_threads(3)
        fork(lambda: None)  # OpenBLAS, which is numpy's, ends its threads too
        expected = work()
        others = alive() - 3  # which are in no child

        def in_child():
            check(1)
            fork(lambda: check(1))  # a child of the child
            torch.set_num_threads(3)  # which makes threads for others too
            before = alive()
            work()
            assert alive() == before + 2
            fork(lambda: check(1))
            work()
            assert torch.get_num_threads() == 3

        for _ in range(3):
            fork(in_child)
            fork(in_child)  # the parent did nothing since
            for ours, theirs in zip(work(), expected, strict=True):
                torch.testing.assert_close(ours, theirs)
            assert (torch.get_num_threads(), alive()) == (3, 3 + others)
        """,
        FORKS,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr


def test_a_child_of_a_process_without_started_threads_uses_all():
    run = python(
        """
        expected = work()
        torch.set_num_threads(3)
        fork(lambda: check(3))
        """,
        FORKS,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr


@pytest.mark.exhaustive
def test_any_thread_may_fork_while_others_work():
    run = python(
        """
        torch.set_num_threads(2)
        expected, ended, failed = work(), threading.Event(), []

        def others_work():
            while not ended.is_set():
                work()

        def fork_many_times():
            try:
                for _ in range(5):
                    work()  # this thread's own
                    fork(lambda: check(1))
            except BaseException as error:
                failed.append(error)

        busy = threading.Thread(target=others_work)
        forking = threading.Thread(target=fork_many_times)
        busy.start(), forking.start()
        forking.join(), ended.set(), busy.join()
        assert not failed, failed
        """,
        FORKS,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr


@pytest.mark.exhaustive
def test_forks_leak_nothing():
    run = python(
        """
        torch.set_num_threads(2)
        expected = work()

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

        def round():
            matmuls.matmul(x, x), torch.exp(x)
            fork(lambda: None)

        for _ in range(50):
            round()
        before, threads = resident(), alive()
        for _ in range(200):
            round()
        assert alive() == threads
        assert resident() - before < 4 << 20, resident() - before
        """,
        FORKS,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr


@pytest.mark.exhaustive
def test_data_loader_workers_made_by_fork():
    run = python(
        """
        import multiprocessing
        from torch.utils.data import DataLoader

        torch.set_num_threads(2)
        expected = work()
        context = multiprocessing.get_context("fork")

        def collate(indices):
            assert torch.utils.data.get_worker_info() is not None
            signal.alarm(60)
            return [part.clone() for part in work()]

        loader = DataLoader(range(4), batch_size=1, num_workers=2, multiprocessing_context=context, collate_fn=collate)
        for batch in loader:
            for ours, theirs in zip(batch, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

        def total(n):
            signal.alarm(60)
            return sum(part.double().sum().item() for part in work()) + n

        work()
        with context.Pool(2) as pool:
            totals = pool.map(total, range(4))
        assert all(abs(t - n - totals[0]) < 1e-3 for n, t in enumerate(totals)), totals
        process = context.Process(target=total, args=(0,))
        process.start(), process.join()
        assert process.exitcode == 0
        """,
        FORKS,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr


def test_a_lock_held_at_the_fork_is_free_in_the_child():
    """Another thread holds it to make the copy of a constant plan."""
    dense = torch.eye(8)
    matrix = layouts.Dense(matmuls.plan(dense.to_sparse_csr())._pattern)
    held, forked = threading.Event(), threading.Event()

    def hold():
        with matrix._making:
            held.set()
            forked.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if matrix._making.acquire(timeout=10) else 1)
    try:
        assert not matrix._making.acquire(timeout=0.01)  # the parent's lock is still held
    finally:
        forked.set()
        thread.join()
    assert os.waitpid(child, 0)[1] == 0
