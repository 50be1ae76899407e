"""alpha = 0 reads no operand and beta = 0 no output, as in BLAS and torch.addmm: their NaN and inf do not propagate."""

import pytest
import torch

import custom_mm
from matmuls import matmul, plan, sddmm, spmm

BAD = float("nan"), float("inf")


def draw(device, dtype=torch.float32):
    a = (torch.randn(6, 5) * (torch.rand(6, 5) < 0.6)).to(dtype).to(device)
    return a, torch.randn(5, 8).to(dtype).to(device), torch.randn(6, 8).to(dtype).to(device)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "plan"])
def test_spmm(layout, bad, reduce, device):
    dense, b, out = draw(device)
    a = {
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "coo": dense.to_sparse(),
        "plan": plan(dense.to_sparse_csr()),
    }[layout]
    b[2] = bad
    assert torch.equal(spmm(a, b, reduce=reduce, alpha=0), torch.zeros_like(out))
    for beta in (0, 1, 0.5):
        before = out.clone()
        spmm(a, b, reduce=reduce, alpha=0, beta=beta, out=out)
        assert torch.equal(out, beta * before)
    out[1] = bad
    spmm(a, torch.ones_like(b), reduce=reduce, alpha=0, beta=0, out=out)
    assert torch.equal(out, torch.zeros_like(out))
    out[1] = bad
    spmm(a, torch.ones_like(b), reduce=reduce, beta=0, out=out)
    assert out.isfinite().all()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["values", "dense"])
def test_cusparse_spmm(where, bad, device):
    dense, b, out = draw(device)
    s = dense.to_sparse_csr()
    values = s.values()
    (values if where == "values" else b).view(-1)[3] = bad
    parts = s.crow_indices(), s.col_indices(), values, b, 6, 5
    assert torch.equal(custom_mm.cusparse_spmm(*parts, alpha=0.0), torch.zeros_like(out))
    for beta in (0.0, 1.0, 0.5):
        before = out.clone()
        custom_mm.cusparse_spmm(*parts, alpha=0.0, beta=beta, out=out)
        assert torch.equal(out, beta * before)
    out.fill_(bad)
    ones = torch.ones_like(values), torch.ones_like(b)
    custom_mm.cusparse_spmm(s.crow_indices(), s.col_indices(), *ones, 6, 5, out=out)
    assert out.isfinite().all()


@pytest.mark.parametrize("bad", BAD)
def test_sampled_products(bad, device):
    pattern, b, a = draw(device)
    s = pattern.to_sparse_csr()
    a[1] = bad
    zeros = torch.zeros(s.values().shape, device=device)
    assert torch.equal(sddmm(a, b.mT, s, alpha=0), zeros)
    assert torch.equal(custom_mm.cusparse_sddmm(s.crow_indices(), s.col_indices(), a, b.mT, alpha=0.0), zeros)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_gradients_are_zero(reduce, device):
    dense, b, _ = draw(device)
    made = plan(dense.to_sparse_csr())
    values = made.values.clone()
    b[2], values[1] = torch.nan, torch.inf
    leaves = values.requires_grad_(), b.requires_grad_()
    y = spmm(made.with_values(values), b, reduce=reduce, alpha=0)
    for grad in torch.autograd.grad(y, leaves, torch.full_like(y, torch.nan), create_graph=True):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_outputs_of_dense_products_are_not_read(dtype, device):
    a, b = torch.randn(2, 6, 5, device=device).to(dtype), torch.randn(2, 5, 8, device=device).to(dtype)
    ways = {
        "matmul": lambda x, y, out: matmul(x, y, out=out),
        "cublas_mmul": custom_mm.cublas_mmul,
        "cublaslt_matmul": lambda x, y, out: custom_mm.cublaslt_matmul(x, y, c=out),
    }
    for name, multiply in ways.items():
        out = torch.full((6, 8), torch.nan, dtype=dtype, device=device)
        multiply(a[0], b[0], out)
        torch.testing.assert_close(out, a[0] @ b[0], msg=name)
    out = torch.full((2, 6, 8), torch.nan, dtype=dtype, device=device)
    custom_mm.cublas_bmm(a, b, out, 3)
    torch.testing.assert_close(out, a @ b)
