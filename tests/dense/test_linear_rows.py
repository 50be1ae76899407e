"""linear_rows and linear_tiles: which products with a bias or an activation run in them, and their results."""

import pytest
import torch
from torch.nn import functional as F

import custom_mm
import matmuls
from custom_mm import _C

ACTIVATIONS = {
    None: lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}


# The fastest configurations by an H200's times, and those within 5 % of them.
@pytest.mark.parametrize(
    ("m", "n", "k", "fast"),
    [
        (16, 2304, 768, {"64x64 in 2"}),
        (64, 768, 768, {"64x64 in 4"}),
        (64, 768, 3072, {"64x64 in 8"}),
        (64, 1024, 4096, {"64x64 in 4"}),
        (128, 768, 3072, {"64x64 in 4"}),
        (128, 384, 1536, {"64x64 in 8", "64x64 in 4"}),
        (128, 3072, 768, {"64x64 in 1", "64x64 in 2", "128x64 in 2"}),
        (256, 1536, 384, {"64x64 in 1"}),
        (512, 4096, 1024, {"128x64 in 1"}),
        (512, 384, 1536, {"64x64 in 4", "128x64 in 4", "64x64 in 2"}),
        (1024, 768, 3072, {"128x96 in 2"}),
        (1024, 3072, 768, {"128x96 in 1"}),
        (2048, 1536, 384, {"128x96 in 1"}),
        (4096, 3072, 768, {"128x128 in 1"}),
        (4096, 4096, 1024, {"128x128 in 1"}),
    ],
)
def test_chosen_configuration(m, n, k, fast):
    assert _C.choose_product(m, n, k, "gelu", 132)[1] in fast


@pytest.mark.parametrize(
    ("m", "n", "k", "activation", "expected"),
    [
        (16384, 3072, 768, "gelu", "linear_tiles"),
        (8192, 3072, 768, "gelu", "linear_tiles"),
        (8192, 8192, 2048, "gelu", "linear_tiles"),
        (2048, 3072, 768, "gelu", "linear_rows"),
        (1535, 8192, 2048, "gelu", "linear_rows"),
        (1536, 8192, 2048, "gelu", "linear_tiles"),
        (6000, 3072, 768, "gelu", "linear_rows"),
        (32768, 1536, 384, "gelu", "linear_rows"),
        (1, 8192, 2048, "gelu", "linear_rows"),
        (8192, 8192, 4096, "gelu", "linear_tiles"),
        (16384, 768, 3072, "gelu", "linear_tiles"),
        (12000, 768, 3072, "gelu", "cublaslt"),
        (4096, 64, 4096, "gelu", "cublaslt"),
        (16384, 504, 3072, "gelu", "cublaslt"),
        (16384, 8192, 8256, "gelu", "cublaslt"),
        (64, 768, 768, None, "linear_rows"),
        (63, 768, 760, None, "cublaslt"),
        (64, 768, 376, None, "cublaslt"),
        (128, 768, 4096, None, "linear_rows"),
        (129, 768, 4096, None, "cublaslt"),
        (256, 768, 3072, None, "linear_rows"),
        (257, 768, 3072, None, "cublaslt"),
        (512, 2304, 768, None, "linear_rows"),
        (513, 2304, 768, None, "cublaslt"),
        (64, 4104, 1024, None, "cublaslt"),
        (64, 376, 1024, None, "cublaslt"),
        (64, 768, 4104, None, "cublaslt"),
        (64, 768, 768, "relu", "cublaslt"),
        (64, 768, 768, "gelu_tanh", "cublaslt"),
    ],
)
def test_where_they_run(m, n, k, activation, expected):
    assert _C.choose_product(m, n, k, activation, 132)[0] == expected
    assert _C.choose_product(m, n, k, activation, 1)[0]


# --------------------------------------------------------------------------------------------------------- on Hopper


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel runs on Hopper")
    return "cuda"


def operands(m, n, k, dtype=torch.bfloat16, gap=0):
    """x with `gap` NaNs between its rows, w, bias."""
    generator = torch.Generator().manual_seed(m * n + k)
    wide = torch.full((m, k + gap), torch.nan)
    wide[:, :k] = torch.randn(m, k, generator=generator)
    w, bias = torch.randn(n, k, generator=generator) / k**0.5, torch.randn(n, generator=generator)
    x, w, bias = (t.to("cuda", dtype) for t in (wide, w, bias))
    return x[:, :k], w, bias


def linear(x, w, bias, activation, out=None):
    return matmuls.matmul(x, w, transb=True, bias=bias, activation=activation, out=out)


def is_near(y, x, w, bias, activation, rounds_first=False):
    """True if y is rounded once, or, as torch's, before the activation too, whose slope is at most 1.13."""
    z = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    reference, rounding = ACTIVATIONS[activation](z), torch.finfo(y.dtype).eps / 2
    allowed = reference.abs() + (1.13 * z.abs() if rounds_first else 0)
    return bool(((y.double() - reference).abs() <= 1.02 * rounding * allowed + 3e-4).all())


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ["linear_rows", "linear_tiles"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *[(1, 8, 8), (65, 40, 72), (130, 200, 384), (300, 96, 1024), (520, 768, 136), (63, 768, 3072)],
        *[(129, 3072, 768), (500, 384, 1536), (1025, 768, 3072), (1030, 3072, 768), (4001, 3072, 768)],
        *[(9000, 1288, 200), (17000, 264, 64)],  # several tiles a cluster; fewer K steps than stages
    ],
)
def test_agrees_with_float64(hopper, m, n, k, activation, dtype, kernel):
    x, w, bias = operands(m, n, k, dtype, gap=8)
    with custom_mm.only_kernel(kernel):
        results = [
            (added, linear(x, w, added, activation)) for added in (bias, None) if added is not None or activation
        ]
    assert all(is_near(y, x, w, added, activation, kernel == "linear_tiles") for added, y in results)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("m", "activation"),
    [(7, None), (64, None), (300, None), (1, "gelu"), (333, "gelu"), (2049, "gelu"), (5632, "gelu")],
)
def test_they_are_taken(hopper, m, activation):
    """The results of the call are those of the kernel alone, to the bit."""
    x, w, bias = operands(m, 1536, 1024, gap=64)
    y = linear(x, w, bias, activation)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    kernel, _ = _C.choose_product(m, 1536, 1024, activation, multiprocessors)
    assert kernel == ("linear_tiles" if m == 5632 else "linear_rows") or multiprocessors != 132
    with custom_mm.only_kernel(kernel):
        assert torch.equal(y, linear(x, w, bias, activation))
    with custom_mm.without_kernels("linear_rows", "linear_tiles"):
        other = linear(x, w, bias, activation)
    assert is_near(y, x, w, bias, activation, kernel == "linear_tiles")
    assert (other.double() - y.double()).abs().max() <= 0.05  # cuBLASLt rounds before gelu too


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ["linear_rows", "linear_tiles"])
def test_other_layouts(hopper, kernel):
    """Batches, vectors, an out of strided rows, no rows; operands that the kernel does not read go to cuBLASLt."""
    x, w, bias = operands(96, 264, 320)
    out = torch.full((96, 272), 77.0, dtype=x.dtype, device="cuda")
    with custom_mm.only_kernel(kernel):
        assert linear(x, w, bias, "gelu", out[:, :264]).data_ptr() == out.data_ptr()
        assert torch.equal(linear(x.view(4, 1, 24, 320), w, bias, "gelu").view(96, 264), out[:, :264])
        assert torch.equal(linear(x[3], w, bias, "gelu"), linear(x[3:4], w, bias, "gelu")[0])
        assert torch.equal(matmuls.matmul(x, w.t(), bias=bias, activation="gelu"), out[:, :264])
        assert linear(x[:0], w, bias, "gelu").shape == (0, 264)
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(linear(x.float(), w.float(), bias.float(), "gelu"), out[:, :264])
    assert bool((out[:, 264:] == 77).all())
    assert is_near(out[:, :264], x, w, bias, "gelu", kernel == "linear_tiles")
    for a in (x[:, :12], x[:, 1:9], x.t().contiguous().t()):
        b = w[:, : a.size(1)]
        assert linear(a, b, bias, "gelu").shape == (96, 264)
        with custom_mm.only_kernel(kernel), pytest.raises(ValueError, match="every kernel that takes"):
            linear(a, b, bias, "gelu")


@pytest.mark.cuda
@pytest.mark.parametrize(("kernel", "rows"), [("linear_rows", 320), ("linear_tiles", 320), ("linear_tiles", 9000)])
def test_graph_of_products_that_read_each_other(hopper, kernel, rows):
    """Kernels that start before the one ahead has ended."""
    x, up, bias = operands(rows, 1536, 384)
    _, down, _ = operands(rows, 384, 1536)
    h, y, z = (x.new_zeros(rows, n) for n in (1536, 384, 1536))

    def steps():
        with custom_mm.only_kernel(kernel):
            linear(x, up, bias, "gelu", h)
            linear(h, down, None, "gelu", y)
            linear(y, up, bias, "gelu", z)

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    tiles = kernel == "linear_tiles"
    for _ in range(4):
        x.normal_()
        for t in (h, y, z):
            t.fill_(77)
        graph.replay()
        torch.cuda.synchronize()
        assert is_near(h, x, up, bias, "gelu", tiles)
        assert is_near(y, h, down, None, "gelu", tiles)
        assert is_near(z, y, up, bias, "gelu", tiles)


@pytest.mark.cuda
def test_same_bits_every_time_and_on_two_streams(hopper):
    x, w, bias = operands(9000, 1536, 384)
    with custom_mm.only_kernel("linear_tiles"):
        first = linear(x, w, bias, "gelu")
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        found = []
        for turn in range(20):
            with torch.cuda.stream(streams[turn % 2]):
                found.append(linear(x, w, bias, "gelu"))
        torch.cuda.synchronize()
    assert all(torch.equal(first, y) for y in found)
