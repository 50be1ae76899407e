"""Sampled products, softmax of nonzeros and sparse attention."""

import pytest
import torch

from common.sparse_cases import assert_close, draw_sparse, every_dtype, every_layout, in_layout, long_rows
from matmuls import plan, sddmm, sparse_attention, sparse_softmax

# ---------------------------------------------------------------------------------------------------- SDDMM and softmax


@pytest.mark.parametrize("n", [3, 8, 16, 64, 136, 264, 520])
@pytest.mark.parametrize(
    "rows", [(0, 1, 40, 5000), (4999, 5000), (17, 18, 19, 400, 433, 466, 3000), (0,), (2500,)], ids=str
)
def test_sampled_products_among_empty_rows(rows, n, device):
    """Thousands of empty rows in sequence, as in web graphs."""
    each = torch.zeros(5001, dtype=torch.int32)
    each[list(rows)] = torch.randint(1, 40, (len(rows),), dtype=torch.int32)
    crow = torch.cat([each.new_zeros(1), each.cumsum(0, dtype=torch.int32)]).to(device)
    col = torch.cat([torch.randperm(60)[:k].sort().values for k in each[each > 0].tolist()]).int().to(device)
    a, b = torch.randn(5001, n, device=device), torch.randn(n, 60, device=device)
    pattern = torch.sparse_csr_tensor(crow, col, torch.ones(len(col), device=device), (5001, 60))
    row = torch.repeat_interleave(torch.arange(5001, device=device), crow.diff().long())
    expected = (a.double()[row] * b.double().mT[col.long()]).sum(1)
    torch.testing.assert_close(sddmm(a, b, pattern).double(), expected, atol=1e-5, rtol=1e-5)


@every_dtype
@every_layout
def test_sddmm(layout, dtype, device):
    dense = draw_sparse(30, 42, 0.2, dtype, device, empty=(4,))
    pattern = in_layout(dense, layout)
    for lead, d in (
        ((), 1),
        ((), 8),
        ((), 33),
        ((), 128),
        ((), 264),
        ((3,), 16),
        ((2, 3), 5),
        ((2, 1), 64),
        ((2,), 520),
    ):
        x, y = (torch.randn(*lead, rows, d, device=device).to(dtype) for rows in (30, 42))
        ours = sddmm(x, y.mT, plan(pattern), alpha=0.5)
        assert torch.equal(ours, sddmm(x, y.mT, pattern, alpha=0.5))
        # in the pattern's own order again: values of a matrix of the same layout
        full, truth = 0.5 * (x @ y.mT), 0.5 * (x.double() @ y.double().mT)
        places = in_layout(
            torch.arange(1.0, 30 * 42 + 1, device=device).view(30, 42) * (pattern.to_dense() != 0), layout
        )
        index = (places.coalesce() if layout == "coo" else places).values().reshape(-1).long() - 1
        if layout in ("bsr", "bsc"):
            keep = index >= 0
            ours, index = ours[..., keep], index[keep]
        sample = [t.flatten(-2)[..., index] for t in (truth, full)]
        assert_close(ours, *sample, scale=torch.linalg.vector_norm(truth).item())


@every_dtype
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_sparse_softmax(layout, dtype, device):
    dense = draw_sparse(30, 42, 0.3, dtype, device, empty=(4,))
    a = in_layout(dense, layout)
    ours = torch.zeros(30, 42, dtype=dtype, device=device)
    where = in_layout(torch.where(dense != 0, torch.arange(1.0, 30 * 42 + 1, device=device).view(30, 42), 0), layout)
    ours.view(-1)[where.values().long() - 1] = sparse_softmax(a.values(), a, scale=1.5)

    def reference(x):
        y = torch.softmax(torch.where(dense != 0, x * 1.5, -torch.inf), -1)
        return torch.where((dense != 0).any(1, keepdim=True), y, 0)

    assert_close(ours, reference(dense.double()), reference(dense))
    batch = torch.stack([a.values(), a.values() * 2]).view(2, 1, -1)
    assert torch.equal(sparse_softmax(batch, plan(a))[0, 0], sparse_softmax(a.values(), a))


@every_dtype
def test_softmax_of_long_rows(dtype, device):
    crow, col, values, shape = long_rows(device)
    x = values.to(dtype)
    pattern = torch.sparse_csr_tensor(crow, col, x, shape)
    rows = list(zip(crow.tolist()[:-1], crow.tolist()[1:], strict=True))
    truth, theirs = (torch.cat([torch.softmax(t[b:e], 0) for b, e in rows]) for t in (x.double(), x))
    assert_close(sparse_softmax(x, pattern), truth, theirs)
    grad = torch.randn(len(x), device=device).to(dtype)
    ours = torch.ops.custom_mm.csr_softmax_backward(crow, theirs, grad)
    g = grad.double()
    exact = torch.cat([t * (g[b:e] - (t * g[b:e]).sum()) for b, e in rows for t in [theirs[b:e].double()]])
    narrow = torch.cat([torch._softmax_backward_data(grad[b:e], theirs[b:e], 0, dtype) for b, e in rows])
    assert_close(ours, exact, narrow)


def test_softmax_of_nan_and_inf(device):
    x = torch.tensor([1.0, float("nan"), 2.0, 3.0, float("inf"), 1.0, -float("inf"), 0.0], device=device)
    crow = torch.tensor([0, 2, 4, 6, 8], device=device)
    ours = sparse_softmax(x, torch.sparse_csr_tensor(crow, torch.tensor([0, 1] * 4, device=device), x, (4, 2)))
    torch.testing.assert_close(ours.view(4, 2), torch.softmax(x.view(4, 2), -1), equal_nan=True)


@every_dtype
@pytest.mark.parametrize("lead", [(), (3,), (2, 4)], ids=str)
def test_sparse_attention(lead, dtype, device):
    mask = draw_sparse(33, 21, 0.3, torch.float64, device, empty=(7,)) != 0
    q, k, v = (torch.randn(*lead, rows, d, device=device).to(dtype) for rows, d in ((33, 16), (21, 16), (21, 24)))

    def reference(q, k, v):
        scores = torch.where(mask, q @ k.mT / 4, -torch.inf)
        return torch.where(mask.any(1, keepdim=True), torch.softmax(scores, -1), 0) @ v

    for pattern in (mask.to(dtype).to_sparse_csr(), plan(mask.to(dtype).to_sparse_csc())):
        results, gradients = [], []
        for function, wide in (
            (lambda *x, p=pattern: sparse_attention(*x, p), False),
            (reference, True),
            (reference, False),
        ):
            leaves = [(t.double() if wide else t).clone().requires_grad_() for t in (q, k, v)]
            results.append(function(*leaves))
            results[-1].backward(torch.ones_like(results[-1]))
            gradients.append([leaf.grad for leaf in leaves])
        assert_close(*results)
        for ours, truth, theirs in zip(*gradients, strict=True):
            assert_close(ours, truth, theirs)


def test_attention_with_float16_scores_that_overflow(device):
    """Scaled scores of 80000 and more, which torch's sdpa keeps in float32, and their gradients."""
    torch.manual_seed(0)
    q = torch.randn(4, 12, 64, device=device).sign().mul(100).half()
    v = torch.randn(4, 12, 8, device=device).half()
    pattern = torch.ones(12, 12, device=device).tril().to_sparse_csr()
    scores = (q.double() @ q.double().mT / 8).masked_fill(pattern.to_dense() == 0, -torch.inf)
    assert scores.max() > 65504
    leaves = [x.clone().requires_grad_() for x in (q, q, v)]
    result = sparse_attention(*leaves, pattern)
    torch.testing.assert_close(result.double(), scores.softmax(-1) @ v.double(), atol=1e-3, rtol=1e-3)
    result.sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_attention_never_allocates_dense_scores(device):
    n = 20000  # dense scores would take 1.6 GB
    crow, col = torch.arange(0, 4 * n + 1, 4, device=device), torch.randint(n, (4 * n,), device=device)
    pattern = plan(torch.sparse_csr_tensor(crow, col, torch.ones(4 * n, device=device), (n, n)))
    q, k, v = (torch.randn(n, 8, device=device, requires_grad=True) for _ in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        sparse_attention(q, k, v, pattern).sum().backward()
    assert max(abs(e.self_cpu_memory_usage) for e in profile.events()) < 64 * n * 8
    assert q.grad.shape == q.shape
