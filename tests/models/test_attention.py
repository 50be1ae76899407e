"""Attention with its probabilities: values and gradients against plain torch, saved tensors, memory, unmodified
inputs."""

from itertools import product

import pytest
import torch

from common.attention_cases import MASKS, B, D, E, H, K, Q, drawer, kept, operands, plain
from matmuls import attention, timing

PIECES = {"whole": 1 << 30, "two heads": 2 * Q * K * 8, "two of the batch": 2 * H * Q * K * 8, "least": 1}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients(device, mask, pieces, recompute, monkeypatch):
    monkeypatch.setattr(attention, "PIECE_BYTES", PIECES[pieces])
    for causal, probabilities in product((False, True), repeat=2):
        inputs = [x.requires_grad_() for x in operands(device=device)]
        m = MASKS[mask](drawer(device))
        truth = plain(*inputs, m, 0.3, causal)
        with torch.no_grad():
            untracked = attention.attend(*inputs, m, 0.3, causal=causal, probabilities=probabilities)
        ours = attention.attend(*inputs, m, 0.3, causal=causal, probabilities=probabilities, recompute=recompute)
        assert ours[0].is_contiguous()
        assert (ours[1] is None) == (untracked[1] is None) == (not probabilities)
        for x, y, z in list(zip(ours, truth, untracked, strict=True))[: 1 + probabilities]:
            torch.testing.assert_close(x, y)
            torch.testing.assert_close(z, y)
        # gradients of the context only, the probabilities only, both
        for wanted in [(0,), (1,), (0, 1)] if probabilities else [(0,)]:
            losses = (sum((i + 1) * o[i].sin().sum() for i in wanted) for o in (ours, truth))
            found, true = (torch.autograd.grad(x, inputs, retain_graph=True, allow_unused=True) for x in losses)
            assert [x is None for x in found] == [x is None for x in true]
            torch.testing.assert_close(*([x for x in gradients if x is not None] for gradients in (found, true)))


@pytest.mark.parametrize("recompute", [False, True])
def test_second_derivatives(recompute):
    inputs = [x[:1, :2].requires_grad_() for x in operands()]
    mask = torch.randn(1, 1, 1, K) > 0.5

    def run(*inputs):
        return attention.attend(*inputs, mask, 0.3, recompute=recompute)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_second_derivatives_if_only_v_requires_grad():
    q, k, v = operands()
    v.requires_grad_()
    for given in ((0,), (0, 1)):
        grads = []
        for attend in (attention.attend, plain):
            results = attend(q, k, v, None, 0.3)
            (grad,) = torch.autograd.grad(sum(results[i].pow(2).sum() for i in given), v, create_graph=True)
            grads.append((grad, *torch.autograd.grad(grad.sin().sum(), v)))
        torch.testing.assert_close(*grads)
    probabilities = attention.attend(q, k, v, None, 0.3)[1].sum()
    assert torch.autograd.grad(probabilities, v, create_graph=True, allow_unused=True) == (None,)


def test_one_tensor_as_query_key_and_value_compiles():
    x = operands()[0].requires_grad_()
    grads = []
    for attend in (attention.attend, torch.compile(attention.attend, fullgraph=True, backend="aot_eager")):
        grads.append(torch.autograd.grad(attend(x, x, x, None, 0.3)[0].sin().sum(), x)[0])
    torch.testing.assert_close(*grads)


def test_only_needed_gradients_are_computed():
    for needed in product((False, True), repeat=3):
        inputs = [x.requires_grad_(need) for x, need in zip(operands(), needed, strict=True)]
        if any(needed):
            attention.attend(*inputs, None, 0.3)[0].sum().backward()
        assert [x.grad is not None for x in inputs] == list(needed)


def test_at_most_one_score_sized_tensor_is_saved():
    rest = sorted([(B, H, Q, D), (B, H, K, D), (B, H, K, E)])
    assert kept() == kept(probabilities=False) == sorted([*rest, (B, H, Q, K)])
    assert kept(recompute=True) == kept(recompute=True, probabilities=False) == rest


@pytest.mark.parametrize(("recompute", "scores"), [(False, 1), (True, 0)])
def test_peak_memory(device, recompute, scores, monkeypatch):
    """Backward allocates pieces, no further tensors of the scores' size."""
    length = 128
    matrix = length * length * 4
    monkeypatch.setattr(attention, "PIECE_BYTES", matrix)
    q, k, v = (torch.randn(2, 8, length, 4, device=device, requires_grad=True) for _ in range(3))

    def step():
        context, _ = attention.attend(q, k, v, None, 0.5, probabilities=False, recompute=recompute)
        torch.autograd.grad(context.sum(), (q, k, v))

    step()
    small = 12 * q.nbytes  # copies, gradients, contexts
    assert scores * 16 * matrix <= timing.peak_memory(step, device) <= (scores * 16 + 2) * matrix + small


def test_backward_does_not_change_the_probabilities():
    inputs = [x.requires_grad_() for x in operands()]
    context, y = attention.attend(*inputs, None, 0.3)
    before = y.clone()
    first = torch.autograd.grad(context.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(context.sum(), inputs)
    assert torch.equal(y, before)
    assert all(map(torch.equal, first, second))


def test_overwritten_probabilities_raise_in_backward():
    inputs = [x.requires_grad_() for x in operands()]
    context, y = attention.attend(*inputs, None, 0.3)
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        context.sum().backward()


def test_fewer_key_heads_and_a_mask_with_a_gradient():
    q, k, v = operands()
    k, v = k[:, :2], v[:, :2]
    mask = torch.randn(1, H, Q, K, dtype=torch.float64, requires_grad=True)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    ours = attention.attend(*inputs, mask, 0.3)
    truth = plain(q, *(x.repeat_interleave(2, 1) for x in (k, v)), mask, 0.3)
    leaves = [*inputs, mask]
    grads = [torch.autograd.grad(sum(x.sin().sum() for x in pair), leaves) for pair in (ours, truth)]
    for x, y in zip((*ours, *grads[0]), (*truth, *grads[1]), strict=True):
        torch.testing.assert_close(x, y)


def test_dropout_matches_torch():
    q, k, v = operands()
    torch.manual_seed(1)
    context, y = attention.attend(q, k, v, None, 0.3, dropout=0.5)
    torch.manual_seed(1)
    dropped = torch.nn.functional.dropout(plain(q, k, v, None, 0.3)[1], 0.5)
    torch.testing.assert_close(context, (dropped @ v).transpose(1, 2))
    torch.testing.assert_close(y, plain(q, k, v, None, 0.3)[1])


def test_autocast_runs_the_products_in_16_bits(device):
    q, k, v = (x.requires_grad_() for x in operands(torch.float32, device))
    with torch.autocast(device, torch.bfloat16):
        context, y = attention.attend(q, k, v, None, 0.3)
        context.float().sum().backward()
    assert context.dtype == y.dtype == torch.bfloat16
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(context.float(), plain(q, k, v, None, 0.3)[0], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("empty", ["batch", "queries", "head size"])
def test_empty(empty):
    b, n, d = (0 if empty == name else size for name, size in (("batch", B), ("queries", Q), ("head size", D)))
    q, k, v = (torch.randn(s, requires_grad=True) for s in [(b, H, n, d), (b, H, K, d), (b, H, K, E)])
    context, y = attention.attend(q, k, v, None, 0.3)
    context.sum().backward()
    assert (context.shape, y.shape) == ((b, n, H, E), (b, H, n, K))
    torch.testing.assert_close(y, torch.full_like(y, 1 / K if empty == "head size" else 0))
    assert q.grad.shape == q.shape


def test_probabilities_into_a_given_tensor(device):
    q, k, v = operands(device=device)
    room = torch.full((B, H, Q, K), torch.nan, dtype=q.dtype, device=device)
    context, y = attention.attend(q, k, v, None, 0.3, into=room)
    assert y is room
    torch.testing.assert_close((context, y), plain(q, k, v, None, 0.3))


def test_a_mask_of_another_dtype_raises_before_any_write():
    q, k, v = operands()
    room = torch.full((B, H, Q, K), 7.0, dtype=q.dtype)
    with pytest.raises(RuntimeError, match="expected a strided mask in Bool, Byte, Double or Float, got Long"):
        attention.attend(q, k, v, torch.zeros(K, dtype=torch.int64), 0.3, into=room)
    with pytest.raises(RuntimeError, match="expected q of a floating-point dtype, got ComplexDouble"):
        attention.attend(*(t.to(torch.complex128) for t in (q, k, v)), None, 0.3)
    assert (room == 7).all()


def test_probabilities_of_fewer_key_heads_into_a_given_tensor():
    q, k, v = operands()
    room = torch.full((B, H, Q, K), torch.nan, dtype=q.dtype)
    context, y = attention.attend(q, k[:, :2], v[:, :2], None, 0.3, into=room)
    assert y is room
    torch.testing.assert_close((context, y), attention.attend(q, k[:, :2], v[:, :2], None, 0.3))


@pytest.mark.parametrize("made", ["given twice", "of another"])
def test_differentiable_gradients_equal_plain_gradients(made):
    x = operands()[0].requires_grad_()

    def gradient(create_graph):
        k = x if made == "given twice" else x.tanh()
        context, y = attention.attend(x, k, k, None, 0.3)
        return torch.autograd.grad(context.square().sum() + y.square().sum(), x, create_graph=create_graph)[0]

    torch.testing.assert_close(gradient(True).detach(), gradient(False))
