"""Masked and causal softmax: every mask, its strides and its gradient."""

import pytest
import torch

import matmuls
from common.row_cases import INF, NAN, SCALE, SIXTEEN, draw, every_dtype, masked_softmax, with_gradients
from common.table_cases import error

# --------------------------------------------------------------------------------------------------------------- masks


def masks_of(hidden, dtype):
    """The same masked columns as every kind of mask."""
    zeros = torch.zeros(hidden.shape, device=hidden.device)
    return [
        hidden,
        hidden.to(torch.uint8) * 2,
        hidden.to(torch.uint8) * 255,
        zeros.to(dtype).masked_fill(hidden, -INF),
        *([zeros.masked_fill(hidden, -INF)] if dtype != torch.float64 else []),
    ]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("columns", [5, 64, 128, 5003])
@every_dtype
def test_fully_masked_rows_and_their_gradients_are_zero(inplace, columns, dtype, device):
    x, grad = (draw(2, 3, columns, device=device, dtype=dtype, seed=i) for i in range(2))
    x[1, 2, 0] = NAN
    hidden = draw(2, 3, columns, device=device, seed=2) > 0
    hidden[:, 0], hidden[1, 2] = True, True
    expected = with_gradients(lambda x: masked_softmax(x, hidden))(grad, x)
    for mask in masks_of(hidden, dtype):
        run = with_gradients(lambda x, mask=mask: matmuls.scaled_masked_softmax(x, mask, SCALE, inplace=inplace))
        y, dx = run(grad, x)
        assert not y[hidden].any()
        assert not dx[hidden].any()
        assert all(error(*pair) <= 4 * torch.finfo(dtype).eps for pair in zip((y, dx), expected, strict=True))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("columns", [5, 64, 128, 5003])
@every_dtype
def test_nan_in_masked_columns_does_not_spread(value, columns, dtype, device):
    x, grad = (draw(2, 3, columns, device=device, dtype=dtype, seed=i) for i in range(2))
    hidden = torch.zeros(columns, dtype=torch.bool, device=device)
    hidden[::3] = True
    spoilt = x.masked_fill(hidden, value)
    for mask in masks_of(hidden, dtype):
        run = with_gradients(lambda x, mask=mask: matmuls.scaled_masked_softmax(x, mask, SCALE))
        for ours, expected in zip(run(grad, spoilt), run(grad, x), strict=True):
            assert torch.equal(ours, expected)


def test_nan_in_unmasked_columns_fills_its_row(device):
    """But neither masked columns nor other rows."""
    x = draw(3, 40, device=device)
    x[1, 7] = NAN
    hidden = torch.arange(40, device=device) % 2 == 0
    y = matmuls.scaled_masked_softmax(x, hidden)
    assert torch.equal(y.isnan().nonzero().unique(dim=0)[:, 0].unique().cpu(), torch.tensor([1]))
    assert y[1, ~hidden].isnan().all()
    assert not y[:, hidden].any()


@pytest.mark.parametrize("shape", [(2, 3, 4, 9), (2, 3, 7, 7), (2, 3, 9, 4), (3, 1, 70), (1, 70, 5003)], ids=str)
def test_causal_equals_a_triangular_mask(shape, device):
    """With fewer, as many and more queries than keys; elements above the diagonal are not read."""
    x, grad = (draw(*shape, device=device, seed=i) for i in range(2))
    above = torch.ones(shape[-2:], dtype=torch.bool, device=device).triu(1)
    also = draw(shape[-1], device=device, seed=2) > 1
    for mask, hidden in ((None, above), (also, above | also)):
        expected = with_gradients(lambda x, m=hidden: matmuls.scaled_masked_softmax(x, m, SCALE))(grad, x)
        run = with_gradients(lambda x, m=mask: matmuls.scaled_masked_softmax(x, m, SCALE, causal=True))
        torch.testing.assert_close(run(grad, x.masked_fill(above, NAN)), expected)
        assert torch.equal(expected[0] != 0, ~hidden.expand(shape))


STRIDED_MASKS = {
    "batch": lambda m: m(2, 1, 1, 40).expand(2, 3, 5, 40),
    "heads": lambda m: m(1, 1, 5, 40).expand(2, 3, 5, 40),
    "not expanded": lambda m: m(2, 1, 5, 40),
    "fewer dimensions": lambda m: m(40),
    "transposed": lambda m: m(2, 1, 40, 5).mT,
    "stepped": lambda m: m(2, 1, 5, 80)[..., ::2],
    "offset": lambda m: m(2, 1, 5, 43)[..., 3:],
    "one column for all": lambda m: m(2, 3, 5, 1).expand(2, 3, 5, 40),
    "one number": lambda m: m(1).expand(2, 3, 5, 40),
}


@pytest.mark.parametrize("view", STRIDED_MASKS.values(), ids=STRIDED_MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mask_is_read_through_its_strides(view, dtype, device):
    x = draw(2, 3, 5, 40, device=device, dtype=dtype)

    def values(*shape):
        return draw(*shape, device=device, seed=3)

    for mask in (view(lambda *s: values(*s) > 0), view(lambda *s: values(*s).to(dtype)), view(values)):
        whole = mask.expand(x.shape).contiguous()
        assert torch.equal(matmuls.scaled_masked_softmax(x, mask), matmuls.scaled_masked_softmax(x, whole))
        expected = masked_softmax(x.double(), whole.double() if whole.is_floating_point() else whole, 1)
        torch.testing.assert_close(matmuls.scaled_masked_softmax(x, mask), expected.to(dtype))


@pytest.mark.parametrize("shape", [(2, 4, 6, 128), (2, 3, 5, 128), (1, 2, 131, 128), (3, 7, 1, 128), (5, 128)], ids=str)
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_rows_that_share_a_mask_are_processed_together(shape, dtype, device):
    *lead, queries, columns = shape
    x = draw(*shape, device=device, dtype=dtype)
    batch = lead[:1] + [1] * len(lead[1:])
    for mask_shape in ((columns,), (queries, columns), (*batch, 1, columns), (*batch, queries, columns), shape):
        mask = draw(*mask_shape, device=device, seed=5) > 0.2
        mask.view(-1, columns)[0] = True
        expected = masked_softmax(x.double(), mask)
        torch.testing.assert_close(matmuls.scaled_masked_softmax(x, mask, SCALE), expected.to(dtype))
        assert torch.equal(
            matmuls.scaled_masked_softmax(x, mask, SCALE), matmuls.scaled_masked_softmax(x, mask.expand(shape), SCALE)
        )


RAGGED = [
    (5, 7, 3, 131),
    (3, 4, 50, 25),
    (2, 3, 41, 49),
    (2, 2, 40, 197),
    (1, 3, 7, 401),
    (1, 2, 5, 577),
    (2, 2, 3, 785),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", RAGGED, ids=str)
@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32], ids=str)
def test_rows_off_16_bytes_with_every_mask(shape, dtype, causal, device):
    """Consecutive rows have consecutive mask rows, one common mask row, or the mask rows of another head."""
    batch, heads, queries, columns = shape
    x = draw(*shape, device=device, dtype=dtype)
    for n, lead in enumerate(((1, 1, 1), (batch, 1, 1), (batch, 1, queries), (1, heads, queries), shape[:3])):
        hidden = draw(*lead, columns, device=device, seed=n) > 0.3
        hidden[..., -1, :] = True
        expected = masked_softmax(x.double(), hidden, causal=causal)
        for mask in masks_of(hidden, dtype):
            ours = matmuls.scaled_masked_softmax(x, mask, SCALE, causal=causal)
            torch.testing.assert_close(ours, expected.to(dtype))
    bias = draw(1, heads, queries, columns, device=device, dtype=dtype, seed=9)
    expected = masked_softmax(x.double(), bias.double(), causal=causal)
    torch.testing.assert_close(matmuls.scaled_masked_softmax(x, bias, SCALE, causal=causal), expected.to(dtype))
    ours = matmuls.scaled_masked_softmax(x, None, SCALE, causal=causal)
    torch.testing.assert_close(ours, masked_softmax(x.double(), None, causal=causal).to(dtype))


@pytest.mark.parametrize("columns", [25, 131, 577])
def test_many_rows_off_16_bytes_whose_masks_restart_within_a_warp(columns, device):
    x = draw(1300 // columns + 1, 12, 2500, columns, device=device, dtype=torch.bfloat16)
    x = x if device == "cuda" else x[:, :2, :77]
    bias = draw(*x.shape[1:], device=device, dtype=x.dtype, seed=1)
    for mask in (bias, bias[:1], bias[0] > 0):
        expected = masked_softmax(x.double(), mask if mask.dtype == torch.bool else mask.double())
        torch.testing.assert_close(matmuls.scaled_masked_softmax(x, mask, SCALE), expected.to(x.dtype))


def test_a_mask_shared_by_heads_with_scores_larger_than_the_cache(device):
    """The kernel then processes the rows of one query head after head."""
    x = draw(2, 3, 1500, 1500, device=device)
    for mask in (draw(2, 1, 1500, 1500, device=device, seed=1) > 0, draw(1500, 1500, device=device, seed=1)):
        torch.testing.assert_close(
            matmuls.scaled_masked_softmax(x, mask, SCALE), masked_softmax(x, mask), atol=1e-7, rtol=1e-4
        )


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_shape", [(1, 3, 4, 9), (2, 1, 1, 9), (9,), (4, 1), (2, 3, 4, 9)], ids=str)
def test_an_added_mask_has_a_gradient(inplace, causal, mask_shape, device):
    """As a learned position bias: with and without a gradient of x."""
    grad, x = (draw(2, 3, 4, 9, device=device, seed=i) for i in range(2))
    mask = draw(*mask_shape, device=device, seed=2)

    def ours(x, mask):
        return matmuls.scaled_masked_softmax(x, mask, SCALE, causal=causal, inplace=inplace)

    expected = with_gradients(lambda x, mask: masked_softmax(x, mask, causal=causal))(grad, x, mask)
    torch.testing.assert_close(with_gradients(ours)(grad, x, mask), expected)
    (y, dmask) = with_gradients(lambda mask: ours(x.clone(), mask))(grad, mask)
    torch.testing.assert_close((y, dmask), (expected[0], expected[2]))


def test_a_float32_mask_of_16_bit_scores_has_a_float32_gradient(device):
    grad, x = (draw(2, 3, 4, 9, device=device, dtype=torch.bfloat16, seed=i) for i in range(2))
    mask = draw(3, 1, 9, device=device)
    ours = with_gradients(lambda x, m: matmuls.scaled_masked_softmax(x, m, SCALE))(grad, x, mask)
    expected = with_gradients(lambda x, m: masked_softmax(x, m))(grad.double(), x.double(), mask.double())
    assert [t.dtype for t in ours] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert all(error(*pair) < torch.finfo(torch.bfloat16).eps for pair in zip(ours, expected, strict=True))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", [(1, 16, 16), (2, 1, 16), (16,), (5, 1, 2, 16, 16), (5, 3, 2, 16, 16)])
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_gradients_of_float32_masks_are_summed_in_float32(dtype, shape, inplace, device):
    """They are sums of the gradient that a mask of x's shape gets, exact but for float32's rounding."""
    x, grad = (draw(5, 3, 2, 16, 16, device=device, dtype=dtype, seed=i) for i in range(2))
    small = draw(*shape, device=device, seed=2)

    def gradient(mask):
        mask = mask.clone().requires_grad_()
        y = matmuls.scaled_masked_softmax(x.clone(), mask, SCALE, inplace=inplace)
        return torch.autograd.grad(y, mask, grad)[0]

    found, summands = gradient(small), gradient(small.expand(x.shape))
    assert (found.dtype, found.shape) == (torch.float32, small.shape)
    expected = summands.double().sum_to_size(shape)
    assert (found - expected).norm() <= 1e-6 * summands.double().abs().sum_to_size(shape).norm()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_sum_beyond_float16_stays_finite_in_the_gradient_of_a_float32_mask(inplace, device):
    x, grad = (torch.zeros(4096, 2, 2, device=device, dtype=torch.float16) for _ in range(2))
    grad[..., 0] = 100
    mask = torch.zeros(2, 2, device=device, requires_grad=True)
    (found,) = torch.autograd.grad(matmuls.scaled_masked_softmax(x, mask, inplace=inplace), mask, grad)
    assert found.tolist() == [[102400, -102400]] * 2
