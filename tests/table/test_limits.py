"""Launches with simulated limits of other GPUs: shared memory, number of multiprocessors, compute capability."""

import hashlib
import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import common.row_cases as rowwise
import matmuls
from matmuls import device, info
from matmuls.attention import reads_strided
from matmuls.sparse import select
from matmuls_bench.table import Draw

ops = torch.ops.custom_mm
GPUS = {
    "7.5": {"capability": (7, 5), "shared_memory": 64 << 10, "multiprocessors": 40},
    "8.0": {"capability": (8, 0), "shared_memory": 163 << 10, "multiprocessors": 108},
    "8.6": {"capability": (8, 6), "shared_memory": 99 << 10, "multiprocessors": 84},
    "12.0": {"capability": (12, 0), "shared_memory": 99 << 10},
    "9.0, a seventh": {"multiprocessors": 16},
}
COLUMNS = [1, 33, 131, 577, 768, 1025, 3072, 4096, 8191, 16_384, 24_584, 30_522, 50_257, 65_536, 100_003, 262_144]
every_gpu = pytest.mark.parametrize("limits", GPUS.values(), ids=GPUS)

HERE = Path(__file__).resolve().parent


@pytest.fixture
def simulated(limits):
    with device.simulate(**limits):
        yield


def random(*shape, dtype=torch.float32, seed=0):
    return Draw(dtype, "cuda", seed)(*shape)


def sparse(rows, columns, density=0.1, dtype=torch.float16, seed=0):
    kept = torch.rand(rows, columns, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) < density
    return (random(rows, columns, dtype=dtype, seed=seed) * kept).to_sparse_csr()


# -------------------------------------------------------------------------------------------------------- shared memory


@pytest.mark.cuda
@every_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", ["layer_norm_", "rms_norm_"])
def test_long_unaligned_rows_with_constants(norm, dtype, limits, simulated):
    """One block per row keeps weight and bias in shared memory: 128 KB at 32,775 columns."""
    ours, theirs = getattr(matmuls, norm), getattr(rowwise, norm.removesuffix("_"))
    for columns in (4097, 8191, 12_001, 15_369, 20_001, 24_585, 28_675, 32_775, 32_777):
        x, weight, bias = (random(*s, dtype=dtype, seed=columns) for s in ((37, columns), (columns,), (columns,)))
        constants = (weight, bias) if norm == "layer_norm_" else (weight,)
        truth = theirs(x.double(), *(t.double() for t in constants))
        expected = theirs(x, *constants)
        rowwise.assert_as_good_as_torch(ours(x, *constants), expected, truth)


@pytest.mark.cuda
@every_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@rowwise.every_operation
def test_rows_of_any_length(operation, dtype, limits, simulated):
    for columns in COLUMNS:
        if columns >= operation.least_columns:
            operation.check(operation.draw(Draw(dtype, "cuda", seed=columns), 61, columns))


@pytest.mark.cuda
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("shared", [64 << 10, 99 << 10])
def test_a_wide_matrix_is_packed_part_by_part(shared, in_order):
    a = sparse(200, 32_768)
    parts = a.crow_indices(), a.col_indices()
    units = ops.csr_packed_units(*parts, 32_768, in_order)
    packed = ops.csr_packed(*parts, a.values(), 32_768, units.item(), None, in_order)
    with device.simulate(shared_memory=shared):
        assert torch.equal(ops.csr_packed_units(*parts, 32_768, in_order), units)
        again = ops.csr_packed(*parts, a.values(), 32_768, units.item(), None, in_order)
    assert torch.equal(again.view(torch.int16), packed.view(torch.int16))


@pytest.mark.cuda
def test_two_of_four_with_more_columns_than_fit_in_shared_memory():
    a = sparse(200, 32_768)
    with (
        device.simulate(shared_memory=64 << 10),
        pytest.raises(ValueError, match=r"at most 16128 columns to keep two of four on this GPU.*, got 32768"),
    ):
        ops.csr_halves(a.crow_indices(), a.col_indices(), a.values(), 32_768, None, True)


@pytest.mark.cuda
def test_threads_do_not_reset_each_others_shared_memory_limits():
    """Threads launch kernels with different sizes of dynamic shared memory concurrently."""
    failures = []

    def work(columns):
        a = sparse(64, columns)
        parts = a.crow_indices(), a.col_indices()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(300):
                    ops.csr_halves(*parts, a.values(), columns, None, True)
                    ops.csr_packed_units(*parts, columns)
            torch.cuda.synchronize()
        except RuntimeError as error:
            failures.append((columns, error))

    threads = [threading.Thread(target=work, args=(columns,)) for columns in (13_056, 16_384, 20_480, 32_768)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---------------------------------------------------------------------------------------------------------- determinism


def gradients_of_norms(shapes):
    """A digest of dweight and dbias for each shape, computed in this order."""
    found = {}
    for rows, columns, name in shapes:
        dtype = getattr(torch, name)
        grad, xhat = (random(rows, columns, dtype=dtype, seed=n) for n in (1, 2))
        rstd, weight = random(rows, seed=3).abs() + 1, random(columns, dtype=dtype, seed=4)
        results = ops.norm_backward(grad, xhat, rstd, weight, False)
        digest = hashlib.sha256()
        for result in results:
            digest.update(result.cpu().view(torch.uint8).numpy().tobytes())
        found[f"{rows} x {columns} {name}"] = digest.hexdigest()
    return found


SHAPES = [
    (rows, columns, name)
    for name in ("float32", "bfloat16")
    for columns in (33, 131, 301, 415, 577, 769, 1000, 1025, 2049, 3001, 4097, 6152, 24_584, 40_000)
    for rows in (64, 1000, 16_384)
    if rows * columns < 10**8
]


@pytest.mark.cuda
def test_gradients_of_norms_do_not_depend_on_earlier_calls():
    """The split of column sums depends on the number of resident blocks, which depends on the call's own shape only."""
    code = """
        import json, sys
        sys.path[:0] = [{here!r}, {tests!r}]
        from test_limits import SHAPES, gradients_of_norms
        print(json.dumps(gradients_of_norms(SHAPES[::-1])))
    """
    code = textwrap.dedent(code).format(here=str(HERE), tests=str(HERE.parent))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    assert gradients_of_norms(SHAPES) == json.loads(run.stdout.splitlines()[-1])


# ----------------------------------------------------------------------------------------------------------- contexts


@pytest.mark.cuda
def test_in_a_green_context():
    """Fewer multiprocessors than the device properties report."""
    code = """
        import torch, custom_mm, matmuls
        custom_mm.init_cublas()
        x = torch.randn(300, 100352, device="cuda", dtype=torch.bfloat16)
        try:
            from torch.cuda.green_contexts import GreenContext
            context = GreenContext.create(num_sms=16, device_id=0)
        except (ImportError, RuntimeError) as error:
            print("skipped:", error)
            raise SystemExit
        a, b = torch.randn(4096, 1024, device="cuda"), torch.randn(1024, 1024, device="cuda") / 32
        rstd, weight = torch.rand(300, device="cuda") + 1, torch.randn(100352, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        context.set_context()
        results = torch.ops.custom_mm.norm_backward(x, x, rstd, weight, False)
        y = matmuls.layer_norm_(x.clone())
        z = matmuls.matmul_(a.clone(), b)
        h = matmuls.matmul_(a.bfloat16(), b.bfloat16())
        torch.cuda.synchronize()
        context.pop_context()
        others = torch.ops.custom_mm.norm_backward(x, x, rstd, weight, False)
        for ours, other in zip(results, others, strict=True):
            torch.testing.assert_close(ours, other, rtol=2**-6, atol=2**-6 * other.abs().max().item())
        torch.testing.assert_close(y, matmuls.layer_norm_(x.clone()), rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(z, a @ b, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(h, a.bfloat16() @ b.bfloat16(), rtol=2**-6, atol=2**-6)
        print("right")
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    if run.stdout.startswith("skipped"):
        pytest.skip(run.stdout)
    assert (run.returncode, run.stdout) == (0, "right\n"), run.stderr


# ------------------------------------------------------------------------------------------ what the build has code for


def test_hopper_kernels_are_chosen_only_if_compiled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gpu = torch.device("cuda", 99)
    for compiled in (False, True):
        monkeypatch.setattr(device, "HOPPER_KERNELS", compiled)
        device.has_hopper_kernels.cache_clear()
        device.capability.cache_clear()
        assert device.has_hopper_kernels(gpu) is compiled
        assert not device.has_hopper_kernels(torch.device("cpu"))
    device.has_hopper_kernels.cache_clear()
    device.capability.cache_clear()


def test_info_reports_a_build_without_hopper_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gpus = [{"name": "NVIDIA H100", "capability": "9.0"}]
    for archs, hopper in (("9.0", False), ("9.0a", True)):
        state = info._cuda_state({"cuda": "13.0", "archs": archs, "hopper_kernels": hopper}, gpus)
        assert ("without Hopper's own kernels" in state) is not hopper


@pytest.mark.cuda
def test_a_build_without_hopper_kernels():
    """A simulated one: no missing kernel is chosen, and products use the row kernel."""
    a = sparse(4096, 4096)
    b = random(4096, 32, dtype=torch.float16, seed=1)
    truth = a.to_dense().double() @ b.double()
    with device.simulate(hopper_code=False):
        assert not device.has_hopper_kernels(b.device)
        assert not reads_strided(random(2, 64, dtype=torch.float16), 64)
        made = matmuls.plan(a, constant=True)
        for _ in range(3):
            torch.testing.assert_close((made @ b).double(), truth, rtol=2**-8, atol=2**-6)
        assert select.PACKED_MMA not in made.explain()
        x = random(512, 1024, dtype=torch.float16, seed=2)
        w = random(1024, 1024, dtype=torch.float16, seed=3) / 32
        expected = x @ w
        torch.testing.assert_close(matmuls.matmul_(x, w), expected, rtol=2**-8, atol=2**-8)


# ---------------------------------------------------------------------------------------------- launches before the end


@pytest.mark.cuda
def test_a_product_launched_before_the_packing_kernel_ends():
    """With programmatic dependent launch it must wait for the packed data, not read older memory."""
    if not device.has_hopper_kernels(torch.device("cuda", 0)):
        pytest.skip("needs Hopper's own kernels")
    a = sparse(8192, 8192, 0.05)
    crow, col = a.crow_indices(), a.col_indices()
    units = ops.csr_packed_units(crow, col, 8192).item()
    b = random(8192, 32, dtype=torch.float16, seed=1)
    values = [(a.values() * factor).contiguous() for factor in (1, 2, -1, 0.5)]

    def product(v):
        return ops.csr_spmm_packed(ops.csr_packed(crow, col, v, 8192, units), crow, col, v, b, 8192)

    expected = []
    for v in values:
        packed = ops.csr_packed(crow, col, v, 8192, units)
        torch.cuda.synchronize()
        expected.append(ops.csr_spmm_packed(packed, crow, col, v, b, 8192))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for n in range(400):
        wrong += (product(values[n % 4]) != expected[n % 4]).sum()
    assert wrong.item() == 0
