"""solve_triangular: compared with scipy and torch in float64, gradients, the diagonal, hostile input."""

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sparse_cases import every_dtype, every_layout, in_layout
from common.triangle_cases import by_torch, every_transpose, every_unit, every_way, square
from matmuls import plan, solve_triangular


@every_layout
@every_way
@every_transpose
@every_unit
def test_solutions_are_torchs(layout, upper, transpose, unit, device):
    dense = square(18, device=device)
    if unit:
        dense.diagonal().zero_()  # ignored
    options = {"upper": upper, "transpose": transpose, "unit_diagonal": unit}
    for a in (in_layout(dense, layout), plan(in_layout(dense, layout))):
        for b in (torch.randn(18), torch.randn(18, 1), torch.randn(18, 37)):
            b = b.double().to(device)
            x = solve_triangular(a, b, **options)
            torch.testing.assert_close(x, by_torch(dense, b, upper, transpose, unit))


@every_dtype
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_dtypes(dtype, index, device):
    dense = square(40, dtype=dtype, device=device)
    b = torch.randn(40, 5, device=device).to(dtype)
    x = solve_triangular(in_layout(dense, "csr", index), b, upper=False)
    assert x.dtype == dtype
    truth = by_torch(dense.double(), b.double(), False, False, False)
    torch.testing.assert_close(x.double(), truth, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@st.composite
def triangles(draw):
    """A CSR matrix with columns in any order, duplicates, nonzeros of both triangles, and a b."""
    n = draw(st.integers(0, 10))
    rows = [[*draw(st.lists(st.integers(0, n - 1), max_size=5)), r] for r in range(n)]
    col = [c for row in rows for c in draw(st.permutations(row))]
    row = [r for r, cs in enumerate(rows) for _ in cs]
    values = [8.0 if r == c else draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0])) for r, c in zip(row, col, strict=True)]
    crow = torch.tensor([0, *map(len, rows)]).cumsum(0)
    col, values = torch.tensor(col, dtype=torch.int64), torch.tensor(values, dtype=torch.float64)
    return torch.sparse_csr_tensor(crow, col, values, (n, n), check_invariants=False)


@given(triangles(), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_solutions_are_scipys(a, upper, transpose):
    b = torch.linspace(-1, 2, a.shape[0], dtype=torch.float64)
    x = solve_triangular(a, b, upper=upper, transpose=transpose)
    matrix = scipy.sparse.csr_matrix((a.values(), a.col_indices(), a.crow_indices()), shape=tuple(a.shape))
    triangle = (scipy.sparse.triu if upper else scipy.sparse.tril)(matrix).tocsr()
    if not a.shape[0]:
        return
    expected = scipy.sparse.linalg.spsolve_triangular(
        triangle.T if transpose else triangle, b.numpy(), upper == transpose
    )
    np.testing.assert_allclose(x, expected, rtol=1e-10, atol=1e-12)


@every_way
@every_transpose
@every_unit
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_gradcheck(upper, transpose, unit, layout):
    made = plan(in_layout(square(6, 0.5), layout))

    def function(values, b):
        a = made.with_values(values)
        return solve_triangular(a, b, upper=upper, transpose=transpose, unit_diagonal=unit)

    values = made.values.clone().requires_grad_()
    for shape in ((6,), (6, 3)):
        b = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, (values, b))
        assert torch.autograd.gradgradcheck(function, (values, b))


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_gradients_of_a_sparse_leaf(layout, device):
    dense, b = square(12, device=device), torch.randn(12, 4, dtype=torch.float64, device=device)
    leaf, truth = in_layout(dense, layout).requires_grad_(), dense.clone().requires_grad_()
    solve_triangular(leaf, b, upper=True).square().sum().backward()
    by_torch(truth, b, True, False, False).square().sum().backward()
    assert leaf.grad.layout == leaf.layout
    torch.testing.assert_close(leaf.grad.to_dense(), truth.grad * (dense != 0))


def test_the_same_bits_for_every_number_of_threads():
    a, b = plan(square(400, 0.1).to_sparse_csr()), torch.randn(400, 100, dtype=torch.float64)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(solve_triangular(a, b, upper=False))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[0][:, 50:51], solve_triangular(a, b[:, 50:51], upper=False))


@every_transpose
def test_a_diagonal_without_an_element_names_the_row(transpose, device):
    dense = square(9, device=device)
    dense[5, 5] = 0
    b = torch.randn(9, 2, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match=r"solve_triangular: expected a diagonal .*, got no nonzero in row 5"):
        solve_triangular(dense.to_sparse_csr(), b, upper=True, transpose=transpose)
    zero = square(9, device=device).to_sparse_csr()
    zero.values()[zero.crow_indices()[3] + (zero.col_indices()[zero.crow_indices()[3] :] == 3).nonzero()[0]] = 0
    with pytest.raises(ValueError, match=r"solve_triangular: expected a diagonal .*, got 0 in row 3"):
        solve_triangular(zero, b, upper=True, transpose=transpose)


def test_compiled(device):
    made = plan(square(9, device=device).to_sparse_csr())
    b = torch.randn(9, 3, dtype=torch.float64, device=device, requires_grad=True)
    compiled = torch.compile(
        lambda b: solve_triangular(made, b, upper=True).square().sum(), fullgraph=True, backend="aot_eager"
    )
    solve_triangular(made, b, upper=True).square().sum().backward()
    expected, b.grad = b.grad, None
    compiled(b).backward()
    torch.testing.assert_close(b.grad, expected)


def test_errors_say_what_was_expected():
    a, b = square(6).to_sparse_csr(), torch.randn(6, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"solve_triangular: expected a square A, got shape \[5, 6\]"):
        solve_triangular(square(6)[:5].to_sparse_csr(), b, upper=True)
    with pytest.raises(RuntimeError, match=r"solve_triangular: expected b of shape \[6\] or \[6, k\], got \[1, 6\]"):
        solve_triangular(a, b[None], upper=True)
    with pytest.raises(RuntimeError, match="csr_solve_triangular: expected values to be a strided tensor in Float"):
        solve_triangular(a, b.float(), upper=True)
    with pytest.raises(TypeError, match="solve_triangular: expected b to be a dense tensor, got list"):
        solve_triangular(a, [1.0] * 6, upper=True)
    with pytest.raises(TypeError, match="solve_triangular: expected A to be a sparse tensor or a plan"):
        solve_triangular(square(6), b, upper=True)


def test_hostile_indices_do_not_lead_out_of_bounds():
    solve, a, b = torch.ops.custom_mm.csr_solve_triangular, square(6).to_sparse_csr(), torch.randn(6, 2).double()
    crow, col, values = a.crow_indices(), a.col_indices(), a.values()
    transposed = torch.ops.custom_mm.csr_transpose(crow, col, 6)
    for bad in (
        lambda: solve(crow, col + 6, values, b, True),
        lambda: solve(crow + 1, col, values, b, True),
        lambda: solve(crow, col, values, b, True, False, False, col * 2**40),
        lambda: solve(crow, col, values, b, True, True, False, None, transposed[0][:4], *transposed[1:]),
        lambda: solve(crow, col, values, b, True, True, False, None, transposed[0], transposed[1] - 1, transposed[2]),
    ):
        with pytest.raises(ValueError, match="csr_solve_triangular: expected"):
            bad()


def test_a_zero_in_one_sample_of_a_vmap_is_refused(device):
    made = plan(square(9, device=device).to_sparse_csr())
    b = torch.randn(9, 2, dtype=torch.float64, device=device)
    samples = made.values.detach().expand(3, -1).clone()
    samples[1, int((made.values == square(9, device=device)[3, 3]).nonzero())] = 0
    with pytest.raises(ValueError, match="expected a diagonal without zeros, got 0 in row"):
        torch.vmap(lambda values: solve_triangular(made.with_values(values), b, upper=True))(samples)
