"""Rows that are not 16-byte aligned: several short ones in a warp, long ones with elements outside aligned vectors."""

import pytest
import torch
import torch.nn.functional as F

from common.row_cases import SIXTEEN, assert_as_good_as_torch
from matmuls import layer_norm_, rms_norm_, scaled_masked_softmax, softmax_, softmax_backward_
from matmuls_bench.table import Draw

LENGTHS = [*range(1, 70), 127, 129, 197, 255, 257, 263, 264, 265, 270]
LENGTHS += [577, 641, 767, 769, 1023, 1055, 1057, 2047, 2049, 2111, 2113]
GUARD = 16


def guarded(values, off):
    """The same values, `off` elements after a 16-byte boundary, with other numbers on both sides; and those numbers."""
    memory = values.new_full((GUARD + off + values.numel() + GUARD,), 7)
    inner = memory[GUARD + off : -GUARD]
    inner.copy_(values.reshape(-1))
    return inner.view(values.shape), lambda: bool((memory[: GUARD + off] == 7).all() and (memory[-GUARD:] == 7).all())


@pytest.mark.parametrize("off", [0, 1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_every_length_and_no_write_outside(dtype, off, device):
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
def test_enough_rows_that_a_lane_has_several(rows, columns, dtype):
    x, grad = (Draw(dtype, "cuda", seed)(rows, columns) for seed in (columns, columns + 1))
    theirs = torch.softmax(x, -1)
    expected = torch.ops.aten._softmax_backward_data(grad, theirs, -1, dtype)
    assert_as_good_as_torch(softmax_(x.clone()), theirs, torch.softmax(x.double(), -1))
    exact = theirs.double() * (grad.double() - (theirs.double() * grad.double()).sum(-1, keepdim=True))
    assert_as_good_as_torch(softmax_backward_(theirs, grad), expected, exact, scale=exact.abs().amax())


# Rows of one aligned vector more or less than a warp, a block or a cluster of threads handles.
LONGER = [1039, 1087, 2047, 4095, 8191, 8697, 10001, 16383, 16385, 16391, 16393, 20001, 32767, 32769, 50257]
# Rows that fill one or two blocks, and one element more; and the parts of such rows.
LONGER += [20495, 21761, 32783, 40975, 43521, 87041]


@pytest.mark.parametrize("columns", [257, 525, *LONGER, 65537, 100003, 262145, 524301])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_longer_rows(columns, dtype, device):
    for off, rows in ((0, 3), (1, 2), (7, 1)):
        x = Draw(dtype, device, columns)(rows, columns)
        own, untouched = guarded(x, off)
        softmax_(own)
        assert_as_good_as_torch(own, torch.softmax(x, -1), torch.softmax(x.double(), -1))
        assert untouched()


@pytest.mark.parametrize("columns", [257, 525, *LONGER, 65537, 262145])
@pytest.mark.parametrize("into", ["y", "grad"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_gradients_of_longer_rows(columns, into, causal, dtype, device):
    y, grad = (Draw(dtype, device, seed)(3, columns) for seed in (columns, columns + 1))
    y = torch.softmax(y, -1)
    if causal:
        y = y.tril()
    exact = y.double() * (grad.double() - (y.double() * grad.double()).sum(-1, keepdim=True))
    expected = torch.ops.aten._softmax_backward_data(grad, y, -1, dtype)
    for off in (1, 6):
        (mine, untouched), (theirs, beside) = guarded(y, off), guarded(grad, off)
        out = mine if into == "y" else theirs
        torch.ops.custom_mm.softmax_backward.out(mine, theirs, -1, 1.0, causal, out=out)
        assert_as_good_as_torch(out, expected, exact, scale=exact.abs().amax())
        assert untouched()
        assert beside()


@pytest.mark.cuda
def test_causal_gradients_at_the_ends_of_long_rows():
    """The last of 16 395 rows attend to all aligned vectors and to all, one or none of the elements outside them."""
    columns, last = 16395, 20
    y, grad = (Draw(torch.float32, "cuda", seed)(columns, columns)[-last:] for seed in (1, 2))
    y = torch.softmax(y, -1).tril(columns - last)
    own = y.new_zeros(columns, columns)
    own[-last:] = y
    beside = grad.new_zeros(columns, columns)
    beside[-last:] = grad
    torch.ops.custom_mm.softmax_backward.out(own, beside, -1, 1.0, True, out=own)
    exact = y.double() * (grad.double() - (y.double() * grad.double()).sum(-1, keepdim=True))
    expected = torch.ops.aten._softmax_backward_data(grad, y, -1, torch.float32)
    assert_as_good_as_torch(own[-last:], expected, exact, scale=exact.abs().amax())
    assert not own[:-last].any()


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [16393, 20000, 32768, 32769, 50257, 50304, 65536, 65537])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_enough_long_rows_that_threads_have_several(columns, dtype):
    rows = 1300
    x, grad = (Draw(dtype, "cuda", seed)(rows, columns) for seed in (columns, columns + 1))
    theirs = torch.softmax(x, -1)
    expected = torch.ops.aten._softmax_backward_data(grad, theirs, -1, dtype)
    own = softmax_(x.clone())
    backward = softmax_backward_(theirs.clone(), grad)
    for part in range(0, rows, 100):  # all of them in float64 would take 2 GB
        some = slice(part, part + 100)
        assert_as_good_as_torch(own[some], theirs[some], torch.softmax(x[some].double(), -1))
        y, g = theirs[some].double(), grad[some].double()
        exact = y * (g - (y * g).sum(-1, keepdim=True))
        assert_as_good_as_torch(backward[some], expected[some], exact, scale=exact.abs().amax())


@pytest.mark.parametrize("columns", [5, 50, 77, 197, 265, 577, 1025, 1039, 1500, 2047, 3001, 8191, 16391, 16393])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_rows_with_a_mask(columns, causal, dtype, device):
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


# Views of a wider memory as masks, by the position of a row's elements.
LYING = {
    "side by side": lambda wide: wide[..., 8:],
    "off by one": lambda wide: wide[..., 7:-1],
    "stepped": lambda wide: wide.repeat_interleave(2, -1)[..., 16::2],
    "one a row": lambda wide: wide[..., :1].expand(wide.shape)[..., 8:],
}


@pytest.mark.parametrize("columns", [24, 77, 128, 130, 197, 257, 384, 577, 1024, 1280, 1500, 2047, 2048, 3001])
@pytest.mark.parametrize("lying", LYING)
@pytest.mark.parametrize("kind", ["bool", "same", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_masks_of_any_kind_and_alignment(columns, lying, kind, dtype, device):
    """Masked scores are NaN and infinite; an additive mask also has finite numbers."""
    draw = Draw(dtype, device, columns)
    x = draw(2, 3, 5, columns)
    hides = torch.rand(2, 1, 5, columns + 8, device=device, generator=torch.Generator(device).manual_seed(1)) < 0.3
    hides[:, :, 2] = True
    mask = hides
    if kind != "bool":
        mask = draw(*hides.shape).to(dtype if kind == "same" else torch.float32).masked_fill(hides, -torch.inf)
    hidden, mask = LYING[lying](hides), LYING[lying](mask)
    x = x.where(~hidden, torch.tensor([torch.nan, torch.inf, -torch.inf], device=device, dtype=dtype)[:, None, None])
    for causal in (False, True):
        seen = ~hidden
        if causal:
            seen = seen & torch.ones(5, columns, dtype=torch.bool, device=device).tril()
        z = x.double() * 0.5 + (0 if kind == "bool" else mask.double())
        z = z.masked_fill(~seen, -torch.inf)
        truth, theirs = (torch.softmax(z.to(d), -1).nan_to_num(0) for d in (torch.float64, dtype))
        own, untouched = guarded(x, 0)
        scaled_masked_softmax(own, mask, 0.5, causal=causal, inplace=True)
        assert_as_good_as_torch(own, theirs, truth)
        assert untouched()


@pytest.mark.parametrize("columns", [24, 128, 130, 1024, 2047])
@pytest.mark.parametrize("kind", ["bool", "same", "float32"])
@pytest.mark.parametrize("scale", [torch.inf, torch.nan, 1e300])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_masked_elements_are_0_for_every_scale(columns, kind, scale, dtype, device):
    x = Draw(dtype, device, columns)(5, columns)
    hidden = torch.rand(5, columns, device=device, generator=torch.Generator(device).manual_seed(1)) < 0.3
    mask = hidden
    if kind != "bool":
        mask = torch.zeros(5, columns, device=device, dtype=dtype if kind == "same" else torch.float32)
        mask = mask.masked_fill(hidden, -torch.inf)
    y = scaled_masked_softmax(x, mask, scale)
    assert not y[hidden].any()
    assert y[~hidden].isnan().all()


@pytest.mark.parametrize("columns", [1032, 1039, 1100, 1280, 1500, 2040, 2047])
@pytest.mark.parametrize("scale", [0.5, -0.5])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_causal_rows_of_every_length(columns, scale, dtype, device):
    """With a mask at any alignment, and without; one row is fully masked, another has a NaN and an infinity."""
    x = Draw(dtype, device, columns)(columns, columns)
    above = torch.ones(columns, columns, dtype=torch.bool, device=device).triu(1)
    memory = torch.rand(columns * columns + 3, device=device, generator=torch.Generator(device).manual_seed(1)) < 0.3
    mask = memory[3:].view(columns, columns)
    mask[columns // 2, : columns // 2 + 1] = True
    x[columns - 9, 3], x[columns - 7, columns - 8] = torch.nan, torch.inf
    for hidden in (None, mask):
        seen = ~above if hidden is None else ~(above | hidden)
        z = (x.double() * scale).masked_fill(~seen, -torch.inf)
        truth = torch.softmax(z, -1)
        truth[~seen.any(-1)] = 0
        own, untouched = guarded(x, 1 if columns % 8 else 0)
        scaled_masked_softmax(own, hidden, scale, causal=True, inplace=True)
        odd = truth.isnan().any(-1)
        assert torch.equal(own[odd].isnan(), truth[odd].isnan() & seen[odd])
        theirs = torch.softmax(z[~odd].to(dtype), -1).nan_to_num(0)
        assert_as_good_as_torch(own[~odd], theirs, truth[~odd])
        assert untouched()


@pytest.mark.parametrize("columns", [3, 77, 1023, 4095, 20001, 43521, 100003])
def test_special_values_stay_in_their_row(columns, device):
    x = Draw(torch.bfloat16, device, columns)(40, columns)
    x[3, columns // 2], x[5, 0], x[7, -1] = torch.nan, torch.inf, -torch.inf
    x[9] = -torch.inf
    expected = torch.softmax(x.float(), -1)
    assert torch.equal(softmax_(x).isnan(), expected.isnan())
    rest = [r for r in range(40) if r not in (3, 5, 9)]
    assert torch.allclose(x[rest].float(), expected[rest], rtol=2**-7, atol=1e-6)


def norms(draw, columns, dtype, device):
    """Each norm in place, in torch and in float64, of x with and without a residual."""
    weight, bias = draw(columns), draw(columns)
    zero = torch.zeros((), dtype=dtype, device=device)

    def plain(norm, *constants):
        def of(x, residual, dtype=None):
            h = x.to(dtype) + residual.to(dtype)
            return norm(h, (columns,), *(None if c is None else c.to(dtype) for c in constants), eps=1e-5)

        return lambda x, residual: (
            of(x, zero if residual is None else residual, dtype),
            of(x, zero if residual is None else residual, torch.float64),
        )

    for w, b in ((weight, bias), (None, None), (None, bias)):
        yield lambda x, r, w=w, b=b: layer_norm_(x, w, b, residual=r), plain(F.layer_norm, w, b)
    for w in (weight, None):
        yield lambda x, r, w=w: rms_norm_(x, w, residual=r), plain(F.rms_norm, w)


NORMED = [20, 71, 72, 77, 127, 129, 135, 137, 197, 255, 257, 263, 383, 385, 513, 577, 641, 767, 769, 1023, 1031, 1033]
NORMED += [1279, 1537, 2047, 2049, 2063, 3001, 4095, 4097, 8191, 12287]


@pytest.mark.parametrize("off", [0, 1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_norms_of_every_length_and_no_write_outside(dtype, off, device):
    for columns in NORMED:
        draw = Draw(dtype, device, columns)
        for rows, with_residual in ((1, False), (5, True), (130 if columns < 1000 else 9, False)):
            x = draw(rows, columns)
            residual, _ = guarded(draw(rows, columns), off)
            for ours, theirs in norms(draw, columns, dtype, device):
                own, untouched = guarded(x, off)
                ours(own, residual if with_residual else None)
                expected, exact = theirs(x, residual if with_residual else None)
                assert_as_good_as_torch(own, expected, exact)
                assert untouched(), (rows, columns)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "columns"), [(70_001, 77), (40_001, 197), (20_001, 577), (9_001, 1023), (3_001, 3001)]
)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_norms_of_enough_rows_that_threads_have_several(rows, columns, with_residual, dtype):
    draw = Draw(dtype, "cuda", columns)
    x = draw(rows, columns)
    residual = draw(rows, columns) if with_residual else None
    for ours, theirs in norms(draw, columns, dtype, "cuda"):
        own = x.clone()
        ours(own, residual)
        assert_as_good_as_torch(own, *theirs(x, residual))


@pytest.mark.parametrize("columns", [77, 577, 1023, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_gradients_after_norms_of_uneven_rows(columns, dtype, device):
    draw = Draw(dtype, device, columns)
    x, weight, bias, grad = draw(37, columns), draw(columns), draw(columns), draw(37, columns)

    def gradients(norm, *tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        return torch.autograd.grad(norm(*leaves), leaves, grad.to(leaves[0].dtype))

    ours = gradients(lambda x, w, b: layer_norm_(x.clone(), w, b), x, weight, bias)
    plain = [
        gradients(lambda x, w, b: F.layer_norm(x, (columns,), w, b), *(t.to(d) for t in (x, weight, bias)))
        for d in (dtype, torch.float64)
    ]
    for own, theirs, exact in zip(ours, *plain, strict=True):
        assert_as_good_as_torch(own, theirs, exact, scale=exact.abs().amax())
