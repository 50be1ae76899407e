"""Uncoalesced COO matrices: entries in any order, several at one place."""

import pytest
import torch

from common.sparse_cases import assert_close, every_dtype
from matmuls import plan, sddmm, sparse_softmax, spmm

SHAPES = [
    (30, 42, 200),
    (5, 4, 300),
    (400, 3, 100),
    (1, 9, 50),
    (70000, 80000, 60),
]  # the last: few entries, not counted


def uncoalesced(rows, columns, entries, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(rows)
    index = torch.stack([torch.randint(n, (entries,), generator=generator) for n in (rows, columns)])
    values = torch.randn(entries, generator=generator, dtype=torch.float64).to(dtype)
    return torch.sparse_coo_tensor(index, values, (rows, columns), device=device)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape, dtype, device):
    a = uncoalesced(*shape, dtype, device)
    truth = a.double().coalesce()
    magnitudes = torch.sparse_coo_tensor(a._indices(), a._values().double().abs(), a.shape)
    for n in (1, 3, 8, 40):
        b = torch.randn(shape[1], n, dtype=dtype, device=device)
        wanted, theirs = truth @ b.double(), (a.float() @ b.float()).to(dtype)
        terms = torch.linalg.vector_norm(magnitudes @ b.double().abs()).item()
        for product in (spmm(a, b), spmm(a, b), plan(a) @ b):
            assert_close(product, wanted, theirs, terms)
    out = torch.randn(shape[0], n, dtype=dtype, device=device)
    wanted = 0.5 * wanted - 2 * out.double()
    assert_close(spmm(a, b, alpha=0.5, beta=-2, out=out), wanted, wanted.to(dtype), terms)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_needs_the_sum_of_the_entries(shape, device):
    a = uncoalesced(*shape, device=device)
    c, b = a.coalesce(), torch.randn(shape[1], 6, device=device)
    for reduce in ("mean", "max", "min"):
        torch.testing.assert_close(spmm(a, b, reduce=reduce), spmm(c, b, reduce=reduce))
    x, y = torch.randn(shape[0], 5, device=device), torch.randn(5, shape[1], device=device)
    torch.testing.assert_close(sddmm(x, y, a), sddmm(x, y, c))
    scores = torch.randn(c._nnz(), device=device)
    torch.testing.assert_close(sparse_softmax(scores, a), sparse_softmax(scores, c))
    torch.testing.assert_close(plan(a).values, c.values())


def test_gradients(device):
    a, b = uncoalesced(30, 42, 200, device=device), torch.randn(42, 7, device=device)
    weight = torch.randn(30, 7, device=device)

    def gradients(matrix):
        matrix, x = matrix.detach().clone().requires_grad_(), b.clone().requires_grad_()
        (spmm(matrix, x) * weight).sum().backward()
        return matrix.grad.to_dense(), x.grad

    torch.testing.assert_close(gradients(a), gradients(a.coalesce()))
    x = b.clone().requires_grad_()  # of b alone
    (spmm(a, x) * weight).sum().backward()
    torch.testing.assert_close(x.grad, a.to_dense().mT @ weight)


def test_entries_are_sorted_once(monkeypatch):
    """Neither a product nor a pattern coalesces on a CPU, and a second product sorts nothing."""
    a, b = uncoalesced(3000, 4000, 5000), torch.randn(4000, 8)
    wanted = a @ b

    def refuse(*args, **kwargs):
        raise AssertionError("the entries are sorted again")

    monkeypatch.setattr(torch.Tensor, "coalesce", refuse)
    prepared = plan(a)
    for product in (spmm(a, b), prepared @ b, spmm(a, b, reduce="sum")):
        torch.testing.assert_close(product, wanted)
    monkeypatch.setattr(torch, "sort", refuse)
    monkeypatch.setattr("matmuls.sparse.entries._csr_transpose", refuse)
    for product in (spmm(a, b), prepared @ b):
        torch.testing.assert_close(product, wanted)
    with pytest.raises(AssertionError, match="sorted again"):
        spmm(uncoalesced(3000, 4000, 5000), b)  # a new tensor
    monkeypatch.undo()
    a._values().mul_(2)  # indices and values share a version
    for product in (spmm(a, b), prepared @ b):
        torch.testing.assert_close(product, 2 * wanted)


@pytest.mark.parametrize("place", [(0, 30), (1, 42), (0, -1)], ids=str)
def test_indices_out_of_range(place, device):
    dimension, index = place
    a, b = uncoalesced(30, 42, 200, device=device), torch.randn(42, 7, device=device)
    spmm(a, b)
    what, size = (("rows", 30), ("columns", 42))[dimension]
    bad = a._indices().clone()
    bad[dimension, 17] = index
    broken = torch.sparse_coo_tensor(bad, a._values(), a.shape, check_invariants=False)
    with pytest.raises(ValueError, match=f"spmm: expected {what} from 0 to {size - 1}.*, got {index}"):
        spmm(broken, b)
