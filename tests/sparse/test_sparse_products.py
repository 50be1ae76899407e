"""Sparse products of every layout, dtype and reduction against float64."""

from itertools import product

import pytest
import torch

from common.sparse_cases import assert_close, draw_sparse, every_dtype, every_layout, in_layout, long_rows
from matmuls import plan, sddmm, sparse_softmax, spmm


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
