"""Lifetime of the library handles: created in advance or on demand, per thread, across forks, captures and exits."""

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import custom_mm
import matmuls

INIT = [custom_mm.init_cublas, custom_mm.init_cublaslt, custom_mm.init_cusparse]
DESTROY = [custom_mm.destroy_cublas, custom_mm.destroy_cublaslt, custom_mm.destroy_cusparse]


def python(code, *options):
    """Run code in a new interpreter; returns (status, stdout, stderr)."""
    run = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    return run.returncode, run.stdout, run.stderr


@pytest.fixture
def no_handles():
    for destroy in DESTROY:
        destroy()
    yield
    custom_mm.set_workspace_size(0)
    for destroy in DESTROY:
        destroy()


def live(library=None):
    return [h for h in custom_mm.handle_info() if library in (None, h["library"])]


def product(device="cuda"):
    x = torch.ones(4, 4, device=device)
    return matmuls.matmul(x, x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_init_returns_0_and_warns_once():
    status, out, err = python(
        """
        import torch, warnings
        from custom_mm import *
        from matmuls import cublasMM, handles
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(init_cublas(), init_cublaslt(), init_cusparse(), init_cublas(), len(caught))
            print(caught[0].filename == "<string>", "CPU tensors need no handle" in str(caught[0].message))
            with handles() as devices:
                print(devices, cublasMM.apply(torch.ones(2, 3), torch.ones(3, 2)).sum().item())
            destroy_cublas(), destroy_cublas()
            print(len(caught))
        """
    )
    assert (status, err) == (0, "")
    assert out.splitlines() == ["0 0 0 0 1", "True True", "0 12.0", "1"]


def test_a_build_without_cuda_or_a_machine_without_gpu_has_no_handles():
    if not torch.cuda.is_available():
        assert custom_mm.handle_info() == []


def test_workspace_size_is_checked():
    with pytest.raises(RuntimeError, match="set_workspace_size: expected a size >= 0 bytes, got -1"):
        custom_mm.set_workspace_size(-1)


def test_use_in_a_forked_child_without_handles_is_fine():
    status, out, _ = python(
        """
        import os, torch, matmuls
        torch.set_num_threads(1)
        pid = os.fork()
        x = torch.ones(3, 3)
        assert matmuls.matmul(x, x).sum() == 27
        if pid == 0: os._exit(0)
        print(os.waitpid(pid, 0)[1])
        """
    )
    assert (status, out.strip()) == (0, "0")


@pytest.mark.cuda
@pytest.mark.parametrize("n", range(3), ids=["cublas", "cublaslt", "cusparse"])
def test_init_and_destroy_are_idempotent(no_handles, n):
    devices = torch.cuda.device_count()
    for _ in range(3):
        assert INIT[n]() == devices
        assert len(live()) == devices
    for _ in range(3):
        DESTROY[n]()
        assert live() == []


@pytest.mark.cuda
def test_a_product_creates_handles_and_works_after_destroy(no_handles):
    assert product().sum() == 64
    assert len(live("cublas")) == 1
    custom_mm.destroy_cublas()
    assert product().sum() == 64
    assert len(live("cublas")) == 1


@pytest.mark.cuda
def test_context_manager(no_handles):
    with matmuls.handles() as devices:
        assert devices == torch.cuda.device_count()
        assert len(live()) == 3 * devices
    assert live() == []
    with pytest.raises(ZeroDivisionError), matmuls.handles():
        raise ZeroDivisionError
    assert live() == []


@pytest.mark.cuda
def test_workspace_per_stream_is_settable_and_visible(no_handles):
    side = torch.cuda.Stream()
    product()
    with torch.cuda.stream(side):
        product()
    torch.cuda.synchronize()
    default = 32 << 20 if torch.cuda.get_device_capability()[0] >= 9 else 8 << 20
    assert [w["nbytes"] for w in live("cublas")[0]["workspaces"]] == [default, default]
    assert side.cuda_stream in [w["stream"] for w in live("cublas")[0]["workspaces"]]
    custom_mm.set_workspace_size(1 << 20)
    assert custom_mm.workspace_size() == 1 << 20
    product()
    assert sorted(w["nbytes"] for w in live("cublas")[0]["workspaces"]) == [1 << 20, default]


@pytest.mark.cuda
def test_out_of_memory_for_a_workspace_raises_torchs_error(no_handles):
    custom_mm.set_workspace_size(1 << 50)
    x = torch.ones(16, 16, device="cuda")
    told = f": CUDA out of memory.*a workspace of {1 << 50} bytes"
    for work, name in ((matmuls.matmul, "matmul"), (custom_mm.cublaslt_matmul, "cublaslt_matmul")):
        with pytest.raises(torch.OutOfMemoryError, match=f"^{name}{told}"):
            work(x, x)
    custom_mm.set_workspace_size(0)
    assert product().eq(4).all()


@pytest.mark.cuda
def test_out_of_memory_for_a_workspace_during_a_capture(no_handles):
    """torch's cache cannot be emptied then, and the capture continues."""
    begun, tried = threading.Event(), threading.Event()
    x, failures = torch.ones(4, 4, device="cuda"), []
    graph = torch.cuda.CUDAGraph()

    def capture():
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                y = x + 1
                begun.set()
                tried.wait(60)
                y += 1
        except RuntimeError as error:
            failures.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=capture)
    custom_mm.set_workspace_size(1 << 50)
    thread.start()
    begun.wait(60)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"^matmul: CUDA out of memory"):
            matmuls.matmul(x, x)
    finally:
        tried.set()
        thread.join()
    assert not failures
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.cuda
def test_workspaces_of_destroyed_streams_are_freed(no_handles):
    custom_mm.set_workspace_size(1 << 16)
    for n in range(200):
        stream = torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream) if n % 2 else torch.cuda.Stream(priority=-1)
        with torch.cuda.stream(stream):
            product()
    torch.cuda.synchronize()
    assert len(live("cublas")[0]["workspaces"]) <= 80


@pytest.mark.cuda
def test_new_streams_have_new_ids_and_right_products(no_handles):
    """Also those that the driver gives the address of a destroyed one."""
    runtime = torch.cuda.cudart()
    a = torch.randn(512, 512, device="cuda")
    truth, ids, addresses = a @ a, set(), set()
    for _ in range(20):
        address = ctypes.c_void_p()
        assert int(runtime.cudaStreamCreate(ctypes.addressof(address))) == 0
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(address.value)):
            torch.cuda._sleep(1_000_000)
            y = custom_mm.cublas_mmul(a, a)
            ids.add(custom_mm._C.current_stream(0))
            addresses.add(address.value)
        assert int(runtime.cudaStreamDestroy(address.value)) == 0
        torch.cuda.synchronize()
        torch.testing.assert_close(y, truth)
    assert len(ids) == 20
    workspaces = [w["stream"] for handle in custom_mm.handle_info() for w in handle["workspaces"]]
    assert len(workspaces) <= len(addresses)


# Before CUDA's own functions by LD_PRELOAD: whether the driver reuses an address is its choice, so ids are made up.
OTHER_IDS = """
#include <dlfcn.h>
#include <stddef.h>
unsigned long long added;
size_t nbytes, made;
int cudaStreamGetId(void* stream, unsigned long long* id) {
  *id = (unsigned long long)stream + added;
  return 0;
}
int cudaMalloc(void** data, size_t wanted) {
  int (*next)(void**, size_t) = (int (*)(void**, size_t))dlsym(dlopen(RUNTIME, RTLD_LAZY | RTLD_NOLOAD), "cudaMalloc");
  made += wanted == nbytes;
  return next(data, wanted);
}
"""


@pytest.mark.cuda
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_stream_that_reuses_an_address_gets_a_new_workspace(tmp_path, monkeypatch):
    """It has a new id; the destroyed stream's work may still use the old workspace."""
    (tmp_path / "ids.c").write_text(OTHER_IDS)
    runtime = f'-DRUNTIME="libcudart.so.{torch.version.cuda.split(".")[0]}"'
    command = ["cc", "-shared", "-fPIC", runtime, tmp_path / "ids.c", "-o", tmp_path / "ids.so", "-ldl"]
    subprocess.run(command, check=True)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "ids.so"))
    status, out, err = python(
        """
        import ctypes, os, torch, custom_mm
        ids = ctypes.CDLL(os.environ["LD_PRELOAD"])
        added, nbytes, made = (ctypes.c_size_t.in_dll(ids, name) for name in ("added", "nbytes", "made"))
        nbytes.value = (3 << 20) + 256  # no allocation of torch's
        custom_mm.set_workspace_size(nbytes.value)
        a = torch.randn(64, 64, device="cuda")
        truth, stream = a @ a, torch.cuda.Stream()
        torch.cuda.synchronize()
        for added.value in (0, 0, 7, 7, 0):
            with torch.cuda.stream(stream):
                torch.testing.assert_close(custom_mm.cublas_mmul(a, a), truth)
            workspaces = [w["stream"] for handle in custom_mm.handle_info() for w in handle["workspaces"]]
            print(made.value, workspaces == [stream.cuda_stream])
        """
    )
    assert (status, out.splitlines()) == (0, ["1 True", "1 True", "2 True", "2 True", "3 True"]), err


@pytest.mark.cuda
def test_threads_have_their_own_handles_and_later_threads_reuse_them(no_handles):
    barrier = threading.Barrier(3)

    def work():
        product()
        barrier.wait()
        barrier.wait()

    for _ in range(4):
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        assert len({h["thread"] for h in live("cublas")} - {"free"}) == 2
        barrier.wait()
        for thread in threads:
            thread.join()
        end = time.monotonic() + 5  # join() returns before the OS thread ends, and its end releases the handle
        while (owners := [h["thread"] for h in live("cublas")]) != ["free", "free"] and time.monotonic() < end:
            time.sleep(0.01)
        assert owners == ["free", "free"]


@pytest.mark.cuda
def test_destroy_while_other_threads_multiply(no_handles):
    stop, wrong = time.monotonic() + 2, []

    def work():
        while time.monotonic() < stop:
            with torch.cuda.stream(torch.cuda.Stream()):
                if product().sum().item() != 64:
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while time.monotonic() < stop:
        custom_mm.destroy_cublas()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.cuda
def test_capture_refuses_to_create_and_destroy_handles(no_handles):
    x = torch.ones(4, 4, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"matmul: expected a live cublas handle .* call init_cublas\(\)"):
            matmuls.matmul(x, x)
        y = x + x
    graph.replay()
    assert y.sum() == 32
    custom_mm.init_cublas()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        y = matmuls.matmul(x, x)
        with pytest.raises(RuntimeError, match="destroy_cublas: expected no CUDA graph capture in progress"):
            custom_mm.destroy_cublas()
    custom_mm.destroy_cublas()
    assert live() == []


@pytest.mark.cuda
def test_capture_in_another_thread_refuses_destroy(no_handles):
    custom_mm.init_cublas()
    captured, release = threading.Event(), threading.Event()
    x = torch.ones(4, 4, device="cuda")

    def work():
        matmuls.matmul(x, x)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            matmuls.matmul(x, x)
            captured.set()
            release.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    captured.wait(30)
    try:
        with pytest.raises(RuntimeError, match="destroy_cublas: expected no CUDA graph capture in progress"):
            custom_mm.destroy_cublas()
    finally:
        release.set()
        thread.join()


@pytest.mark.cuda
def test_a_forked_child_gets_an_error_that_names_spawn():
    status, out, err = python(
        """
        import os, torch, custom_mm, matmuls
        custom_mm.init_cublas()
        x = torch.ones(3, 3, device="cuda")
        matmuls.matmul(x, x)
        pid = os.fork()
        if pid == 0:
            for use in (lambda: matmuls.matmul(x, x), custom_mm.init_cublas, custom_mm.init_cusparse):
                try:
                    use()
                    os._exit(1)
                except RuntimeError as error:
                    print(str(error).splitlines()[0], flush=True)
            custom_mm.destroy_cublas()
            cpu = torch.ones(3, 3)
            assert matmuls.matmul(cpu, cpu).sum() == 27 and custom_mm.handle_info() == []
            os._exit(0)
        print(os.waitpid(pid, 0)[1], matmuls.matmul(x, x).sum().item())
        """
    )
    lines = out.splitlines()
    assert status == 0, err
    assert len(lines) == 4
    assert all("made before fork()" in line and "'spawn'" in line for line in lines[:3])
    assert lines[0].startswith("matmul:")
    assert lines[3] == "0 27.0"


@pytest.mark.cuda
def test_exit_is_silent():
    code = """
        import threading, torch, custom_mm, matmuls
        x = torch.ones(3, 3, device="cuda")
        custom_mm.init_cublas(), custom_mm.init_cublaslt(), custom_mm.init_cusparse()
        matmuls.matmul(x, x, bias=x[0].clone())
        work = lambda: matmuls.matmul(x, x)
        thread = threading.Thread(target=work); thread.start(); thread.join()
        """
    assert python(code) == (0, "", "")


@pytest.mark.cuda
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="the device's free memory is others' too")
def test_10_000_cycles_leave_the_drivers_memory_alone(no_handles):
    cycles = int(os.environ.get("MATMULS_CYCLES", "500"))
    x = torch.ones(4, 4, device="cuda")

    def cycle():
        custom_mm.init_cublas()
        y = matmuls.matmul(x, x)
        custom_mm.destroy_cublas()
        return y

    for _ in range(20):
        cycle()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(cycles):
        y = cycle()
    torch.cuda.synchronize()
    assert y.sum() == 64
    moved = abs(torch.cuda.mem_get_info()[0] - free)
    print(f"{cycles} cycles moved the driver's free memory by {moved} bytes")
    assert moved < 4 << 20
