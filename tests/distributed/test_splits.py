"""Row ranges for ranks, and the sums and copies of rows that they exchange, in one process."""

import importlib.util

import numpy as np
import pytest
import scipy.sparse
import torch

from matmuls import distributed
from matmuls.distributed.group import digest, even
from matmuls.distributed.part import LONG_ROW, RowCopies, row_sums
from matmuls.distributed.peers import places
from matmuls.distributed.splits import balanced, parts_in_order


def sparse(rows, columns, share=0.2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return (a * (torch.rand(rows, columns, generator=generator) < share)).to_sparse_csr()


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_equal_nonzeros_to_within_the_longest_row(parts):
    a = sparse(60, 50)
    sizes = distributed.split(a, parts).sizes
    assert len(sizes) == parts
    assert sum(sizes) == 60
    counts = torch.stack([part.sum() for part in a.crow_indices().diff().split(list(sizes))])
    assert (counts - a._nnz() / parts).abs().max() <= a.crow_indices().diff().max()


def test_one_long_row_leaves_ranks_without_rows():
    crow = torch.tensor([0, 1, 100, 101])
    assert sum(balanced(crow, 4)) == 3
    assert min(balanced(crow, 4)) == 0
    assert balanced(torch.tensor([0, 0, 0]), 2) in ([0, 2], [1, 1], [2, 0])


@pytest.mark.parametrize(("total", "parts"), [(7, 3), (4, 4), (5, 4), (2, 4), (0, 2), (9, 4)])
def test_rows_as_torch_chunk(total, parts):
    chunks = [chunk.numel() for chunk in torch.arange(total).chunk(parts)] if total else []
    assert even(total, parts) == chunks + [0] * (parts - len(chunks))


@pytest.mark.parametrize("reorder", [None, "rcm"])
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_local_rows_are_the_matrix(reorder, layout):
    a = sparse(30, 30).to_dense()
    split = distributed.split(a.to_sparse(layout=layout), 4, reorder=reorder)
    own = torch.cat([distributed.local_rows(a.to_sparse(layout=layout), rank, split).to_dense() for rank in range(4)])
    order = torch.arange(30) if split.permutation is None else split.permutation
    assert torch.equal(own, a[order][:, order])


def test_metis_cuts_few_edges_or_says_what_to_install():
    a = torch.block_diag(torch.ones(8, 8), torch.ones(8, 8))
    order = torch.arange(16).view(2, 8).T.reshape(-1)
    a = a[order][:, order].to_sparse_csr()
    if importlib.util.find_spec("pymetis") is None:
        with pytest.raises(ImportError, match="pip install pymetis"):
            distributed.split(a, 2, reorder="metis")
        return
    split = distributed.split(a, 2, reorder="metis")
    assert split.sizes == (8, 8)
    own = distributed.local_rows(a, 0, split)
    assert own.col_indices().max() < 8


def test_parts_are_put_in_order():
    """Two shuffled paths: each is a part, and its vertices follow each other."""
    vertices = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    ends = vertices.view(2, 30)
    row, col = torch.cat([ends[:, :-1], ends[:, 1:]], 1).view(-1), torch.cat([ends[:, 1:], ends[:, :-1]], 1).view(-1)
    graph = scipy.sparse.csr_array((np.ones(row.shape[0], bool), (row.numpy(), col.numpy())), shape=(60, 60))
    member = np.zeros(60, np.int64)
    member[ends[1].numpy()] = 1
    order = parts_in_order(graph, member)
    assert sorted(order) == list(range(60))
    for part in range(2):
        found = order[30 * part : 30 * part + 30].tolist()
        assert found in (ends[part].tolist(), ends[part].tolist()[::-1])


def test_a_part_may_be_empty():
    graph = scipy.sparse.csr_array(np.eye(5, k=1) + np.eye(5, k=-1) > 0)
    assert sorted(parts_in_order(graph, np.array([0, 0, 3, 3, 3]))) == list(range(5))


def test_errors_of_splits():
    a = sparse(6, 5)
    with pytest.raises(ValueError, match="at least one part, got 0"):
        distributed.split(a, 0)
    with pytest.raises(ValueError, match="expected by"):
        distributed.split(a, 2, by="columns")
    with pytest.raises(ValueError, match="expected reorder"):
        distributed.split(a, 2, reorder="amd")
    with pytest.raises(ValueError, match=r"square matrix to reorder, got \[6, 5\]"):
        distributed.split(a, 2, reorder="rcm")
    with pytest.raises(TypeError, match=r"expected a sparse matrix, got torch\.strided"):
        distributed.split(a.to_dense(), 2)
    with pytest.raises(ValueError, match="rank 2, got one of 6 rows for 2 ranks"):
        distributed.local_rows(a, 2, distributed.split(a, 2))


def test_one_process_needs_no_torch_distributed():
    a = sparse(20, 20)
    plan = distributed.plan(a)
    x = torch.randn(20, 3, dtype=torch.float64)
    torch.testing.assert_close(plan @ x, a.to_dense() @ x)
    assert plan.bytes_sent(3) == [0]
    with pytest.raises(ValueError, match="20 columns, got \\[19\\]"):
        distributed.plan(a, columns=[19])


def test_a_product_breaks_the_graph_of_torch_compile():
    a = sparse(20, 20)
    plan = distributed.plan(a)
    x = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda x: (plan @ (2 * x)).relu(), backend="eager")
    compiled(x).sum().backward()
    truth = a.to_dense() @ (2 * x.detach())
    torch.testing.assert_close(compiled(x), truth.relu())
    torch.testing.assert_close(x.grad, 2 * a.to_dense().T @ (truth > 0).double())


def test_lists_that_differ_have_other_digests():
    lists = [[1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [0, 1, 2, 3]]
    assert len({digest(one) for one in lists}) == len(lists)


def test_rows_that_are_written_lie_where_an_all_to_all_puts_them():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(4, (5, 5), generator=generator).fill_diagonal_(0).tolist()
    counts[2], counts[3][1] = [0] * 5, 0
    names = [[(o, r, i) for r in range(5) for i in range(counts[r][o])] for o in range(5)]  # the rows that o sends
    found = [[None] * sum(row) for row in counts]
    for o in range(5):
        starts, slots = places(counts, o)
        assert starts[-1] == len(names[o])
        for r in range(5):
            found[r][slots[r] : slots[r] + starts[r + 1] - starts[r]] = names[o][starts[r] : starts[r + 1]]
    assert found == [[(o, r, i) for o in range(5) for i in range(counts[r][o])] for r in range(5)]


@pytest.mark.parametrize("n", [1, 7, 32, 130])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_few_rows(device, dtype, n):
    """Rows below and above the length from which a block sums one, and empty ones; added to a result, and written."""
    generator = torch.Generator().manual_seed(0)
    a = sparse(20, 200, 0.1)
    long = torch.zeros(20, 200, dtype=torch.float64)
    long[3], long[17, : LONG_ROW + 1] = torch.randn(200, generator=generator, dtype=torch.float64), 1.5
    a = (a.to_dense() * (torch.arange(20) % 4 != 1)[:, None] + long).to(device, dtype)
    csr = a.to_sparse_csr()
    values, order = csr.values(), torch.randperm(csr.values().shape[0], generator=generator).to(device)
    shuffled = torch.empty_like(values)
    shuffled[order] = values
    crow, col = csr.crow_indices().int(), csr.col_indices().int()
    b = torch.randn(200, n, generator=generator, dtype=torch.float64).to(device, dtype)
    truth = a.double() @ b.double()
    within = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 512 * torch.finfo(dtype).eps}
    whole = row_sums((crow, col, order.int()), None, shuffled, (20, 200), True)
    torch.testing.assert_close(whole.product(b).double(), truth, **within)
    targets = torch.randperm(50, generator=generator)[:20].to(device)
    y = torch.randn(50, n, generator=generator, dtype=torch.float64).to(device, dtype)
    wanted = y.double().index_add(0, targets, truth)
    row_sums((crow, col, None), targets, values, (50, 200), False).add(y, b)
    torch.testing.assert_close(y.double(), wanted, **within)
    with pytest.raises(RuntimeError, match=r"distributed.plan: expected contiguous rows \[200, n\]"):
        whole.product(b[:-1])
    with pytest.raises(RuntimeError, match=r"expected a contiguous result \[20, "):
        whole.add(y, b)


@pytest.mark.parametrize("n", [1, 7, 32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_copies_of_rows(device, dtype, n):
    """Rows read any number of times, and rows added to once each, with the bits of torch's operations."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2 * n, generator=generator, dtype=torch.float64).to(device, dtype)[:, ::2]
    index = torch.randint(60, (100,), generator=generator).to(device)
    for given in (x, x.contiguous()):
        assert torch.equal(RowCopies(index, 60).of(given), x.index_select(0, index))
    index = torch.randperm(60, generator=generator)[:25].to(device)
    for y in (torch.stack([x, x], -1)[..., 0], x.contiguous()):
        wanted = y.clone().index_add(0, index, x[:25])
        RowCopies(index, 60).add_to(y, x[:25])
        torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    made, empty = RowCopies(index[:0], 60), x.contiguous()
    made.add_to(empty, x[:0])
    assert torch.equal(empty, x)
    assert made.of(x).shape == (0, n)
