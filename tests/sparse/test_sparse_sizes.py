"""Sparse products of more than 2^31 elements or nonzeros. On a CPU, memory that is never written takes no space."""

import os

import numpy as np
import pytest
import torch

from matmuls import plan, sddmm, sparse_softmax, spmm

MANY = 2**31 + 2**20


def needs(device, gigabytes):
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    if free < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GiB")


def zeros(dtype, device):
    """On a CPU from calloc, whose pages take no memory; torch.zeros would write them."""
    if device == "cuda":
        return torch.zeros(MANY, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(MANY, str(dtype).removeprefix("torch.")))


def csr(crow, col, values, shape, device):
    parts = [torch.tensor(t, device=device) for t in (crow, col)]
    return torch.sparse_csr_tensor(*parts, torch.tensor(values, dtype=torch.bfloat16, device=device), shape)


@pytest.mark.gpu_memory(10)
def test_b_of_more_elements(device):
    needs(device, 6)
    rows, n = MANY // 2**15 + 1, 2**15
    b = torch.empty(rows, n, dtype=torch.bfloat16, device=device)
    met = [0, 32767, 65535, 65536, rows - 1]
    b[met] = torch.randn(len(met), n, dtype=torch.bfloat16, device=device)
    a = csr([0, 2, 2, 5], [*met[3:], *met[:3]], [1.0, 2, 3, 4, 5], (3, rows), device)
    truth, x = torch.zeros(3, n, dtype=torch.float64, device=device), b[met].double()
    truth[0], truth[2] = x[3] + 2 * x[4], 3 * x[0] + 4 * x[1] + 5 * x[2]
    for y in (spmm(a, b), plan(a) @ b):
        torch.testing.assert_close(y.double(), truth, rtol=2**-8, atol=2**-18)
    # The gradient of the values: products of rows of b with rows of the gradient.
    values = a.values().clone().requires_grad_()
    (plan(a).with_values(values) @ b)[:, -8:].sum().backward()
    expected = x[[3, 4, 0, 1, 2], -8:].sum(1)
    torch.testing.assert_close(values.grad.double(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.exhaustive
@pytest.mark.gpu_memory(16)
def test_a_result_of_more_elements(device):
    needs(device, 12)
    rows, n = MANY // 2**15 + 1, 2**15
    crow = torch.full((rows + 1,), 2)
    crow[:3], crow[-2:] = torch.tensor([0, 1, 2]), torch.tensor([3, 4])
    a = csr(crow.tolist(), [1, 0, 2, 1], [1.0, 2, 3, 4], (rows, 3), device)
    b = torch.randn(3, n, dtype=torch.bfloat16, device=device)
    for matrix in (a, plan(a)) if device == "cuda" else (a,):
        y = spmm(matrix, b)
        for row, expected in ((0, b[1]), (1, 2 * b[0]), (rows - 2, 3 * b[2]), (rows - 1, 4 * b[1])):
            torch.testing.assert_close(y[row], expected, rtol=2**-7, atol=0)
        assert not y[2].any()
        assert not y[rows - 3].any()
        assert not y[65535:65537].any()


@pytest.mark.exhaustive
@pytest.mark.gpu_memory(90)
def test_more_nonzeros(device):
    """Nearly all in the first column, repeatedly, and only a few of them not 0."""
    needs(device, 60 if device == "cuda" else 8)
    crow = torch.tensor([0, 5, MANY - 7, MANY], device=device)
    col, values = zeros(torch.int64, device), zeros(torch.float16, device)
    places = torch.tensor([1, 7, 2**31 - 1, 2**31, MANY - 9, MANY - 7, MANY - 1], device=device)
    values[places] = torch.arange(1.0, 8, dtype=torch.float16, device=device)
    col[places[1::2]] = 3
    a = torch.sparse_csr_tensor(crow, col, values, (3, 4), check_invariants=False)
    b = torch.tensor([[1.0, 10], [0, 0], [0, 0], [100, 1000]], dtype=torch.float16, device=device).repeat(1, 4)
    truth = torch.tensor([[1.0, 10], [2 * 100 + 3 + 4 * 100 + 5, 2 * 1000 + 30 + 4 * 1000 + 50], [6 * 100 + 7, 6070]])
    made = plan(a)
    assert (made.nnz, made._pattern.longest, made._pattern.crow.dtype) == (MANY, MANY - 12, torch.int64)
    for y in (spmm(a, b), made @ b):
        torch.testing.assert_close(y.float().cpu(), truth.repeat(1, 4), rtol=2**-10, atol=0)
    bad = col.clone() if device == "cuda" else col
    bad[MANY - 2] = 4
    with pytest.raises(ValueError, match=f"columns from 0 to 3 at nonzero {MANY - 2}, got 4"):
        plan(torch.sparse_csr_tensor(crow, bad, values, (3, 4), check_invariants=False))


@pytest.mark.cuda
@pytest.mark.gpu_memory(90)
def test_scores_of_more_nonzeros():
    needs("cuda", 90)
    crow = torch.tensor([0, 5, MANY - 7, MANY], device="cuda")
    col = zeros(torch.int64, "cuda")
    col[MANY - 3] = 1
    pattern = torch.sparse_csr_tensor(crow, col, zeros(torch.float16, "cuda"), (3, 2), check_invariants=False)
    made = plan(pattern)
    x = torch.tensor([[1.0], [2], [3]], dtype=torch.float16, device="cuda").expand(3, 8).contiguous()
    y = torch.tensor([[1.0, 4]], dtype=torch.float16, device="cuda").expand(8, 2).contiguous()
    scores = sddmm(x, y, made)
    for at, expected in ((0, 8), (5, 16), (2**31, 16), (MANY - 8, 16), (MANY - 7, 24), (MANY - 3, 96)):
        assert scores[at].item() == expected
    soft = sparse_softmax(scores[:], made)
    assert abs(soft[0].item() - 0.2) < 1e-3
    assert soft[MANY - 3].item() == 1
    assert soft[2**31].item() < 1e-8
