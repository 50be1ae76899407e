"""spgemm and plan_spgemm: patterns and values compared with scipy, gradients, sizes, structure reuse, hostile input."""

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sparse_cases import assert_close, draw_sparse, every_dtype, every_layout, in_layout
from matmuls import plan, plan_spgemm, spgemm, spgemm_size


def to_scipy(a, values=None):
    a = a.detach().cpu()
    values = a.values().double() if values is None else values
    return scipy.sparse.csr_matrix((values, a.col_indices(), a.crow_indices()), shape=tuple(a.shape))


def assert_is_product(c, a, b):
    """c has scipy's pattern of a @ b with ones for values (scipy leaves sums of 0 out), sorted, and scipy's values."""
    pattern = to_scipy(a, torch.ones(a._nnz())) @ to_scipy(b, torch.ones(b._nnz()))
    pattern.sort_indices()
    assert c.layout == torch.sparse_csr
    assert tuple(c.shape) == pattern.shape
    assert np.array_equal(c.crow_indices().cpu(), pattern.indptr)
    assert np.array_equal(c.col_indices().cpu(), pattern.indices)
    difference = to_scipy(c) - to_scipy(a) @ to_scipy(b)
    assert np.abs(difference.data).max(initial=0) <= 1e-12 * max(1, np.abs(to_scipy(c).data).max(initial=0))


@st.composite
def matrices(draw):
    """Two CSR matrices with empty rows, columns in any order, duplicates and zeros."""
    rows, middle, columns = (draw(st.integers(0, 12)) for _ in range(3))
    index = draw(st.sampled_from([torch.int32, torch.int64]))

    def matrix(height, width):
        lengths = [draw(st.integers(0, 6 if width else 0)) for _ in range(height)]
        col = [draw(st.integers(0, width - 1)) for _ in range(sum(lengths))]
        values = [draw(st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0])) for _ in col]
        crow = torch.tensor([0, *lengths]).cumsum(0).to(index)
        col, values = torch.tensor(col, dtype=index), torch.tensor(values, dtype=torch.float64)
        return torch.sparse_csr_tensor(crow, col, values, (height, width), check_invariants=False)

    return matrix(rows, middle), matrix(middle, columns)


@given(matrices())
@settings(max_examples=150, deadline=None)
def test_products_are_scipys(pair):
    a, b = pair
    c = spgemm(a, b)
    assert c.col_indices().dtype == a.col_indices().dtype
    assert_is_product(c, a, b)
    made = plan_spgemm(a, b)
    assert_is_product(made(), a, b)
    assert spgemm_size(a, b).nnz == made.nnz == c._nnz()


@every_layout
@every_dtype
def test_layouts_and_dtypes(layout, dtype, device):
    dense = draw_sparse(24, 36, 0.2, dtype, device), draw_sparse(36, 12, 0.3, dtype, device, seed=1, empty=(3,))
    a, b = (in_layout(d, layout) for d in dense)
    truth = dense[0].double() @ dense[1].double()
    theirs = (dense[0].float() @ dense[1].float()).to(dtype) if dtype.itemsize == 2 else dense[0] @ dense[1]
    for c in spgemm(a, b), plan(a) @ b, plan(a) @ plan(b), plan_spgemm(a, plan(b))():
        assert c.dtype == dtype
        assert_close(c.to_dense(), truth, theirs, torch.linalg.vector_norm(dense[0].abs() @ dense[1].abs()).item())


def few_in(columns):
    crow, col = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 1])
    a = torch.sparse_csr_tensor(crow, col, torch.tensor([1.0, 2.0, 3.0]), (3, 2))
    crow, col = torch.tensor([0, 2, 4]), torch.tensor([columns - 1, 5, 5, columns // 2])
    b = torch.sparse_csr_tensor(crow, col, torch.tensor([1.0, 10.0, 100.0, 1000.0]), (2, columns))
    return a, b


def test_few_nonzeros_in_many_columns():
    """Rows are searched where a dense row would cost more pages than there are products."""
    columns = 1 << 40
    c = spgemm(*few_in(columns))
    assert c.crow_indices().tolist() == [0, 3, 3, 5]
    assert c.col_indices().tolist() == [5, columns // 2, columns - 1, 5, columns // 2]
    assert c.values().tolist() == [210.0, 2000.0, 1.0, 300.0, 3000.0]
    a, b = few_in(1 << 21)
    leaves = a.values().double().requires_grad_(), b.values().double().requires_grad_()
    assert torch.autograd.gradcheck(plan_spgemm(a, b).values, leaves)


def test_long_rows():
    """Rows beyond those that are ranked, in one group of 4096 columns and in many."""
    a = draw_sparse(40, 60, 0.5, torch.float64).to_sparse_csr()
    for columns, density in ((3000, 0.05), (300000, 0.001)):
        generator = torch.Generator().manual_seed(columns)
        count = int(60 * columns * density)
        places = torch.randint(60 * columns, (count,), generator=generator).unique()
        values = torch.randn(len(places), generator=generator, dtype=torch.float64)
        index = torch.stack([places // columns, places % columns])
        b = torch.sparse_coo_tensor(index, values, (60, columns)).coalesce().to_sparse_csr()
        assert_is_product(spgemm(a, b), a, b)


def test_the_same_bits_for_every_number_of_threads():
    a = draw_sparse(3000, 500, 0.05).to_sparse_csr()
    before, results = torch.get_num_threads(), []
    made = plan_spgemm(a, a.mT)
    weights = torch.randn(made.nnz)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            values = [t.clone().requires_grad_() for t in (made.a.values, made.b.values)]
            out = made.values(*values)
            out.backward(weights)
            c = spgemm(a, a.mT)
            results.append([out.detach(), c.values(), c.col_indices(), *(v.grad for v in values)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@every_layout
def test_gradcheck(layout):
    a = in_layout(draw_sparse(6, 9, 0.4, torch.float64, empty=(2,)), layout)
    b = in_layout(draw_sparse(9, 6, 0.4, torch.float64, seed=1), layout)
    made = plan_spgemm(a, b)
    leaves = [torch.randn(p.nnz, dtype=torch.float64, requires_grad=True) for p in (made.a, made.b)]
    assert torch.autograd.gradcheck(made.values, leaves)
    assert torch.autograd.gradgradcheck(made.values, leaves)


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_gradients_of_sparse_leaves(layout, device):
    dense = [draw_sparse(12, 8, 0.3, torch.float64, device), draw_sparse(8, 10, 0.3, torch.float64, device, seed=1)]
    weight = torch.randn(12, 10, dtype=torch.float64, device=device)
    for function in (spgemm, lambda a, b: plan(a) @ b, lambda a, b: plan_spgemm(a, b)()):
        a, b = (in_layout(d, layout).requires_grad_() for d in dense)
        (function(a, b).to_dense() * weight).sum().backward()
        assert a.grad.layout == a.layout
        torch.testing.assert_close(a.grad.to_dense(), (weight @ dense[1].mT) * (dense[0] != 0))
        torch.testing.assert_close(b.grad.to_dense(), (dense[0].mT @ weight) * (dense[1] != 0))


def test_a_plan_reads_the_values_of_each_product(device):
    a, b = (draw_sparse(20, 20, 0.2, torch.float64, device, seed=s).to_sparse_csr() for s in (0, 1))
    made = plan_spgemm(a, b)
    a.values().mul_(3)
    assert_is_product(made(), a, b)
    values = torch.randn(made.b.nnz, dtype=torch.float64, device=device)
    other = torch.sparse_csr_tensor(b.crow_indices(), b.col_indices(), values, b.shape)
    assert_is_product(made(None, values), a, other)
    made.b.update(values)
    assert_is_product(made(), a, other)
    single = made(made.a.values.float(), values.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.values().double(), made.values(), rtol=1e-5, atol=1e-5)


def test_the_size_is_known_before(device):
    a = draw_sparse(20, 20, 0.2, torch.float64, device).to_sparse_csr()
    size = spgemm_size(a, a)
    c = spgemm(a, a, max_nnz=size.nnz)
    assert size.nbytes == sum(t.nbytes for t in (c.crow_indices(), c.col_indices(), c.values()))
    for function in spgemm, plan_spgemm:
        with pytest.raises(
            ValueError, match=rf"{function.__name__}: expected a product of at most 5 nonzeros, got {size.nnz}"
        ):
            function(a, a, max_nnz=5)


@pytest.mark.exhaustive
def test_more_nonzeros_than_int32_reaches_is_an_error_before_the_allocation(device):
    n = 50000  # a full result would have 2.5e9 nonzeros
    column = torch.sparse_csr_tensor(torch.arange(n + 1).int(), torch.zeros(n).int(), torch.ones(n), (n, 1)).to(device)
    row = torch.sparse_csr_tensor(torch.tensor([0, n]).int(), torch.arange(n).int(), torch.ones(n), (1, n)).to(device)
    assert spgemm_size(column, row).nnz == n * n
    with pytest.raises(ValueError, match=r"csr_spgemm_pattern: expected at most 2147483647 nonzeros .*got 2500000000"):
        spgemm(column, row)


@pytest.mark.parametrize("width", [5, 8, 12, 300])
@every_dtype
def test_counted_and_uncounted_products_are_equal(width, dtype):
    """Rows of few products, which are sorted, and of many, with duplicates; for one thread and for several parts."""
    generator = torch.Generator().manual_seed(width)
    rows, columns = 60_000 // width, 700
    crow = torch.arange(0, rows * width + 1, width)
    col = torch.randint(columns, (rows * width,), generator=generator)
    a = torch.sparse_csr_tensor(crow, col, torch.randn(len(col), generator=generator).to(dtype), (rows, columns))
    b = draw_sparse(columns, 500, 0.004, dtype).to_sparse_csr()
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            ours, counted = spgemm(a, b), spgemm(a, b, max_nnz=2**31)
            for part in (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values):
                assert torch.equal(part(ours), part(counted))
                assert part(ours).untyped_storage().nbytes() == part(ours).nbytes
    finally:
        torch.set_num_threads(before)
    assert torch.equal(ours.values(), plan_spgemm(a, b).values())


def test_more_products_than_are_kept_uncounted():
    """They are counted then, not held: 144 million products of 12000 nonzeros."""
    n = 12_000
    a = torch.sparse_csr_tensor(torch.tensor([0, n]), torch.zeros(n).long(), torch.ones(n), (1, 1))
    b = torch.sparse_csr_tensor(torch.tensor([0, n]), torch.arange(n), torch.ones(n), (1, n))
    c = spgemm(a, b)
    assert torch.equal(c.col_indices(), torch.arange(n))
    assert c.values().eq(n).all()


def test_compiled(device):
    a = draw_sparse(9, 9, 0.4, device=device).to_sparse_csr()
    made = plan_spgemm(a, a)
    values = made.a.values.clone().requires_grad_()
    compiled = torch.compile(lambda v: made.values(v, v).square().sum(), fullgraph=True, backend="aot_eager")
    made.values(values, values).square().sum().backward()
    expected, values.grad = values.grad, None
    compiled(values).backward()
    torch.testing.assert_close(values.grad, expected)


def test_compiled_without_a_limit(device):
    """A graph break: the number of nonzeros is known only at run time."""
    a = draw_sparse(9, 9, 0.4, device=device).to_sparse_csr()
    made = plan(a)
    torch._dynamo.reset()
    compiled = torch.compile(lambda v: spgemm(made.with_values(v), made).values(), backend="eager")
    torch.testing.assert_close(compiled(2 * made.values), spgemm(made.with_values(2 * made.values), made).values())


def test_errors_say_what_was_expected(device):
    a, b = (draw_sparse(*s, 0.4, device=device).to_sparse_csr() for s in ((4, 5), (5, 3)))
    with pytest.raises(RuntimeError, match=r"spgemm: expected B of 5 rows for A of shape \[4, 5\], got \[4, 5\]"):
        spgemm(a, a)
    with pytest.raises(
        RuntimeError, match=r"plan_spgemm: expected B in torch.float32 on .* as A is, got torch.float64"
    ):
        plan_spgemm(a, b.double())
    with pytest.raises(TypeError, match="spgemm: expected B to be a sparse tensor or a plan, got a dense tensor"):
        spgemm(a, b.to_dense())
    with pytest.raises(TypeError, match="spgemm: expected A to be a sparse tensor or a plan, got list"):
        spgemm([a], b)
    batch = torch.stack([b.to_dense()] * 2).to_sparse_csr()
    with pytest.raises(ValueError, match="spgemm: expected B to be one matrix, got a batch"):
        spgemm(a, batch)
    made = plan_spgemm(a, b)
    with pytest.raises(ValueError, match=rf"expected values of shape \[{a._nnz()}\]"):
        made(torch.randn(a._nnz() + 1, device=device))


def test_hostile_indices_do_not_lead_out_of_bounds():
    ops = torch.ops.custom_mm
    a = draw_sparse(10, 10, 0.4).to_sparse_csr()
    parts, values = [a.crow_indices(), a.col_indices()], a.values()
    offsets, state = ops.csr_spgemm_size(parts, parts, 10)
    nnz = int(offsets[-1])
    crow, col, _ = ops.csr_spgemm_pattern(parts, parts, 10, offsets, state, nnz)
    beyond = [parts[0], parts[1] + 2**40]
    for bad in (
        lambda: ops.csr_spgemm_size(parts, beyond, 10),
        lambda: ops.csr_spgemm_size(beyond, parts, 10),
        lambda: ops.csr_spgemm_size(parts, parts, 3),
        lambda: ops.csr_spgemm_pattern(parts, parts, 10, offsets - 1, state, nnz),
        lambda: ops.csr_spgemm_pattern(parts, parts, 10, (offsets - 1).clamp_min(0), state, nnz - 1),
        lambda: ops.csr_spgemm_pattern(parts, parts, 10, offsets * 2, state, 2 * nnz, values, values),
        lambda: ops.csr_spgemm_pattern(parts, parts, 10, offsets // 2, state, nnz // 2, values, values),
        lambda: ops.csr_spgemm_pattern(parts, beyond, 10, offsets, state, -1, values, values),
        lambda: ops.csr_spgemm_pattern(parts, parts, 10, offsets, state, -2, values, values),
        lambda: ops.csr_spgemm(values, values, parts, parts, [crow, col - 1], 10),
        lambda: ops.csr_spgemm(values, values, parts, parts, [crow, col, col + nnz], 10),
        lambda: ops.csr_spgemm_sampled(values, values, parts, beyond, parts, 10),
        lambda: ops.csr_spgemm_sampled(values, values, [], parts, parts, 10),
    ):
        with pytest.raises(ValueError, match=r"csr_spgemm.*: expected"):
            bad()
