"""Rows of any length that lie side by side, which a GPU works on several at a time (src/tiled_rows.cuh)."""

import pytest
import torch
from test_rowwise import SIXTEEN, assert_as_good_as_torch

from matmuls import scaled_masked_softmax, softmax_, softmax_backward_
from matmuls.specs import Draw

LENGTHS = [*range(1, 70), 127, 129, 197, 255, 257, 263, 264, 265, 270, 577, 1023, 1055, 1057, 2047, 2049, 2111, 2113]
GUARD = 16


def guarded(values, off):
    """The same values `off` elements behind 16 bytes, others' numbers on both sides; and those."""
    memory = values.new_full((GUARD + off + values.numel() + GUARD,), 7)
    inner = memory[GUARD + off : -GUARD]
    inner.copy_(values.reshape(-1))
    return inner.view(values.shape), lambda: bool((memory[: GUARD + off] == 7).all() and (memory[-GUARD:] == 7).all())


@pytest.mark.parametrize("off", [0, 1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_every_length_and_nothing_beside_it_is_written(dtype, off, device):
    for columns in LENGTHS:
        for rows in (1, 5, 130):
            draw = Draw(dtype, device, columns)
            x, grad = draw(rows, columns), draw(rows, columns)
            wide = torch.softmax(x.double(), -1)
            theirs = torch.softmax(x, -1)
            own, untouched = guarded(x, off)
            softmax_(own)
            assert_as_good_as_torch(own, theirs, wide)
            assert untouched(), (rows, columns)

            y, y_untouched = guarded(theirs, off)
            g, _ = guarded(grad, off)
            exact = theirs.double() * (grad.double() - (theirs.double() * grad.double()).sum(-1, keepdim=True))
            softmax_backward_(y, g)
            expected = torch.ops.aten._softmax_backward_data(grad, theirs, -1, dtype)
            assert_as_good_as_torch(y, expected, exact, scale=exact.abs().amax().clamp_min(1e-3))
            assert y_untouched(), (rows, columns)
            assert torch.equal(g, grad)


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "columns"), [(150_001, 50), (50_001, 77), (50_001, 197), (13_001, 1023)])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_so_many_rows_that_a_lane_has_several(rows, columns, dtype):
    x, grad = (Draw(dtype, "cuda", seed)(rows, columns) for seed in (columns, columns + 1))
    theirs = torch.softmax(x, -1)
    expected = torch.ops.aten._softmax_backward_data(grad, theirs, -1, dtype)
    assert_as_good_as_torch(softmax_(x.clone()), theirs, torch.softmax(x.double(), -1))
    exact = theirs.double() * (grad.double() - (theirs.double() * grad.double()).sum(-1, keepdim=True))
    assert_as_good_as_torch(softmax_backward_(theirs, grad), expected, exact, scale=exact.abs().amax())


@pytest.mark.parametrize("columns", [8697, 10001, 16383, 16385])
@pytest.mark.parametrize("into", ["y", "grad"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_gradients_of_longer_rows(columns, into, causal, dtype, device):
    y, grad = (Draw(dtype, device, seed)(3, columns) for seed in (columns, columns + 1))
    y = torch.softmax(y, -1)
    if causal:
        y = y.tril()
    exact = y.double() * (grad.double() - (y.double() * grad.double()).sum(-1, keepdim=True))
    expected = torch.ops.aten._softmax_backward_data(grad, y, -1, dtype)
    (y, untouched), (grad, beside) = guarded(y, 1), guarded(grad, 1)
    out = y if into == "y" else grad
    torch.ops.custom_mm.softmax_backward.out(y, grad, -1, 1.0, causal, out=out)
    assert_as_good_as_torch(out, expected, exact, scale=exact.abs().amax())
    assert untouched()
    assert beside()


@pytest.mark.parametrize("columns", [5, 50, 77, 197, 265, 577, 1025, 2047])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_behind_a_mask(columns, causal, dtype, device):
    draw = Draw(dtype, device, columns)
    x = draw(2, 3, 7, columns)
    for shape in ((2, 1, 1, columns), (2, 1, 7, columns)):
        mask = torch.rand(shape, device=device, generator=torch.Generator(device).manual_seed(columns)) < 0.3
        z = (x.double() * 0.5).masked_fill(mask, -torch.inf)
        if causal:
            z = z.masked_fill(torch.ones(7, columns, dtype=torch.bool, device=device).triu(1), -torch.inf)
        truth = torch.softmax(z, -1).nan_to_num(0)
        theirs = torch.softmax(z.to(dtype), -1).nan_to_num(0)
        own, untouched = guarded(x, 1)
        scaled_masked_softmax(own, mask, 0.5, causal=causal, inplace=True)
        assert_as_good_as_torch(own, theirs, truth)
        assert untouched()


@pytest.mark.parametrize("columns", [3, 77, 1023])
def test_special_values_stay_in_their_row(columns, device):
    x = Draw(torch.bfloat16, device, columns)(40, columns)
    x[3, columns // 2], x[5, 0], x[7, -1] = torch.nan, torch.inf, -torch.inf
    x[9] = -torch.inf
    expected = torch.softmax(x.float(), -1)
    assert torch.equal(softmax_(x).isnan(), expected.isnan())
    rest = [r for r in range(40) if r not in (3, 5, 9)]
    assert torch.allclose(x[rest].float(), expected[rest], rtol=2**-7, atol=1e-6)
