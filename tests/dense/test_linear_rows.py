"""linear_rows: a linear layer of the rows before a count that the device alone may know."""

import re

import pytest
import torch
from torch.nn import functional as F

from custom_mm import _C

ACTIVATIONS = {
    None: lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}


@pytest.fixture(autouse=True)
def needs_hopper(request):
    if request.node.callspec.params.get("device") == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel runs on Hopper")


def operands(m, n, k, dtype, device, gap=0):
    """x with `gap` NaNs between its rows, w, bias."""
    generator = torch.Generator().manual_seed(m * n + k)
    wide = torch.full((m, k + gap), torch.nan)
    wide[:, :k] = torch.randn(m, k, generator=generator)
    w, bias = torch.randn(n, k, generator=generator) / k**0.5, torch.randn(n, generator=generator)
    x, w, bias = (t.to(device, dtype) for t in (wide, w, bias))
    return x[:, :k], w, bias


def is_near(y, reference):
    rounding = torch.finfo(y.dtype).eps / 2
    return bool(((y.double() - reference).abs() <= 1.02 * rounding * reference.abs() + 3e-4).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (65, 40, 72), (130, 200, 384), (300, 96, 1024), (520, 768, 136)])
def test_agrees_with_float64(device, m, n, k, activation, dtype):
    x, w, bias = operands(m, n, k, dtype, device, gap=8)
    for added in (bias, None):
        z = F.linear(x.double(), w.double(), None if added is None else added.double())
        assert is_near(_C.linear_rows(x, w, added, activation), ACTIVATIONS[activation](z))


@pytest.mark.parametrize("count", [-3, 0, 1, 63, 64, 129, 256, 299, 300, 999])
def test_rows_from_count_on_are_neither_read_nor_written(device, count):
    x, w, bias = operands(300, 264, 320, torch.bfloat16, device)
    live = min(max(count, 0), 300)
    x[live:] = torch.nan
    out = torch.full((300, 272), 77.0, dtype=x.dtype, device=device)[:, :264]
    counted = torch.tensor([count], dtype=torch.int32, device=device)
    assert _C.linear_rows(x, w, bias, "gelu", counted, out).data_ptr() == out.data_ptr()
    assert is_near(out[:live], F.gelu(F.linear(x[:live].double(), w.double(), bias.double())))
    assert bool((out[live:] == 77).all())


def test_writes_are_counted(device):
    x, w, _ = operands(8, 16, 8, torch.float16, device)
    out = x.new_empty(8, 16)
    before = out._version
    _C.linear_rows(x, w, None, None, out=out)
    assert out._version > before


def test_no_results(device):
    x, w, bias = operands(4, 8, 8, torch.float16, device)
    assert _C.linear_rows(x[:0], w, bias, None).shape == (0, 8)
    assert _C.linear_rows(x, w[:0], bias[:0], None).shape == (4, 0)


BAD = {
    "expected x in BFloat16 or Half, got Float": lambda x, w, b: (x.float(), w, b, None),
    "expected w of dtype BFloat16 as a is, got Half": lambda x, w, b: (x, w.half(), b, None),
    "expected x [M, K] and w [N, K], got [8, 16] and [24, 8]": lambda x, w, b: (x, w[:, :8], b, None),
    "expected x [M, K] and w [N, K], got [16] and [24, 16]": lambda x, w, b: (x[0], w, b, None),
    "expected contiguous bias of shape [24], got [8]": lambda x, w, b: (x, w, b[:8], None),
    "expected activation None, 'relu', 'gelu' or 'gelu_tanh', got 'elu'": lambda x, w, b: (x, w, b, "elu"),
    "expected count of one element in Int": lambda x, w, b: (x, w, b, None, x.new_ones(1, dtype=torch.int64)),
    "expected out of shape [8, 24], got [8, 16]": lambda x, w, b: (x, w, b, None, None, x.new_empty(8, 16)),
    "expected out and x not to overlap": lambda x, w, b: (x, w[:16], b[:16], None, None, x),
    "expected no gradient to be recorded": lambda x, w, b: (x, w.requires_grad_(), b, None),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_operands(device, message):
    arguments = BAD[message](*operands(8, 24, 16, torch.bfloat16, device))
    with pytest.raises(RuntimeError, match=re.escape(f"linear_rows: {message}")):
        _C.linear_rows(*arguments)


@pytest.mark.cuda
@pytest.mark.parametrize("make", [lambda x: x[:, :12], lambda x: x[:, 1:9], lambda x: x.t().contiguous().t()])
def test_rows_that_the_kernel_does_not_read(make):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel runs on Hopper")
    x, w, _ = operands(8, 24, 16, torch.bfloat16, "cuda")
    x = make(x)
    with pytest.raises(RuntimeError, match="linear_rows: expected a Hopper GPU, and x, w and out of contiguous rows"):
        _C.linear_rows(x, w[:, : x.size(1)], None, None)


@pytest.mark.cuda
def test_graph_with_a_count_of_its_own():
    """Products launched early that read each other's results, and a count that the graph writes."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel runs on Hopper")
    x, up, _ = operands(320, 1536, 384, torch.bfloat16, "cuda")
    _, down, _ = operands(320, 384, 1536, torch.bfloat16, "cuda")
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    h, y, z = (x.new_zeros(320, n) for n in (1536, 384, 1536))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count.add_(1)
        _C.linear_rows(x, up, None, "gelu", count, h)
        _C.linear_rows(h, down, None, None, count, y)
        _C.linear_rows(y, up, None, None, count, z)
    for live in (1, 100, 160, 320):
        count.fill_(live - 1)
        for t in (h, y, z):
            t.fill_(77)
        graph.replay()
        torch.cuda.synchronize()
        assert is_near(h[:live], F.gelu(x.double() @ up.double().t())[:live])
        assert is_near(y[:live], (h.double() @ down.double().t())[:live])
        assert is_near(z[:live], (y.double() @ up.double().t())[:live])
        assert all(bool((t[live:] == 77).all()) for t in (h, y, z))
