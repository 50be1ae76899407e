"""Softmax along any dimension on a CPU: strided rows next to each other, short rows, gradients, speed."""

import random
import time

import pytest
import torch

import matmuls

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(seed, most=20_000):
    """A random shape and dimension; rows of 1 to 600 numbers, contiguous or strided."""
    rng = random.Random(seed)
    while True:
        shape = [max(1, int(2 ** rng.uniform(-0.5, 9.2))) for _ in range(rng.choice([2, 3, 4]))]
        if torch.Size(shape).numel() <= most:
            return shape, rng.randrange(len(shape))


def close(ours, truth, dtype):
    info = torch.finfo(dtype)
    rtol = (
        1 if dtype.itemsize == 2 else 32
    ) * info.eps  # a rounding of z - max z is a relative error of the result, z times as large
    torch.testing.assert_close(ours.double(), truth, rtol=rtol, atol=info.tiny, equal_nan=True)


@every_dtype
@pytest.mark.parametrize("seed", range(24))
def test_every_variant(seed, dtype, device):
    shape, dim = drawn(seed)
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(device, dtype)
    truth = x.double().softmax(dim)
    close(matmuls.softmax(x, dim), truth, dtype)
    around = torch.full([s + 2 for s in shape], 7.0, dtype=dtype, device=device)
    out = around[tuple(slice(1, -1) for _ in shape)]
    close(matmuls.softmax(x, dim, out=out), truth, dtype)
    out.fill_(7)
    assert (around == 7).all()
    out.copy_(x)
    close(matmuls.softmax_(out, dim), truth, dtype)
    scaled = x.movedim(dim, -1)
    close(matmuls.scaled_masked_softmax(scaled, None, -0.5), (scaled.double() * -0.5).softmax(-1), dtype)
    close(matmuls.softmax_(x, dim), truth, dtype)


@every_dtype
@pytest.mark.parametrize("seed", range(24))
def test_gradients(seed, dtype, device):
    shape, dim = drawn(seed)
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(shape, generator=generator).softmax(dim).to(device, dtype)
    grad = torch.randn(shape, generator=generator).to(device, dtype)
    product = y.double() * grad.double()
    truth = product - y.double() * product.sum(dim, keepdim=True)
    scale = (product.abs() + y.double() * product.abs().sum(dim, keepdim=True)) * 4 * torch.finfo(dtype).eps
    for function in (matmuls.softmax_backward, matmuls.softmax_backward_):
        assert ((function(y, grad, dim).double() - truth).abs() <= scale + torch.finfo(dtype).tiny).all()


@every_dtype
@pytest.mark.parametrize("columns", [1, 2, 5, 8, 9, 16, 17, 40, 300])
@pytest.mark.parametrize("width", [1, 3, 16, 37, 530])
def test_special_values_match_torch(columns, width, dtype, device):
    x = torch.randn(columns, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    inf, nan = float("inf"), float("nan")
    for column, row, value in ((0, 0, inf), (columns - 1, 1, -inf), (columns // 2, 2, nan), (0, 5, -inf), (0, 5, nan)):
        x[column, row % width] = value
    x[:, width - 1] = -inf
    x[: columns // 2, width // 2] = -inf
    for t, dim in ((x, 0), (x.mT.contiguous(), 1), (x[None].expand(2, -1, -1).contiguous(), 1)):
        close(matmuls.softmax(t, dim), t.double().softmax(dim), dtype)


def test_sums_of_many_columns_are_accurate(device):
    x = torch.zeros(200_000, 33, device=device)
    torch.testing.assert_close(matmuls.softmax(x, 0), torch.full_like(x, 1 / 200_000), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((2048, 4096), 0), ((8, 512, 700), 1), ((200_000, 1), 1)], ids=str)
def test_speed_is_at_least_nine_tenths_of_torchs(shape, dim, dtype):
    """softmax_ and torch.softmax alternate; the fastest run of each counts."""
    x, out = torch.randn(shape).to(dtype), torch.empty(shape, dtype=dtype)
    functions = [lambda: torch.softmax(x, dim, out=out), lambda: matmuls.softmax_(out, dim)]
    least = [float("inf")] * 2
    for _ in range(12):
        for i, function in enumerate(functions):
            begin = time.perf_counter()
            function()
            least[i] = min(least[i], time.perf_counter() - begin)
    assert least[1] <= least[0] / 0.9
