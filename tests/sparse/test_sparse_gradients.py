"""Gradients of sparse products, sampled products and sparse attention."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from common.sparse_cases import draw_sparse, every_layout, in_layout, long_rows
from matmuls import cusparseMM, plan, sddmm, sparse_attention, sparse_softmax, spmm

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
