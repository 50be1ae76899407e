"""Second and third derivatives through sparse tensors of values: torch's own constructors cut the graph."""

import pytest
import torch

from matmuls import plan, plan_spgemm, spgemm, spmm


def built(of, values):
    """A sparse tensor of the values, as torch builds it."""
    return torch.sparse_csr_tensor(of.crow_indices(), of.col_indices(), values, of.shape, check_invariants=False)


def operands():
    torch.manual_seed(0)
    return [(torch.randn(*n, dtype=torch.float64) * (torch.rand(*n) < 0.6)).to_sparse_csr() for n in ((4, 5), (5, 3))]


def leaves():
    return [m.values().clone().requires_grad_() for m in operands()]


A, B = operands()
MADE = plan_spgemm(A, B)
DENSE = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2)
OTHER = plan(DENSE.to_sparse_csr())
FUNCTIONS = {
    "plan": lambda v, w: MADE(v, w).values(),
    "spgemm": lambda v, w: spgemm(plan(A).with_values(v), plan(B).with_values(w)).values(),
    "with a limit": lambda v, w: spgemm(plan(A).with_values(v), plan(B).with_values(w), max_nnz=99).values(),
    "built by torch": lambda v, w: spgemm(built(A, v), built(B, w)).values(),
    "built for spmm": lambda v, w: spmm(built(A, v), w[:5, None] * w[:2]),
    "built for a plan": lambda v, w: plan(built(A, v)) @ (w[:5, None] * w[:2]),
    "times dense": lambda v, w: (MADE(v, w) @ DENSE).square(),
    "times a plan": lambda v, w: spgemm(MADE(v, w), OTHER).values(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(name):
    assert torch.autograd.gradcheck(FUNCTIONS[name], leaves())
    assert torch.autograd.gradgradcheck(FUNCTIONS[name], leaves())


def dense_values(v, w):
    """The values of the product, by dense matrices."""
    full = [m.to_dense().zero_().masked_scatter(m.to_dense() != 0, x) for m, x in ((A, v), (B, w))]
    c = MADE()
    rows = torch.repeat_interleave(torch.arange(4), c.crow_indices().diff())
    return (full[0] @ full[1])[rows, c.col_indices()]


@pytest.mark.parametrize("name", ["plan", "spgemm", "built by torch"])
def test_third_derivatives(name):
    found = []
    for function in (FUNCTIONS[name], dense_values):
        v, w = leaves()
        (first,) = torch.autograd.grad(function(v, w).pow(3).sum(), v, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), w, create_graph=True)
        found.append(torch.autograd.grad(second.sum(), (v, w)))
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth)


def test_several_uses_of_a_product():
    """torch adds their gradients without graphs: a second derivative is an error, not a wrong number."""
    eye = torch.eye(3, dtype=torch.float64).to_sparse_csr()
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    c = plan_spgemm(eye, eye)(x, x)
    (first,) = torch.autograd.grad((c.values() * c.values()).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 4 * x**3)
    with pytest.raises(RuntimeError, match=r"spgemm: expected one use of the sparse product, C\.values\(\)"):
        torch.autograd.grad(first.sum(), x)


def test_the_gradient_of_a_product_takes_no_dense_matrix():
    """[2^20, 2^20] would take 4 TiB."""
    n = 1 << 20
    crow = torch.arange(n + 1, dtype=torch.int32).clamp_(max=3)
    eye = torch.sparse_csr_tensor(crow, torch.arange(3, dtype=torch.int32), torch.ones(3), (n, n))
    v = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    spgemm(plan(eye).with_values(v), eye).values().square().sum().backward()
    assert v.grad.tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("create_graph", [False, True])
def test_the_gradient_of_a_sparse_tensor_between_the_values_and_the_product(create_graph):
    v, _ = leaves()
    a = built(A, v)
    y = spgemm(a, B).values().square().sum()
    (to_v,) = torch.autograd.grad(y, v, retain_graph=True, create_graph=create_graph)
    (to_a,) = torch.autograd.grad(y, a, create_graph=create_graph)
    assert to_a.layout == torch.sparse_csr
    torch.testing.assert_close(to_a.detach().values(), to_v.detach())
