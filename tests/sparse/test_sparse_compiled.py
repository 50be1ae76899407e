"""Sparse operations under torch.compile and autocast, and their flops."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.sparse_cases import LAYOUTS, assert_close, draw_sparse, every_dtype, in_layout
from matmuls import cusparseMM, plan, sddmm, sparse_attention, sparse_softmax, spmm


def test_a_number_as_b_raises(device):
    made = plan(draw_sparse(6, 9, 0.5, device=device).to_sparse_csr())
    with pytest.raises(RuntimeError, match=r"spmm: expected dense of shape \[..., 9, n\], got \[\]"):
        made @ torch.tensor(1.0, device=device)


def test_attention_whose_unscaled_scores_overflow_float16(device):
    """Sums of 64 products, before they are scaled."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 64, device=device, dtype=torch.float16) for _ in range(3))
    q, k = (36 + t for t in (q, k))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    assert not (q @ k.mT).isfinite().all()
    pattern = torch.ones(6, 6, device=device, dtype=torch.float16).to_sparse_csr()
    y = sparse_attention(*leaves, pattern)
    scores = (q.double() @ k.double().mT / 8).half().double()  # rounded as they are kept: in steps of 8
    assert (y - scores.softmax(-1) @ v.double()).abs().max() < 1e-2
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), leaves))


def test_scales_with_a_gradient_are_refused(device):
    """A missing gradient would be silent."""
    made, x = plan(torch.ones(3, 3, device=device).to_sparse_csr()), torch.ones(3, 3, device=device)
    scale, out = torch.tensor(2.0, requires_grad=True), torch.zeros(3, 3, device=device)
    for call in (
        lambda s: spmm(made, x, alpha=s),
        lambda s: spmm(made, x, beta=s, out=out),
        lambda s: sddmm(x, x, made, alpha=s),
        lambda s: sparse_softmax(torch.ones(9, device=device), made, scale=s),
        lambda s: sparse_attention(x, x, x, made, scale=s),
    ):
        with pytest.raises(
            RuntimeError, match=r": expected .* without a gradient, got one that requires grad; multiply"
        ):
            call(scale)
        torch.testing.assert_close(call(scale.detach()), call(2.0))


@pytest.mark.parametrize("reduce", ["max", "min", "sum"])
@pytest.mark.parametrize(("a", "b", "alpha"), [(1000.0, 100.0, 0.01), (1e-3, 1e-4, 1e4), (3.0, 5.0, -2.0)])
def test_alpha_is_applied_before_rounding(reduce, a, b, alpha, device):
    """Also with autograd."""
    sparse = torch.tensor([[a]], device=device, dtype=torch.float16).to_sparse_csr()
    dense = torch.tensor([[b]], device=device, dtype=torch.float16, requires_grad=True)
    y = spmm(sparse, dense, reduce=reduce, alpha=alpha)
    expected = (sparse.to_dense().double() * dense.double() * alpha).half()
    assert torch.equal(y, expected)
    (grad,) = torch.autograd.grad(y.sum(), dense)
    torch.testing.assert_close(grad, (sparse.to_dense() * alpha).to(grad.dtype), atol=0, rtol=2e-3)
    assert torch.equal(spmm(sparse, dense.detach(), reduce=reduce, alpha=alpha), expected)


def test_attention_of_odd_shapes(device):
    v = torch.randn(5, 3, device=device)
    made = plan(torch.ones(6, 5, device=device).to_sparse_csr())
    y = sparse_attention(torch.ones(6, 0, device=device), torch.ones(5, 0, device=device), v, made)
    torch.testing.assert_close(y, v.mean(0).expand(6, 3))
    batched = torch.ones(2, 6, 5, device=device).to_sparse_csr()
    q, k = torch.randn(6, 4, device=device), torch.randn(2, 5, 4, device=device)
    expected = torch.softmax(q @ k.mT / 2, -1) @ v
    torch.testing.assert_close(sparse_attention(q, k, v.expand(2, 5, 3), batched), expected)


def test_a_batch_of_other_leading_dimensions_is_refused(device):
    batched = torch.ones(2, 3, 6, 5, device=device).to_sparse_csr()
    q, k, v = (torch.randn(3, 2, n, 4, device=device) for n in (6, 5, 5))
    with pytest.raises(ValueError, match=r"sddmm: expected a with leading dimensions \[2, 3\].* got \[3, 2, 6, 4\]"):
        sddmm(q, k.mT, batched)
    with pytest.raises(ValueError, match=r"expected v with leading dimensions \[2, 3\].* got \[3, 2, 5, 4\]"):
        sparse_attention(q.view(2, 3, 6, 4), k.view(2, 3, 5, 4), v, batched)


def test_compiled_batches_into_out():
    a, b = plan(torch.ones(2, 4, 5).to_sparse_csr()), torch.randn(2, 5, 3)
    step = torch.compile(lambda out: spmm(a, b, out=out), fullgraph=True, backend="aot_eager")
    for out in (torch.empty(2, 4, 3), torch.empty(2, 3, 4).mT):
        torch.testing.assert_close(step(out), torch.ones(2, 4, 5) @ b)
        torch.testing.assert_close(out, torch.ones(2, 4, 5) @ b)


def test_compiled_plan():
    made = plan(draw_sparse(6, 9, 0.4, torch.float32).to_sparse_csr())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(values, b, q):
        product = spmm(made.with_values(values), b, reduce="mean") + spmm(made.with_values(values), b, reduce="max")
        return product.sum() + sparse_attention(q, b, b, made).square().sum()

    torch.manual_seed(0)
    drawn = [torch.randn(s) for s in ((made.nnz,), (9, 3), (6, 3))]
    leaves = [[t.clone().requires_grad_() for t in drawn] for _ in range(2)]
    results = step(*leaves[0]), step._torchdynamo_orig_callable(*leaves[1])
    for result in results:
        result.backward()
    torch.testing.assert_close(*results)
    for x, y in zip(*leaves, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("name", "layout"),
    [("spmm", "csr"), ("spmm", "coo"), ("plan", "csr"), ("MM", "csr"), ("MM", "coo"), ("MM", "dense")],
)
def test_compile_breaks_the_graph_at_untraceable_code(name, layout, gradient):
    """The product runs eagerly, outside the compiled graph."""
    dense, b = draw_sparse(6, 9, 0.5), torch.randn(9, 4)
    a = (dense if layout == "dense" else in_layout(dense, layout)).requires_grad_(gradient)
    function = {"spmm": spmm, "plan": lambda a, b: plan(a) @ b, "MM": cusparseMM.apply}[name]
    torch._dynamo.reset()
    y = torch.compile(lambda a, b: function(a, b) + 1, backend="aot_eager")(a, b)
    torch.testing.assert_close(y, dense @ b + 1)
    if gradient:
        y.sum().backward()
        torch.testing.assert_close(a.grad.to_dense(), b.sum(1) * ((dense != 0) | (layout == "dense")))


def test_autocast(device):
    made = plan(draw_sparse(6, 9, 0.4, torch.float32, device).to_sparse_csr())
    b, q = torch.randn(9, 4, device=device, requires_grad=True), torch.randn(6, 4, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert (made @ b).dtype == torch.bfloat16
        assert sddmm(q, b.mT, made).dtype == torch.bfloat16
        narrow = made.values.bfloat16()
        assert sparse_softmax(narrow, made).dtype == torch.softmax(narrow, -1).dtype
        sparse_attention(q, b, b, made).float().sum().backward()
    assert b.grad.dtype == torch.float32
    assert q.grad.dtype == torch.float32


def test_flops_of_every_layout():
    with torch.device("meta"):
        crow, col = torch.empty(17, dtype=torch.int32), torch.empty(60, dtype=torch.int32)
        values, b, x = torch.empty(60), torch.empty(8, 24), torch.empty(5, 8).half()
    ops, parts, narrow = torch.ops.custom_mm, (crow, col, values), (crow, col, values.half())
    chunks, halves = ops.csr_chunks(crow, col, 8, 8)[:4], ops.csr_halves(*parts, 8)
    tiles = ops.csr_tiles(crow, col, 8, 1, 2, 16)
    tiles += ops.csr_tile_entries(*tiles, *parts, 8, 16, 4)
    packed = [ops.csr_packed(*narrow, 8, 40, None, in_order) for in_order in (False, True)]
    for call, n in (
        (lambda: ops.csr_spmm(*parts, b, 8), 24),
        (lambda: ops.csr_spmm_chunks(*chunks, *parts, b, 8, 0), 24),
        (lambda: ops.csr_spmm_halves(*halves, *parts, b, 8), 24),
        (lambda: ops.csr_spmm_tiles(*tiles, *parts, b, 8, 16), 24),
        (lambda: ops.csr_spmm_packed(packed[0], *narrow, b.half(), 8), 24),
        (lambda: ops.csr_linear_packed(packed[1], *narrow, x, 8), 5),
    ):
        with FlopCounterMode(display=False) as counted:
            call()
        assert counted.get_total_flops() == 2 * 60 * n


def test_flops():
    made = plan(draw_sparse(6, 9, 0.4).to_sparse_csr())
    with FlopCounterMode(display=False) as counter:
        made @ torch.randn(9, 4)
        sddmm(torch.randn(2, 6, 5), torch.randn(2, 5, 9), made)
    assert counter.get_total_flops() == 2 * made.nnz * 4 + 2 * made.nnz * 5 * 2


# ---------------------------------------------------------------------------------------------------- the upstream's MM


@every_dtype
def test_cusparse_mm(dtype, device):
    dense = draw_sparse(12, 10, 0.3, dtype, device)
    b = torch.randn(10, 7, device=device).to(dtype)
    truth = dense.double() @ b.double()
    for layout in LAYOUTS[:2]:
        assert_close(cusparseMM.apply(in_layout(dense, layout), b), truth, dense @ b)
    assert_close(cusparseMM.apply(dense, b), truth, dense @ b)
    batch, wide = torch.stack([dense, dense.flip(0), dense * 0]), torch.stack([b, b * 2, b])
    assert_close(cusparseMM.apply(batch, wide), batch.double() @ wide.double(), batch @ wide)
    assert_close(cusparseMM.apply(dense, wide), dense.double() @ wide.double(), dense @ wide)


@pytest.mark.parametrize("lead", [((), ()), ((2,), (2,)), ((), (2,))], ids=str)
def test_gradcheck_of_cusparse_mm(lead):
    # No element near 0: the numerical step of gradcheck must not change which entries are stored.
    a = draw_sparse(8, 6, 0.5, torch.float64).view(2, 4, 6)
    a = (a.sign() + a)[: 2 if lead[0] else 1].reshape(*lead[0], 4, 6).requires_grad_()
    b = torch.randn(*lead[1], 6, 3, dtype=torch.float64, requires_grad=True)
    stored = (a != 0).detach()

    def at_stored(a, b):
        return cusparseMM.apply(torch.where(stored, a, 0), b)

    assert torch.autograd.gradcheck(at_stored, (a, b))
    assert torch.autograd.gradgradcheck(at_stored, (a, b))
    cusparseMM.apply(a, b).sum().backward()
    expected = torch.ones(4, 3, dtype=torch.float64) @ b.detach().mT
    torch.testing.assert_close(a.grad, expected.sum_to_size(a.shape))  # at zeros of a as well
