"""Sparse matrices with many nonzeros on a CPU, multiplied in dense blocks of rows; and few columns of B."""

import pytest
import torch
import torch.nn.functional as F

from common.sparse_cases import assert_close, draw_sparse, every_dtype, in_layout
from matmuls import plan, sddmm, spmm
from matmuls.nn import SparseLinear

# The last has several blocks of rows.
SHAPES = [(48, 40, 60), (130, 70, 20), (700, 1500, 50)]


def layer_of(rows, columns, density, dtype):
    linear = torch.nn.Linear(columns, rows, dtype=dtype)
    return SparseLinear.from_linear(linear, sparsity=1 - density)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("density", [0.9, 0.3, 0.05])
def test_a_layer_of_any_density(shape, density, dtype):
    """Values, x and bias, and their gradients."""
    rows, columns, n = shape
    layer, x = layer_of(rows, columns, density, dtype), torch.randn(2, n, columns, dtype=dtype)
    grad = torch.randn(2, n, rows, dtype=dtype)
    kept = layer.weight.to_dense() != 0

    def results(weight, bias, x, run):
        x = x.detach().clone().requires_grad_()
        y = run(x)
        y.backward(grad.to(y.dtype))
        return y.detach(), x.grad, weight.grad[kept] if weight.grad.dim() > 1 else weight.grad, bias.grad

    def dense(wide):
        weight = layer.weight.to_dense().to(wide).requires_grad_()
        bias = layer.bias.detach().to(wide).requires_grad_()
        return results(weight, bias, x.to(wide), lambda x: F.linear(x, weight, bias))

    layer.zero_grad()
    for ours, theirs, truth in zip(
        results(layer.values, layer.bias, x, layer), dense(dtype), dense(torch.float64), strict=True
    ):
        assert_close(ours, truth, theirs)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_nan_and_inf_reach_no_other_output(bad):
    """A zero of the weight is no factor."""
    layer = layer_of(60, 40, 0.5, torch.float32)
    x = torch.randn(128, 40)
    x[5, 7] = bad
    y = layer(x)
    reached = layer.weight.to_dense()[:, 7] != 0
    assert y[5, ~reached].isfinite().all()
    assert not y[5, reached].isfinite().any()
    assert y[:5].isfinite().all()


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sampled_products_at_many_nonzeros(layout, dtype):
    dense = draw_sparse(300, 700, 0.6, dtype)
    a, b = draw_sparse(300, 100, 1, dtype, seed=1), draw_sparse(100, 700, 1, dtype, seed=2)
    pattern = in_layout(dense, layout)
    places = in_layout((dense != 0).double().mul_(torch.arange(1, dense.numel() + 1).view(300, 700)), layout)
    index = (places.coalesce() if layout == "coo" else places).values().long() - 1
    for alpha in (1, -0.5):
        truth = (alpha * (a.double() @ b.double())).view(-1)[index]
        assert_close(sddmm(a, b, pattern, alpha=alpha), truth, (alpha * (a @ b)).view(-1)[index])


def test_duplicates_are_added():
    crow, col = torch.arange(41, dtype=torch.int32) * 20, torch.randint(20, (800,), dtype=torch.int32)
    values, x = torch.randn(800), torch.randn(128, 20)
    y = torch.ops.custom_mm.csr_linear.default(crow, col, values, x)
    torch.testing.assert_close(y, x @ torch.sparse_csr_tensor(crow, col, values, (40, 20)).to_dense().mT)


@every_dtype
@pytest.mark.parametrize("k", [1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130])
def test_sampled_products_of_any_length(k, dtype, device):
    pattern = draw_sparse(40, 60, 0.1, dtype, device, empty=(0, 7, 39)).to_sparse_csr()
    for batch in ((), (3,)):
        a, b = (torch.randn(*batch, n, k, dtype=dtype, device=device) for n in (40, 60))
        index = torch.repeat_interleave(torch.arange(40, device=device), pattern.crow_indices().diff())
        x, y = a[..., index, :], b[..., pattern.col_indices(), :]
        truth = (x.double() * y.double()).sum(-1)
        terms = torch.linalg.vector_norm((x.double() * y.double()).abs().sum(-1)).item()
        assert_close(sddmm(a, b.mT, pattern), truth, (x * y).sum(-1), terms)


@every_dtype
@pytest.mark.parametrize("order", [False, True], ids=["by rows", "by order"])
def test_a_column_does_not_depend_on_the_others(order, dtype):
    """Nor a row on the others: each sum is added up in the order of its row."""
    dense = draw_sparse(203, 90, 0.3, dtype, empty=(0, 5, 202))
    dense[::7, 3:] = 0  # rows of other lengths
    a = in_layout(dense, "csc" if order else "csr")
    b = torch.randn(90, 40, dtype=dtype)
    whole = plan(a, tune=False) @ b
    for n in (2, 3, 5, 8, 9, 13, 16, 17, 24):
        assert torch.equal(spmm(a, b[:, :n].contiguous()), whole[:, :n])
    one = spmm(a, b[:, :1])  # a loop of its own, which rounds products by themselves
    assert_close(one, dense.double() @ b[:, :1].double(), dense @ b[:, :1])
    assert torch.equal(spmm(in_layout(dense[9:20].clone(), "csc" if order else "csr"), b[:, :1]), one[9:20])
    out = torch.randn(203, 1, dtype=torch.float64).to(dtype)
    wanted = 2 * dense.double() @ b[:, :1].double() - 3 * out.double()
    assert_close(spmm(a, b[:, :1], alpha=2, beta=-3, out=out), wanted, wanted.to(dtype))
