"""What a plan does besides `plan @ B`: x @ plan, vectors, T, to and repr, against torch in float64."""

import copy
import pickle
import re

import pytest
import torch

from matmuls import plan, sddmm, spmm

DTYPES = torch.float64, torch.float32, torch.float16, torch.bfloat16
LAYOUTS = "csr", "csc", "coo", "bsr", "bsc"


def drawn(rows=6, columns=9, dtype=torch.float64, device="cpu", seed=0):
    torch.manual_seed(seed)
    kept = torch.rand(rows, columns) < 0.4
    kept[min(2, rows - 1)] = False
    return (torch.randn(rows, columns, dtype=torch.float64) * kept).to(device, dtype)


def in_layout(dense, layout):
    block = {"blocksize": (2, 3)} if layout in ("bsr", "bsc") else {}
    return dense.to_sparse(layout=getattr(torch, "sparse_coo" if layout == "coo" else f"sparse_{layout}"), **block)


def assert_close(ours, truth):
    """Within four roundings of the result's dtype, of the largest element."""
    bound = 4 * torch.finfo(ours.dtype).eps * truth.abs().max().clamp(min=1)
    assert ours.shape == truth.shape
    assert (ours.double() - truth).abs().max() <= bound


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_times_plan(layout, dtype, lead, device):
    a = drawn(dtype=dtype, device=device)
    made = plan(in_layout(a, layout))
    x = torch.randn(*lead, 6, dtype=dtype, device=device)
    for product in (x @ made, x @ made.T.T):
        assert product.dtype == dtype
        assert_close(product, x.double() @ a.double()) if x.numel() else None
        assert product.shape == (*lead, 9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transposed_plan(layout, dtype, device):
    a = drawn(dtype=dtype, device=device)
    made = plan(in_layout(a, layout))
    x, b = torch.randn(6, dtype=dtype, device=device), torch.randn(6, 4, dtype=dtype, device=device)
    assert made.T.shape == (9, 6)
    assert made.T.T is made
    assert made.mT.mT is made
    assert_close(made.T @ x, a.double().T @ x.double())
    for _ in range(3):  # the second and third by a call that was prepared
        assert_close(made.T @ b, a.double().T @ b.double())
        assert_close(made @ b.new_ones(9, 2), a.double() @ torch.ones(9, 2, device=device).double())
    assert_close(spmm(made.T, b, reduce="sum", alpha=2), 2 * a.double().T @ b.double())
    assert_close(b.mT @ made.T.T, b.double().mT @ a.double())
    assert_close(torch.ones(9, device=device, dtype=dtype) @ made.T, a.double().sum(1))


def test_vectors(device):
    a = drawn(device=device)
    made = plan(a.to_sparse_csr())
    assert_close(
        made @ torch.arange(9.0, dtype=torch.float64, device=device), a @ torch.arange(9.0, device=device).double()
    )
    assert_close(torch.ones(6, device=device).double() @ made, a.sum(0))
    assert (made @ torch.ones(9, device=device).double()).shape == (6,)


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)], ids=str)
def test_gradcheck_of_dense_times_plan(lead):
    a = drawn(5, 4)
    made = plan(a.to_sparse_csr())
    x = torch.randn(*lead, 5, dtype=torch.float64, requires_grad=True)
    values = a.to_sparse_csr().values().clone().requires_grad_()

    def product(x, values):
        return x @ made.with_values(values)

    assert torch.autograd.gradcheck(product, (x, values))
    assert torch.autograd.gradgradcheck(product, (x, values))


def test_gradcheck_of_a_transposed_plan():
    made = plan(drawn(5, 4).to_sparse_csc())
    b = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    values = made.values.clone().requires_grad_()

    def product(b, values):
        return made.with_values(values).T @ b

    assert torch.autograd.gradcheck(product, (b, values))
    assert torch.autograd.gradgradcheck(product, (b, values))
    assert torch.autograd.gradcheck(lambda b, values: made.T.with_values(values) @ b, (b, values))


@pytest.mark.parametrize("layout", ["csr", "coo"])  # torch does not add up gradients in CSC
def test_gradients_reach_the_values_of_the_matrix(layout, device):
    """The plan, its transpose and x @ plan: against the gradients of the dense matrix."""
    dense = drawn(device=device)
    x, b = torch.randn(5, 6, device=device).double(), torch.randn(9, 4, device=device).double()
    a = in_layout(dense, layout).requires_grad_()
    made = plan(a)
    ((x @ made).sin().sum() + (made @ b).cos().sum() + (made.T @ x.T).square().sum()).backward()
    truth = dense.clone().requires_grad_()
    ((x @ truth).sin().sum() + (truth @ b).cos().sum() + (truth.T @ x.T).square().sum()).backward()
    torch.testing.assert_close(a.grad.to_dense(), truth.grad * (dense != 0))


def test_other_values_reach_the_transposed_plan_and_back(device):
    a = drawn(device=device)
    matrix = a.to_sparse_csr()
    made = plan(matrix)
    reverse, b = made.T, torch.randn(6, 4, device=device).double()
    products = [reverse @ b for _ in range(3)]
    matrix.values().mul_(2)
    assert_close(reverse @ b, 2 * products[0])
    made.update(3 * made.values)
    assert_close(reverse @ b, 6 * products[0])
    assert reverse.update(made.values / 6) is reverse
    assert_close(made @ torch.ones(9, device=device).double(), a.sum(1))
    assert_close(reverse @ b, products[0])


def test_writes_to_the_indices_are_seen_by_the_transposed_plan():
    matrix = drawn().to_sparse_csr()
    reverse = plan(matrix).T
    reverse @ torch.ones(6).double()
    matrix.col_indices()[0] += 1 if matrix.col_indices()[0] == 0 else -1
    matrix.values().mul_(1)  # shares its version with the indices
    with pytest.raises(ValueError, match=r"spmm: expected the indices that the plan was made of, got others"):
        reverse @ torch.ones(6).double()


@pytest.mark.parametrize("constant", [False, True])
def test_plan_of_a_transposed_plan(constant):
    a = drawn()
    made = plan(a.to_sparse_csr(), constant=constant)
    assert plan(made.T, products=1000).T is made
    assert made._selector.products == made.T._selector.products == 1000
    if not constant:
        assert "constant=True" in repr(plan(made.T, constant=True))
        assert "constant=True" in repr(made)
    product = made.T @ torch.ones(6, 300).double()
    assert_close(product, a.T @ torch.ones(6, 300).double())
    assert_close(torch.ones(300, 6).double() @ made, product.T)


def test_a_constant_plan_keeps_copies_of_both(device):
    a = drawn(64, 48, torch.float32, device)
    made = plan(a.to_sparse_csr(), constant=True)
    before = made.nbytes
    b, x = torch.randn(48, 128, device=device), torch.randn(64, 128, device=device)
    for _ in range(2):
        assert_close(made @ b, a.double() @ b.double())
        assert_close(made.T @ x, a.double().T @ x.double())
        made.update(made.values * 2)
        a = a * 2
    assert made.nbytes >= before


def test_sampled_products_in_the_order_of_the_values():
    a = drawn()
    made = plan(a.to_sparse_csr())
    q, k = torch.randn(9, 5).double(), torch.randn(6, 5).double()
    values = sddmm(q, k.mT, made.T)
    assert_close(values, (k @ q.T)[a != 0])
    assert_close(made.T.with_values(values) @ torch.ones(6).double(), ((q @ k.T) * (a != 0).T).sum(1))


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_batches(layout, device):
    """A batch of sparse matrices has one number of nonzeros."""
    torch.manual_seed(0)
    kept = torch.zeros(2, 3, 4, 5, dtype=torch.bool)
    kept.view(6, 20)[torch.arange(6)[:, None], torch.rand(6, 20).argsort(1)[:, :7]] = True
    a = torch.randn(2, 3, 4, 5).double().mul(kept).to(device)
    made = plan(a.to_sparse_csr() if layout == "csr" else a.to_sparse_csc())
    b, x = torch.randn(2, 3, 4, 6, device=device).double(), torch.randn(2, 3, 7, 4, device=device).double()
    assert made.mT.shape == (2, 3, 5, 4)
    assert_close(made.mT @ b, a.mT @ b)
    assert_close(x @ made, x @ a)
    assert_close(x[0, 0] @ made, x[0, 0] @ a)
    with pytest.raises(
        RuntimeError, match=re.escape("SparsePlan.T: expected one matrix, got a batch of shape [2, 3, 4, 5]")
    ):
        made.T  # noqa: B018


@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_another_dtype(layout):
    a = drawn()
    made = plan(in_layout(a, layout))
    assert made.to(torch.float64) is made
    assert made.to("cpu") is made
    assert made.T.to(device="cpu", dtype=torch.float64).T is made
    half = made.to("cpu", torch.bfloat16)
    assert (half.dtype, half.device, half.shape, half.nnz) == (torch.bfloat16, made.device, made.shape, made.nnz)
    b = torch.randn(9, 4, dtype=torch.bfloat16)
    assert_close(half @ b, a.bfloat16().double() @ b.double())
    assert_close(made.T.to(dtype=torch.float32) @ torch.ones(6, 2), a.float().double().T @ torch.ones(6, 2).double())
    made.update(2 * made.values)  # which the other plan does not follow
    assert_close(half @ b, a.bfloat16().double() @ b.double())


def test_to_is_differentiable():
    a = drawn().to_sparse_csr().requires_grad_()
    (plan(a).to(torch.float32) @ torch.ones(9, 2)).square().sum().backward()
    truth = drawn().requires_grad_()
    (truth.float() @ torch.ones(9, 2)).square().sum().backward()
    torch.testing.assert_close(a.grad.to_dense(), truth.grad * (truth != 0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e5m2, torch.bool], ids=str)
def test_to_a_dtype_without_products(dtype):
    with pytest.raises(TypeError):
        plan(drawn().to_sparse_csr()).to(dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_another_device(layout):
    a = drawn()
    made = plan(in_layout(a, layout))
    b, x = torch.randn(9, 4).double(), torch.randn(5, 6).double()
    moved = made.to("cuda")
    assert moved.device.type == "cuda"
    assert_close((moved @ b.cuda()).cpu(), a @ b)
    assert_close((x.cuda() @ moved).cpu(), x @ a)
    back = moved.to("cpu", torch.float32)
    assert_close(back @ b.float(), a.float().double() @ b.float().double())


def test_copies_of_a_transposed_plan():
    a = drawn()
    made = plan(a.to_sparse_csr()).T
    for one in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert one.T is not made.T
        assert_close(one @ torch.ones(6).double(), a.sum(0))
        assert_close(one.T @ torch.ones(9).double(), a.sum(1))


def test_repr_says_what_the_plan_is():
    made = plan(drawn(dtype=torch.float32).to_sparse_csr())
    nnz = made.nnz
    facts = f"nnz={nnz}, dtype=torch.float32, device=cpu, constant=False"
    assert repr(made) == f"SparsePlan(shape=[6, 9], {facts})"
    assert repr(made.T) == f"SparsePlan(shape=[9, 6], {facts})"
    assert "constant=True" in repr(plan(drawn().to_sparse_csr(), constant=True))
    tuned = plan(drawn(dtype=torch.float32).to_sparse_csr(), tune=[16])
    assert repr(tuned) == f"SparsePlan(shape=[6, 9], {facts}, kernels={{float32 x 16: by_rows}})"
    assert (
        repr(plan(drawn().to_sparse_csr(), tune=False))
        == f"SparsePlan(shape=[6, 9], nnz={nnz}, dtype=torch.float64, device=cpu)"
    )


FITTING = "x of shape [..., 6] for x @ A with A of shape [6, 9]"


@pytest.mark.parametrize(
    ("product", "error", "expected", "got"),
    [
        (lambda a: torch.ones(5, 9).double() @ a, RuntimeError, FITTING, "[5, 9]"),
        (lambda a: torch.ones(9).double() @ a, RuntimeError, FITTING, "[9]"),
        (lambda a: torch.tensor(1.0) @ a, RuntimeError, FITTING, "[]"),
        (
            lambda a: torch.eye(6).to_sparse() @ a,
            TypeError,
            "x to be a dense tensor",
            "a tensor of layout torch.sparse",
        ),
        (lambda a: [[1.0] * 6] @ a, TypeError, "x to be a dense tensor", "list"),
        (lambda a: a @ ([[1.0]] * 9), TypeError, "b to be a dense tensor", "list"),
        (
            lambda a: a @ torch.ones(6).double(),
            RuntimeError,
            "dense of shape [..., 9, n] for a sparse matrix",
            "[6, 1]",
        ),
    ],
)
def test_operands_that_do_not_fit(product, error, expected, got):
    made = plan(drawn().to_sparse_csr())
    with pytest.raises(error, match=rf"^spmm: expected {re.escape(expected)}.*, got {re.escape(got)}"):
        product(made)


def test_operands_of_another_dtype():
    with pytest.raises(RuntimeError, match=r"^spmm: expected values .* in Float .*, got .* Double"):
        torch.ones(5, 6) @ plan(drawn().to_sparse_csr())


def test_compiled():
    a = drawn()
    made, x = plan(a.to_sparse_csr()), torch.randn(5, 6).double().requires_grad_()
    torch._dynamo.reset()
    y = torch.compile(lambda x: (2 * x) @ made + made.T.shape[0], backend="aot_eager")(x)
    assert_close(y.detach(), 2 * x.detach() @ a + 9)
    y.sum().backward()
    assert_close(x.grad, 2 * a.sum(1).expand(5, 6))


def test_autocast_and_no_gradient(device):
    a = drawn(dtype=torch.float32, device=device)
    made, x = plan(a.to_sparse_csr()), torch.randn(5, 6, device=device)
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        assert (x @ made).dtype == (x @ a).dtype == torch.bfloat16


def small(dtype=torch.float32, layout="csr"):
    dense = torch.tensor([[0, 1, 0], [2, 0, 3]], dtype=dtype)
    return dense, getattr(dense, f"to_sparse_{layout}" if layout != "coo" else "to_sparse")()


@pytest.mark.parametrize("first", [lambda p: torch.ones(2, 2) @ p, lambda p: p.T], ids=["x @ plan", "plan.T"])
def test_inference_first_and_training_after_from_the_other_side(first):
    dense, a = small()
    made = plan(a)
    with torch.inference_mode():
        first(made)
    x = torch.ones(4, 2, requires_grad=True)
    (x @ made).sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(1).expand(4, 2))
    b = torch.ones(3, 4, requires_grad=True)
    (made @ b).sum().backward()
    torch.testing.assert_close(b.grad, dense.sum(0)[:, None].expand(3, 4))


def test_to_sees_writes_to_the_matrix_and_refuses_other_indices():
    _, a = small(layout="coo")
    a = a.coalesce()
    made = plan(a)
    a._values().mul_(10)
    torch.testing.assert_close(made.to(torch.float64) @ torch.eye(3).double(), a.to_dense().double())
    other = torch.tensor([[1.0, 0, 0], [0, 2, 3]]).to_sparse().coalesce()
    a.copy_(other)
    with pytest.raises(ValueError, match=r"SparsePlan\.to: expected the indices that the plan was made of"):
        made.to(torch.float64)


def test_settings_of_a_transposed_plan_are_those_of_the_plan():
    _, a = small()
    made = plan(a)
    t = made.T
    assert plan(t, constant=True) is t
    assert "constant=True" in repr(t)
    assert "constant=True" in repr(made)
    assert t.nbytes == made.nbytes
