"""Indices overwritten after a sparse tensor was created from them: CPU products raise, and never access memory out of
bounds.
"""

import pytest
import torch

from custom_mm import _C
from matmuls import cusparseMM, plan, sddmm, sparse_attention, sparse_softmax, spmm

ops = torch.ops.custom_mm
BAD = {"beyond": 2**40, "negative": -(2**40), "one beyond": 12}
every_bad = pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
refused = pytest.raises(ValueError, match="expected")


def parts(index=torch.int64):
    """Offsets, columns and values of a 10 x 12 matrix."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(10, 12, generator=generator) * (torch.rand(10, 12, generator=generator) < 0.4)
    a = dense.to_sparse_csr()
    return a.crow_indices().to(index), a.col_indices().to(index), a.values()


def matrix(layout="csr", values=None, index=torch.int64):
    """A matrix of the layout, and the tensor that its column indices (CSC: row indices) share memory with."""
    crow, col, own = parts(index)
    values = own if values is None else values
    if layout == "csr":
        return torch.sparse_csr_tensor(crow, col, values, (10, 12)), col
    if layout == "csc":
        return torch.sparse_csc_tensor(crow, col, values, (12, 10)), col
    if layout == "coo":
        rows = torch.repeat_interleave(torch.arange(10), crow.diff())
        indices = torch.stack([rows, col])
        return torch.sparse_coo_tensor(indices, values, (10, 12), is_coalesced=True), indices[1]
    blocks = values[:, None, None].expand(-1, 16, 16).contiguous()
    return torch.sparse_bsr_tensor(crow, col, blocks, (160, 192)), col


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@every_bad
def test_spmm_of_every_reduction(bad, reduce, index):
    if index == torch.int32 and abs(bad) > 2**31:
        bad = 2**31 - 1 if bad > 0 else -(2**31)
    a, c = matrix(index=index)
    b = torch.randn(12, 5)
    spmm(a, b, reduce=reduce)
    c[0] = bad
    with refused:
        spmm(a, b, reduce=reduce)


@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr"])
@pytest.mark.parametrize("known", [True, False], ids=["after a product", "before any"])
@every_bad
def test_spmm_of_every_layout(bad, known, layout):
    a, c = matrix(layout)
    b = torch.randn(a.shape[1], 5)
    if known:
        spmm(a, b)
    c[0] = bad
    with refused:
        spmm(a, b)


@every_bad
def test_overwritten_offsets(bad):
    crow, col, values = parts()
    a = torch.sparse_csr_tensor(crow, col, values, (10, 12))
    spmm(a, torch.randn(12, 5))
    crow[3] = bad * 10
    for reduce in ("sum", "max"):
        with refused:
            spmm(a, torch.randn(12, 5), reduce=reduce)


def test_spmm_into_out_writes_nothing():
    a, c = matrix()
    out = torch.full((10, 5), 7.0)
    spmm(a, torch.randn(12, 5))
    c[-1] = 2**40
    with refused:
        spmm(a, torch.randn(12, 5), alpha=2, beta=1, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("wanted", ["values", "dense", "both"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_backward_after_the_write(layout, reduce, wanted):
    """The gradient is correct if it uses copies made before the write; else backward raises."""

    def leaves():
        generator = torch.Generator().manual_seed(1)
        values, b = parts()[2], torch.randn(12, 5, generator=generator)
        return values.requires_grad_(wanted != "dense"), b.requires_grad_(wanted != "values")

    expected = leaves()
    spmm(matrix(layout, expected[0])[0], expected[1], reduce=reduce).sum().backward()
    given = leaves()
    a, c = matrix(layout, given[0])
    y = spmm(a, given[1], reduce=reduce).sum()
    with torch.no_grad():
        c[0] = 2**40
    try:
        y.backward()
    except (ValueError, RuntimeError):
        return
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_backward_of_the_operator_after_the_write():
    crow, col, values = parts()
    values.requires_grad_()
    b = torch.randn(12, 5, requires_grad=True)
    y = ops.csr_spmm(crow, col, values, b, 12).sum()
    col.data[0] = 2**40  # without a version change
    with refused:
        y.backward()


@pytest.mark.parametrize("layout", ["csr", "coo", "csc", "bsr"])
def test_backward_of_cusparse_spmm_after_the_write(layout):
    a, _ = matrix(layout)
    values, b = a.values().requires_grad_(), torch.randn(a.shape[1], 5, requires_grad=True)
    if layout == "coo":
        offsets, inner = a.indices()[0].clone(), a.indices()[1].clone()
    else:
        offsets, inner = (a.ccol_indices(), a.row_indices()) if layout == "csc" else (a.crow_indices(), a.col_indices())
    y = ops.cusparse_spmm(offsets, inner, values, b, *a.shape, layout).sum()
    for t in (inner, offsets):
        before = t[-1].item()
        t.data[-1] = 2**40
        with refused:
            y.backward(retain_graph=True)
        t.data[-1] = before
    y.backward()


@every_bad
def test_the_other_operations(bad):
    a, c = matrix()
    calls = {
        "sddmm": lambda: sddmm(torch.randn(10, 4), torch.randn(4, 12), a),
        "sparse_attention": lambda: sparse_attention(torch.randn(10, 4), torch.randn(12, 4), torch.randn(12, 4), a),
        "cusparseMM": lambda: cusparseMM.apply(a, torch.randn(12, 5)),
        "plan": lambda: plan(a),
    }
    for call in calls.values():
        call()
    c[0] = bad
    for call in calls.values():
        with refused:
            call()


def test_sparse_softmax_of_overwritten_offsets():
    crow, col, values = parts()
    a = torch.sparse_csr_tensor(crow, col, values, (10, 12))
    sparse_softmax(values, a)
    crow[3] = 2**40
    with refused:
        sparse_softmax(values, a)


@every_bad
def test_the_cusparse_functions(bad):
    crow, col, values = parts()
    b, x, y = torch.randn(12, 5), torch.randn(10, 4), torch.randn(4, 12)
    calls = (
        lambda: ops.cusparse_spmm(crow, col, values, b, 10, 12),
        lambda: ops.cusparse_prepare(crow, col, values, b, 10, 12),
        lambda: ops.cusparse_sddmm(crow, col, x, y),
    )
    for call in calls:
        call()
    col[0] = bad
    for call in calls:
        with refused:
            call()


def test_unsorted_row_indices():
    row, col = torch.tensor([0, 2, 1]), torch.tensor([0, 1, 2])
    with refused:
        ops.cusparse_spmm(row, col, torch.ones(3), torch.ones(4, 2), 4, 4, "coo")


# ------------------------------------------------------------------------------------------------ what a plan holds


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_a_plan_reads_its_own_copy_of_the_indices(layout):
    a, c = matrix(layout)
    b = torch.randn(a.shape[1], 5)
    made = plan(a)
    expected = made @ b
    c[0] = 2**40
    torch.testing.assert_close(made @ b, expected)


@pytest.mark.parametrize("bad", [2**31 - 1, -1, 1000])
@pytest.mark.parametrize("which", ["crow", "col"])
@pytest.mark.parametrize("by_view", [False, True], ids=["itself", "by a view"])
def test_a_write_to_a_plans_own_indices_is_seen(by_view, which, bad):
    a, _ = matrix()
    made, b = plan(a), torch.randn(12, 5)
    made @ b
    t = getattr(made._pattern, which)
    if by_view:
        t[2:][0] = bad
    else:
        t[2] = bad
    with refused:
        made @ b


def test_only_checked_indices_are_trusted():
    crow, col, values = parts(torch.int32)
    b = torch.randn(12, 5)
    _C.trust_indices(crow, col, None, 12)
    expected = ops.csr_spmm(crow, col, values, b, 12)
    with refused:  # trusted for 12 columns, not for fewer
        ops.csr_spmm(crow, col, values, b[:8], 8)
    other = col.clone()  # a copy is not trusted
    other[0] = 2**30
    with refused:
        ops.csr_spmm(crow, other, values, b, 12)
    alias = col.detach()
    alias[0] = 2**30  # an alias shares the version counter
    with refused:
        ops.csr_spmm(crow, col, values, b, 12)
    alias[0] = parts()[1][0]
    torch.testing.assert_close(ops.csr_spmm(crow, col, values, b, 12), expected)
    col.data = torch.full_like(col, 2**30)
    with refused:
        ops.csr_spmm(crow, col, values, b, 12)


def test_a_tensor_that_shares_memory_is_not_trusted():
    crow, col, values = parts(torch.int32)
    _C.trust_indices(crow, col, None, 12)
    shared = col.data
    shared[0] = 2**30
    with refused:
        ops.csr_spmm(crow, shared, values, torch.randn(12, 5), 12)


@every_bad
def test_only_valid_indices_are_trusted(bad):
    crow, col, _ = parts()
    col[3] = bad
    with refused:
        _C.trust_indices(crow, col, None, 12)
    with refused:
        _C.trust_indices(crow, parts()[1], col * 0 + bad * 100, 12)
