"""Rows reordered so that neighbours read the same rows of B (src/sparse/spmm/reordered/)."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from common import layout_references
from custom_mm.indices import Check
from matmuls import plan, spmm
from matmuls.device import Memory
from matmuls.sparse import costs, reordered, select, selector
from matmuls.sparse.chunks import chunks_of

_ops = torch.ops.custom_mm
SIZES = 32, 64  # nonzeros per chunk and per piece


def grid(side, device, *, scrambled, keep=1.0):
    """crow and col of a 5-point stencil on side x side points, or a random part of it, with randomly numbered
    points.
    """
    at = torch.arange(side * side).view(side, side)
    pairs = [torch.stack([at.flatten(), at.flatten()])]
    for here, there in ((at[1:], at[:-1]), (at[:, 1:], at[:, :-1])):
        pairs += [torch.stack([x.flatten(), y.flatten()]) for x, y in ((here, there), (there, here))]
    row, col = torch.cat(pairs, 1)
    kept = torch.rand(len(row), generator=torch.Generator().manual_seed(2)) < keep
    row, col = row[kept], col[kept]
    if scrambled:
        names = torch.randperm(side * side, generator=torch.Generator().manual_seed(1))
        row, col = names[row], names[col]
    order = (row * side * side + col).argsort()
    crow = torch.zeros(side * side + 1, dtype=torch.int32)
    crow[1:] = torch.bincount(row, minlength=side * side).cumsum(0)
    return crow.to(device), col[order].int().to(device)


@pytest.mark.cuda
@pytest.mark.parametrize("keep", [1.0, 0.4])  # at 0.4 some rows have no path to others
@pytest.mark.parametrize(("size", "rounds"), [(1, 1), (7, 1), (50, 2), (50, 7), (300, 40), (10_000, 3)])
def test_regions(size, rounds, keep):
    crow, col = grid(23, "cuda", scrambled=True, keep=keep)
    made = _ops.csr_regions(crow, col, 23 * 23, size, rounds)
    assert torch.equal(made.cpu(), layout_references.regions(crow.cpu(), col.cpu(), 23 * 23, size, rounds))


@pytest.mark.cuda
def test_regions_of_empty_and_non_square_matrices():
    crow, col = grid(5, "cuda", scrambled=False)
    empty = crow[:1].clone()
    assert _ops.csr_regions(empty, col[:0], 0, 4, 3).shape == (0,)
    for bad in ((crow, col, 26), (crow.long(), col.long(), 25)):
        for operator in (_ops.csr_regions, _ops.csr_reads):
            with pytest.raises(ValueError, match="expected a square matrix in Int"):
                operator(*bad, 4, 3)
    for bad in ((0, 3), (4, 0), (4, 1025)):
        with pytest.raises(ValueError, match="csr_regions: expected regions of 1 row at least and 1 to 1024 rounds"):
            _ops.csr_regions(crow, col, 25, *bad)
    for bad in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="csr_reads: expected windows of 1 row at least"):
            _ops.csr_reads(crow, col, 25, *bad)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_count_of_rows_that_start_far_from_the_diagonal(index, device):
    """At least 2^14 columns away: rows 2 and 3, and the last, by its first column only; an empty row does not count."""
    begins = [16383, 16384, 16386, 40_000, None, 5]
    col = [c for c in begins if c is not None]
    far_row = 20_000
    crow = torch.tensor([0, 1, 2, 3, 4, 4] + [5] * (far_row - 5) + [8], dtype=index, device=device)
    col = torch.tensor([*col, 0, 19_999, 30_000], dtype=index, device=device)
    facts = Check("here", crow, col, 50_000).facts()
    rows = crow.diff().nonzero().flatten().cpu()
    first = col.cpu()[crow.cpu()[:-1][rows].long()]
    assert facts.far == int(((first - rows).abs() >= 2**14).sum()) == 3
    assert facts.longest == 3


@pytest.fixture
def small(monkeypatch, layouts_on_cpu):
    """Regions, and rows on their way at once, for matrices of a few hundred rows."""
    monkeypatch.setattr(reordered, "REGION_ROWS", 64)
    monkeypatch.setattr(reordered, "AT_ONCE", 64)


@pytest.mark.parametrize("keep", [1.0, 0.5])
@pytest.mark.parametrize("sizes", [SIZES, (8, 3)], ids=str)  # at (8, 3) rows are cut
def test_a_scrambled_grid_is_reordered(sizes, keep, device, small):
    crow, col = grid(40, device, scrambled=True, keep=keep)
    made = reordered.reorder(crow, col, *sizes)
    before, after = made.reads
    assert after < (0.5 if keep == 1 else 0.7) * before
    assert sorted(made.place.tolist()) == list(range(len(col)))
    assert torch.equal(made.col, col[made.place.long()])
    row = torch.repeat_interleave(torch.arange(1600, device=device), crow.diff().long())
    moved = row[made.place.long()]
    order = torch.unique_consecutive(moved)
    assert sorted(order.tolist()) == sorted(set(row.tolist()))  # a row's nonzeros stay together,
    assert all((made.place[moved == r].diff() == 1).all() for r in (0, 7, 1599))  # in their order
    of_rows = chunks_of(crow, col, *sizes)
    assert made.chunks.slots == of_rows.slots
    assert sorted(made.chunks.empty.tolist()) == of_rows.empty.tolist()
    ends = made.chunks.ends
    whole = (ends >= 0) & (ends < 1600)
    assert torch.equal(ends[whole].long(), moved[whole])
    assert (ends >= 0).sum() == (of_rows.ends >= 0).sum()
    cut = {r: count for r, _, count in of_rows.cut.tolist()}
    assert {r: count for r, _, count in made.chunks.cut.tolist()} == cut


def test_a_grid_in_order_is_left_so(device, small):
    assert reordered.reorder(*grid(40, device, scrambled=False), *SIZES) is None


@pytest.mark.cuda
def test_the_rows_of_b_that_windows_read(small):
    crow, col = grid(60, "cuda", scrambled=True)
    order = torch.randperm(3600, device="cuda", dtype=torch.int32)
    for given in (None, order):
        for at_once, every in ((64, 1), (64, 3), (1000, 2), (1, 1), (5000, 4)):
            expected = layout_references.reads(
                crow.cpu(), col.cpu(), 3600, at_once, every, None if given is None else given.cpu()
            )
            assert torch.equal(_ops.csr_reads(crow, col, 3600, at_once, every, given).cpu(), expected)


@pytest.mark.cuda
def test_reordered_rows():
    crow, col = grid(20, "cuda", scrambled=True, keep=0.5)
    order = torch.randperm(400, device="cuda", dtype=torch.int32)
    new_crow, new_col, place = _ops.csr_reorder(crow, col, order)
    dense = torch.sparse_csr_tensor(crow, col, torch.arange(1.0, len(col) + 1, device="cuda"), (400, 400)).to_dense()
    moved = torch.sparse_csr_tensor(new_crow, new_col, place + 1.0, (400, 400)).to_dense()
    assert torch.equal(moved, dense[order.long()])
    for bad in (order[:7], order.long(), order[:, None]):
        with pytest.raises(ValueError, match="csr_reorder: expected the order of 400 rows in Int"):
            _ops.csr_reorder(crow, col, bad)
        with pytest.raises(ValueError, match="csr_chunks: expected names of 400 rows in Int"):
            _ops.csr_chunks(crow, col, 8, 8, bad)


def multiply(made, crow, col, values, b):
    chunks = made.chunks
    cuts = chunks.begins, chunks.ends, chunks.cut, chunks.empty
    moved = values.index_select(0, made.place)
    return _ops.csr_spmm_chunks(*cuts, crow, col, values, b, len(crow) - 1, chunks.slots, None, -1, made.col, moved)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [SIZES, (8, 3)], ids=str)
def test_products_equal_those_in_the_original_order(sizes, dtype, small):
    crow, col = grid(40, "cuda", scrambled=True, keep=0.8)
    values = torch.randn(len(col), device="cuda").to(dtype)
    made, of_rows = reordered.reorder(crow, col, *sizes), chunks_of(crow, col, *sizes)
    for n in (8, 64, 136, 520):
        b = torch.randn(1600, n, device="cuda").to(dtype)
        expected = _ops.csr_spmm_chunks(
            of_rows.begins, of_rows.ends, of_rows.cut, of_rows.empty, crow, col, values, b, 1600, of_rows.slots
        )
        torch.empty_like(expected).fill_(torch.nan)  # memory that the result may reuse
        assert torch.equal(multiply(made, crow, col, values, b), expected)
    for b in (torch.randn(1600, 7, device="cuda").to(dtype), torch.randn(1600, 72, device="cuda").to(dtype)[:, 1:65]):
        by_rows = _ops.csr_spmm(crow, col, values, b, 1600)
        assert torch.equal(multiply(made, crow, col, values, b), by_rows)
    b = torch.randn(1600, 16, device="cuda").to(dtype).requires_grad_()
    (to_b,) = torch.autograd.grad(multiply(made, crow, col, values, b).sum(), b)
    (expected,) = torch.autograd.grad(_ops.csr_spmm(crow, col, values, b, 1600).sum(), b)
    assert torch.equal(to_b, expected)


@pytest.mark.cuda
def test_columns_without_values_are_refused(small):
    crow, col = grid(40, "cuda", scrambled=True)
    chunks = reordered.reorder(crow, col, *SIZES).chunks
    cuts = chunks.begins, chunks.ends, chunks.cut, chunks.empty
    parts = crow, col, torch.randn(len(col), device="cuda"), torch.randn(1600, 8, device="cuda"), 1600, chunks.slots
    with pytest.raises(ValueError, match="expected chunk_col and chunk_values together"):
        _ops.csr_spmm_chunks(*cuts, *parts, None, -1, col)


SIDE = 256  # of a grid whose neighbours' numbers differ by more than 2^14


def scrambled_plan(device, dtype=torch.float32, scrambled=True):
    crow, col = grid(SIDE, device, scrambled=scrambled)
    values = torch.randn(len(col), device=device).to(dtype)
    a = torch.sparse_csr_tensor(crow, col, values, (SIDE * SIDE, SIDE * SIDE))
    return a, plan(a, constant=True)


def dense_side(n, device, dtype=torch.float32):
    return torch.randn(SIDE * SIDE, n, device=device).to(dtype)


@pytest.fixture
def small_cache(monkeypatch):
    monkeypatch.setattr(select, "memory", lambda device: Memory(4e5, 2**23))


@pytest.fixture
def reordering(small_cache, monkeypatch, layouts_on_cpu):
    """On a CPU too, where nothing is scattered."""
    monkeypatch.setattr(selector, "is_scattered", lambda f: f.device.type == "cpu" or select.is_scattered(f))


def takes(made):
    return {m.fastest(True) for m in made._selector.measured.values()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_plan_reorders_and_follows_its_values(dtype, device, reordering):
    a, made = scrambled_plan(device, dtype)
    before = made.nbytes
    b = dense_side(128, device, dtype)
    first = made @ b
    assert takes(made) == {select.REORDERED}
    assert select.REORDERED in made.explain()
    torch.testing.assert_close(first, spmm(a, b))
    assert all(torch.equal(made @ b, first) for _ in range(5))
    assert made.nbytes >= before + (12 + dtype.itemsize) * a.values().numel()
    made.update(a.values() * 2)
    torch.testing.assert_close(made @ b, 2 * first)  # equal except for subnormal numbers
    torch.testing.assert_close(copy.deepcopy(made) @ b, 2 * first)
    torch.testing.assert_close(pickle.loads(pickle.dumps(made)) @ b, 2 * first)
    made.values.mul_(0.5)
    assert torch.equal(made @ b, first)
    torch.testing.assert_close(made.with_values(a.values() * 4) @ b, 4 * first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_with_reordered_rows(dtype, device, reordering):
    a, made = scrambled_plan(device, dtype)
    b, grad = (dense_side(128, device, dtype) for _ in range(2))
    b.requires_grad_()

    def step():
        return torch.autograd.grad(made @ b, b, grad)[0]

    first = step()
    assert takes(made) == {select.REORDERED}
    form = made._selector._products[select.REORDERED]
    assert form._transposed.tensors
    by_rows = torch.autograd.grad(spmm(a, b), b, grad)[0]
    torch.testing.assert_close(first, by_rows)
    assert torch.equal(step(), first)
    made.update(a.values() * 2)
    torch.testing.assert_close(step(), 2 * first)
    with torch.autocast(device, dtype=torch.bfloat16):
        torch.testing.assert_close(step().float(), 2 * first.float(), atol=0.5, rtol=0.05)
    values = made.values.clone().requires_grad_()  # the gradient of the values uses the original order
    to_values, to_b = torch.autograd.grad(made.with_values(values) @ b, (values, b), grad)
    torch.testing.assert_close(to_b, 2 * by_rows)
    assert to_values.shape == values.shape


def test_second_derivatives_with_reordered_rows(device, reordering):
    _, made = scrambled_plan(device)
    b = dense_side(64, device).requires_grad_()
    grad = dense_side(64, device).requires_grad_()
    (to_b,) = torch.autograd.grad(made @ b, b, grad, create_graph=True)
    weight = dense_side(64, device)
    (to_grad,) = torch.autograd.grad(to_b, grad, weight)
    torch.testing.assert_close(to_grad, made @ weight)


def test_rows_are_not_reordered_without_memory(device, reordering, monkeypatch):
    def refuse(*args):
        raise torch.OutOfMemoryError("no memory")

    a, made = scrambled_plan(device)
    monkeypatch.setattr("matmuls.sparse.csr_pattern.reorder", refuse)
    b = dense_side(128, device)
    torch.testing.assert_close(made @ b, spmm(a, b))
    assert select.REORDERED not in made.explain()


def test_rows_of_the_transpose_are_not_reordered_without_memory(device, reordering, monkeypatch):
    def refuse(*args):
        raise torch.OutOfMemoryError("no memory")

    a, made = scrambled_plan(device)
    b = dense_side(128, device).requires_grad_()
    product = made @ b
    assert takes(made) == {select.REORDERED}
    monkeypatch.setattr("matmuls.sparse.csr_pattern.reorder", refuse)
    torch.testing.assert_close(torch.autograd.grad(product.sum(), b)[0], torch.autograd.grad(spmm(a, b).sum(), b)[0])


@pytest.mark.cuda
def test_a_plan_does_not_reorder_ordered_or_cached_matrices(small_cache):
    b = dense_side(128, "cuda")
    for scrambled, side in ((False, b), (True, b[:, :16].contiguous())):
        made = scrambled_plan("cuda", scrambled=scrambled)[1]
        made @ side
        assert select.REORDERED not in made.explain()


@pytest.mark.cuda
def test_a_graph_reads_changed_values(reordering):
    a, made = scrambled_plan("cuda")
    b, grad = dense_side(512, "cuda").requires_grad_(), dense_side(512, "cuda")

    def step():
        return torch.autograd.grad(made @ b, b, grad)[0]

    with torch.no_grad():
        first = made @ b
    gradient = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with torch.no_grad():
            captured = made @ b
        captured_gradient = step()
    graph.replay()
    assert torch.equal(captured, first)
    assert torch.equal(captured_gradient, gradient)
    made.update(a.values() * 2)
    graph.replay()
    torch.testing.assert_close(captured, 2 * first)
    torch.testing.assert_close(captured_gradient, 2 * gradient)


@pytest.mark.cuda
@pytest.mark.parametrize("known", [False, True], ids=["nothing", "the matrix, not the transposed one"])
def test_a_graph_captured_before_everything_is_measured(known, reordering):
    a, made = scrambled_plan("cuda")
    b, grad = dense_side(128, "cuda"), dense_side(128, "cuda")
    if known:
        made @ b
    spmm(a, b)
    b.requires_grad_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made @ b
        gradient = torch.autograd.grad(captured, b, grad)[0]
    graph.replay()
    expected = spmm(a, b)
    torch.testing.assert_close(captured, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, b, grad)[0])


def test_savings_and_cost_of_reordering():
    """For a mesh as measured on an H100: it saves 13 us at 256 bytes a row of B, 50 at 512 and 200 at 2048; reordering
    costs 1100 us.
    """
    s, h100 = SimpleNamespace(columns=258569, rows=258569, nonzeros=1026264), Memory(3.35e6, 50 * 2**20)
    saved = [costs.us_saved_by_reordering(s, row_bytes, h100) for row_bytes in (64, 256, 512, 2048)]
    assert saved[0] < 0
    for found, measured in zip(saved[1:], (13, 50, 200), strict=True):
        assert found == pytest.approx(measured, rel=0.4)
    assert costs.us_to_reorder(s) == pytest.approx(1100, rel=0.1)
    assert costs.us_saved_by_reordering(SimpleNamespace(columns=0, rows=0, nonzeros=0), 64, h100) == 0
    us = [costs.us_by_reads(s, 512, 4, reads, h100) for reads in (786524, 358396)]
    assert us == pytest.approx([172, 122], rel=0.25)


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"far": 258569 // 5}, False),
        ({"columns": 258570}, False),
        ({"longest": 65}, False),
        ({"longest": 20}, False),  # five times the average
        ({"n": 64}, False),
        ({"n": 512}, True),
        ({"dtype": torch.float16}, False),
        ({"dtype": torch.float16, "products": 200}, True),
        ({"dtype": torch.float64}, False),
        ({"device": torch.device("cpu")}, False),
    ],
    ids=str,
)
def test_which_matrices_are_reordered(changed, taken, monkeypatch):
    monkeypatch.setattr(select, "memory", lambda device: Memory(3.35e6, 50 * 2**20))
    of = {"rows": 258569, "columns": 258569, "nonzeros": 1026264, "longest": 4, "far": 190000}
    structure = SimpleNamespace(**of | {k: v for k, v in changed.items() if k in of}, crow=torch.zeros(1).int())
    asked = {"dtype": torch.float32, "n": 128, "device": torch.device("cuda")}
    asked |= {k: v for k, v in changed.items() if k in asked}
    products = changed.get("products", select.PRODUCTS)
    assert select.is_scattered(select.Facts(structure, **asked, products=products)) == taken
