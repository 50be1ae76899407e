"""Sparse products in chunks of nonzeros: how a matrix is cut, and correct results for every cut."""

import itertools

import pytest
import torch
import torch.utils.checkpoint

from common import layout_references
from matmuls import plan, spmm
from matmuls.sparse import default_spmm, ops
from matmuls.sparse.chunks import chunks_of

_ops = torch.ops.custom_mm

SHAPES = [(50, 60, 0.3), (200, 100, 0.05), (64, 64, 0.9), (300, 500, 0.004), (1, 50, 1.0), (50, 1, 0.5)]
MANY_ROWS = (300_000, 4, 0.2)  # more than run on a GPU at once
LONG_ROWS = (40, 30_000, 0.5)
SIZES = [(8, 8), (8, 16), (16, 8), (32, 32), (1, 1), (4, 64)]


def draw(rows, columns, density, device, dtype=torch.float32):
    """A random dense matrix with a full row and, from two rows on, an empty one."""
    dense = torch.randn(rows, columns, dtype=torch.float64) * (torch.rand(rows, columns) < density)
    dense[rows // 3] = 0
    dense[rows // 2] = torch.randn(columns)
    return dense.to(dtype).to(device)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("shape", "sizes"), [*itertools.product(SHAPES, SIZES), (MANY_ROWS, (32, 2)), (LONG_ROWS, (64, 32))], ids=str
)
def test_every_nonzero_is_in_one_chunk_and_every_row_ends_once(shape, sizes):
    a = draw(*shape, "cuda").to_sparse_csr()
    crow, nonzeros, rows = a.crow_indices().int(), a.values().numel(), shape[0]
    made = chunks_of(crow, a.col_indices().int(), *sizes)
    assert all(t.dtype == torch.int32 for t in made.tensors)
    size, piece = sizes
    begins, ends, crow = made.begins.cpu(), made.ends.cpu(), crow.cpu()
    assert (int(begins[0]), int(begins[-1])) == (0, nonzeros)
    assert int(begins.diff().min()) >= 0
    assert int(begins.diff().max()) < size + piece
    assert (ends[begins[1:].long() - 1] >= 0).all()  # a chunk ends at the end of a row or of a piece
    row = torch.arange(rows)
    for names in (None, row.flip(0).int()):
        found = _ops.csr_chunks(crow.cuda(), a.col_indices().int(), *sizes, None if names is None else names.cuda())
        expected = layout_references.chunks(crow, a.col_indices().cpu().int(), *sizes, names)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(found, expected, strict=True))
    assert torch.equal(made.empty.cpu(), row[crow.diff() == 0].int())


@pytest.fixture
def always(monkeypatch):
    """Uses chunks for products of any size; yields their sizes."""

    def use(size, piece):
        monkeypatch.setattr(default_spmm, "takes_chunks", lambda structure, n, row_bytes: True)
        monkeypatch.setattr(default_spmm, "chunk_sizes", lambda structure, row_bytes: (size, piece))

    return use


def narrow(dense):
    a = dense.to_sparse_csr()
    return torch.sparse_csr_tensor(a.crow_indices().int(), a.col_indices().int(), a.values(), dense.shape)


def assert_right(result, dense, b):
    """Each element within a few roundings of the sum of its terms' magnitudes, or half a subnormal step."""
    size, of = dense.double().abs() @ b.double().abs(), torch.finfo(b.dtype)
    bound = 2 * of.eps * size + 2**-21 * size + of.smallest_normal * of.eps / 2
    assert ((result.double() - dense.double() @ b.double()).abs() <= bound).all()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (700, 900, 0.02)], ids=str)
def test_products_by_chunks(shape, dtype, always):
    dense = draw(*shape, "cuda", dtype)
    a = narrow(dense)
    for n in (8, 16, 24, 32, 40, 64, 128, 136, 512):
        b = torch.randn(shape[1], n, device="cuda").to(dtype)
        for sizes in SIZES:
            always(*sizes)
            torch.empty(1 << 16, device="cuda").fill_(torch.nan)  # memory that the result may reuse
            result = spmm(a, b)
            assert_right(result, dense, b)
            assert torch.equal(spmm(a, b), result)
    by_columns = plan(dense.to_sparse_csc(), tune=False)
    assert_right(by_columns @ b, dense, b)
    wide = torch.randn(shape[1], 200, device="cuda").to(dtype)
    assert_right(spmm(a, wide[:, 8:72]), dense, wide[:, 8:72])
    assert_right(spmm(a, wide[:, 1:65]), dense, wide[:, 1:65])  # not 16-byte aligned: row kernel


@pytest.mark.cuda
@pytest.mark.parametrize("each", [1, 40], ids=["few values", "many, which are put in order first"])
def test_values_in_another_order(each, always):
    always(32, 64)
    rows, columns = 60_000, 500
    crow = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * each
    col = torch.rand(rows, columns, device="cuda").argsort()[:, :each].sort().values.flatten().int()
    values, order = torch.randn(rows * each, device="cuda"), torch.randperm(rows * each, device="cuda").int()
    b = torch.randn(columns, 32, device="cuda")
    made = chunks_of(crow, col, 32, 64)
    parts = made.begins, made.ends, made.cut, made.empty, crow, col
    result = _ops.csr_spmm_chunks(*parts, values, b, columns, made.slots, order)
    moved = values[order.long()]
    assert torch.equal(result, _ops.csr_spmm_chunks(*parts, moved, b, columns, made.slots))
    assert_right(result, torch.sparse_csr_tensor(crow, col, moved, (rows, columns)).to_dense(), b)


@pytest.mark.cuda
def test_non_finite_values_stay_in_their_rows(always):
    always(8, 8)
    dense = draw(200, 100, 0.05, "cuda")
    a, b = narrow(dense), torch.randn(100, 32, device="cuda")
    b[7, 3], b[50, 4], b[0, 9], b[99, 10] = torch.nan, torch.inf, torch.nan, torch.inf
    result = spmm(a, b)
    for row, column in ((7, 3), (50, 4), (0, 9), (99, 10)):
        assert torch.equal(~result[:, column].isfinite(), dense[:, row] != 0)
    assert result.isfinite().sum() == result.numel() - sum(int((dense[:, r] != 0).sum()) for r in (7, 50, 0, 99))


@pytest.fixture
def anywhere(always, monkeypatch, layouts_on_cpu):
    """Also on a CPU."""
    always(8, 8)
    monkeypatch.setattr(default_spmm, "_may_use_chunks", lambda structure, b: b.dim() == 2)


@pytest.mark.parametrize("layout", ["csr", "csc"])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=str)
def test_gradients_by_chunks(wanted, layout, device, anywhere, monkeypatch):
    taken, go = [], default_spmm.Recorded.apply
    monkeypatch.setattr(default_spmm.Recorded, "apply", lambda *args: (taken.append(args), go(*args))[1])
    dense = draw(200, 100, 0.05, device)
    made = plan(getattr(dense, f"to_sparse_{layout}")(), tune=False)
    values = made.values.clone().requires_grad_(wanted[0])
    b = torch.randn(100, 32, device=device, requires_grad=wanted[1])
    grad = torch.randn(200, 32, device=device)
    result = made.with_values(values) @ b
    assert_right(result.detach(), dense, b.detach())
    result.backward(grad)
    assert len(taken) == 1
    if wanted[1]:
        assert_right(b.grad, dense.mT, grad)
    if wanted[0]:
        everywhere, stored = grad @ b.detach().mT, dense != 0
        by_columns = layout == "csc"
        expected = everywhere.mT[stored.mT] if by_columns else everywhere[stored]
        torch.testing.assert_close(values.grad, expected)
    (made @ b.detach().requires_grad_()).sum().backward()  # an expanded gradient (strides 0)


@pytest.mark.parametrize("recording", [False, True])
def test_int64_indices_are_narrowed_once(recording, device, anywhere, monkeypatch):
    dense = draw(200, 100, 0.05, device)
    a, b, go, seen = dense.to_sparse_csr(), torch.randn(100, 32, device=device), default_spmm._spmm_chunks, []
    assert a.crow_indices().dtype == torch.int64
    monkeypatch.setattr(default_spmm, "_spmm_chunks", lambda *args: (seen.append(args[4]), go(*args))[1])
    monkeypatch.setattr(ops, "record", lambda *_: None)  # every product is seen
    for _ in range(2):
        assert_right(spmm(a, b.requires_grad_(recording)).detach(), dense, b.detach())
    first, second = seen
    assert first is second
    assert first.dtype == torch.int32
    if recording:
        spmm(a, b).sum().backward()
        assert [t.dtype for t in seen] == [torch.int32] * 4
        torch.testing.assert_close(b.grad, dense.sum(0)[:, None].expand(100, 32))


def test_gradients_of_gradients_by_chunks(anywhere):
    made = plan(draw(9, 7, 0.4, "cpu", torch.float64).to_sparse_csr(), tune=False)
    values = made.values.clone().requires_grad_()
    b = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)

    def product(values, b):
        return made.with_values(values) @ b

    assert torch.autograd.gradcheck(product, (values, b))
    assert torch.autograd.gradgradcheck(product, (values, b))
    assert type(product(values, b).grad_fn).__name__.startswith("Recorded")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_by_chunks_equal_the_row_kernels(dtype, anywhere, monkeypatch):
    a = narrow(draw(700, 900, 0.02, "cuda", dtype)).requires_grad_()
    b, grad = (torch.randn(n, 64, device="cuda").to(dtype) for n in (900, 700))
    b.requires_grad_()
    by_chunks = torch.autograd.grad(spmm(a, b), (a, b), grad)
    again = torch.autograd.grad(spmm(a, b), (a, b), grad)
    assert all(torch.equal(x.to_dense(), y.to_dense()) for x, y in zip(by_chunks, again, strict=True))
    monkeypatch.setattr(default_spmm, "_may_use_chunks", lambda structure, b: False)
    by_rows = torch.autograd.grad(spmm(a, b), (a, b), grad)
    for x, y in zip(by_chunks, by_rows, strict=True):
        torch.testing.assert_close(x.to_dense(), y.to_dense(), atol=1e-2 if dtype.itemsize == 2 else 1e-4, rtol=2e-2)


@pytest.mark.cuda
def test_a_graph_of_gradients_by_chunks(anywhere):
    """A captured step of product and gradients; cut and transposed before capture, else by the row kernel."""
    dense = draw(700, 900, 0.02, "cuda")
    for known in (False, True):
        made = plan(narrow(dense), tune=False)
        b, grad = torch.randn(900, 128, device="cuda", requires_grad=True), torch.randn(700, 128, device="cuda")

        def step(made=made, b=b, grad=grad):
            return torch.autograd.grad(made @ b, b, grad)[0]

        if known:
            first = step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        graph.replay()
        assert_right(captured, dense.mT, grad)
        assert not known or torch.equal(captured, first)


def test_a_checkpointed_step(anywhere, device):
    dense = draw(200, 100, 0.05, device)
    made, b = plan(dense.to_sparse_csr(), tune=False), torch.randn(100, 32, device=device, requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda x: made @ x, b, use_reentrant=False).sum().backward()
    torch.testing.assert_close(b.grad, dense.sum(0)[:, None].expand(100, 32), atol=1e-4, rtol=1e-4)


@pytest.mark.cuda
def test_a_graph_of_chunks(always):
    always(8, 16)
    dense = draw(700, 900, 0.02, "cuda")
    a, b = narrow(dense), torch.randn(900, 128, device="cuda")
    made = plan(a, tune=False)
    unseen = torch.cuda.CUDAGraph()
    with torch.cuda.graph(unseen):  # a new matrix cannot be cut under capture: row kernel
        by_rows = made @ b
    first = made @ b
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = made @ b
    unseen.replay()
    assert_right(by_rows, dense, b)
    for _ in range(20):
        result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(result, first)
    assert made.nbytes > plan(narrow(dense), tune=False).nbytes
