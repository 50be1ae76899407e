"""Sparse sums by chunks of nonzeros: how a matrix is cut, and that products are right whatever the cuts."""

import itertools

import pytest
import torch

from matmuls import ours, plan, spmm
from matmuls.chunks import chunks_of

SHAPES = [(50, 60, 0.3), (200, 100, 0.05), (64, 64, 0.9), (300, 500, 0.004), (1, 50, 1.0), (50, 1, 0.5)]
MANY_ROWS = (300_000, 4, 0.2)  # more than a GPU's blocks take at once
LONG_ROWS = (40, 30_000, 0.5)
SIZES = [(8, 8), (8, 16), (16, 8), (32, 32), (1, 1), (4, 64)]


def draw(rows, columns, density, device, dtype=torch.float32):
    """With a full row and, where there are two, an empty one."""
    dense = torch.randn(rows, columns, dtype=torch.float64) * (torch.rand(rows, columns) < density)
    dense[rows // 3] = 0
    dense[rows // 2] = torch.randn(columns)
    return dense.to(dtype).to(device)


@pytest.mark.parametrize(
    ("shape", "sizes"), [*itertools.product(SHAPES, SIZES), (MANY_ROWS, (32, 2)), (LONG_ROWS, (64, 32))], ids=str
)
def test_every_nonzero_is_in_one_chunk_and_every_row_ends_once(shape, sizes, device):
    a = draw(*shape, device).to_sparse_csr()
    crow, nonzeros, rows = a.crow_indices().int(), a.values().numel(), shape[0]
    made = chunks_of(crow, a.col_indices().int(), *sizes)
    assert all(t.dtype == torch.int32 for t in made.tensors)
    size, piece = sizes
    begins, ends, cut, crow = made.begins.cpu(), made.ends.cpu(), made.cut.cpu(), crow.cpu()
    assert (int(begins[0]), int(begins[-1])) == (0, nonzeros)
    assert int(begins.diff().min()) >= 0
    assert int(begins.diff().max()) < size + piece
    assert (ends[begins[1:].long() - 1] >= 0).all()  # a chunk ends with a row or a piece
    lengths, row = crow.diff(), torch.arange(rows)
    long, whole = lengths > piece, (lengths > 0) & (lengths <= piece)
    count = -(-lengths[long] // piece)
    assert torch.equal(cut, torch.stack([row[long], count.cumsum(0) - count, count], 1).int())
    assert int(count.sum()) == made.slots
    assert torch.equal(made.empty.cpu(), row[lengths == 0].int())
    expected = torch.full((nonzeros,), -1)
    expected[crow[1:][whole].long() - 1] = row[whole]
    pieces = (min(at + piece, end) - 1 for begin, end in cut_rows(crow, long) for at in range(begin, end, piece))
    expected[list(pieces)] = rows + torch.arange(made.slots)
    assert torch.equal(ends, expected.int())


def cut_rows(crow, long):
    return zip(crow[:-1][long].tolist(), crow[1:][long].tolist(), strict=True)


@pytest.fixture
def always(monkeypatch):
    """Chunks whatever the size of the product; of which sizes."""

    def use(size, piece):
        monkeypatch.setattr(ours, "takes_chunks", lambda structure, n, row_bytes: True)
        monkeypatch.setattr(ours, "chunk_sizes", lambda structure, row_bytes: (size, piece))

    return use


def narrow(dense):
    a = dense.to_sparse_csr()
    return torch.sparse_csr_tensor(a.crow_indices().int(), a.col_indices().int(), a.values(), dense.shape)


def assert_right(result, dense, b):
    """Each element within a few roundings of the sum of what is added up in it, or half a step of subnormal numbers."""
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
            torch.empty(1 << 16, device="cuda").fill_(torch.nan)  # what the result's memory may hold
            result = spmm(a, b)
            assert_right(result, dense, b)
            assert torch.equal(spmm(a, b), result)
    by_columns = plan(dense.to_sparse_csc(), tune=False)
    assert_right(by_columns @ b, dense, b)
    wide = torch.randn(shape[1], 200, device="cuda").to(dtype)
    assert_right(spmm(a, wide[:, 8:72]), dense, wide[:, 8:72])
    assert_right(spmm(a, wide[:, 1:65]), dense, wide[:, 1:65])  # not on 16 bytes: by rows


@pytest.mark.cuda
def test_what_is_not_finite_stays_in_its_rows(always):
    always(8, 8)
    dense = draw(200, 100, 0.05, "cuda")
    a, b = narrow(dense), torch.randn(100, 32, device="cuda")
    b[7, 3], b[50, 4], b[0, 9], b[99, 10] = torch.nan, torch.inf, torch.nan, torch.inf
    result = spmm(a, b)
    for row, column in ((7, 3), (50, 4), (0, 9), (99, 10)):
        assert torch.equal(~result[:, column].isfinite(), dense[:, row] != 0)
    assert result.isfinite().sum() == result.numel() - sum(int((dense[:, r] != 0).sum()) for r in (7, 50, 0, 99))


@pytest.mark.cuda
def test_gradients_beside_chunks(always):
    always(8, 8)
    dense = draw(200, 100, 0.05, "cuda")
    a = narrow(dense).requires_grad_()
    b = torch.randn(100, 32, device="cuda", requires_grad=True)
    grad = torch.randn(200, 32, device="cuda")
    plain = spmm(a.detach(), b.detach())
    result = spmm(a, b)
    torch.testing.assert_close(result, plain)
    to_a, to_b = torch.autograd.grad(result, (a, b), grad)
    torch.testing.assert_close(to_b, dense.mT @ grad)
    torch.testing.assert_close(to_a.values(), (grad @ b.detach().mT)[dense != 0])


@pytest.mark.cuda
def test_a_graph_of_chunks(always):
    always(8, 16)
    dense = draw(700, 900, 0.02, "cuda")
    a, b = narrow(dense), torch.randn(900, 128, device="cuda")
    made = plan(a, tune=False)
    unseen = torch.cuda.CUDAGraph()
    with torch.cuda.graph(unseen):  # nothing of it can be cut under capture: by rows
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
