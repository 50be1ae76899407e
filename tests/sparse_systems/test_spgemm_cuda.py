"""spgemm on a GPU: every class of rows against scipy in float64, the same bits at each call, more than fits at once."""

import numpy as np
import pytest
import scipy.sparse
import torch

from matmuls import plan_spgemm, spgemm, spgemm_size

pytestmark = pytest.mark.cuda


def drawn(rows, columns, lengths, seed, index=torch.int32, distinct=True, dtype=torch.float64):
    """A matrix whose row r has lengths[r] nonzeros; sorted and distinct, or in any order with duplicates."""
    generator = np.random.default_rng(seed)
    parts = [
        np.sort(generator.choice(columns, min(n, columns), replace=False))
        if distinct
        else generator.integers(0, columns, n)
        for n in lengths
    ]
    crow = np.cumsum([0, *map(len, parts)])
    col = np.concatenate([*parts, np.empty(0, np.int64)])
    values = torch.from_numpy(generator.standard_normal(len(col))).to(dtype)
    crow, col = (torch.from_numpy(t).to(index) for t in (crow, col))
    return torch.sparse_csr_tensor(crow, col, values, (rows, columns), check_invariants=False).cuda()


def in_scipy(a, ones=False):
    a = a.cpu()
    values = np.ones(a._nnz()) if ones else a.values().double().numpy()
    parts = values, a.col_indices().numpy(), a.crow_indices().numpy()
    return scipy.sparse.csr_matrix(parts, shape=tuple(a.shape), copy=True)  # scipy adds duplicates up in place


def assert_is_product(c, a, b, eps=1e-13):
    pattern = in_scipy(a, ones=True) @ in_scipy(b, ones=True)
    pattern.sort_indices()
    assert np.array_equal(c.crow_indices().cpu(), pattern.indptr)
    assert np.array_equal(c.col_indices().cpu(), pattern.indices)
    assert c.col_indices().dtype == a.col_indices().dtype
    sizes = abs(in_scipy(a)) @ abs(in_scipy(b))
    difference = abs(in_scipy(c) - in_scipy(a) @ in_scipy(b)) - eps * sizes
    assert (
        difference.data.max(initial=0) <= torch.finfo(c.dtype).smallest_normal * torch.finfo(c.dtype).eps
    )  # subnormal


def assert_same(x, y):
    for part in (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values):
        assert torch.equal(part(x), part(y))


# Products of a row: every class of classes.cuh and its bounds; columns of C: 8 lanes, a warp, one tile and several.
LENGTHS = {
    "empty": lambda g: [0] * 50,
    "short": lambda g: g.integers(0, 5, 3000),
    "mean": lambda g: g.integers(0, 40, 900),
    "skewed": lambda g: [700, *g.integers(0, 12, 600), 0, 0, 1500],
    "hub": lambda g: [1900, 0, 3],
}


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("columns", [90, 5000, 300_000])
@pytest.mark.parametrize("kind", LENGTHS)
def test_products_are_scipys(kind, columns, index, distinct):
    generator = np.random.default_rng(columns)
    lengths = LENGTHS[kind](generator)
    middle = 2000
    a = drawn(len(lengths), middle, lengths, 1, index, distinct)
    for seed, width in ((2, 3), (3, 30)):
        b_lengths = generator.integers(0, 2 * width, middle)
        b_lengths[7] = 3000
        b = drawn(middle, columns, b_lengths, seed, index, distinct)
        c = spgemm(a, b)
        assert_is_product(c, a, b)
        assert_same(c, spgemm(a, b))
        assert_same(c, spgemm(a, b, max_nnz=c._nnz()))
        assert_same(c, plan_spgemm(a, b)())
        assert spgemm_size(a, b).nnz == c._nnz()


@pytest.mark.parametrize("products", [15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 256, 257, 511, 512, 513])
def test_bounds_of_the_classes(products):
    """Rows of exactly so many products, of which none meet, or all, or some."""
    for columns in (products, 1, max(products // 3, 1)):
        a = drawn(40, products, [products] * 40, 1)
        col = torch.arange(products).int() % columns
        crow = torch.arange(products + 1).int()
        values = torch.randn(products, dtype=torch.float64)
        b = torch.sparse_csr_tensor(crow, col, values, (products, columns)).cuda()
        assert_is_product(spgemm(a, b), a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_values_are_summed_in_float32(dtype):
    lengths = np.random.default_rng(0).integers(0, 60, 300)
    a, b = drawn(300, 300, lengths, 1, dtype=dtype), drawn(300, 2000, lengths, 2, dtype=dtype)
    c = spgemm(a, b)
    assert c.dtype == dtype
    assert_is_product(c, a, b, eps=8 * torch.finfo(dtype).eps)
    assert_same(c, spgemm(a, b))


def test_columns_far_beyond_those_that_occur():
    """They are numbered by their order: neither bits nor 32-bit columns reach them."""
    columns, lengths = 1 << 40, [900, 3, 0, 700]
    generator = np.random.default_rng(0)
    middle = 1000
    a = drawn(4, middle, lengths, 1, torch.int64)
    narrow = drawn(middle, 5000, generator.integers(0, 30, middle), 2, torch.int64)
    spread = torch.from_numpy(np.sort(generator.choice(1 << 39, 5000, replace=False))).cuda() * 2
    b = torch.sparse_csr_tensor(
        narrow.crow_indices(), spread[narrow.col_indices()], narrow.values(), (middle, columns), check_invariants=False
    )
    expected, c = spgemm(a, narrow), spgemm(a, b)
    assert torch.equal(c.crow_indices(), expected.crow_indices())
    assert torch.equal(c.col_indices(), spread[expected.col_indices()])
    assert torch.equal(c.values(), expected.values())
    assert_same(c, plan_spgemm(a, b)())


@pytest.mark.gpu_memory(8)
def test_more_columns_than_are_kept_between_the_steps():
    n = 17_000  # 289 million products, of which 2^28 would be kept
    column = torch.sparse_csr_tensor(torch.arange(n + 1).int(), torch.zeros(n).int(), torch.ones(n), (n, 1)).cuda()
    row = torch.sparse_csr_tensor(torch.tensor([0, n]).int(), torch.arange(n).int(), torch.ones(n), (1, n)).cuda()
    c = spgemm(column, row)
    assert torch.equal(c.crow_indices(), torch.arange(0, n * n + 1, n, device="cuda").int())
    assert torch.equal(c.col_indices().view(n, n)[n // 2], torch.arange(n, device="cuda").int())
    assert c.col_indices().view(n, n).eq(c.col_indices()[:n]).all()
    assert c.values().eq(1).all()


def test_a_state_of_other_matrices_is_none():
    ops = torch.ops.custom_mm
    a, b = (drawn(200, 200, [n] * 200, n) for n in (9, 20))
    of_a, of_b = ([t.crow_indices(), t.col_indices()] for t in (a, b))
    offsets, state = ops.csr_spgemm_size(of_b, of_b, 200)
    _, other = ops.csr_spgemm_size(of_a, of_a, 200)
    expected, count = spgemm(b, b), int(offsets[-1])
    for given in (state, state.clone(), other):
        for said in (offsets, offsets * 1000 - 7):
            crow, col, _ = ops.csr_spgemm_pattern(of_b, of_b, 200, said, given, count)
            assert torch.equal(crow, expected.crow_indices())
            assert torch.equal(col, expected.col_indices())
        for wrong in (count - 1, count + 1, 0):
            with pytest.raises(ValueError, match=f"expected the {count} nonzeros of the product's size, got {wrong}"):
                ops.csr_spgemm_pattern(of_b, of_b, 200, offsets, given, wrong)


def test_nonzeros_without_rows_are_refused():
    a = torch.sparse_csr_tensor(torch.tensor([0]), torch.tensor([], dtype=torch.int64), torch.ones(0), (0, 3)).cuda()
    b = torch.eye(3).to_sparse_csr().cuda()
    parts = ([t.crow_indices(), t.col_indices()] for t in (a, b))
    lying = [a.crow_indices(), torch.zeros(1, dtype=torch.int64, device="cuda")]
    with pytest.raises(ValueError, match="expected C without nonzeros, as it has no rows, got 1"):
        torch.ops.custom_mm.csr_spgemm(a.values(), b.values(), *parts, lying, 3)


@pytest.mark.parametrize("lie", ["alternating", "falling", "negative", "beyond"])
def test_offsets_of_c_that_lie_do_not_lead_out_of_bounds(lie):
    """The values are wrong then; nothing else is written."""
    a = drawn(3000, 3000, [20] * 3000, 1)
    parts, c = [a.crow_indices(), a.col_indices()], spgemm(a, a)
    crow, count = c.crow_indices().clone(), c.col_indices().shape[0]
    rows = torch.arange(len(crow), device="cuda", dtype=crow.dtype)
    crow = {
        "alternating": rows % 2 * count,
        "falling": crow.flip(0),
        "negative": crow - 2**30,
        "beyond": crow + 2**30,
    }[lie].to(crow.dtype)
    torch.ops.custom_mm.csr_spgemm(a.values(), a.values(), parts, parts, [crow, c.col_indices()], 3000)
    torch.cuda.synchronize()
    assert torch.equal(spgemm(a, a).values(), c.values())
