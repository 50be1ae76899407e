"""Tests the Triton kernels for block-sparse matrices in Triton's interpreter; test_interpreter.py starts this process.

TRITON_INTERPRET=1 must be set when triton is imported. The operators then run the kernels on CPU tensors as well: the
forward, backward and double backward are those of a GPU.
"""

import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from matmuls import blocks
from matmuls.blocks import bsr_sddmm, bsr_spmm
from matmuls.sparse.tensor_pattern import pattern_of
from matmuls.triton import blocks as kernels
from matmuls.triton import configs, launch

SIZES = [(16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (128, 32)]
WIDTHS = (1, 7, 16, 33, 128, 200)
# Block rows of every kind: unsorted, empty, one block, duplicates.
CROW, COL, ACROSS = torch.tensor([0, 3, 3, 4, 6]), torch.tensor([2, 0, 1, 1, 2, 2]), 3
every_size = pytest.mark.parametrize(("h", "w"), SIZES)


@pytest.fixture(autouse=True)
def through_the_kernels(monkeypatch):
    """Records which kernels ran; uninitialized memory is NaN."""
    monkeypatch.setattr(blocks, "_by_triton", lambda x, *sizes: x.dtype != torch.float64)
    ran = []

    def counted(kernel, *args):
        ran.append(kernel.__name__)
        launch.launch(kernel, *args)

    monkeypatch.setattr(kernels, "launch", counted)
    real = torch.Tensor.new_empty

    def poisoned(*args, **kwargs):
        made = real(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    return ran


def error(x, truth):
    assert x.isfinite().all()
    scale = truth.norm().item()
    return (x.double() - truth).norm().item() / scale if scale else x.double().norm().item()


def dense_of(crow, col, values, across):
    """The dense matrix; differentiable."""
    (_, h, w), rows = values.shape, len(crow) - 1
    row = torch.repeat_interleave(torch.arange(rows), crow.diff())
    full = values.new_zeros(rows, across, h, w).index_put((row, col), values, accumulate=True)
    return full.transpose(1, 2).reshape(rows * h, across * w)


def compare(function, truth, *tensors):
    """Compare results and gradients of the kernels with float64."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    y, expected = function(*leaves), truth(*wide)
    g = torch.randn(y.shape).to(y.dtype)
    ours, theirs = torch.autograd.grad(y, leaves, g), torch.autograd.grad(expected, wide, g.double())
    for x, t in zip((y, *ours), (expected, *theirs), strict=True):
        assert x.dtype == y.dtype
        assert error(x, t) < (1e-6 if y.dtype == torch.float32 else 1e-3)


@every_size
@pytest.mark.parametrize(
    ("n", "dtype"), [*((n, torch.float32) for n in WIDTHS), (16, torch.float16), (33, torch.float16)], ids=str
)
def test_product(h, w, n, dtype, through_the_kernels):
    """No bfloat16: the interpreter has no bfloat16 products."""
    torch.manual_seed(n)
    values, b = torch.randn(6, h, w).to(dtype), torch.randn(ACROSS * w, n).to(dtype)
    compare(
        lambda v, b: bsr_spmm(CROW, COL, v, b, ACROSS * w),
        lambda v, b: dense_of(CROW, COL, v, ACROSS) @ b,
        values,
        b,
    )
    assert through_the_kernels == ["product_kernel", "product_kernel", "sampled_kernel"]


@every_size
def test_double_backward(h, w):
    def twice(product, *leaves):
        found = torch.autograd.grad(product(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in found), leaves)

    tensors = torch.randn(6, h, w) / 16, torch.randn(ACROSS * w, 5) / 16
    ours = twice(lambda v, b: bsr_spmm(CROW, COL, v, b, ACROSS * w), *(t.clone().requires_grad_() for t in tensors))
    wide = [t.double().requires_grad_() for t in tensors]
    for x, truth in zip(ours, twice(lambda v, b: dense_of(CROW, COL, v, ACROSS) @ b, *wide), strict=True):
        assert error(x, truth) < 1e-5


@pytest.mark.parametrize("d", [1, 33, 64])
@pytest.mark.parametrize(("h", "w"), [(32, 32), (16, 64)])
def test_sampled(h, w, d):
    a, b = torch.randn(4 * h, d), torch.randn(ACROSS * w, d)
    row = torch.repeat_interleave(torch.arange(4), CROW.diff())
    compare(
        lambda a, b: bsr_sddmm(CROW, COL, a, b, ACROSS * w, h, w),
        lambda a, b: a.view(4, h, d)[row] @ b.view(ACROSS, w, d)[COL].mT,
        a,
        b,
    )


@pytest.mark.parametrize("layout", ["bsr", "bsc"])
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
def test_sorted_columns_and_the_transposed_structure(layout, index, through_the_kernels):
    """Also by block columns, with their value permutation, and the transposes made from them."""
    h, w = 32, 16
    full = torch.randn(4 * h, 5 * w)
    full.view(4, h, 5, w).mul_(torch.rand(4, 1, 5, 1) < 0.5)
    full[h : 2 * h] = 0
    found, values = pattern_of("test", getattr(full, f"to_sparse_{layout}")((h, w)))
    found = found.in_int32() if index == torch.int32 else found
    s = found.blocks.pattern
    assert s.crow.dtype == index
    order, *reverse = s.arguments(True)
    assert (order is not None) == (layout == "bsc")
    values, b = values.view(-1, h, w), torch.randn(5 * w, 40)
    at = s.row.long(), s.col.long()

    def truth(v, b):
        zeros = v.new_zeros(4, 5, h, w)
        return zeros.index_put(at, v if order is None else v[order]).transpose(1, 2).reshape(4 * h, 5 * w) @ b

    compare(lambda v, b: bsr_spmm(s.crow, s.col, v, b, 5 * w, order, False, *reverse), truth, values, b)
    torch.testing.assert_close(truth(values, b), full @ b)
    assert len(through_the_kernels) == 3


def test_one_long_row():
    """Bitwise reproducible, and independent of the other rows."""
    crow, col = torch.tensor([0, 0, 50, 51]), torch.randint(3, (51,))
    values, b = torch.randn(51, 16, 16), torch.randn(48, 20)
    y = bsr_spmm(crow, col, values, b, 48)
    assert error(y, dense_of(crow, col, values.double(), 3) @ b.double()) < 1e-6
    assert torch.equal(y, bsr_spmm(crow, col, values, b, 48))
    assert torch.equal(y[16:32], bsr_spmm(torch.tensor([0, 50]), col[:50], values[:50], b, 48))


def test_no_blocks():
    crow, none = torch.zeros(4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    values, b = torch.zeros(0, 16, 32, requires_grad=True), torch.randn(64, 5, requires_grad=True)
    y = bsr_spmm(crow, none, values, b, 64)
    assert torch.equal(y, torch.zeros(48, 5))
    y.sum().backward()
    assert torch.equal(b.grad, torch.zeros(64, 5))
    assert values.grad.shape == (0, 16, 32)


def test_strides():
    """Row and column strides, overlapping rows (stride 0), non-contiguous values."""
    values, b = torch.randn(6, 16, 32), torch.randn(96, 20)
    apart = torch.full((96, 26), float("nan"))
    apart[:, 3:23] = b
    truth = dense_of(CROW, COL, values.double(), ACROSS) @ b.double()
    for v in (values, values.mT.contiguous().mT):
        for x in (b, apart[:, 3:23], b.T.contiguous().T):
            assert error(bsr_spmm(CROW, COL, v, x, 96), truth) < 1e-6
    row = b[:1].expand(96, 20)
    assert error(bsr_spmm(CROW, COL, values, row, 96), dense_of(CROW, COL, values.double(), 3) @ row.double()) < 1e-6


def test_non_contiguous_indices():
    values, b, a = torch.randn(6, 16, 16), torch.randn(ACROSS * 16, 8), torch.randn(4 * 16, 8)
    order = torch.randperm(6)
    apart = torch.stack([CROW, CROW.flip(0)], 1)[:, 0], *(torch.stack([t, t.flip(0)], 1)[:, 0] for t in (COL, order))
    ours = bsr_spmm(apart[0], apart[1], values, b, ACROSS * 16, apart[2])
    assert torch.equal(ours, bsr_spmm(CROW, COL, values, b, ACROSS * 16, order))
    ours = bsr_sddmm(apart[0], apart[1], a, b, ACROSS * 16, 16, 16, apart[2])
    assert torch.equal(ours, bsr_sddmm(CROW, COL, a, b, ACROSS * 16, 16, 16, order))


@every_size
def test_nan_stays_in_its_rows(h, w):
    """A block row that ends inside a loop step reads neither the next row's blocks nor blocks that it does not have."""
    crow, col = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    values, b = torch.randn(2, h, w), torch.randn(2 * w, 10)
    values[1], b[:w] = float("nan"), float("nan")
    y = bsr_spmm(crow, col, values, b, 2 * w)
    assert error(y[:h], values[0].double() @ b[w:].double()) < 1e-6
    assert y[h:].isnan().all()


@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_every_tile(multiprocessors, monkeypatch):
    """The widest and the narrowest tile that a number of multiprocessors leads to."""
    gpu = configs.Gpu("interpreter", (8, 0), multiprocessors)
    monkeypatch.setattr(kernels, "gpu", lambda index: gpu)
    values, b = torch.randn(6, 64, 64).half(), torch.randn(192, 130).half()
    compare(lambda v, b: bsr_spmm(CROW, COL, v, b, 192), lambda v, b: dense_of(CROW, COL, v, ACROSS) @ b, values, b)
