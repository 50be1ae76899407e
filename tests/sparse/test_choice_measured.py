"""When a plan measures, on which stream, and that every candidate is right."""

import copy
import math
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.choice_cases import assert_as_exact_as_float32, assert_densified, draw
from custom_mm.indices import Check
from matmuls import plan, spmm
from matmuls.sparse import costs, default_spmm, layouts, select, selector


def test_a_width_beside_the_one_that_was_measured(dense_wins, monkeypatch):
    """Tiles of more than 1024 columns are for dense sides of at most 32."""
    monkeypatch.setattr(selector.Selector, "_copies", lambda *_: [select.SMEM_TILES])
    dense, _ = draw("cpu", 64, 2048)
    made = plan(dense.to_sparse_csr(), constant=True)
    for n in (32, 40, 63):
        b = torch.randn(2048, n)
        assert_as_exact_as_float32(made @ b, dense, b)
    assert select.SMEM_TILES in made.explain()


@pytest.mark.parametrize("passing_first", [False, True])
def test_what_cannot_be_made_is_not_taken(passing_first, monkeypatch):
    """Nonzeros that lie too unevenly to be packed, or no memory: whoever's product came first."""
    monkeypatch.setattr(selector.Selector, "_copies", lambda *_: [select.PACKED_MMA])
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *_: {select.DEFAULT: 9e-6, select.PACKED_MMA: 6e-6})
    dense, b = draw("cpu", 512, 512)
    dense *= torch.rand(512, 512) < 0.1
    dense[:64, :64] = 1
    dense, b = dense.bfloat16(), b.bfloat16()
    made = plan(dense.to_sparse_csr(), constant=True)
    if passing_first:
        made.with_values(made.values.clone()) @ b
    torch.testing.assert_close(made @ b, dense @ b)
    assert "by_rows" in made.explain().splitlines()[-1]


@pytest.mark.parametrize("shape", [(2048, 2048), (0, 2048), (2048, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_empty_products_are_not_measured(shape, dtype, device):
    a = draw("cpu", *shape)[0].to(dtype).to(device).to_sparse_csr()
    for n in (0, 8):
        made = plan(a, tune=[n], constant=True)
        b = torch.randn(shape[1], n, device=device).to(dtype)
        truth, theirs = a.to_dense().double() @ b.double(), a.to_dense() @ b
        error, its = ((y - truth).norm() for y in (made @ b, theirs))
        assert error <= 2 * its + torch.finfo(dtype).eps * truth.norm()


def test_cases_in_which_nothing_is_measured(dense_wins, device):
    dense, b = draw(device)
    a = dense.to_sparse_csr()
    expected = spmm(a, b)
    assert torch.equal(plan(a, tune=False) @ b, expected)
    plan(a, constant=True) @ b[:, :2].contiguous()  # small
    made = plan(a, constant=True)
    compiled = torch.compile(lambda x: spmm(made, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(b), expected)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(plan(a, constant=True) @ b, expected)
    finally:
        torch.use_deterministic_algorithms(False)
    leaf = dense.to_sparse_csr().requires_grad_()
    plan(leaf) @ b
    assert dense_wins == []


def test_tune_measures_in_advance(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True, tune=[128, 4])
    assert len(dense_wins) == 2
    made @ b
    assert plan(made) is made
    assert len(dense_wins) == 2


def test_what_few_products_could_not_pay_for(dense_wins, device, monkeypatch):
    """Sizes say 10 us of ours and 10.5 of the dense product: 50 of them would not pay for a measurement."""
    known = {select.DEFAULT: 10.0e-6, select.DENSE: 10.5e-6, select.FP16X2: 10.5e-6, select.SMEM_TILES: math.inf}
    monkeypatch.setattr(
        selector.Selector, "_estimates", lambda self, facts, others: {k: known[k] for k in (select.DEFAULT, *others)}
    )
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    few = made @ b
    torch.testing.assert_close(few, dense @ b)
    assert "float32, 128 columns: by_rows, by its size alone" in made.explain()
    assert dense_wins == []
    many = plan(dense.to_sparse_csr(), constant=True, products=10**6)
    for kept in (many, copy.deepcopy(many), pickle.loads(pickle.dumps(many)), plan(made, products=10**6, tune=[128])):
        torch.testing.assert_close(kept @ b, dense @ b)
        assert_densified(kept)
    assert dense_wins == [2, 2, 2, 2]


def test_autocast_and_copies(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        result = made @ b
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), dense @ b, atol=0.3, rtol=0.05)
    torch.testing.assert_close(copy.deepcopy(made) @ b, dense @ b)


def test_a_refused_candidate_is_reported(dense_wins, monkeypatch):
    dense, b = draw("cpu")

    def refuse(self, *args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(layouts.Dense, "call", refuse)
    made = plan(dense.to_sparse_csr(), constant=True)
    torch.testing.assert_close(made @ b, dense @ b)
    assert "dense refused" in made.explain()


def test_mismatched_operands_raise_before_a_measurement(dense_wins):
    dense, b = draw("cpu")
    made = plan(dense.to_sparse_csr(), constant=True)
    with pytest.raises(RuntimeError, match=r"spmm: expected dense of shape \[..., 80, n\]"):
        made @ b[1:]
    with pytest.raises(RuntimeError, match="spmm: expected values to be a strided tensor in Double"):
        made @ b.double()
    assert dense_wins == []


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_an_empty_matrix_is_checked_in_advance_too(shape):
    made = plan(torch.zeros(shape).to_sparse_csr(), tune=[8], constant=True)
    assert torch.equal(made @ torch.randn(shape[1], 8), torch.zeros(shape[0], 8))
    assert min(costs.us_fp16x2(made._pattern, 8).values()) > 0


@pytest.mark.cuda
def test_a_plan_works_on_every_stream(monkeypatch):
    """Including its int32 indices, which are created after the index check has synchronized."""

    def check_then_keep_the_gpu_busy(check):
        found = facts(check)
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        return found

    facts = Check.facts
    monkeypatch.setattr(Check, "facts", check_then_keep_the_gpu_busy)
    dense, b = draw("cuda", 512, 512)
    a = dense.to_sparse_csr()
    torch.cuda.synchronize()
    made = plan(a, tune=False)
    with torch.cuda.stream(torch.cuda.Stream()):
        y = made @ b
    torch.cuda.synchronize()
    assert_as_exact_as_float32(y, dense, b)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [layouts.Fp16x2, layouts.Dense])
def test_what_a_stream_makes_of_other_values_others_wait_for(kind):
    dense, b = draw("cuda", 512, 512)
    made = plan(dense.to_sparse_csr(), tune=False)
    values, product = made.values, kind(made._pattern)
    product.call(values, b, b.dtype).run()
    values *= 2
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # a tenth of a second
    product.call(values, b, b.dtype).run()
    with torch.cuda.stream(torch.cuda.Stream()):
        y = product.call(values, b, b.dtype).run()
    torch.cuda.synchronize()
    assert_as_exact_as_float32(y, 2 * dense, b)


@pytest.mark.cuda
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("kind", [layouts.Fp16x2, layouts.Dense])
def test_other_values_wait_for_those_who_still_read(kind, bound):
    """On whatever stream: a product goes by the values that it was called with."""
    dense, b = draw("cuda", 512, 512)
    made = plan(dense.to_sparse_csr(), tune=False)
    values, product, side = made.values, kind(made._pattern), torch.cuda.Stream()
    calls = [product.call(values, b, b.dtype)]
    calls[0].run()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        calls.append(product.call(values, b, b.dtype))
        calls[1].run()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        y = (calls[1] if bound else product.call(values, b, b.dtype)).run()
    product.refresh(2 * values)
    torch.cuda.synchronize()
    assert_as_exact_as_float32(y, dense, b)
    assert_as_exact_as_float32(product.call(2 * values, b, b.dtype).run(), 2 * dense, b)


@pytest.mark.cuda
def test_capture_uses_measured_choices_and_measures_nothing():
    dense, b = draw("cuda", 512, 512)
    made = plan(dense.to_sparse_csr(), constant=True)
    for n in range(2):  # before and after it was measured
        if n:
            made @ b
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            spmm(made, b, alpha=1.0, out=torch.empty(512, 128, device="cuda"))
            if n:
                made @ b
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made @ b
        assert len(made._selector.measured) == n
        graph.replay()
        torch.testing.assert_close(y.double(), dense.double() @ b.double(), atol=1e-3, rtol=1e-4)
        first = y.clone()
        for _ in range(100):
            graph.replay()
            assert torch.equal(y, first)


@pytest.mark.parametrize("name", [select.FP16X2, select.SPARSE24, select.SMEM_TILES, select.PACKED_MMA, select.DENSE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_candidate_is_correct_and_reproducible(name, dtype, device, layouts_on_cpu):
    dense, b = draw(device, 300, 400, dtype)
    made = plan(dense.to_sparse_csc(), tune=[128])
    values, truth = made.values, dense.double() @ b.double()
    if name in (select.FP16X2, select.SPARSE24, select.SMEM_TILES) and dtype != torch.float32:
        pytest.skip("float32's alone")
    if name == select.PACKED_MMA and dtype == torch.float32:
        pytest.skip("16 bits' alone")
    if device == "cpu" and name == select.SPARSE24:
        pytest.skip("tensor cores' own layout")
    product = made._selector._made(name)
    first = product.call(values, b, dtype).run()
    error = torch.linalg.vector_norm(first.double() - truth) / torch.linalg.vector_norm(truth)
    assert error < 8 * torch.finfo(dtype).eps
    assert all(torch.equal(product.call(values, b, dtype).run(), first) for _ in range(100))


KERNELS = Path(__file__).resolve().parents[2] / "src/sparse/spmm"


def test_the_name_of_a_kernel_is_that_of_its_file():
    folders = {select.BY_ROWS, select.CHUNKS, select.PACKED_MMA, select.SMEM_TILES, select.REORDERED}
    assert all((KERNELS / name).is_dir() for name in folders)
    assert all((KERNELS / f"densified/{name}_sm90.cu").is_file() for name in (select.FP16X2, select.SPARSE24))
    others = {select.SPLIT_ROWS, select.SHARES, select.DENSE, select.BLOCKS, select.PACKED_MMA_LINEAR}
    assert set(select.BY_NAME) == folders | {select.FP16X2, select.SPARSE24} | others
    assert len(select.BY_NAME) == len(select.CANDIDATES)


@pytest.mark.parametrize("name", sorted(set(select.BY_NAME) - {select.SPARSE24, select.REORDERED}))
def test_the_table_names_the_operator_that_is_called(name, layouts_on_cpu):
    dtype = torch.float16 if name.startswith(select.PACKED_MMA) else torch.float32
    dense, b = draw("cpu", 64, 64, dtype)
    made = plan(dense.to_sparse_bsr((16, 16)), tune=False)
    candidate = select.BY_NAME[name]
    if name == select.CHUNKS:
        chunks = made._pattern.chunks(32, 64)
        op = default_spmm.chunks_op(made._pattern, chunks, made.values, b)
    elif candidate.layout is None:
        op = default_spmm.default_op(made._pattern, made.values, b)
    else:
        op = candidate.layout(made._pattern).call(made.values, b, dtype)
    assert op.operator == candidate.operator.default
    assert op.arguments[op.b_index].shape == (b.mT if name == select.PACKED_MMA_LINEAR else b).shape
    assert op.reusable


@pytest.mark.parametrize(
    ("sizes", "n", "dtype", "where", "kernel"),
    [
        ((2**14, 2**18, 20), 128, torch.float32, "cuda", select.CHUNKS),  # short rows, much of B
        ((2**14, 2**18, 20), 128, torch.float32, "cpu", select.BY_ROWS),
        ((2**14, 2**18, 20), 128, torch.float64, "cuda", select.BY_ROWS),
        ((2**14, 2**18, 20), 32, torch.float32, "cuda", select.BY_ROWS),  # rows of B below 512 bytes
        ((2**14, 2**18, 65), 64, torch.float32, "cuda", select.CHUNKS),  # skewed
        ((2**10, 2**16, 4 * 64), 64, torch.float32, "cuda", select.BY_ROWS),  # long rows
        ((2**10, 2**16, 8 * 64), 64, torch.float32, "cuda", select.BY_ROWS),
        ((2**10, 2**16, 8 * 64 + 1), 64, torch.float32, "cuda", select.SPLIT_ROWS),
        ((2**10, 2**16, 8 * 64 + 1), 64, torch.float32, "cpu", select.BY_ROWS),
        ((2**14, 2**22, 4096), 64, torch.float32, "cuda", select.SHARES),
        ((2**10, 2**13, 96), 64, torch.float32, "cuda", select.BY_ROWS),  # skewed, but no row is worth cutting
        ((2**10, 0, 0), 64, torch.float32, "cuda", select.BY_ROWS),
    ],
)
def test_the_default_product_is_named_by_the_kernel_that_runs(monkeypatch, sizes, n, dtype, where, kernel):
    monkeypatch.setattr(default_spmm, "multiprocessors", lambda device: 132)
    rows, nonzeros, longest = sizes
    pattern = SimpleNamespace(rows=rows, columns=rows, nonzeros=nonzeros, longest=longest, blocks=None)
    facts = select.Facts(pattern, n, dtype, torch.device(where))
    assert select.default_kernel(facts) == kernel
    assert sum(c.may_run(facts) for c in select.CANDIDATES if c.layout is None) == 1
    one = selector.Measurement(n, {select.DEFAULT: None}, kernel=kernel)
    assert (one.chosen, one.describe()) == (kernel, f"{kernel}, without another candidate")
    two = selector.Measurement(n, {select.DEFAULT: 2e-6, select.DENSE: 1e-6, select.FP16X2: None}, kernel=kernel)
    assert (two.chosen, two.describe()) == (select.DENSE, f"{kernel} 2.0 us, dense 1.0 us*, fp16x2 refused")
    assert two.fastest(without_gradient=False) == select.DENSE
