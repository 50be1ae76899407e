"""Sparse products in complex dtypes: against scipy in complex128, and torch's gradients."""

import numpy as np
import pytest
import scipy.sparse
import torch

from common.sparse_cases import LAYOUTS, every_layout, in_layout, long_rows
from matmuls import cusparseMM, plan, sddmm, sparse_attention, sparse_softmax, spgemm, spmm
from matmuls.nn import SparseLinear
from matmuls.sparse.layouts import Dense

COMPLEX = [torch.complex64, torch.complex128]
every_complex = pytest.mark.parametrize("dtype", COMPLEX, ids=str)


def draw(*shape, dtype=torch.complex128, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.complex128).to(device, dtype)


def draw_matrix(rows, columns, dtype=torch.complex128, device="cpu", density=0.4):
    kept = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) < density
    kept[rows // 2] = False
    return draw(rows, columns, dtype=dtype, device=device) * kept.to(device)


def in_scipy(dense):
    return scipy.sparse.csr_matrix(dense.cpu().to(torch.complex128).numpy())


def assert_near(ours, truth):
    truth = torch.from_numpy(np.asarray(truth))
    error = torch.linalg.vector_norm(ours.cpu().to(truth.dtype) - truth) / torch.linalg.vector_norm(truth)
    assert error <= 8 * torch.finfo(ours.dtype).eps


@every_complex
@every_layout
def test_products_against_scipy(layout, dtype, device):
    dense = draw_matrix(12, 30, dtype, device)
    a, truth = in_layout(dense, layout), in_scipy(dense)
    made = plan(a)
    for n in (1, 7, 64):
        b, x = (draw(rows, n, dtype=dtype, device=device, seed=n) for rows in (30, 12))
        in_numpy = b.cpu().to(torch.complex128).numpy()
        for product in (spmm(a, b), made @ b, cusparseMM.apply(a, b), spmm(a, b.mT.contiguous().mT)):
            assert product.dtype == dtype
            assert_near(product, truth @ in_numpy)
        assert_near(made @ b.conj(), truth @ in_numpy.conj())
        left = x.cpu().to(torch.complex128).numpy()
        assert_near(made.T @ x, truth.T @ left)
        assert_near(x.mT @ made, left.T @ truth)
        lengths = np.maximum(np.diff(truth.indptr), 1)[:, None]
        if layout not in ("bsr", "bsc"):  # blocks store zeros
            assert_near(spmm(a, b, reduce="mean"), truth @ in_numpy / lengths)
    vector, other = draw(30, dtype=dtype, device=device), draw(12, dtype=dtype, device=device)
    assert_near(made @ vector, truth @ vector.cpu().to(torch.complex128).numpy())
    assert_near(other @ made, other.cpu().to(torch.complex128).numpy() @ truth)


@every_complex
def test_rows_of_every_length(dtype, device):
    """Rows of up to 20,000 nonzeros, with the same bits for every number of threads."""
    crow, col, values, shape = long_rows(device)
    values = torch.complex(values, values.flip(0)).to(dtype)
    made = plan(torch.sparse_csr_tensor(crow, col, values, shape))
    truth = scipy.sparse.csr_matrix(tuple(t.cpu().numpy() for t in (values.to(torch.complex128), col, crow)), shape)
    before = torch.get_num_threads()
    for n in (1, 5, 200):
        b, products = draw(20000, n, dtype=dtype, device=device), []
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                products.append(made @ b)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(*products)
        expected = torch.from_numpy(truth @ b.cpu().to(torch.complex128).numpy())
        error = torch.linalg.vector_norm(products[0].cpu().to(torch.complex128) - expected)
        assert error <= 64 * torch.finfo(dtype).eps * torch.linalg.vector_norm(expected)


@every_complex
@pytest.mark.parametrize("beta", [0, 1, -0.5])
def test_products_into_a_tensor(dtype, beta, device):
    dense, b = draw_matrix(9, 8, dtype, device), draw(8, 5, dtype=dtype, device=device)
    before = draw(9, 10, dtype=dtype, device=device)
    for view in (lambda t: t[:, :5].contiguous(), lambda t: t[:, :5], lambda t: t[:, ::2]):
        out = view(before.clone())
        expected = 0.5 * (in_scipy(dense) @ b.cpu().to(torch.complex128).numpy())
        expected = expected + beta * out.cpu().to(torch.complex128).numpy()
        assert spmm(dense.to_sparse_csr(), b, alpha=0.5, beta=beta, out=out) is out
        assert_near(out, expected)


def test_out_that_is_not_read_may_be_nan(device):
    dense, b = draw_matrix(9, 8, device=device), draw(8, 5, device=device)
    out = torch.full((9, 5), float("nan"), dtype=dense.dtype, device=device)
    assert_near(spmm(dense.to_sparse_csr(), b, out=out), in_scipy(dense) @ b.cpu().numpy())


@every_complex
def test_sampled_products_do_not_conjugate(dtype, device):
    dense = draw_matrix(7, 6, dtype, device)
    made = plan(dense.to_sparse_csc())
    a, b = draw(2, 1, 7, 5, dtype=dtype, device=device), draw(3, 5, 6, dtype=dtype, device=device, seed=1)
    row, column = made._pattern.row.long(), made._pattern.col.long()
    expected = (a.to(torch.complex128) @ b.to(torch.complex128))[..., row, column]
    ours = sddmm(a, b, made, alpha=0.5)[..., made._pattern.order.long()]
    assert_near(ours, 0.5 * expected.cpu())


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@every_layout
def test_gradcheck(layout, reduce):
    made = plan(in_layout(draw_matrix(6, 9), layout))
    for lead in ((), (2,)):
        values, b = draw(made.nnz).requires_grad_(), draw(*lead, 9, 3).requires_grad_()
        left = draw(*lead, 6, 3, seed=2).requires_grad_()

        def product(values, b):
            return spmm(made.with_values(values), b, reduce=reduce, alpha=0.75)

        for function, leaves in (
            (product, (values, b)),
            (lambda values, b: made.with_values(values).T @ b, (values, left)),
            (lambda a, b: sddmm(a, b.mT, made, alpha=0.5), (left, b)),
        ):
            assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
            assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@every_complex
@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_gradients_are_those_of_torch(layout, dtype, device):
    """A, its transpose and x @ A; for real and for complex losses of the products."""
    dense = draw_matrix(12, 8, dtype, device)
    b, x, weight = (draw(*s, dtype=dtype, device=device) for s in ((8, 5), (3, 12), (12, 5)))
    sides = [t.requires_grad_() for t in (b, x)]

    def gradients(a, leaf):
        loss = ((a @ b) * weight).sum().abs() + (x @ a).abs().square().sum() + (a.T @ x.mT).real.sin().sum()
        return torch.autograd.grad(loss, (leaf, *sides))

    leaf, truth = in_layout(dense, layout).requires_grad_(), dense.clone().requires_grad_()
    ours, theirs = gradients(plan(leaf), leaf), gradients(truth, truth)
    assert ours[0].layout == leaf.layout
    assert_near(ours[0].to_dense(), (theirs[0] * (dense != 0)).cpu().to(torch.complex128))
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        assert_near(mine, other.cpu().to(torch.complex128))


def test_gradients_of_a_dense_operand(device):
    a, b = draw_matrix(6, 5, device=device).requires_grad_(), draw(5, 4, device=device).requires_grad_()
    ours = torch.autograd.grad(cusparseMM.apply(a, b).abs().sum(), (a, b), create_graph=True)
    theirs = torch.autograd.grad((a @ b).abs().sum(), (a, b), create_graph=True)
    torch.testing.assert_close(ours, theirs)
    seconds = [torch.autograd.grad(first[1].abs().sum(), a)[0] for first in (ours, theirs)]
    torch.testing.assert_close(*seconds)


@every_complex
def test_the_dense_layout_of_a_constant_plan(dtype, device):
    dense = draw_matrix(96, 100, dtype, device)
    made = plan(dense.to_sparse_csr(), constant=True)
    b = draw(100, 128, dtype=dtype, device=device)
    expected = in_scipy(dense) @ b.cpu().to(torch.complex128).numpy()
    assert_near(Dense(made._pattern).call(made.values, b, dtype).run(), expected)
    assert_near(made @ b, expected)


@every_complex
def test_batches_of_matrices(dtype, device):
    dense = torch.stack([draw_matrix(5, 6, dtype, device), 2j * draw_matrix(5, 6, dtype, device)])
    b = draw(2, 6, 3, dtype=dtype, device=device)
    made = plan(dense.to_sparse_csr())
    assert_near(made @ b, (dense.to(torch.complex128) @ b.to(torch.complex128)).cpu())


def test_plan_to_a_complex_dtype(device):
    a = draw_matrix(6, 5, device=device).real.to_sparse_csr()
    b = draw(5, 3, dtype=torch.complex64, device=device)
    assert_near(plan(a).to(torch.complex64) @ b, a.to_dense().to(torch.complex128).cpu() @ b.cpu().to(torch.complex128))


def test_repeated_products_see_conjugation(device):
    """A prepared call of the same b, conjugated lazily, is another call."""
    dense, b = draw_matrix(6, 5, device=device), draw(5, 3, device=device)
    made = plan(dense.to_sparse_csr())
    for operand in (b, b.conj(), b, b.conj()):
        assert_near(made @ operand, (dense @ operand.resolve_conj()).cpu())


def test_autocast_leaves_complex_operands(device):
    dense, b = draw_matrix(6, 5, torch.complex64, device), draw(5, 3, dtype=torch.complex64, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert (plan(dense.to_sparse_csr()) @ b).dtype == torch.complex64


def test_a_sparse_linear_layer_trains(device):
    linear = torch.nn.Linear(8, 6, dtype=torch.complex128, device=device)
    layer = SparseLinear.from_linear(linear, sparsity=0.5)
    pruned = layer.weight.to_dense().requires_grad_()
    x, truth_x = (draw(3, 8, device=device).requires_grad_() for _ in range(2))
    layer(x).abs().sum().backward()
    torch.nn.functional.linear(truth_x, pruned, linear.bias).abs().sum().backward()
    assert_near(x.grad, truth_x.grad.cpu())
    assert_near(layer.values.grad, pruned.grad[pruned != 0].cpu())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_has_no_complex_form_names_itself(layout):
    dense = draw_matrix(6, 6)
    a, values = in_layout(dense, layout), draw(plan(in_layout(dense, layout)).nnz)
    q = draw(6, 3)
    for call, words in (
        (lambda: spmm(a, q, reduce="max"), "spmm: expected reduce to be sum or mean in ComplexDouble, got max"),
        (lambda: spmm(plan(a), q, reduce="min"), "spmm: expected reduce to be sum or mean in ComplexDouble, got min"),
        (lambda: sparse_softmax(values, a), "sparse_softmax: expected x of a floating-point dtype, got ComplexDouble"),
        (lambda: sparse_attention(q, q, q, a), "sparse_attention: expected q of a real floating-point dtype"),
        (lambda: spgemm(a, a), "csr_spgemm.* expected a_values of a floating-point dtype, got ComplexDouble"),
        (lambda: spmm(a, q.real), "spmm: expected values to be a strided tensor in Double"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
