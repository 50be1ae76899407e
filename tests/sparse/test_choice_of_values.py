"""The layouts of a plan after writes to the values: gradients, optimizers, autocast."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from common.choice_cases import assert_as_exact_as_float32, draw
from matmuls import plan, spmm, timing
from matmuls.sparse import race


def test_duplicates_are_added(dense_wins):
    crow, col = torch.arange(0, 4 * 1000 + 1, 4), torch.randint(20, (4000,))
    made = plan(torch.sparse_csr_tensor(crow, col, torch.randn(4000), (1000, 20)), constant=True)
    b = torch.randn(20, 128)
    torch.testing.assert_close(made @ b, plan(made, tune=False) @ b)
    expected = torch.zeros(1000, 20).index_put_((torch.arange(1000).repeat_interleave(4), col), made.values, True) @ b
    torch.testing.assert_close(made @ b, expected)
    assert made._selector.tensors


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 300), (torch.float16, 3000)], ids=str)
def test_duplicates_are_not_added_in_16_bits(dense_wins, dtype, count, device):
    crow, col = torch.arange(0, 64 * count + 1, count), torch.zeros(64 * count, dtype=torch.long)
    a = torch.sparse_csr_tensor(crow, col, torch.ones(64 * count), (64, count)).to(device)
    b, expected = torch.ones(count, 128, device=device), torch.full((64, 128), count, dtype=dtype, device=device)
    assert torch.equal(plan(a.to(dtype), constant=True) @ b.to(dtype), expected)
    with torch.autocast(device, dtype):
        assert torch.equal(plan(a, constant=True) @ b, expected)


def test_the_chosen_layout_stays_for_graphs_that_read_it(dense_wins, monkeypatch, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    made @ b
    kept = made._selector.tensors
    monkeypatch.setattr(
        race, "time_warm", lambda runs, *_: [timing.Timing(1.0 + i, 0.0, 1.0 + i) for i in range(len(runs))]
    )
    plan(made, tune=[b.shape[1]])  # ours wins now
    assert "by_rows" in made.explain().splitlines()[-1].partition("*")[0]
    assert [t.data_ptr() for t in made._selector.tensors] == [t.data_ptr() for t in kept]


def test_products_with_other_values_do_not_change_the_copy(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    made @ b
    before = [t.clone() for t in made._selector.tensors]
    other = torch.randn(b.shape[0], 100, device=device)
    passing = made.with_values(2 * made.values)
    result = passing @ other
    plan(passing.update(3 * made.values), tune=[b.shape[1]])
    assert not passing._selector._products, "no copies"
    assert all(torch.equal(x, y) for x, y in zip(before, made._selector.tensors, strict=True))
    assert_as_exact_as_float32(result, 2 * dense, other)
    assert_as_exact_as_float32(passing @ other, 3 * dense, other)


def test_changed_values_between_a_product_and_its_gradient(dense_wins, device):
    """With each candidate as the fastest."""
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    b.requires_grad_()
    for _ in range(2):
        y = made @ b
        made.update(2 * made.values)
        b.grad = None
        y.sum().backward()
        torch.testing.assert_close(b.grad, dense.sum(0)[:, None].expand(b.shape))
        dense = 2 * dense
    assert_as_exact_as_float32((made @ b).detach(), dense, b.detach())


def test_many_duplicates_are_summed_in_a_fixed_order():
    nonzeros = 300_000
    crow, col = torch.tensor([0, nonzeros // 3, 2 * nonzeros // 3, nonzeros]), torch.randint(50, (nonzeros,))
    made = plan(torch.sparse_csr_tensor(crow, col, torch.randn(nonzeros), (3, 50)), constant=True)
    b = torch.randn(50, 8)
    first = made @ b
    assert "by_rows" in repr(made)  # no dense copy of more nonzeros than elements
    assert all(torch.equal(made.update(made.values.clone()) @ b, first) for _ in range(10))


def test_every_tf32_setting_of_torch_is_respected(dense_wins, device):
    products = torch.backends.cuda.matmul
    dense, b = draw(device)
    before = products.fp32_precision
    try:
        products.fp32_precision = "tf32"
        torch.testing.assert_close(plan(dense.to_sparse_csr(), constant=True) @ b, dense @ b, atol=1e-1, rtol=1e-2)
    finally:
        products.fp32_precision = before


def test_autocast_leaves_float64_alone(dense_wins, device):
    dense, b = draw(device, dtype=torch.float64)
    made = plan(dense.to_sparse_csr(), constant=True)
    with torch.autocast(device, torch.bfloat16):
        y = made @ b
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, dense @ b)


@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_gradients(dense_wins, layout, device):
    dense, b = draw(device, dtype=torch.float64)
    made = plan(getattr(dense, f"to_sparse_{layout}")())
    weight = torch.randn(dense.shape[0], b.shape[1], dtype=b.dtype, device=device)
    b.requires_grad_()
    (made @ b * weight).sum().backward()
    torch.testing.assert_close(b.grad, dense.mT @ weight)
    values = made.values.clone().requires_grad_()
    b.grad = None
    made.update(values)
    (made @ b * weight).sum().backward()
    torch.testing.assert_close(b.grad, dense.mT @ weight)
    row, column = made._pattern.row.long(), made._pattern.col.long()
    ours = made._pattern.by_rows(values.grad)
    torch.testing.assert_close(ours, (weight @ b.detach().mT)[row, column])


@pytest.mark.parametrize("train", ["matmul", "mean", "few columns", "compiled"])
def test_values_that_a_fused_optimizer_wrote(dense_wins, train, device):
    """A fused optimizer does not change their version counter."""
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr())
    values = torch.nn.Parameter(made.values.clone())
    made.update(values)
    optimizer = torch.optim.SGD([values], lr=1.0, fused=True)
    steps = {
        "matmul": lambda: made @ b,
        "mean": lambda: spmm(made, b, reduce="mean"),
        "few columns": lambda: made @ b[:, :2],
        "compiled": torch.compile(lambda: spmm(made, b), fullgraph=True, backend="aot_eager"),
    }
    for _ in range(3):
        with torch.no_grad():
            dense[made._pattern.row.long(), made._pattern.col.long()] = values
            for _ in range(2):
                assert_as_exact_as_float32(made @ b, dense, b)
                assert_as_exact_as_float32(made @ b[:, :100], dense, b[:, :100])
            assert made._again(b) is not None
        optimizer.zero_grad()
        steps[train]().square().mean().backward()
        optimizer.step()


def test_values_that_a_fused_optimizer_wrote_through_another_plan(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr())
    values = torch.nn.Parameter(made.values.clone())
    made.update(values)
    optimizer = torch.optim.SGD([values], lr=1.0, fused=True)
    for _ in range(2):
        with torch.no_grad():
            made @ b
            made @ b
        (made.with_values(values) @ b).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            dense[made._pattern.row.long(), made._pattern.col.long()] = values
            assert_as_exact_as_float32(made @ b, dense, b)


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_an_overwritten_sparse_leaf(dense_wins, layout, device):
    dense, b = draw(device)
    a = (dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()).requires_grad_()
    made = plan(a)
    with torch.no_grad():
        for _ in range(3):
            assert_as_exact_as_float32(made @ b, a.detach().to_dense(), b)
            a.values().mul_(2)
    assert not dense_wins  # a plan that is not constant measures nothing


def test_new_values_at_the_same_address(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    both = torch.randn(2 * made.nnz, device=device)
    values = both[: made.nnz]
    made.update(values)
    for _ in range(2):
        made @ b
    values.data = both[::2]
    torch.testing.assert_close(made @ b, plan(made, tune=False).with_values(both[::2].clone()) @ b)


def test_fake_and_functional_tensors_are_not_cached(dense_wins, device):
    dense, b = draw(device)
    made = plan(dense.to_sparse_csr(), constant=True)
    leaf = b.clone().requires_grad_()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        product = made @ mode.from_tensor(b)
        assert product.shape == (dense.shape[0], b.shape[1])
        (made @ mode.from_tensor(leaf)).sum().backward()
    torch.testing.assert_close(torch.func.vmap(lambda x: made @ x)(b[None]), (dense @ b)[None])
    slope = torch.func.grad(lambda x: (made @ x).sum())(b)
    torch.testing.assert_close(slope, dense.T @ torch.ones_like(dense @ b))
    assert dense_wins == []
    for _ in range(2):
        assert type(made @ b) is torch.Tensor
        assert_as_exact_as_float32(made @ b, dense, b)
    (made @ leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, dense.mT.sum(1, keepdim=True).expand_as(b))
    with forward_ad.dual_level():
        made.update(forward_ad.make_dual(made.values.clone(), torch.ones_like(made.values)))
        with pytest.raises(RuntimeError, match="forward-mode"):
            made @ b
