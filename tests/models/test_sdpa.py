"""attend_by_torch: the context of torch's scaled_dot_product_attention, by the fastest of its backends."""

import pytest
import torch
from torch.nn import functional as F

from matmuls.integrations.transformers import sdpa

HEADS, WIDTH = 3, 64


def operands(device, dtype, batch, queries, keys):
    """q, k and v as views of [B, L, H, D], with gradients, and a gradient of the context."""
    generator = torch.Generator().manual_seed(queries * keys)
    shapes = [(batch, n, HEADS, WIDTH) for n in (queries, keys, keys, queries)]
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [t.requires_grad_() for t in drawn[:3]], drawn[3]


def mask_of(kind, device, batch, queries, keys):
    """True where a key may be attended to; each query sees a key."""
    if kind is None:
        return None
    shape = {"padding": (batch, 1, 1, keys), "pairs": (batch, 1, queries, keys), "heads": (batch, HEADS, 1, keys)}[kind]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(keys)) < 0.7
    mask[..., 0] = True
    return mask.to(device)


def results(function, x, grad, *rest):
    """The context and the gradients of q, k and v."""
    y = function(*(t.transpose(1, 2) for t in x), *rest)
    return y, *torch.autograd.grad(y, x, grad)


def by_torch(q, k, v, mask, dropout, causal, scale):
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [None, "padding", "pairs", "heads"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (33, 20), (64, 64), (65, 65), (64, 96)])
def test_agrees_with_float64(device, queries, keys, kind, causal):
    if causal and (kind or queries != keys):
        pytest.skip("the caller gives a mask instead")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, grad = operands(device, dtype, 2, queries, keys)
    rest = mask_of(kind, device, 2, queries, keys), 0.0, causal, 0.125
    truth = results(by_torch, [t.detach().double().requires_grad_() for t in x], grad.double(), *rest)
    ours, torchs = results(sdpa.attend_by_torch, x, grad, *rest), results(by_torch, x, grad, *rest)
    for found, other, true in zip(ours, torchs, truth, strict=True):
        allowed = 2 * (other.double() - true).norm() + torch.finfo(dtype).eps * true.norm()
        assert (found.double() - true).norm() <= allowed
        assert found.dtype == dtype
    assert ours[0].is_contiguous()


@pytest.mark.parametrize("length", [64, 65])
def test_by_which_function(device, length, monkeypatch):
    calls = []
    right = sdpa._efficient
    monkeypatch.setattr(sdpa, "_efficient", lambda *args, **kwargs: calls.append(1) or right(*args, **kwargs))
    x, grad = operands(device, torch.bfloat16, 2, length, length)
    is_short = device == "cuda" and torch.cuda.get_device_capability() == (9, 0) and length <= sdpa.SHORT
    results(sdpa.attend_by_torch, x, grad, None, 0.1, False, 0.125)
    assert len(calls) == is_short
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        results(sdpa.attend_by_torch, x, grad, None, 0.0, False, 0.125)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        results(sdpa.attend_by_torch, x, grad, None, 0.0, False, 0.125)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(calls) == is_short, "a backend that was switched off ran"


@pytest.mark.cuda
def test_dropout_keeps_the_mean():
    x, _ = operands("cuda", torch.bfloat16, 64, 64, 64)
    with torch.no_grad():
        q, k, v = (t.transpose(1, 2) for t in x)
        ones = torch.ones_like(v)
        found = sdpa.attend_by_torch(q, k, ones, None, 0.25, False, 0.125).float()
    assert (found.mean() - 1).abs() < 0.01
    assert found.std() > 0.01


@pytest.mark.cuda
def test_queries_without_keys_give_no_nan():
    """Zeros, where the memory-efficient kernel runs; torch's choice of cuDNN gives other numbers."""
    x, grad = operands("cuda", torch.bfloat16, 2, 64, 64)
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool, device="cuda")
    mask[1] = False
    ours, torchs = (results(f, x, grad, mask, 0.0, False, 0.125) for f in (sdpa.attend_by_torch, by_torch))
    for found, other in zip(ours, torchs, strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found[0], other[0], atol=0.05, rtol=0.05)
