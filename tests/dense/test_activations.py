"""Activations at the ends of their range: infinities, NaN and the largest numbers, forward and backward."""

import math

import pytest
import torch
import torch.nn.functional as F

import custom_mm
import matmuls

INF, NAN = math.inf, math.nan
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = ["relu", "gelu", "gelu_tanh"]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def ends(dtype, device):
    """Inputs with known results: 0 for the lowest, the input itself for the highest. Repeated, so that both vectors and
    the remainder contain each.
    """
    info = torch.finfo(dtype)
    negative, positive = [-INF, -13.24, -100.0, -1e4, info.min], [INF, 100.0, 1e4, info.max]
    x = torch.tensor([*negative, *positive, NAN], dtype=dtype, device=device).repeat(37)
    return x, torch.where(x < 0, 0, x), torch.where(x < 0, 0, torch.where(x > 0, 1, NAN)).to(dtype)


def assert_ends(y, expected):
    """Exactly as expected, except that 0 may be subnormal."""
    small = (expected == 0) & (y.abs() < torch.finfo(y.dtype).tiny)
    torch.testing.assert_close(torch.where(small, 0, y), expected, rtol=0, atol=0, equal_nan=True)


def through_bias_act(x, activation):
    return custom_mm.bias_act_(x.clone(), None, activation)


def with_a_bias(x, activation):
    return custom_mm.bias_act_(torch.zeros(3, x.numel(), dtype=x.dtype, device=x.device), x, activation)[2]


def strided(x, activation):
    wide = torch.zeros(x.numel(), 3, dtype=x.dtype, device=x.device)
    wide[:, 1] = x
    return custom_mm.bias_act_(wide[:, 1], None, activation)


def transposed_with_a_bias(x, activation):
    wide = torch.zeros(x.numel(), 5, dtype=x.dtype, device=x.device).T
    return custom_mm.bias_act_(wide, x, activation)[4]


def stepped_with_a_bias(x, activation):
    wide = torch.zeros(2, x.numel() * 2, dtype=x.dtype, device=x.device)[:, ::2]
    return custom_mm.bias_act_(wide, x, activation)[1]


def as_a_product(x, activation):
    """A product with inner size 1 and the factor 1: the result is the input."""
    return matmuls.matmul(x[:, None], torch.ones(1, 1, dtype=x.dtype, device=x.device), activation=activation)[:, 0]


def as_a_bias_of_a_product(x, activation):
    a, b = torch.zeros(4, 8, dtype=x.dtype, device=x.device), torch.zeros(8, x.numel(), dtype=x.dtype, device=x.device)
    return matmuls.matmul(a, b, bias=x, activation=activation)[3]


def into_out(x, activation):
    out = torch.empty(x.numel(), 1, dtype=x.dtype, device=x.device)
    return matmuls.matmul(x[:, None], torch.ones_like(x[:1, None]), activation=activation, out=out)[:, 0]


def of_two_vectors(x, activation):
    one = torch.ones(1, dtype=x.dtype, device=x.device)
    return torch.stack([matmuls.matmul(v[None], one, activation=activation) for v in x[:10]]).repeat(37)


def with_a_gradient(x, activation):
    return as_a_product(x.clone().requires_grad_(), activation).detach()


WAYS = [
    through_bias_act,
    with_a_bias,
    strided,
    transposed_with_a_bias,
    stepped_with_a_bias,
    as_a_product,
    as_a_bias_of_a_product,
    into_out,
    of_two_vectors,
    with_a_gradient,
]
PRODUCTS = WAYS[5:9]


@every_dtype
@every_activation
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_activations_at_the_ends(way, activation, dtype, device):
    x, expected, _ = ends(dtype, device)
    if device == "cuda" and way in PRODUCTS:  # may end in cuBLASLt's epilogue, which has its own values there
        if activation == "gelu_tanh" and dtype.itemsize == 2:
            x, expected = x[x != -INF], expected[x != -INF]
        if activation == "relu" and dtype != torch.float64:
            x, expected = x[~x.isnan()], expected[~x.isnan()]
    assert_ends(way(x, activation), expected[:10].repeat(37) if way is of_two_vectors else expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_the_epilogue_of_cublaslt_at_minus_infinity(dtype):
    """Reports cuBLASLt's value if it is not 0: its formula computes -inf * 0 = NaN."""
    y = as_a_bias_of_a_product(torch.full((64,), -INF, dtype=dtype, device="cuda"), "gelu_tanh")
    if not (y == 0).all():
        pytest.xfail(f"cuBLASLt's gelu epilogue gives {y[0].item()} for -inf in {dtype}")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_epilogue_of_cublaslt_at_nan(dtype):
    """Reports cuBLASLt's value if it is not NaN: its relu is max(0, x)."""
    y = as_a_product(torch.full((64,), float("nan"), dtype=dtype, device="cuda"), "relu")
    if not y.isnan().all():
        pytest.xfail(f"cuBLASLt's relu epilogue gives {y[0].item()} for NaN in {dtype}")


@every_dtype
@every_activation
def test_gradients_at_the_ends(activation, dtype, device):
    x, _, expected = ends(dtype, device)
    leaf = x.clone().requires_grad_()
    as_a_product(leaf, activation).backward(torch.ones_like(x))
    if activation == "relu":  # torch's gradient, which is 1 for NaN
        expected = torch.where(x.isnan(), 1, expected)
    torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=1e-30, equal_nan=True)


@every_dtype
@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
def test_second_derivatives_at_the_ends(tanh, dtype, device):
    x, _, _ = ends(dtype, device)
    x = x[~x.isnan()].requires_grad_()
    (first,) = torch.autograd.grad(torch.ops.custom_mm.gelu(x, tanh).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.zeros_like(second), rtol=0, atol=1e-30)


@every_activation
def test_feed_forward_with_minus_infinity(activation, device):
    """A row whose hidden activations are -inf before gelu and relu, which give 0."""
    x = torch.zeros(3, 4, device=device)
    up_bias = torch.tensor([-INF, 1.0], device=device)
    y = matmuls.feed_forward_(
        x.clone(), torch.zeros(2, 4, device=device), up_bias, torch.ones(4, 2, device=device), None,
        activation=activation,
    )  # fmt: skip
    torch.testing.assert_close(y, torch.zeros_like(x))


@pytest.mark.parametrize("backend", ["aot_eager"])
@every_activation
def test_compiled_gradients_at_the_ends(activation, backend, device):
    x, expected, slope = ends(torch.float32, device)
    torch._dynamo.reset()
    leaf = x[~x.isnan()].requires_grad_()
    y = torch.compile(as_a_product, backend=backend)(leaf, activation)
    assert_ends(y.detach(), expected[~x.isnan()])
    y.sum().backward()
    torch.testing.assert_close(leaf.grad, slope[~x.isnan()], rtol=0, atol=1e-30)


@every_dtype
@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
def test_gelu_and_its_gradient_are_as_exact_as_torchs(tanh, dtype, device):
    x = torch.linspace(-14, 14, 10_001, dtype=torch.float64, device=device).to(dtype)
    grad = torch.linspace(-1, 1, 10_001, dtype=torch.float64, device=device).to(dtype)
    approximate = "tanh" if tanh else "none"
    wide = x.double().requires_grad_()
    truth = F.gelu(wide, approximate=approximate)
    (slope,) = torch.autograd.grad(truth, wide, grad.double())
    theirs = F.gelu(x, approximate=approximate), torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    ours = torch.ops.custom_mm.gelu(x, tanh), torch.ops.custom_mm.gelu_backward(grad, x, tanh)
    for y, torchs, exact in zip(ours, theirs, (truth.detach(), slope), strict=True):
        error, torch_error = ((t.double() - exact).norm() / exact.norm() for t in (y, torchs))
        bound = 4e-5 if device == "cuda" and dtype.itemsize == 2 else 4 * torch.finfo(dtype).eps
        assert error <= 2 * torch_error + bound
