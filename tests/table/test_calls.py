"""Prepared calls of a plan: products that are repeated without Python's checks, and all that must prevent that."""

import copy
import io
import threading
import weakref

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from custom_mm import _C
from matmuls import plan, spmm, timing
from matmuls.device import has_hopper_kernels
from matmuls.sparse import race, select, selector


def draw(device="cpu", rows=64, columns=48, n=32, dtype=torch.float32, density=0.3, constant=False):
    dense = (torch.randn(rows, columns) * (torch.rand(rows, columns) < density)).to(dtype).to(device)
    made = plan(dense.to_sparse_csr(), constant=constant)
    return dense, made, torch.randn(columns, n, device=device).to(dtype)


def assert_product(result, dense, b):
    truth = dense.double() @ b.double()
    error = torch.linalg.vector_norm(result.double() - truth)
    assert error <= 8 * torch.finfo(result.dtype).eps * torch.linalg.vector_norm(truth)


def test_a_repeated_product_is_bitwise_equal(device):
    for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        dense, made, b = draw(device, dtype=kind)
        assert made._again(b) is None
        first = made @ b
        assert torch.equal(made._again(b), first)
        assert torch.equal(spmm(made, b), first)
        other = torch.randn_like(b)
        assert_product(made._again(other), dense, other)
        assert made._again(other).grad_fn is None


def test_each_shape_has_a_call_and_the_latest_are_kept():
    dense, made, _ = draw()
    sides = [torch.randn(48, n) for n in range(1, 21)]
    for b in sides:
        made @ b
    assert sum(made._again(b) is not None for b in sides) == 16
    for b in sides:
        assert_product(made @ b, dense, b)
    batch = torch.randn(3, 48, 5)
    made @ batch
    assert torch.equal(made._again(batch), torch.stack([made @ b for b in batch]))


def test_operands_that_no_prepared_call_fits():
    dense, made, b = draw()
    made @ b
    assert made._again(b.t().contiguous().t()) is None  # other strides
    assert made._again(b.double()) is None
    assert made._again(b[:, :31]) is None
    assert made._again("b") is None
    assert made._again(b.clone().requires_grad_()) is None
    with torch.no_grad():
        assert made._again(b.clone().requires_grad_()) is not None
    with torch.inference_mode():
        assert made._again(b) is None
        assert_product(made @ b, dense, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made._again(b) is None
        assert (made @ b).dtype == torch.bfloat16
    assert (made @ b).dtype == torch.float32
    with pytest.raises(ValueError, match="expected out= with beta"):
        spmm(made, b, beta=1)
    for wrong in (b[:47], b.double(), torch.zeros(48, 32, dtype=torch.int32)):
        with pytest.raises(RuntimeError, match="spmm: expected"):
            made @ wrong


def test_deterministic_algorithms_are_respected():
    _, made, b = draw()
    made @ b
    torch.use_deterministic_algorithms(True)
    try:
        assert made._again(b) is None
        made @ b
        assert made._again(b) is not None
    finally:
        torch.use_deterministic_algorithms(False)


def test_overwritten_values_are_seen(device):
    dense, made, b = draw(device)
    a = dense.to_sparse_csr()
    made = plan(a)
    made @ b
    a.values().mul_(2)
    assert made._again(b) is None
    assert_product(made @ b, 2 * dense, b)
    made.update(a.values() * 2)
    assert made._again(b) is None
    assert_product(made @ b, 4 * dense, b)
    values = made.values
    values.data = 3 * values  # does not change the version counter
    assert_product(made._again(b), 12 * dense, b)
    values.data = values.double()
    assert made._again(b) is None
    values.data = values.float()
    values.requires_grad_()
    assert (made @ b).requires_grad


@pytest.mark.parametrize("name", [select.DENSE, select.FP16X2, select.SMEM_TILES, select.SPARSE24, select.DEFAULT])
def test_values_of_a_plan_that_shares_the_pattern(name, device, monkeypatch):
    """The copy that the constant plan keeps stays as it is."""
    if name == select.SPARSE24 and device == "cpu":
        pytest.skip("tensor cores' own layout")
    if name not in (select.DENSE, select.DEFAULT) and device == "cuda" and not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("Hopper's")
    monkeypatch.setattr(selector, "SMALLEST", 0)
    monkeypatch.setattr(selector.Selector, "_copies", lambda *_: [name])
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *_: {name: 1.0})
    dense, made, b = draw(device, 256, 192, constant=True)
    other = made.with_values(2 * made.values)
    for _ in range(3):
        assert_product(made @ b, dense, b)
        assert_product(made @ b, dense, b)
        assert_product(other @ b, 2 * dense, b)
    assert other._again(b) is not None


def test_requires_grad_may_change_between_calls():
    dense, made, b = draw()
    made @ b
    for _ in range(3):
        leaf = b.clone().requires_grad_()
        (made @ leaf).sum().backward()
        torch.testing.assert_close(leaf.grad, dense.sum(0)[:, None].expand(b.shape))
        assert not (made @ b).requires_grad
    a = dense.to_sparse_csr().requires_grad_()
    trained = plan(a)
    for _ in range(2):
        (trained @ b).sum().backward()
        with torch.no_grad():
            assert_product(trained @ b, dense, b)
    assert a.grad is not None


def test_dispatch_modes_see_prepared_calls():
    _, made, b = draw()
    made @ b
    with FlopCounterMode(display=False) as counted:
        made @ b
        made @ b
    assert counted.get_total_flops() == 2 * 2 * made.nnz * 32


def test_copied_plans_have_no_prepared_calls():
    _, made, b = draw()
    expected = made @ b
    stored = io.BytesIO()
    torch.save(made, stored)
    stored.seek(0)
    for copied in (copy.deepcopy(made), torch.load(stored, weights_only=False)):
        assert copied._again(b) is None
        assert torch.equal(copied @ b, expected)
        assert torch.equal(copied._again(b), expected)


def test_threads_bind_and_call_at_once():
    dense, made, _ = draw(rows=200, columns=100)
    sides = [torch.randn(100, n) for n in range(1, 25)]
    truths = [dense @ b for b in sides]
    failures = []

    def work(seed):
        order = torch.randperm(len(sides), generator=torch.Generator().manual_seed(seed)).tolist()
        for i in 20 * order:
            if not torch.allclose(made @ sides[i], truths[i], atol=1e-4):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_deallocation_may_call_the_same_plan(monkeypatch):
    """As another thread may: torch releases the GIL while it frees a tensor."""
    monkeypatch.setattr(
        race, "time_warm", lambda runs, *_: [timing.Timing(10.0**-i, 0.0, 10.0**-i) for i in range(len(runs))]
    )
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *args: {})
    dense, made, _ = draw(rows=96, columns=80, density=0.5, constant=True)
    made.update(made.values.clone())
    sides = [torch.randn(80, n) for n in (128, 129, 130)]
    others = [torch.randn(80, n) for n in range(1, 12)]
    for b in sides:
        made @ b
    weakref.finalize(made._selector.tensors[0], lambda: [made @ b for b in others])
    made @ torch.randn(80, 131, requires_grad=True)  # what is kept is saved: other values are kept elsewhere
    for factor in (2, 4):  # the second time what was retired goes, and with it the calls that read it
        with torch.no_grad():
            made.values.mul_(2)
        for b in sides:
            assert_product(made @ b, factor * dense, b)
    assert all(made._again(b) is not None for b in (*others, *sides))


def test_b_is_not_kept_alive():
    _, made, b = draw()
    made @ b
    made @ b
    weak = b.untyped_storage()._weak_ref()
    assert not torch.UntypedStorage._expired(weak)
    del b
    assert torch.UntypedStorage._expired(weak)
    torch.UntypedStorage._free_weak_ref(weak)


def test_bad_bindings_raise():
    x = torch.randn(3, 3)
    calls = _C.PreparedCalls()
    with pytest.raises(RuntimeError, match="nothing_like_it"):
        calls.bind("custom_mm::nothing_like_it", [x, x], 1, [], [])
    calls.bind("custom_mm::matmul", [x, x, False, False], 1, [x], [])
    assert torch.equal(calls(x, x), x @ x)
    assert calls(x, x.clone()) is None
    with pytest.raises(ValueError, match="expected at most 4 tensors, got 5"):
        calls.bind("custom_mm::matmul", [x, x, False, False], 1, 5 * [x], [])


@pytest.mark.cuda
def test_graph_capture_does_not_use_prepared_calls():
    dense, made, b = draw("cuda", 512, 512, 128, constant=True)
    first = made @ b
    assert made._again(b) is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert made._again(b) is None
        y = made @ b
    made.update(2 * made.values)
    graph.replay()
    assert_product(made @ b, 2 * dense, b)
    assert_product(first, dense, b)
    assert y.isfinite().all()


@pytest.mark.cuda
def test_another_stream_reads_what_was_made(monkeypatch):
    monkeypatch.setattr(selector.Selector, "_copies", lambda *_: [select.DENSE])
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *_: {select.DENSE: 1.0})
    dense, made, b = draw("cuda", 1024, 1024, 256, torch.float16, constant=True)
    made @ b
    for factor in (2, 4, 8):
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        made.values.mul_(2)
        made @ b  # rebuilds the dense copy, queued after the sleep
        assert made._again(b) is not None
        with torch.cuda.stream(torch.cuda.Stream()):
            y = made @ b
        torch.cuda.synchronize()
        assert_product(y, factor * dense, b)


@pytest.mark.cuda
def test_out_of_memory_raises_torchs_error():
    _, made, b = draw("cuda")
    made @ b

    limit = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    wide = torch.randn(48, 1 << 22, device="cuda")
    made @ wide
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(max(limit, torch.cuda.memory_reserved() / 1e12) + 0.0001)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            [made @ wide for _ in range(10)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert made._again(wide) is not None
