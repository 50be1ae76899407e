"""plan_solve: compared with scipy, torch and solve_triangular; values that change, gradients, kept analyses, copies,
threads."""

import copy
import pickle
import threading

import numpy as np
import pytest
import scipy.sparse.linalg
import torch

from common.sparse_cases import every_dtype, every_layout, in_layout
from common.triangle_cases import by_torch, drawn, every_transpose, every_unit, every_way, square
from custom_mm import _C
from matmuls import SolvePlan, plan, plan_solve, solve_triangular

WIDTHS = (), (1,), (5,), (37,)


@every_layout
@every_way
@every_transpose
@every_unit
def test_solutions_are_torchs_and_follow_the_values(layout, upper, transpose, unit, device):
    dense = square(18, device=device)
    if unit:
        dense.diagonal().zero_()  # ignored
    ways = upper, transpose, unit
    a = in_layout(dense, layout)
    made = plan_solve(a, upper=upper, transpose=transpose, unit_diagonal=unit)
    for factor in (1, -3):
        if factor != 1:
            (a._values() if layout == "coo" else a.values()).mul_(factor)
        for columns in WIDTHS * 2:
            b = drawn(18, *columns, device=device)
            torch.testing.assert_close(made(b), by_torch(factor * dense, b, *ways))
            values = 2 * made.a.values  # of this call alone
            torch.testing.assert_close(made(b, values), by_torch(2 * factor * dense, b, *ways))
    made.a.update(made.a.values / 4)
    torch.testing.assert_close(made(b), by_torch(-0.75 * dense, b, *ways))


@every_way
@every_transpose
def test_solutions_are_scipys(upper, transpose, device):
    dense, b = square(300, 0.02), drawn(300, 4)
    made = plan_solve(dense.to_sparse_csr().to(device), upper=upper, transpose=transpose)
    triangle = scipy.sparse.csr_matrix((torch.triu if upper else torch.tril)(dense).numpy())
    expected = scipy.sparse.linalg.spsolve_triangular(
        triangle.T.tocsr() if transpose else triangle, b.numpy(), upper == transpose
    )
    for _ in range(2):
        np.testing.assert_allclose(made(b.to(device)).cpu(), expected, rtol=1e-10, atol=1e-12)


@every_dtype
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_the_bits_are_those_of_one_solve(dtype, index, device):
    dense = square(40, dtype=dtype, device=device)
    a = in_layout(dense, "csr", index)
    made = plan_solve(a, upper=False)
    for columns in WIDTHS:
        b = drawn(40, *columns, dtype=dtype, device=device)
        for x in (made(b), made(b), made(b, made.a.values.clone())):
            assert x.dtype == dtype
            if device == "cpu":
                assert torch.equal(x, solve_triangular(a, b, upper=False))
            truth = by_torch(dense.double(), b.double(), False, False, False)
            eps = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(x.double(), truth, rtol=eps, atol=eps)
    wide = made(b.double(), made.a.values.double())  # values of another dtype
    torch.testing.assert_close(wide, by_torch(dense.double(), b.double(), False, False, False))


def test_b_is_not_written_and_may_have_any_strides(device):
    dense = square(21, device=device)
    made = plan_solve(dense.to_sparse_csr(), upper=True)
    base = drawn(42, 12, device=device)
    for b in (base[::2, :6], base.view(-1)[1:127].view(21, 6), base[:21].T.contiguous().T, base[:21, :1].expand(21, 6)):
        before = b.clone()
        torch.testing.assert_close(made(b), by_torch(dense, b, True, False, False))
        assert torch.equal(b, before)


@every_way
@every_transpose
@every_unit
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_gradcheck(upper, transpose, unit, layout, device):
    made = plan_solve(
        plan(in_layout(square(6, 0.5, device=device), layout)), upper=upper, transpose=transpose, unit_diagonal=unit
    )
    values = made.a.values.clone().requires_grad_()

    def function(b, values):
        return made(b, values.clone())  # gradcheck writes through .data

    for columns in ((), (3,)):
        b = drawn(6, *columns, device=device).requires_grad_()
        assert torch.autograd.gradcheck(function, (b, values))
        assert torch.autograd.gradgradcheck(function, (b, values))


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_a_trained_matrix(layout, device):
    """The optimizer writes to A in place: the version of what is read is A's own."""
    dense, b = square(12, device=device), drawn(12, 4, device=device)
    leaf, truth = in_layout(dense, layout).requires_grad_(), dense.clone().requires_grad_()
    made = plan_solve(leaf, upper=True)
    for _ in range(3):
        made(b).square().sum().backward()
        by_torch(truth, b, True, False, False).square().sum().backward()
        torch.testing.assert_close(leaf.grad.to_dense(), truth.grad * (dense != 0))
        with torch.no_grad():
            values = leaf._values() if layout == "coo" else leaf.values()
            values.mul_(0.9)
            truth.mul_(0.9)
            leaf.grad = truth.grad = None


@pytest.mark.parametrize("columns", [(), (4,)])
def test_writes_by_data_are_read(columns, device):
    """Their version does not tell; a constant plan on a GPU has promised that there are none."""
    dense, b = square(12, device=device), drawn(12, *columns, device=device)
    a = dense.to_sparse_csr()
    made, constant = plan_solve(a, upper=True), plan_solve(plan(a, constant=True), upper=True)
    first = made(b)
    torch.testing.assert_close(constant(b), first)
    a.values().data.mul_(2)
    torch.testing.assert_close(made(b), first / 2)
    torch.testing.assert_close(constant(b), first if device == "cuda" else first / 2)
    torch.testing.assert_close(constant(b, 4 * made.a.values), first / 8)


def test_gradients_of_a_step_that_solves_twice(device):
    """An iteration: the same plan several times before the backward pass, with other values in between."""
    dense = square(15, device=device)
    made = plan_solve(dense.to_sparse_csr(), upper=False)
    values = made.a.values.clone().requires_grad_()
    truth = dense.clone().requires_grad_()
    b = drawn(15, 3, device=device)
    made(made(made(b, values), 2 * values), values).square().sum().backward()
    x = by_torch(2 * truth, by_torch(truth, b, False, False, False), False, False, False)
    by_torch(truth, x, False, False, False).square().sum().backward()
    torch.testing.assert_close(values.grad, truth.grad[dense != 0])


def without_diagonal(a, row):
    """Where the diagonal of a row lies among A's values."""
    begin, end = a.crow_indices()[row : row + 2].tolist()
    return begin + a.col_indices()[begin:end].tolist().index(row)


@every_transpose
def test_a_zero_on_the_diagonal_after_a_write(transpose, device):
    a, b = square(9, device=device).to_sparse_csr(), drawn(9, 2, device=device)
    made = plan_solve(a, upper=True, transpose=transpose)
    x = made(b)
    places = [without_diagonal(a, row) for row in (7, 4)]
    kept = a.values()[places].clone()
    a.values()[places] = 0
    young = plan_solve(a, upper=True, transpose=transpose)  # analysed with a zero
    with pytest.raises(ValueError, match=r"got 0 in row 4"):
        young(b)
    for columns in (b, b, b[:, 0]):  # each time, and for other columns too
        with pytest.raises(ValueError, match=r"solve_triangular: expected a diagonal .*, got 0 in row 4"):
            made(columns)
    a.values()[places] = kept
    torch.testing.assert_close(young(b), x)
    torch.testing.assert_close(made(b), x)
    values = a.values().clone()
    values[places[0]] = 0
    with pytest.raises(ValueError, match=r"got 0 in row 7"):
        made(b, values)
    with pytest.raises(ValueError, match=r"got 0 in row 7"):
        made(b.clone().requires_grad_(), values.requires_grad_())
    torch.testing.assert_close(made(b), x)
    missing = square(9, device=device)
    missing[5, 5] = 0
    never = plan_solve(missing.to_sparse_csr(), upper=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"got no nonzero in row 5"):
            never(b)
    with pytest.raises(ValueError, match=r"got no nonzero in row 5"):
        never(b[:, :0])


def test_duplicates_are_added_on_a_cpu():
    crow, col = torch.tensor([0, 3, 5]), torch.tensor([0, 0, 1, 1, 0])
    a = torch.sparse_csr_tensor(crow, col, torch.tensor([1.0, 3.0, 9.0, 2.0, 4.0]), (2, 2), check_invariants=False)
    made = plan_solve(a, upper=False)
    for _ in range(2):
        assert torch.equal(made(torch.tensor([4.0, 8.0])), torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="got 0 in row 0"):
        made(torch.tensor([4.0, 8.0]), torch.tensor([1.0, -1.0, 9.0, 2.0, 4.0]))


def test_more_kinds_than_are_kept(device):
    dense = square(30, device=device)
    made = plan_solve(dense.to_sparse_csr(), upper=False)
    empty = made.nbytes
    for _ in range(2):
        for k in (*range(1, 12), 3):
            b = drawn(30, k, device=device)
            torch.testing.assert_close(made(b), by_torch(dense, b, False, False, False))
    kept = _C.kept_solves(made._state)
    assert [one[0] for one in kept] == ([5, 6, 7, 8, 9, 10, 11, 3] if device == "cuda" else [])
    assert made.nbytes == empty + sum(one[-1] for one in kept)
    assert made.explain().count("SpSM: ") == len(kept)
    single = made(b.float(), made.a.values.float())
    torch.testing.assert_close(single.double(), made(b), rtol=1e-4, atol=1e-4)


def test_empty(device):
    none = plan_solve(torch.zeros(0, 0, device=device).to_sparse_csr(), upper=True)
    assert none(torch.zeros(0, 3, device=device)).shape == (0, 3)
    made = plan_solve(square(4, device=device).float().to_sparse_csr(), upper=True)
    assert made(torch.zeros(4, 0, device=device)).shape == (4, 0)
    b = torch.randn(4, 2, device=device)
    alone = plan_solve(torch.zeros(4, 4, device=device).to_sparse_csr(), upper=True, unit_diagonal=True)
    assert torch.equal(alone(b), b)
    with pytest.raises(ValueError, match="got no nonzero in row 0"):
        plan_solve(torch.zeros(4, 4, device=device).to_sparse_csr(), upper=True)(b)


def test_copies_pickles_and_to(device):
    dense, b = square(11, device=device), drawn(11, 3, device=device)
    made = plan_solve(dense.to_sparse_csr(), upper=False, transpose=True)
    expected = made(b)
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        for _ in range(2):
            torch.testing.assert_close(other(b), expected)
        torch.testing.assert_close(other(b, 2 * made.a.values), expected / 2)
    single = made.to(torch.float32)
    torch.testing.assert_close(single(b.float()).double(), expected, rtol=1e-4, atol=1e-4)
    assert made.to(torch.float64) is made
    torch.testing.assert_close(made.to("cpu")(b.cpu()), expected.cpu())
    assert isinstance(single, SolvePlan)
    assert repr(single) == (
        f"SolvePlan(shape=[11, 11], nnz={single.a.nnz}, upper=False, transpose=True, dtype=torch.float32, "
        f"device={single.a.device})"
    )


def test_a_state_of_another_matrix_and_a_clone_of_one_are_none(device):
    ops = torch.ops.custom_mm
    a, other = (square(8, device=device, seed=s).to_sparse_csr() for s in (0, 1))
    state, b = ops.csr_solve_state(other.crow_indices(), other.col_indices()), drawn(8, 2, device=device)
    parts = a.crow_indices(), a.col_indices(), a.values(), b, True
    for _ in range(2):
        for given in (state, state.clone()):
            x = ops.csr_solve_triangular(*parts, state=given, version=1)
            torch.testing.assert_close(x, by_torch(a.to_dense(), b, True, False, False))


def test_saved_tensors_that_hooks_move(device):
    """The backward pass has the indices at another address than the state."""
    dense, b = square(40, device=device), drawn(40, 3, device=device).requires_grad_()
    made = plan_solve(dense.to_sparse_csr(), upper=True)
    (right,) = torch.autograd.grad(made(b).square().sum(), b)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone() if t.nbytes >= 64 else t, lambda t: t):
        y = made(b).square().sum()
    torch.testing.assert_close(torch.autograd.grad(y, b)[0], right)


def test_traced_calls_take_the_values_that_they_are_given(device):
    dense, b = square(12, device=device), drawn(12, 2, device=device)
    made = plan_solve(plan(dense.to_sparse_csr(), constant=True), upper=True)
    values = made.a.values.clone()
    traced = torch.jit.trace(lambda b, values: made(b, values), (b, values), check_trace=False)
    for factor in (1, 2, 4):
        torch.testing.assert_close(traced(b, factor * values), by_torch(factor * dense, b, True, False, False))


def test_functions_transformed(device):
    dense = square(9, device=device)
    made = plan_solve(dense.to_sparse_csr(), upper=True)
    bs = drawn(3, 9, 2, device=device)
    expected = torch.stack([by_torch(dense, b, True, False, False) for b in bs])
    torch.testing.assert_close(torch.vmap(made)(bs), expected)
    samples = torch.stack([made.a.values, 2 * made.a.values, 4 * made.a.values])
    scaled = expected / torch.tensor([1.0, 2, 4], dtype=torch.float64, device=device)[:, None, None]
    torch.testing.assert_close(torch.vmap(made)(bs, samples), scaled)
    found = torch.func.grad(lambda b: made(b).sum())(bs[0])
    ones = torch.ones_like(bs[0])
    torch.testing.assert_close(found, by_torch(dense, ones, True, True, False))
    torch.testing.assert_close(made(bs[0]), expected[0])
    samples[1, without_diagonal(dense.to_sparse_csr(), 3)] = 0
    with pytest.raises(ValueError, match="got 0 in row 3"):
        torch.vmap(made)(bs, samples)


def test_compiled(device):
    made = plan_solve(square(9, device=device).to_sparse_csr(), upper=True)
    b = drawn(9, 3, device=device).requires_grad_()
    compiled = torch.compile(lambda b: made(b).square().sum(), fullgraph=True, backend="aot_eager")
    made(b).square().sum().backward()
    expected, b.grad = b.grad, None
    compiled(b).backward()
    torch.testing.assert_close(b.grad, expected)


def test_inference_mode(device):
    dense = square(9, device=device)
    made, b = plan_solve(dense.to_sparse_csr(), upper=True), drawn(9, device=device)
    with torch.inference_mode():
        made(b)
        values = made.a.values.clone()  # writes to it are not counted
        made(b, values)
        values.mul_(2)
        torch.testing.assert_close(made(b, values), by_torch(2 * dense, b, True, False, False))
    leaf = b.requires_grad_()
    made(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, by_torch(dense, torch.ones_like(b), True, True, False))


def test_threads(device):
    """Each with values and columns of its own, all with one plan."""
    dense = square(60, device=device)
    made = plan_solve(dense.to_sparse_csr(), upper=False)
    wrong = []

    def work(factor):
        b, values = drawn(60, 1 + factor % 3, device=device, seed=factor), factor * made.a.values
        expected = by_torch(dense, b, False, False, False)
        for i in range(40):
            mine = i % 3 != 0
            x = made(b, values) if mine else made(b)
            if not torch.allclose(x * factor if mine else x, expected):
                wrong.append(factor)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_errors_say_what_was_expected():
    a, b = square(6).to_sparse_csr(), drawn(6)
    with pytest.raises(ValueError, match=r"plan_solve: expected a square A, got shape \[5, 6\]"):
        plan_solve(square(6)[:5].to_sparse_csr(), upper=True)
    with pytest.raises(TypeError, match="plan_solve: expected a sparse tensor or a plan, got list"):
        plan_solve([a], upper=True)
    with pytest.raises(ValueError, match="plan_solve: expected A to be one matrix, got a batch"):
        plan_solve(torch.stack([square(6)] * 2).to_sparse_csr(), upper=True)
    made = plan_solve(a, upper=True)
    with pytest.raises(RuntimeError, match=r"SolvePlan: expected b of shape \[6\] or \[6, k\], got \[1, 6\]"):
        made(b[None])
    with pytest.raises(TypeError, match="SolvePlan: expected b to be a dense tensor, got list"):
        made([1.0] * 6)
    with pytest.raises(RuntimeError, match="csr_solve_triangular: expected values to be a strided tensor in Float"):
        made(b.float())
    with pytest.raises(ValueError, match=rf"expected values of shape \[{a._nnz()}\]"):
        made(b, made.a.values[1:])
    a.col_indices().copy_(a.col_indices().flip(0))
    with pytest.raises(ValueError, match="SolvePlan: expected the indices that the plan was made of"):
        made(b)
