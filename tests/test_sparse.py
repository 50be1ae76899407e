"""Sparse products: every layout, dtype, index type and reduction against float64; gradients, plans, invalid input."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from custom_mm.indices import Check
from matmuls import cusparseMM, plan, sddmm, sparse_attention, sparse_softmax, spmm
from matmuls.sparse import csr_pattern
from matmuls.sparse.default_spmm import takes_chunks
from matmuls.sparse.smem_tiles import layout_of

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["csr", "csc", "coo", "bsr", "bsc"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def draw_sparse(rows, columns, density, dtype=torch.float32, device="cpu", seed=0, empty=()):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    dense *= torch.rand(rows, columns, generator=generator) < density
    dense[list(empty)] = 0
    return dense.to(dtype).to(device)


def in_layout(dense, layout, index=torch.int64):
    if layout == "coo":
        return dense.to_sparse()
    blocks = next(n for n in (3, 2, 1) if dense.shape[0] % n == 0 and dense.shape[1] % n == 0)
    sizes = ((blocks, blocks),) if layout in ("bsr", "bsc") else ()
    sparse = getattr(dense, f"to_sparse_{layout}")(*sizes)
    if index == torch.int64:
        return sparse
    by_rows = layout in ("csr", "bsr")
    offsets = sparse.crow_indices() if by_rows else sparse.ccol_indices()
    inner = sparse.col_indices() if by_rows else sparse.row_indices()
    return torch.sparse_compressed_tensor(
        offsets.to(index), inner.to(index), sparse.values(), sparse.shape, layout=sparse.layout
    )


def assert_close(ours, truth, torchs, scale=None):
    """At most twice torch's error in the same dtype, plus one rounding, relative to the sum of the terms'
    magnitudes.
    """
    scale = torch.linalg.vector_norm(truth).item() if scale is None else scale
    error, theirs = (torch.linalg.vector_norm(x.double() - truth).item() for x in (ours, torchs))
    roundings = 4 if ours.dtype == torch.float64 else 1
    assert error <= 2 * theirs + roundings * torch.finfo(ours.dtype).eps * scale


def reduced(dense, b, reduce, stored=None):
    """Dense reference of a reduction over the stored entries: `stored`, by default the nonzeros."""
    stored = dense != 0 if stored is None else stored
    if reduce == "sum":
        return dense @ b
    lengths = stored.sum(1, keepdim=True)
    if reduce == "mean":
        return dense @ b / lengths.clamp_min(1).to(b.dtype)
    terms = dense[:, :, None] * b[None]
    end = -torch.inf if reduce == "max" else torch.inf
    terms = torch.where(stored[:, :, None], terms, end)
    best = terms.amax(1) if reduce == "max" else terms.amin(1)
    return torch.where(lengths > 0, best, 0)


# ----------------------------------------------------------------------------------------------------------- products


@every_dtype
@every_layout
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
def test_product_of_every_layout(layout, dtype, index, device):
    dense = draw_sparse(30, 42, 0.2, dtype, device, empty=(3, 29))
    a = in_layout(dense, layout, index)
    for n in (1, 2, 7, 8, 16, 33, 64, 130):
        b = draw_sparse(42, n, 1, dtype, device, seed=n)
        truth = dense.double() @ b.double()
        for matrix in (a, plan(a)):
            assert_close(spmm(matrix, b), truth, dense @ b)
    assert torch.equal(plan(a) @ b, spmm(a, b))
    assert_close(spmm(a, b[:, 0]), truth[:, 0], dense @ b[:, 0])


@every_dtype
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_reductions(reduce, dtype, device):
    dense = draw_sparse(40, 50, 0.15, dtype, device, empty=(0, 17))
    for n in (1, 5, 32, 300):
        b = draw_sparse(50, n, 1, dtype, device, seed=n)
        truth = reduced(dense.double(), b.double(), reduce)
        assert_close(spmm(dense.to_sparse_csr(), b, reduce=reduce), truth, reduced(dense, b, reduce))
        assert_close(spmm(dense.to_sparse_csc(), b, reduce=reduce), truth, reduced(dense, b, reduce))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_out_alpha_and_beta(reduce, device):
    dense, b = draw_sparse(30, 20, 0.2, torch.float64, device, empty=(5,)), draw_sparse(20, 9, 1, torch.float64, device)
    a, c = dense.to_sparse_csr(), draw_sparse(30, 9, 1, torch.float64, device, seed=2)
    expected = 0.5 * reduced(dense, b, reduce) - 2 * c
    torch.testing.assert_close(spmm(a, b, reduce=reduce, alpha=0.5), 0.5 * reduced(dense, b, reduce))
    outs = [c.clone(), c.mT.contiguous().mT, torch.full((30, 12), 7.0, dtype=c.dtype, device=device)[:, 1:10]]
    outs[2].copy_(c)
    for out in outs:
        version = out._version
        assert spmm(a, b, reduce=reduce, alpha=0.5, beta=-2, out=out) is out
        torch.testing.assert_close(out, expected)
        assert out._version > version
    vector = c[:, 0].clone()
    spmm(a, b[:, 0], reduce=reduce, alpha=0.5, beta=-2, out=vector)
    torch.testing.assert_close(vector, expected[:, 0])


def long_rows(device="cpu", index=torch.int64):
    """Rows of every length in 20,000 columns: longer than a work share, empty, a single nonzero."""
    lengths = torch.tensor([0, 1, 12000, 3, 0, 20000, 7, 65, 9000, 129, 0, 0, 2, 15000, 64, 4097, 1])
    crow = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    generator = torch.Generator().manual_seed(0)
    col = torch.cat([torch.randperm(20000, generator=generator)[:n] for n in lengths.tolist()])
    values = torch.randn(col.numel(), generator=generator, dtype=torch.float64)
    return crow.to(index).to(device), col.to(index).to(device), values.to(device), (len(lengths), 20000)


@every_dtype
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
def test_rows_longer_than_a_work_share(dtype, index, device):
    crow, col, values, shape = long_rows(device, index)
    a = torch.sparse_csr_tensor(crow, col, values.to(dtype), shape)
    dense = a.to_dense()
    for n, reduce in ((1, "sum"), (16, "mean"), (37, "sum")):
        b = draw_sparse(shape[1], n, 1, dtype, device, seed=n)
        ours = spmm(a, b, reduce=reduce)
        truth = reduced(dense.double(), b.double(), reduce)
        scale = torch.linalg.vector_norm(reduced(dense.double().abs(), b.double().abs(), reduce)).item()
        assert_close(ours, truth, reduced(dense, b, reduce), scale)
        assert all(torch.equal(spmm(a, b, reduce=reduce), ours) for _ in range(3))
    out = torch.ones(shape[0], n, dtype=dtype, device=device)
    spmm(a, b, beta=1, out=out)
    assert_close(out, truth + 1, dense @ b + 1, scale)


@every_dtype
@pytest.mark.parametrize(("batch", "n"), [(4, 512), (8, 128), (16, 64), (32, 32), (2, 1024)])
def test_skewed_rows(batch, n, dtype, device):
    """Enough nonzeros, distributed unevenly enough, that a GPU splits them into equal shares: empty rows, short rows,
    and a few of thousands, at any position within the shares.
    """
    generator = torch.Generator().manual_seed(n)
    lengths = (40 / torch.rand(4000, generator=generator, dtype=torch.float64) ** 1.2).long().clamp_max(9000) // 4
    lengths[torch.rand(4000, generator=generator) < 0.3] = 0
    lengths[[0, 1, 2, 3997, 3998, 3999]] = torch.tensor([0, 3000, 256, 255, 2000, 0])
    crow = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    col = torch.randint(400, (int(crow[-1]),), generator=generator).int()
    values = torch.randn(col.numel(), generator=generator).to(dtype)
    row = torch.arange(4000).repeat_interleave(lengths)
    b = draw_sparse(batch * 400, n, 1, dtype, device, seed=n).view(batch, 400, n)
    wide = [
        torch.zeros(4000, 400, dtype=torch.float64).index_put_((row, col.long()), v, True).to(device)
        for v in (values.double(), values.double().abs())
    ]
    truth, scale = wide[0] @ b.double(), torch.linalg.vector_norm(wide[1] @ b.double().abs()).item()
    made = plan(torch.sparse_csr_tensor(crow, col, values, (4000, 400)).to(device), tune=False)
    ours = made @ b
    bound = 4 * torch.finfo(dtype).eps * scale
    assert torch.linalg.vector_norm(ours.double() - truth) <= bound
    assert all(torch.equal(made @ b, ours) for _ in range(100 if device == "cuda" else 1))
    out = torch.ones_like(ours)
    spmm(made, b, reduce="mean", alpha=0.5, beta=2, out=out)
    mean = truth / lengths.clamp_min(1).to(device)[:, None]
    assert (
        torch.linalg.vector_norm(out.double() - 2 - 0.5 * mean)
        <= bound + 4 * torch.finfo(dtype).eps * out.numel() ** 0.5
    )


def test_results_do_not_depend_on_the_number_of_threads():
    crow, col, values, shape = long_rows()
    a, b = torch.sparse_csr_tensor(crow, col, values.float(), shape), torch.randn(shape[1], 19)
    threads = torch.get_num_threads()
    results = []
    for n in (1, 2, 5):
        torch.set_num_threads(n)
        results.append((spmm(a, b), *torch.ops.custom_mm.csr_transpose(crow, col, shape[1])))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@every_dtype
def test_any_strides_of_b(dtype, device):
    dense, b = draw_sparse(30, 20, 0.3, dtype, device), draw_sparse(20, 16, 1, dtype, device)
    wide = torch.full((20, 48), float("nan"), dtype=dtype, device=device)
    layouts = [b.mT.contiguous().mT, wide[:, :16].copy_(b), wide[:, 17:33].copy_(b), wide[:, 1::3].copy_(b)]
    layouts.append(b[:1].expand(20, 16))
    for x in layouts:
        assert_close(spmm(dense.to_sparse_csr(), x), dense.double() @ x.double(), dense @ x)


def test_unsorted_and_duplicate_columns(device):
    crow, col = torch.tensor([0, 4, 4, 6], device=device), torch.tensor([2, 0, 2, 1, 1, 1], device=device)
    values = torch.arange(1.0, 7, device=device)
    a, b = torch.sparse_csr_tensor(crow, col, values, (3, 3)), torch.randn(3, 5, device=device)
    expected = torch.stack([4 * b[2] + 2 * b[0] + 4 * b[1], 0 * b[0], 11 * b[1]])
    torch.testing.assert_close(spmm(a, b), expected)
    coo = torch.sparse_coo_tensor(torch.stack([torch.tensor([2, 0, 2, 0, 0, 0], device=device), col]), values, (3, 3))
    torch.testing.assert_close(spmm(coo, b), coo.to_dense() @ b)


@every_dtype
def test_batches(dtype, device):
    dense = torch.stack([draw_sparse(12, 10, 0.4, dtype, device, seed=s) for s in range(6)])
    mask = draw_sparse(12, 10, 0.4, torch.float64, device) != 0
    b = draw_sparse(60, 7, 1, dtype, device).view(6, 10, 7)
    # one pattern with batched values and B
    dense = dense * 0 + torch.where(mask, torch.randn(6, 12, 10, device=device).to(dtype), 0)
    one = plan(mask.to(dtype).to_sparse_csr())
    values = dense[:, mask]
    p = [torch.ops.custom_mm.csr_spmm, one._pattern.crow, one._pattern.col]
    truth = dense.double() @ b.double()
    assert_close(p[0](p[1], p[2], values, b, 10), truth, dense @ b)
    assert_close(p[0](p[1], p[2], values.view(2, 3, -1), b.view(2, 3, 10, 7), 10).view(6, 12, 7), truth, dense @ b)
    assert_close(p[0](p[1], p[2], values, b[0], 10), dense.double() @ b[0].double(), dense @ b[0])
    assert_close(spmm(one.with_values(values[0]), b), dense[0].double() @ b.double(), dense[0] @ b)
    # a batch of sparse matrices, each with its own pattern
    counts = torch.stack([torch.randperm(120)[:40] for _ in range(6)]).to(device)
    own = torch.zeros(6, 120, dtype=dtype, device=device).scatter_(1, counts, 1).view(6, 12, 10) * (1 + dense.abs())
    for layout in ("csr", "csc"):
        a = in_layout(own, layout)
        assert_close(spmm(a, b), own.double() @ b.double(), own @ b)
        assert_close(plan(a) @ b, own.double() @ b.double(), own @ b)
        assert_close(spmm(a, b[0]), own.double() @ b[0].double(), own @ b[0])
        out = torch.empty(6, 12, 7, dtype=dtype, device=device)
        assert_close(spmm(a, b, out=out), own.double() @ b.double(), own @ b)


def test_a_batch_into_an_overlapping_out_is_refused(device):
    dense = torch.randn(2, 4, 4, device=device)
    a, b = dense.to_sparse_csr(), torch.randn(2, 4, 4, device=device)
    over_itself, over_b = torch.zeros(20, device=device).as_strided((2, 4, 4), (2, 4, 1)), b.mT
    over_values = a.values().view(-1).as_strided((2, 4, 4), (16, 1, 4))
    for x, out, message in (
        (b, over_itself, "spmm: expected out to have one memory location per element"),
        (b, over_b, "spmm: expected out and dense not to overlap"),
        (b, over_values, "spmm: expected out and values not to overlap"),
    ):
        before = out.clone()
        with pytest.raises(RuntimeError, match=message):
            spmm(a, x, out=out)
        assert torch.equal(out, before)
    out = torch.empty(2, 4, 4, device=device).mT
    torch.testing.assert_close(spmm(a, b, out=out), dense @ b)


def test_empty_shapes(device):
    for rows, columns, n in product((0, 3), (0, 4), (0, 5)):
        a = torch.zeros(rows, columns, device=device).to_sparse_csr()
        b = torch.randn(columns, n, device=device)
        for reduce in ("sum", "mean", "max", "min"):
            assert torch.equal(spmm(a, b, reduce=reduce), torch.zeros(rows, n, device=device))
        out = torch.ones(rows, n, device=device)
        assert torch.equal(spmm(a, b, beta=2, out=out), torch.full((rows, n), 2.0, device=device))
        assert sddmm(torch.randn(rows, n, device=device), torch.randn(n, columns, device=device), a).shape == (0,)
        assert sparse_softmax(a.values(), a).shape == (0,)
    a = torch.eye(3, device=device).to_sparse_csr()
    assert torch.equal(
        sddmm(torch.randn(3, 0, device=device), torch.randn(0, 3, device=device), a).cpu(), torch.zeros(3)
    )
    assert spmm(a, torch.randn(0, 3, 5, device=device)).shape == (0, 3, 5)


def test_nan_and_inf_stay_in_their_rows(device):
    dense, b = draw_sparse(20, 20, 0.2, torch.float32, device), torch.randn(20, 9, device=device)
    b[3], b[7] = float("inf"), float("nan")
    a = dense.to_sparse_csr()
    stored = dense != 0
    result = spmm(a, b)
    assert result[~(stored[:, 3] | stored[:, 7])].isfinite().all()
    assert result[stored[:, 7]].isnan().all()
    assert (result[stored[:, 3] & ~stored[:, 7]].abs() == torch.inf).all()
    for reduce in ("max", "min"):
        assert spmm(a, b, reduce=reduce)[stored[:, 7]].isnan().all()


# ---------------------------------------------------------------------------------------------------- SDDMM and softmax


@pytest.mark.parametrize("n", [3, 8, 16, 64, 136, 264, 520])
@pytest.mark.parametrize(
    "rows", [(0, 1, 40, 5000), (4999, 5000), (17, 18, 19, 400, 433, 466, 3000), (0,), (2500,)], ids=str
)
def test_sampled_products_among_empty_rows(rows, n, device):
    """Thousands of empty rows in sequence, as in web graphs."""
    each = torch.zeros(5001, dtype=torch.int32)
    each[list(rows)] = torch.randint(1, 40, (len(rows),), dtype=torch.int32)
    crow = torch.cat([each.new_zeros(1), each.cumsum(0, dtype=torch.int32)]).to(device)
    col = torch.cat([torch.randperm(60)[:k].sort().values for k in each[each > 0].tolist()]).int().to(device)
    a, b = torch.randn(5001, n, device=device), torch.randn(n, 60, device=device)
    pattern = torch.sparse_csr_tensor(crow, col, torch.ones(len(col), device=device), (5001, 60))
    row = torch.repeat_interleave(torch.arange(5001, device=device), crow.diff().long())
    expected = (a.double()[row] * b.double().mT[col.long()]).sum(1)
    torch.testing.assert_close(sddmm(a, b, pattern).double(), expected, atol=1e-5, rtol=1e-5)


@every_dtype
@every_layout
def test_sddmm(layout, dtype, device):
    dense = draw_sparse(30, 42, 0.2, dtype, device, empty=(4,))
    pattern = in_layout(dense, layout)
    for lead, d in (
        ((), 1),
        ((), 8),
        ((), 33),
        ((), 128),
        ((), 264),
        ((3,), 16),
        ((2, 3), 5),
        ((2, 1), 64),
        ((2,), 520),
    ):
        x, y = (torch.randn(*lead, rows, d, device=device).to(dtype) for rows in (30, 42))
        ours = sddmm(x, y.mT, plan(pattern), alpha=0.5)
        assert torch.equal(ours, sddmm(x, y.mT, pattern, alpha=0.5))
        # in the pattern's own order again: values of a matrix of the same layout
        full, truth = 0.5 * (x @ y.mT), 0.5 * (x.double() @ y.double().mT)
        places = in_layout(
            torch.arange(1.0, 30 * 42 + 1, device=device).view(30, 42) * (pattern.to_dense() != 0), layout
        )
        index = (places.coalesce() if layout == "coo" else places).values().reshape(-1).long() - 1
        if layout in ("bsr", "bsc"):
            keep = index >= 0
            ours, index = ours[..., keep], index[keep]
        sample = [t.flatten(-2)[..., index] for t in (truth, full)]
        assert_close(ours, *sample, scale=torch.linalg.vector_norm(truth).item())


@every_dtype
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_sparse_softmax(layout, dtype, device):
    dense = draw_sparse(30, 42, 0.3, dtype, device, empty=(4,))
    a = in_layout(dense, layout)
    ours = torch.zeros(30, 42, dtype=dtype, device=device)
    where = in_layout(torch.where(dense != 0, torch.arange(1.0, 30 * 42 + 1, device=device).view(30, 42), 0), layout)
    ours.view(-1)[where.values().long() - 1] = sparse_softmax(a.values(), a, scale=1.5)

    def reference(x):
        y = torch.softmax(torch.where(dense != 0, x * 1.5, -torch.inf), -1)
        return torch.where((dense != 0).any(1, keepdim=True), y, 0)

    assert_close(ours, reference(dense.double()), reference(dense))
    batch = torch.stack([a.values(), a.values() * 2]).view(2, 1, -1)
    assert torch.equal(sparse_softmax(batch, plan(a))[0, 0], sparse_softmax(a.values(), a))


@every_dtype
def test_softmax_of_long_rows(dtype, device):
    crow, col, values, shape = long_rows(device)
    x = values.to(dtype)
    pattern = torch.sparse_csr_tensor(crow, col, x, shape)
    rows = list(zip(crow.tolist()[:-1], crow.tolist()[1:], strict=True))
    truth, theirs = (torch.cat([torch.softmax(t[b:e], 0) for b, e in rows]) for t in (x.double(), x))
    assert_close(sparse_softmax(x, pattern), truth, theirs)
    grad = torch.randn(len(x), device=device).to(dtype)
    ours = torch.ops.custom_mm.csr_softmax_backward(crow, theirs, grad)
    g = grad.double()
    exact = torch.cat([t * (g[b:e] - (t * g[b:e]).sum()) for b, e in rows for t in [theirs[b:e].double()]])
    narrow = torch.cat([torch._softmax_backward_data(grad[b:e], theirs[b:e], 0, dtype) for b, e in rows])
    assert_close(ours, exact, narrow)


def test_softmax_of_nan_and_inf(device):
    x = torch.tensor([1.0, float("nan"), 2.0, 3.0, float("inf"), 1.0, -float("inf"), 0.0], device=device)
    crow = torch.tensor([0, 2, 4, 6, 8], device=device)
    ours = sparse_softmax(x, torch.sparse_csr_tensor(crow, torch.tensor([0, 1] * 4, device=device), x, (4, 2)))
    torch.testing.assert_close(ours.view(4, 2), torch.softmax(x.view(4, 2), -1), equal_nan=True)


@every_dtype
@pytest.mark.parametrize("lead", [(), (3,), (2, 4)], ids=str)
def test_sparse_attention(lead, dtype, device):
    mask = draw_sparse(33, 21, 0.3, torch.float64, device, empty=(7,)) != 0
    q, k, v = (torch.randn(*lead, rows, d, device=device).to(dtype) for rows, d in ((33, 16), (21, 16), (21, 24)))

    def reference(q, k, v):
        scores = torch.where(mask, q @ k.mT / 4, -torch.inf)
        return torch.where(mask.any(1, keepdim=True), torch.softmax(scores, -1), 0) @ v

    for pattern in (mask.to(dtype).to_sparse_csr(), plan(mask.to(dtype).to_sparse_csc())):
        results, gradients = [], []
        for function, wide in (
            (lambda *x, p=pattern: sparse_attention(*x, p), False),
            (reference, True),
            (reference, False),
        ):
            leaves = [(t.double() if wide else t).clone().requires_grad_() for t in (q, k, v)]
            results.append(function(*leaves))
            results[-1].backward(torch.ones_like(results[-1]))
            gradients.append([leaf.grad for leaf in leaves])
        assert_close(*results)
        for ours, truth, theirs in zip(*gradients, strict=True):
            assert_close(ours, truth, theirs)


def test_attention_with_float16_scores_that_overflow(device):
    """Scaled scores of 80000 and more, which torch's sdpa keeps in float32, and their gradients."""
    torch.manual_seed(0)
    q = torch.randn(4, 12, 64, device=device).sign().mul(100).half()
    v = torch.randn(4, 12, 8, device=device).half()
    pattern = torch.ones(12, 12, device=device).tril().to_sparse_csr()
    scores = (q.double() @ q.double().mT / 8).masked_fill(pattern.to_dense() == 0, -torch.inf)
    assert scores.max() > 65504
    leaves = [x.clone().requires_grad_() for x in (q, q, v)]
    result = sparse_attention(*leaves, pattern)
    torch.testing.assert_close(result.double(), scores.softmax(-1) @ v.double(), atol=1e-3, rtol=1e-3)
    result.sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_attention_never_allocates_dense_scores(device):
    n = 20000  # dense scores would take 1.6 GB
    crow, col = torch.arange(0, 4 * n + 1, 4, device=device), torch.randint(n, (4 * n,), device=device)
    pattern = plan(torch.sparse_csr_tensor(crow, col, torch.ones(4 * n, device=device), (n, n)))
    q, k, v = (torch.randn(n, 8, device=device, requires_grad=True) for _ in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        sparse_attention(q, k, v, pattern).sum().backward()
    assert max(abs(e.self_cpu_memory_usage) for e in profile.events()) < 64 * n * 8
    assert q.grad.shape == q.shape


# ----------------------------------------------------------------------------------------------------------- gradients


def as_function(layout, reduce="sum", shape=(6, 9), seed=0):
    dense = draw_sparse(*shape, 0.4, torch.float64, seed=seed, empty=(2,))
    made = plan(in_layout(dense, layout))
    return made, lambda values, b: spmm(made.with_values(values), b, reduce=reduce, alpha=0.75)


@every_layout
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_gradcheck_of_products(layout, reduce):
    made, function = as_function(layout, reduce)
    for lead in ((), (2,)):
        values = torch.randn(made.nnz, dtype=torch.float64, requires_grad=True)
        b = torch.randn(*lead, 9, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, (values, b))
        assert torch.autograd.gradgradcheck(function, (values, b))


@every_layout
def test_gradcheck_of_sddmm_softmax_and_attention(layout):
    made, _ = as_function(layout)
    q, k, v = (torch.randn(2, rows, 3, dtype=torch.float64, requires_grad=True) for rows in (6, 9, 9))
    x = torch.randn(2, made.nnz, dtype=torch.float64, requires_grad=True)
    for function, leaves in (
        (lambda a, b: sddmm(a, b.mT, made, alpha=0.5), (q, k)),
        (lambda t: sparse_softmax(t, made, scale=0.5), (x,)),
        (lambda *t: sparse_attention(*t, made), (q, k, v)),
    ):
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_gradient_of_a_sparse_leaf_is_sparse(layout, device):
    dense, b = draw_sparse(12, 8, 0.3, torch.float64, device), torch.randn(8, 5, dtype=torch.float64, device=device)
    leaf = in_layout(dense, layout).requires_grad_()
    b.requires_grad_()
    weight = torch.randn(12, 5, dtype=torch.float64, device=device)
    for function in (spmm, cusparseMM.apply, lambda a, b: plan(a) @ b):
        leaf.grad = b.grad = None
        (function(leaf, b) * weight).sum().backward()
        assert leaf.grad.layout == leaf.layout
        torch.testing.assert_close(leaf.grad.to_dense(), (weight @ b.detach().mT) * (dense != 0))
        torch.testing.assert_close(b.grad, dense.mT @ weight)


def test_gradient_of_long_rows_and_columns(device):
    crow, col, values, shape = long_rows(device)
    made = plan(torch.sparse_csr_tensor(crow, col, values, shape))
    values = values.clone().requires_grad_()
    b = torch.randn(shape[1], 6, dtype=torch.float64, device=device, requires_grad=True)
    grad = torch.randn(shape[0], 6, dtype=torch.float64, device=device)
    spmm(made.with_values(values), b).backward(grad)
    dense = torch.sparse_csr_tensor(crow, col, values.detach(), shape).to_dense()
    rows = torch.repeat_interleave(torch.arange(shape[0], device=device), crow.diff())
    torch.testing.assert_close(b.grad, dense.mT @ grad)
    torch.testing.assert_close(values.grad, (grad[rows] * b.detach()[col]).sum(1))


def test_gradient_of_values_needs_only_memory_for_nonzeros():
    n = 30000  # densified, it would take 3.6 GB
    crow, col = torch.arange(0, 3 * n + 1, 3), torch.randint(n, (3 * n,))
    a = torch.sparse_csr_tensor(crow, col, torch.randn(3 * n), (n, n)).requires_grad_()
    b = torch.randn(n, 4)
    with torch.profiler.profile(profile_memory=True) as profile:
        spmm(a, b).sum().backward()
    assert max(abs(e.self_cpu_memory_usage) for e in profile.events()) <= 2 * 8 * 3 * n
    assert a.grad._nnz() == 3 * n


@pytest.mark.parametrize("needed", [(True, False), (False, True)], ids=str)
def test_gradient_of_one_side_only(needed, device):
    made = plan(draw_sparse(6, 9, 0.4, torch.float64, device).to_sparse_csr())
    values = made.values.detach().clone().requires_grad_(needed[0])
    b = torch.randn(9, 3, dtype=torch.float64, device=device, requires_grad=needed[1])
    spmm(made.with_values(values), b).sum().backward()
    assert ((values.grad is not None), (b.grad is not None)) == needed


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_checkpoints(reduce, device):
    made = plan(draw_sparse(6, 9, 0.5, torch.float64, device).to_sparse_csc())
    leaves = [made.values.clone().requires_grad_(), torch.randn(9, 3, dtype=torch.float64, device=device)]
    leaves[1].requires_grad_()

    def function(values, b):
        return spmm(made.with_values(values), b, reduce=reduce).square().sum()

    expected = torch.autograd.grad(function(*leaves), leaves)
    again = torch.autograd.grad(checkpoint(function, *leaves, use_reentrant=False), leaves)
    assert all(torch.equal(x, y) for x, y in zip(again, expected, strict=True))


def test_no_gradient_through_out():
    a, b = torch.eye(3).to_sparse_csr(), torch.randn(3, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"spmm: expected no gradient to be recorded through out="):
        spmm(a, b, out=torch.empty(3, 2))


# --------------------------------------------------------------------------------------------------------------- plans


def test_plan(device):
    dense = draw_sparse(20, 30, 0.2, torch.float32, device)
    a = dense.to_sparse_csr()
    made = plan(a)
    assert plan(made) is made
    assert made._pattern.crow.dtype == torch.int32
    assert (made.shape, made.nnz, made.dtype, made.device) == (a.shape, a._nnz(), torch.float32, a.device)
    assert made.nbytes == 4 * 21 + 4 * made.nnz + 4 * made.nnz
    b = torch.randn(30, 4, device=device)
    torch.testing.assert_close(made @ b, dense @ b)
    assert made.update(a.values() * 2) is made
    torch.testing.assert_close(made @ b, 2 * dense @ b)
    torch.testing.assert_close(made.with_values(a.values()) @ b, dense @ b)
    torch.testing.assert_close(made @ b, 2 * dense @ b)
    before = made.nbytes
    spmm(made, b.clone().requires_grad_()).sum().backward()
    assert made.nbytes == before + 4 * (31 + 2 * made.nnz)
    for word in ("20 x 30", f"{made.nnz} nonzeros", "int32", "kept", f"{made.nbytes} bytes"):
        assert word in made.explain()
    assert "nnz=" in repr(made)
    leaf = dense.to_sparse_csr().requires_grad_()
    once = plan(leaf)
    for n in (1, 2):  # a graph for each product
        (once @ b).sum().backward()
        torch.testing.assert_close(leaf.grad.to_dense(), n * (dense != 0) * b.sum(1))
    for bad in (a.values()[1:], a.values()[None]):
        with pytest.raises(ValueError, match=r"SparsePlan: expected values of shape"):
            made.update(bad)


def test_values_in_the_shape_of_the_tensors_values(device):
    dense = draw_sparse(24, 36, 0.4, device=device)
    batch = torch.stack([dense, dense]).to_sparse_csr()
    for a in (dense.to_sparse_bsr((2, 3)), batch):
        b = torch.randn(*a.shape[:-2], 36, 5, device=device)
        torch.testing.assert_close(plan(a).update(3 * a.values()) @ b, 3 * (a.to_dense() @ b))
        torch.testing.assert_close(plan(a).with_values(3 * a.values()) @ b, 3 * (a.to_dense() @ b))


def test_indices_are_checked_once_and_again_after_a_write(device):
    a = draw_sparse(20, 30, 0.2, torch.float32, device).to_sparse_csr()
    b = torch.randn(30, 4, device=device)
    first = spmm(a, b)
    structure = csr_pattern._known[a][1]
    assert torch.equal(spmm(a, b), first)
    assert csr_pattern._known[a][1] is structure
    a.detach().values().mul_(2)
    torch.testing.assert_close(spmm(a, b), 2 * first)
    a.detach().col_indices()[3] = 30
    with pytest.raises(ValueError, match=r"spmm: expected columns from 0 to 29 at nonzero 3, got 30"):
        spmm(a, b)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr"])
@pytest.mark.parametrize("leaf", [False, True])
def test_a_plan_sees_writes_to_its_matrix(leaf, layout, index, device):
    """Values and indices share a version counter: changed values are used, changed indices raise."""
    dense, b = draw_sparse(20, 30, 0.2, torch.float32, device).to_dense(), torch.randn(30, 4, device=device)
    a, moved = in_layout(dense, layout, index), in_layout(dense.roll(10, 1), layout, index)
    made, first = plan(a.requires_grad_(leaf)), spmm(a.detach(), b)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(made @ b, first)
        (a._values() if layout == "coo" else a.values()).mul_(2)
        for _ in range(2):
            torch.testing.assert_close(made @ b, 2 * first)
        copied, again = pickle.loads(pickle.dumps(made)), copy.copy(made)
        a.copy_(moved)
        for use in (lambda: made @ b, lambda: again @ b, lambda: sddmm(dense, b @ b.mT, made)):
            with pytest.raises(ValueError, match=": expected the indices that the plan was made of, got others"):
                use()
        torch.testing.assert_close(copied @ b, 2 * first)
        torch.testing.assert_close(made.update(copied.values) @ b, 2 * first)
        torch.testing.assert_close(spmm(a, b), plan(moved) @ b)
        assert a.to_dense().roll(-10, 1).equal(dense)


def test_a_transform_leaves_nothing_in_a_plan(device):
    eye, ones = torch.eye(4, device=device), torch.ones(4, 2, device=device)
    for made in (plan(eye.to_sparse_csr()), plan(eye.to_sparse_bsr((2, 2)))):
        assert torch.equal(torch.func.grad(lambda b, made=made: (made @ b).sum())(ones), ones)
        pickle.loads(pickle.dumps(made))


def test_blocks_whose_indices_overflow(device):
    crow, col = torch.tensor([[0, 1], [2**30 - 1, 0]], dtype=torch.int32, device=device)
    a = torch.sparse_bsr_tensor(crow, col[:1], torch.ones(1, 1, 4, device=device), (1, 2**33))
    assert plan(a)._pattern.col.tolist() == [2**32 - 4, 2**32 - 3, 2**32 - 2, 2**32 - 1]


@pytest.mark.parametrize("block", [(0, 2), (2, 3)])
def test_blocks_that_do_not_fill_the_matrix_are_refused(block, device):
    crow, col = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    a = torch.sparse_bsr_tensor(crow, col, torch.zeros(0, *block, device=device), (2, 2), check_invariants=False)
    with pytest.raises(
        ValueError, match=rf"spmm: expected blocks that 2 x 2 can be cut into, got {block[0]} x {block[1]}"
    ):
        spmm(a, torch.ones(2, 1, device=device))


def test_indices_are_not_trusted_before_a_plans_check_ends(monkeypatch, device):
    """While a plan waits for the GPU's check of the indices, another thread's product runs its own check."""
    a = draw_sparse(20, 30, 0.2, torch.float32, device).to_sparse_csr()
    a.detach().col_indices()[3] = 30
    facts, met = Check.facts, []

    def slow(self):
        if self.name == "plan":
            with pytest.raises(ValueError, match="spmm: expected columns from 0 to 29 at nonzero 3, got 30"):
                spmm(a, torch.randn(30, 4, device=device))
            met.append(self.name)
        return facts(self)

    monkeypatch.setattr(Check, "facts", slow)
    with pytest.raises(ValueError, match="plan: expected columns from 0 to 29 at nonzero 3, got 30"):
        plan(a)
    assert met == ["plan"]


def test_a_structure_lives_no_longer_than_its_tensor():
    a = torch.eye(4).to_sparse_csr()
    before = len(csr_pattern._known)
    spmm(a, torch.ones(4, 1))
    assert len(csr_pattern._known) == before + 1
    del a
    assert len(csr_pattern._known) == before


def test_the_mean_of_a_row_longer_than_float16_can_count(device):
    nonzeros = 70_000
    values = torch.ones(nonzeros, dtype=torch.float16)
    a = torch.sparse_csr_tensor(torch.tensor([0, nonzeros]), torch.arange(nonzeros), values, (1, nonzeros))
    b = torch.ones(nonzeros, 2, dtype=torch.float16, device=device, requires_grad=True)
    spmm(a.to(device), b, reduce="mean").sum().backward()
    torch.testing.assert_close(b.grad, torch.full_like(b, 1 / nonzeros), atol=1e-7, rtol=0)


@pytest.mark.parametrize("layout", [*LAYOUTS, "uncoalesced"])
def test_inference_first_and_training_after(layout, device):
    a = in_layout(draw_sparse(6, 9, 0.5, device=device), "coo" if layout == "uncoalesced" else layout)
    if layout == "uncoalesced":
        a = torch.sparse_coo_tensor(a.indices().repeat(1, 2), a.values().repeat(2), a.shape)
    x = torch.randn(9, 4, device=device)
    with torch.inference_mode():
        spmm(a, x)
        made = plan(a)
        made @ x
    x.requires_grad_()
    (spmm(a, x).sum() + (made @ x).sum()).backward()
    torch.testing.assert_close(x.grad, 2 * a.to_dense().sum(0)[:, None].expand(-1, 4))


def test_indices_of_inference_tensors_are_checked_each_time(device):
    with torch.inference_mode():
        a = draw_sparse(6, 9, 0.5, device=device).to_sparse_csr()
        x = torch.randn(9, 4, device=device)
        spmm(a, x)
        a.col_indices()[0] = 10**6
        with pytest.raises(ValueError, match="columns from 0 to 8"):
            spmm(a, x)


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_a_plan_of_inference_tensors_copies_the_indices(layout, index, device):
    """Inference tensors have no version counter: a write would go unnoticed and lead out of bounds."""
    dense, x = draw_sparse(32, 32, 0.5, device=device), torch.randn(32, 4, device=device)
    with torch.inference_mode():
        a = in_layout(dense, layout, index)
        if layout == "bsr":  # a block size that has a kernel
            a = dense.to_sparse_bsr((16, 16))
            a = torch.sparse_bsr_tensor(a.crow_indices().to(index), a.col_indices().to(index), a.values(), a.shape)
        made = plan(a)
        for t in csr_pattern._indices_of("plan", a):
            t.fill_(10**6)
        torch.testing.assert_close(made @ x, dense @ x)
    assert not any(t.is_inference() for t in (*made._pattern.tensors, *made._pattern.block_tensors))


def test_a_plan_works_after_a_failed_transposition(monkeypatch, device):
    made = plan(draw_sparse(6, 9, 0.5, device=device).to_sparse_csr())
    right, x = csr_pattern._csr_transpose, torch.randn(9, 4, device=device, requires_grad=True)

    def fails(*args):
        t_crow, t_col, t_order = right(*args)
        return t_crow[:0], t_col, t_order  # no longest row of no rows

    monkeypatch.setattr(csr_pattern, "_csr_transpose", fails)
    with pytest.raises(RuntimeError):
        made @ x
    monkeypatch.undo()
    (made @ x).sum().backward()
    torch.testing.assert_close(x.grad[:, 0], (made @ torch.eye(9, device=device)).sum(0))


def test_empty_batches(device):
    x = torch.randn(2, 4, 5, device=device)
    assert torch.equal(spmm(torch.zeros(2, 3, 4, device=device).to_sparse_csr(), x), x.new_zeros(2, 3, 5))
    full = torch.ones(2, 3, 4, device=device).to_sparse_csr()
    assert spmm(full, x[..., :0]).shape == (2, 3, 0)
    assert not sddmm(x.new_ones(2, 3, 0), x.new_ones(2, 0, 4), full).any()


@pytest.mark.parametrize(
    ("col", "rise"),
    [
        ([0, 2, 1, 2, 0, 1, 2], True),
        ([0, 2, 1, 2, 0, 0, 2], False),
        ([2, 0, 1, 2, 0, 1, 2], False),
        ([0, 2, 1, 1, 0, 1, 2], False),
    ],
)
def test_unsorted_columns_raise(col, rise, device):
    """In rows of 2, 0, 2, 3 and 0 nonzeros, and in a long one."""
    crow, long = torch.tensor([0, 2, 2, 4, 7, 7, 1007]), torch.arange(1000)
    for last in (long, long.clamp(max=998)):
        a = torch.sparse_csr_tensor(crow, torch.cat([torch.tensor(col), last]), torch.ones(1007), (6, 1000)).to(device)
        assert plan(a)._pattern.distinct == (rise and last is long)


def test_int64_indices_are_narrowed_once(device, monkeypatch):
    counted, right = [], csr_pattern._csr_transpose
    monkeypatch.setattr(csr_pattern, "_csr_transpose", lambda *args: counted.append(1) or right(*args))
    pattern = draw_sparse(8, 8, 0.5, device=device).to_sparse_csr()
    q, k, v = (torch.randn(8, 4, device=device, requires_grad=True) for _ in range(3))
    for _ in range(3):
        sparse_attention(q, k, v, pattern).sum().backward()
    assert len(counted) == 1


def test_a_plan_pickled_after_its_indices_were_written_over_is_refused():
    made = plan(draw_sparse(6, 9, 0.5).to_sparse_csr())
    made._pattern.col[0] = 100
    kept = pickle.dumps(made)
    with pytest.raises(ValueError, match="columns from 0 to 8"):
        pickle.loads(kept)


def test_a_plan_pickled_by_a_version_without_blocks():
    dense = draw_sparse(6, 9, 0.5)
    made = plan(dense.to_sparse_csr())
    state = {k: v for k, v in made._pattern.__dict__.items() if k not in ("blocks", "_narrow")}
    made._pattern.__dict__.clear()
    made._pattern.__setstate__(state)
    x = torch.randn(9, 4)
    torch.testing.assert_close(made @ x, dense @ x)
    assert made.nbytes > 0


def test_a_number_as_b_raises(device):
    made = plan(draw_sparse(6, 9, 0.5, device=device).to_sparse_csr())
    with pytest.raises(RuntimeError, match=r"spmm: expected dense of shape \[..., 9, n\], got \[\]"):
        made @ torch.tensor(1.0, device=device)


def test_attention_whose_unscaled_scores_overflow_float16(device):
    """Sums of 64 products, before they are scaled."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 64, device=device, dtype=torch.float16) for _ in range(3))
    q, k = (36 + t for t in (q, k))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    assert not (q @ k.mT).isfinite().all()
    pattern = torch.ones(6, 6, device=device, dtype=torch.float16).to_sparse_csr()
    y = sparse_attention(*leaves, pattern)
    scores = (q.double() @ k.double().mT / 8).half().double()  # rounded as they are kept: in steps of 8
    assert (y - scores.softmax(-1) @ v.double()).abs().max() < 1e-2
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), leaves))


def test_scales_with_a_gradient_are_refused(device):
    """A missing gradient would be silent."""
    made, x = plan(torch.ones(3, 3, device=device).to_sparse_csr()), torch.ones(3, 3, device=device)
    scale, out = torch.tensor(2.0, requires_grad=True), torch.zeros(3, 3, device=device)
    for call in (
        lambda s: spmm(made, x, alpha=s),
        lambda s: spmm(made, x, beta=s, out=out),
        lambda s: sddmm(x, x, made, alpha=s),
        lambda s: sparse_softmax(torch.ones(9, device=device), made, scale=s),
        lambda s: sparse_attention(x, x, x, made, scale=s),
    ):
        with pytest.raises(
            RuntimeError, match=r": expected .* without a gradient, got one that requires grad; multiply"
        ):
            call(scale)
        torch.testing.assert_close(call(scale.detach()), call(2.0))


@pytest.mark.parametrize("reduce", ["max", "min", "sum"])
@pytest.mark.parametrize(("a", "b", "alpha"), [(1000.0, 100.0, 0.01), (1e-3, 1e-4, 1e4), (3.0, 5.0, -2.0)])
def test_alpha_is_applied_before_rounding(reduce, a, b, alpha, device):
    """Also with autograd."""
    sparse = torch.tensor([[a]], device=device, dtype=torch.float16).to_sparse_csr()
    dense = torch.tensor([[b]], device=device, dtype=torch.float16, requires_grad=True)
    y = spmm(sparse, dense, reduce=reduce, alpha=alpha)
    expected = (sparse.to_dense().double() * dense.double() * alpha).half()
    assert torch.equal(y, expected)
    (grad,) = torch.autograd.grad(y.sum(), dense)
    torch.testing.assert_close(grad, (sparse.to_dense() * alpha).to(grad.dtype), atol=0, rtol=2e-3)
    assert torch.equal(spmm(sparse, dense.detach(), reduce=reduce, alpha=alpha), expected)


def test_attention_of_odd_shapes(device):
    v = torch.randn(5, 3, device=device)
    made = plan(torch.ones(6, 5, device=device).to_sparse_csr())
    y = sparse_attention(torch.ones(6, 0, device=device), torch.ones(5, 0, device=device), v, made)
    torch.testing.assert_close(y, v.mean(0).expand(6, 3))
    batched = torch.ones(2, 6, 5, device=device).to_sparse_csr()
    q, k = torch.randn(6, 4, device=device), torch.randn(2, 5, 4, device=device)
    expected = torch.softmax(q @ k.mT / 2, -1) @ v
    torch.testing.assert_close(sparse_attention(q, k, v.expand(2, 5, 3), batched), expected)


def test_a_batch_of_other_leading_dimensions_is_refused(device):
    batched = torch.ones(2, 3, 6, 5, device=device).to_sparse_csr()
    q, k, v = (torch.randn(3, 2, n, 4, device=device) for n in (6, 5, 5))
    with pytest.raises(ValueError, match=r"sddmm: expected a with leading dimensions \[2, 3\].* got \[3, 2, 6, 4\]"):
        sddmm(q, k.mT, batched)
    with pytest.raises(ValueError, match=r"expected v with leading dimensions \[2, 3\].* got \[3, 2, 5, 4\]"):
        sparse_attention(q.view(2, 3, 6, 4), k.view(2, 3, 5, 4), v, batched)


def test_compiled_batches_into_out():
    a, b = plan(torch.ones(2, 4, 5).to_sparse_csr()), torch.randn(2, 5, 3)
    step = torch.compile(lambda out: spmm(a, b, out=out), fullgraph=True, backend="aot_eager")
    for out in (torch.empty(2, 4, 3), torch.empty(2, 3, 4).mT):
        torch.testing.assert_close(step(out), torch.ones(2, 4, 5) @ b)
        torch.testing.assert_close(out, torch.ones(2, 4, 5) @ b)


def test_compiled_plan():
    made = plan(draw_sparse(6, 9, 0.4, torch.float32).to_sparse_csr())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(values, b, q):
        product = spmm(made.with_values(values), b, reduce="mean") + spmm(made.with_values(values), b, reduce="max")
        return product.sum() + sparse_attention(q, b, b, made).square().sum()

    torch.manual_seed(0)
    drawn = [torch.randn(s) for s in ((made.nnz,), (9, 3), (6, 3))]
    leaves = [[t.clone().requires_grad_() for t in drawn] for _ in range(2)]
    results = step(*leaves[0]), step._torchdynamo_orig_callable(*leaves[1])
    for result in results:
        result.backward()
    torch.testing.assert_close(*results)
    for x, y in zip(*leaves, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("name", "layout"),
    [("spmm", "csr"), ("spmm", "coo"), ("plan", "csr"), ("MM", "csr"), ("MM", "coo"), ("MM", "dense")],
)
def test_compile_breaks_the_graph_at_untraceable_code(name, layout, gradient):
    """The product runs eagerly, outside the compiled graph."""
    dense, b = draw_sparse(6, 9, 0.5), torch.randn(9, 4)
    a = (dense if layout == "dense" else in_layout(dense, layout)).requires_grad_(gradient)
    function = {"spmm": spmm, "plan": lambda a, b: plan(a) @ b, "MM": cusparseMM.apply}[name]
    torch._dynamo.reset()
    y = torch.compile(lambda a, b: function(a, b) + 1, backend="aot_eager")(a, b)
    torch.testing.assert_close(y, dense @ b + 1)
    if gradient:
        y.sum().backward()
        torch.testing.assert_close(a.grad.to_dense(), b.sum(1) * ((dense != 0) | (layout == "dense")))


def test_autocast(device):
    made = plan(draw_sparse(6, 9, 0.4, torch.float32, device).to_sparse_csr())
    b, q = torch.randn(9, 4, device=device, requires_grad=True), torch.randn(6, 4, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert (made @ b).dtype == torch.bfloat16
        assert sddmm(q, b.mT, made).dtype == torch.bfloat16
        narrow = made.values.bfloat16()
        assert sparse_softmax(narrow, made).dtype == torch.softmax(narrow, -1).dtype
        sparse_attention(q, b, b, made).float().sum().backward()
    assert b.grad.dtype == torch.float32
    assert q.grad.dtype == torch.float32


def test_flops_of_every_layout():
    dense = torch.randn(16, 8) * (torch.rand(16, 8) < 0.5)
    s, values = plan(dense.to_sparse_csr())._pattern, dense.to_sparse_csr().values()
    ops, parts, b, x = torch.ops.custom_mm, (s.crow, s.col, values), torch.randn(8, 24), torch.randn(5, 8)
    chunks, halves = ops.csr_chunks(s.crow, s.col, 8, 8)[:4], ops.csr_halves(*parts, 8)
    tiles = ops.csr_tiles(s.crow, s.col, 8, 1, 2, 16)
    first, _, until, _ = tiles[0].view(-1, 4)[-1].tolist()
    tiles += ops.csr_tile_entries(*tiles, *parts, 8, 16, first + (until >> 16))
    narrow, packed = (s.crow, s.col, values.half()), []
    for in_order in (False, True):
        units = int(ops.csr_packed_units(s.crow, s.col, 8, in_order))
        packed.append(ops.csr_packed(*narrow, 8, units, None, in_order))
    for call, n in (
        (lambda: ops.csr_spmm(*parts, b, 8), 24),
        (lambda: ops.csr_spmm_chunks(*chunks, *parts, b, 8, 0), 24),
        (lambda: ops.csr_spmm_halves(*halves, *parts, b, 8), 24),
        (lambda: ops.csr_spmm_tiles(*tiles, *parts, b, 8, 16), 24),
        (lambda: ops.csr_spmm_packed(packed[0], *narrow, b.half(), 8), 24),
        (lambda: ops.csr_linear_packed(packed[1], *narrow, x.half(), 8), 5),
    ):
        with FlopCounterMode(display=False) as counted:
            call()
        assert counted.get_total_flops() == 2 * s.nonzeros * n


def test_flops():
    made = plan(draw_sparse(6, 9, 0.4).to_sparse_csr())
    with FlopCounterMode(display=False) as counter:
        made @ torch.randn(9, 4)
        sddmm(torch.randn(2, 6, 5), torch.randn(2, 5, 9), made)
    assert counter.get_total_flops() == 2 * made.nnz * 4 + 2 * made.nnz * 5 * 2


# ---------------------------------------------------------------------------------------------------- the upstream's MM


@every_dtype
def test_cusparse_mm(dtype, device):
    dense = draw_sparse(12, 10, 0.3, dtype, device)
    b = torch.randn(10, 7, device=device).to(dtype)
    truth = dense.double() @ b.double()
    for layout in LAYOUTS[:2]:
        assert_close(cusparseMM.apply(in_layout(dense, layout), b), truth, dense @ b)
    assert_close(cusparseMM.apply(dense, b), truth, dense @ b)
    batch, wide = torch.stack([dense, dense.flip(0), dense * 0]), torch.stack([b, b * 2, b])
    assert_close(cusparseMM.apply(batch, wide), batch.double() @ wide.double(), batch @ wide)
    assert_close(cusparseMM.apply(dense, wide), dense.double() @ wide.double(), dense @ wide)


@pytest.mark.parametrize("lead", [((), ()), ((2,), (2,)), ((), (2,))], ids=str)
def test_gradcheck_of_cusparse_mm(lead):
    # No element near 0: the numerical step of gradcheck must not change which entries are stored.
    a = draw_sparse(8, 6, 0.5, torch.float64).view(2, 4, 6)
    a = (a.sign() + a)[: 2 if lead[0] else 1].reshape(*lead[0], 4, 6).requires_grad_()
    b = torch.randn(*lead[1], 6, 3, dtype=torch.float64, requires_grad=True)
    stored = (a != 0).detach()

    def at_stored(a, b):
        return cusparseMM.apply(torch.where(stored, a, 0), b)

    assert torch.autograd.gradcheck(at_stored, (a, b))
    assert torch.autograd.gradgradcheck(at_stored, (a, b))
    cusparseMM.apply(a, b).sum().backward()
    expected = torch.ones(4, 3, dtype=torch.float64) @ b.detach().mT
    torch.testing.assert_close(a.grad, expected.sum_to_size(a.shape))  # at zeros of a as well


# -------------------------------------------------------------------------------------------------------- hostile input


def csr(crow, col, values=None, shape=(3, 3)):
    values = torch.ones(len(col)) if values is None else values
    return torch.sparse_csr_tensor(torch.tensor(crow), torch.tensor(col), values, shape, check_invariants=False)


HOSTILE = {
    "column too large": (lambda: csr([0, 1, 2, 3], [0, 1, 3]), "columns from 0 to 2 at nonzero 2, got 3"),
    "column negative": (lambda: csr([0, 1, 2, 3], [0, -1, 2]), "columns from 0 to 2 at nonzero 1, got -1"),
    "offsets decrease": (lambda: csr([0, 2, 1, 3], [0, 1, 2]), "offsets that do not decrease after row 1, got 1"),
    "first offset": (lambda: csr([1, 1, 2, 3], [0, 1, 2]), "the first offset to be 0, got 1"),
    "last offset": (
        lambda: csr([0, 1, 2, 4], [0, 1, 2]),
        "the last offset to be 3, as many as there are columns, got 4",
    ),
    "few offsets": (lambda: csr([0, 1, 3], [0, 1, 2]), "4 offsets of rows, got offsets of shape"),
    "few values": (lambda: csr([0, 1, 2, 3], [0, 1, 2], torch.ones(2)), "as many indices as values"),
    "huge offset": (lambda: csr([0, 2**60, 2**61, 3], [0, 1, 2]), "offsets that do not decrease after row 2"),
    "coo row": (
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 5], [0, 1]]), torch.ones(2), (3, 3), check_invariants=False),
        "rows from 0 to 2, got 5",
    ),
    "coo column": (
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 2], [0, -1]]), torch.ones(2), (3, 3), check_invariants=False),
        "columns from 0 to 2, got -1",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_invalid_indices_raise(case):
    make, message = HOSTILE[case]
    try:
        a = make()
    except RuntimeError:
        pytest.skip("this torch refuses it by itself")
    for name, call in (
        ("spmm", lambda: spmm(a, torch.ones(3, 2))),
        ("plan", lambda: plan(a)),
        ("sddmm", lambda: sddmm(torch.ones(3, 2), torch.ones(2, 3), a)),
        ("spmm", lambda: cusparseMM.apply(a, torch.ones(3, 2))),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected .*{message}"):
            call()


def test_mismatched_operands_raise(device):
    a = torch.eye(3, device=device).to_sparse_csr()
    b = torch.randn(3, 2, device=device)
    for call, message in (
        (lambda: spmm(a, b[:2]), r"spmm: expected dense of shape \[..., 3, n\]"),
        (lambda: spmm(a, b.double()), "spmm: expected values to be a strided tensor in Double"),
        (lambda: spmm(a, b.long()), "spmm: expected dense of a floating-point dtype, got Long"),
        (lambda: spmm(a, b, out=torch.empty(2, 2, device=device)), r"spmm: expected out of shape \[3, 2\], got"),
        (lambda: spmm(a, b, out=b), "spmm: expected out and dense not to overlap"),
        (lambda: spmm(a, b, out=b[:1].expand(3, 2)), "spmm: expected out to have one memory location"),
        (lambda: sddmm(b, b.mT[:1], a), r"sddmm: expected b, transposed, of shape \[..., 3, 2\]"),
        (lambda: sddmm(b[:2], b.mT, a), r"sddmm: expected a of shape \[..., 3, n\]"),
        (lambda: cusparseMM.apply(b.mT, b[:2]), r"cusparseMM: expected b of shape \[..., 3, n\]"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            call()
    for call, message in (
        (lambda: spmm(a, b, reduce="prod"), "spmm: expected reduce to be sum, mean, max or min, got prod"),
        (lambda: spmm(a, b, beta=1), "spmm: expected out= beside beta=1"),
        (lambda: spmm(b, b), "spmm: expected a sparse tensor or a plan"),
        (lambda: sparse_softmax(b[0], a), r"sparse_softmax: expected values of shape \[..., 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for call, message in (
        (lambda: spmm([1], b), "spmm: expected a sparse tensor or a plan, got list"),
        (lambda: plan([1]), "plan: expected a sparse tensor or a plan, got list"),
        (lambda: sddmm(b, b.mT, None), "sddmm: expected a sparse tensor or a plan, got NoneType"),
        (lambda: cusparseMM.apply([1], b), "spmm: expected a sparse tensor or a plan, got list"),
        (lambda: plan(a) @ [1], "spmm: expected b to be a dense tensor, got list"),
        (
            lambda: spmm(a, b.to_sparse()),
            "spmm: expected b to be a dense tensor, got a tensor of layout torch.sparse_coo",
        ),
        (lambda: plan(a).update([1.0]), "SparsePlan: expected values to be a dense tensor, got list"),
        (lambda: sddmm(None, b, a), "sddmm: expected a to be a dense tensor, got NoneType"),
        (lambda: sparse_softmax(None, a), "sparse_softmax: expected values to be a dense tensor, got NoneType"),
        (lambda: sparse_attention(b, b, [1.0], a), "sparse_attention: expected v to be a dense tensor, got list"),
        (lambda: cusparseMM.apply(b, None), "cusparseMM: expected b to be a dense tensor, got NoneType"),
        (lambda: plan(a, tune=5), "plan: expected tune to be True, False or several numbers of columns, got 5"),
        (lambda: plan(a, tune=["5"]), "plan: expected tune to be .* numbers of columns, got .'5'"),
        (lambda: plan(a, tune=[-1]), r"plan: expected tune to be .* numbers of columns, got \[-1\]"),
        (lambda: plan(a, products=0), "plan: expected products to be a whole number of 1 or more, got 0"),
        (lambda: plan(plan(a), products=2.5), "plan: expected products to be a whole number of 1 or more, got 2.5"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_sizes_beyond_int32_raise():
    """Offsets of 8 GB and more, as meta tensors, which need no memory."""
    crow, col = (torch.empty(size, dtype=torch.int32, device="meta") for size in (2**31, 9))
    ops = torch.ops.custom_mm
    for call, message in (
        (lambda: ops.csr_chunks(crow, col, 32, 64), "csr_chunks: expected at most 2147483647 rows and nonzeros"),
        (lambda: ops.csr_regions(crow, col, 2**31 - 1, 2048, 24), "csr_regions: expected a square matrix .* at most"),
        (lambda: ops.csr_reorder(crow, col, crow[1:]), "csr_reorder: expected crow in Int and at most"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    made = SimpleNamespace(rows=2**31 - 8, columns=100, nonzeros=9, longest=9)
    assert not takes_chunks(made, 2**20, 4 * 2**20)
    assert layout_of(made, 32) is None


def test_softmax_of_nonzeros_without_rows_raises(device):
    with pytest.raises(ValueError, match="sparse_softmax: expected no nonzeros without rows"):
        torch.ops.custom_mm.csr_softmax(torch.zeros(1, device=device).int(), torch.ones(5, device=device), 1.0)


def test_a_shared_operand_is_copied_once(device):
    """With non-contiguous rows, together with a batch of 64."""
    pattern = draw_sparse(40, 30, 0.3, device=device).to_sparse_csr()
    crow, col = pattern.crow_indices(), pattern.col_indices()
    a, b = torch.randn(64, 40, 16, device=device), torch.randn(16, 30, device=device)
    with torch.profiler.profile(profile_memory=True) as profile:
        sddmm(a, b, pattern)
    if device == "cpu":
        assert max(abs(e.self_cpu_memory_usage) for e in profile.events()) <= max(a[0].nbytes, 64 * col.numel() * 4)
    values, dense = torch.randn(64, col.numel(), device=device), torch.randn(9, 30, device=device).T
    product = torch.ops.custom_mm.csr_spmm(crow, col, values, dense, 30)
    one = torch.ops.custom_mm.csr_spmm(crow, col, values[7].clone(), dense, 30)
    torch.testing.assert_close(product[7], one)


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 300), (torch.float16, 3000)], ids=str)
def test_duplicate_coo_entries_are_not_summed_in_16_bits(dtype, count, device):
    where = torch.zeros(2, count, dtype=torch.long)
    a = torch.sparse_coo_tensor(where, torch.ones(count, dtype=dtype), (1, 1)).to(device).requires_grad_()
    y = spmm(a, torch.ones(1, 1, dtype=dtype, device=device))
    assert y.item() == torch.tensor(float(count)).to(dtype).item()
    (gradient,) = torch.autograd.grad(y.sum(), a)
    assert gradient.to_dense().item() == 1


def test_new_coo_indices_at_the_same_address(device):
    """`.data` set twice: the second tensor may reuse the address of the checked one after that is freed."""
    b = torch.randn(50, 2, device=device)

    def entries():
        place = torch.randperm(2500, device=device)[:400]
        return torch.sparse_coo_tensor(torch.stack([place // 50, place % 50]), torch.ones(400, device=device), (50, 50))

    a = entries()
    for _ in range(20):
        spmm(a, b)
        a.data = entries()
        a.data = entries()
        torch.testing.assert_close(spmm(a, b), a.to_dense() @ b)


def test_cached_facts_die_with_their_tensor():
    for make in (torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc, torch.Tensor.to_sparse):
        a = make(draw_sparse(9, 9, 0.5)).requires_grad_()
        spmm(a, torch.randn(9, 2))
        assert a in csr_pattern._known
        gone = weakref.ref(a)
        del a
        gc.collect()
        assert gone() is None


FUZZ = """
import torch, warnings
from hypothesis import given, settings, strategies as st, HealthCheck
import matmuls
warnings.simplefilter("ignore")
number = st.one_of(st.integers(-3, 12), st.sampled_from([2**31 - 1, 2**31, -2**31, 2**62, -2**63]))
right = wrong = 0

@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def fuzz(data):
    global right, wrong
    rows, columns, n = (data.draw(st.integers(0, 6)) for _ in range(3))
    kind = data.draw(st.sampled_from(["csr", "csc", "coo", "bsr"]))
    nonzeros = data.draw(st.integers(0, 8))
    sane = data.draw(st.booleans())
    inner = st.integers(0, max(0, (columns if kind != "csc" else rows) - 1)) if sane else number
    col = torch.tensor(data.draw(st.lists(inner, min_size=nonzeros, max_size=nonzeros)), dtype=torch.int64)
    outer = columns if kind == "csc" else rows
    if sane and outer > 0:
        cuts = sorted(data.draw(st.lists(st.integers(0, nonzeros), min_size=outer - 1, max_size=outer - 1)))
        crow = [0, *cuts, nonzeros]
    else:
        crow = data.draw(st.lists(number, min_size=0, max_size=outer + 3))
    crow = torch.tensor(crow, dtype=torch.int64)
    if data.draw(st.booleans()) and all(bool((t == t.int()).all()) for t in (crow, col)):
        crow, col = crow.int(), col.int()
    values = torch.randn(data.draw(st.sampled_from([nonzeros, nonzeros, nonzeros, nonzeros + 1])))
    try:
        if kind == "coo":
            row = torch.tensor(data.draw(st.lists(number, min_size=nonzeros, max_size=nonzeros)), dtype=torch.int64)
            a = torch.sparse_coo_tensor(torch.stack([row, col.long()]), values, (rows, columns), check_invariants=False)
        elif kind == "bsr":
            a = torch.sparse_bsr_tensor(crow, col, values[:, None, None], (rows, columns), check_invariants=False)
        else:
            a = getattr(torch, f"sparse_{kind}_tensor")(crow, col, values, (rows, columns), check_invariants=False)
    except RuntimeError:
        return
    b = torch.randn(columns, n, requires_grad=True)
    try:
        out = matmuls.spmm(a, b, reduce=data.draw(st.sampled_from(["sum", "mean", "max"])))
        out.sum().backward()
        matmuls.sddmm(torch.randn(rows, 3), torch.randn(3, columns), a)
        made = matmuls.plan(a)
        matmuls.sparse_softmax(made.values, made)
        product = made @ b
        dense = torch.zeros(rows, columns)
        s = made._pattern
        r = torch.repeat_interleave(torch.arange(rows), s.crow.diff().long())
        v = made.values if s.order is None else made.values[s.order.long()]
        dense.index_put_((r, s.col.long()), v, accumulate=True)
        torch.testing.assert_close(product, dense @ b, atol=1e-4, rtol=1e-4)
        right += 1
    except ValueError as error:
        assert ": expected " in str(error) and ", got " in str(error), error
        wrong += 1

fuzz()
assert right > 50 and wrong > 50, (right, wrong)
print("survived", right, wrong)
"""


def test_hostile_indices_never_crash():
    """Random indices give a correct result or a ValueError that names them; runs in a separate process."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", FUZZ], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "survived" in run.stdout
