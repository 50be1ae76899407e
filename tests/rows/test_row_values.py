"""Softmax and the norms of special values: NaN, infinities, ties, overflow."""

import math

import pytest
import torch
import torch.nn.functional as F

import matmuls
from common.row_cases import INF, NAN, draw, every_dtype, layer_norm, rms_norm
from common.table_cases import error, off_by_one_element

# ------------------------------------------------------------------------------------------------------ special values


def special_rows(columns, dtype, device):
    """Rows with one or two special numbers at the start, in the middle and at the end."""
    low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
    rows = [draw(columns, device=device, dtype=dtype, seed=7) / 4]
    for value in (NAN, INF, -INF, low, high):
        for place in (0, columns // 2, columns - 1):
            rows.append(rows[0].clone())
            rows[-1][place] = value
        rows.append(torch.full_like(rows[0], value))
        rows.append(rows[-1].clone())
        rows[-1][columns // 2] = 1
    for pair in ((NAN, INF), (INF, -INF), (INF, INF), (NAN, -INF), (low, high)):
        rows.append(rows[0].clone())
        rows[-1][0], rows[-1][-1] = pair
    return torch.stack(rows)


def assert_special_alike(ours, theirs):
    """NaN, 0 and 1 at the same positions as torch, and close elsewhere."""
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours == 0, theirs == 0)
    assert torch.equal(ours == 1, theirs == 1)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("columns", [3, 40, 1160, 5003, 8192, 9001, 16384, 200_003])
@every_dtype
def test_softmax_of_special_values_matches_torch(columns, dtype, device):
    x = special_rows(columns, dtype, device)
    expected = x.softmax(-1)
    assert_special_alike(matmuls.softmax(x), expected)
    assert_special_alike(matmuls.softmax_(off_by_one_element(x)), expected)
    assert_special_alike(matmuls.softmax(x.mT, 0).mT, expected)
    assert_special_alike(matmuls.scaled_masked_softmax(x, torch.zeros_like(x[:1])), expected)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0x7F800001, -1, -0x400000])
@pytest.mark.parametrize("columns", [4, 100])
def test_every_nan_propagates(bits, columns, device):
    """NaN of any sign and payload."""
    x = torch.randn(2, columns, device=device)
    x.view(torch.int32)[0, 1] = bits
    masked = matmuls.scaled_masked_softmax(x, torch.zeros(columns, dtype=torch.bool, device=device))
    for result in (matmuls.softmax(x), masked, matmuls.layer_norm_(x.clone()), matmuls.rms_norm_(x.clone())):
        assert result[0].isnan().all()
        assert result[1].isfinite().all()


@pytest.mark.parametrize("shape", [(2, 0, 1), (3, 0, 2, 5), (2, 0)])
def test_empty_tensors_overlap_nothing(shape, device):
    x = torch.empty(1, device=device).expand(shape)
    for write in (matmuls.softmax_, matmuls.layer_norm_, matmuls.rms_norm_):
        assert write(x) is x


@pytest.mark.parametrize("columns", [24, 160, 2056, 40_000])
@every_dtype
def test_small_probabilities_are_as_accurate_as_large_ones(columns, dtype, device):
    """Scores far below the row's maximum, down to float32 underflow; a norm of the row would not show their errors."""
    x = draw(4, columns, device=device, dtype=dtype) - torch.linspace(0, 85, columns, device=device).to(dtype)
    masked = torch.arange(columns, device=device) % 7 == 3
    truth = torch.softmax(x.double(), -1)
    behind = torch.softmax(x.double().masked_fill(masked, -math.inf), -1)
    least = max(torch.finfo(dtype).tiny, torch.finfo(torch.float32).tiny if dtype != torch.float64 else 0)
    for result, expected in (
        (matmuls.softmax(x), truth),
        (matmuls.softmax_(x.clone()), truth),
        (matmuls.scaled_masked_softmax(x, masked), behind),
        (matmuls.scaled_masked_softmax(x, None), truth),
    ):
        kept = expected >= 2 * least
        share = (result.double() / expected)[kept]
        assert (share - 1).abs().max() <= torch.finfo(dtype).eps / 2 + (1e-5 if dtype != torch.float64 else 1e-13)
        assert (result[~kept] <= 4 * least).all()


@pytest.mark.parametrize("op", [matmuls.softmax_, matmuls.layer_norm_, matmuls.rms_norm_])
def test_inference_tensors_are_overwritten_only_in_inference_mode(op, device):
    with torch.inference_mode():
        x = draw(4, 8, device=device)
    before = x.clone()
    with pytest.raises(RuntimeError, match=r"outside torch\.inference_mode"):
        op(x)
    assert torch.equal(x, before)
    with torch.inference_mode():
        assert op(x) is x
    assert not torch.equal(x, before)


@pytest.mark.parametrize("seed", range(40))
def test_strides_that_do_not_overlap_in_any_order(seed, device):
    """All strides that give each element its own address are accepted, and no others."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 5, (3,), generator=generator).tolist()
    strides = torch.randint(1, 16, (3,), generator=generator).tolist()
    x = draw(160, device=device).as_strided(sizes, strides)
    places = torch.arange(160).as_strided(sizes, strides).flatten()
    if len(places.unique()) == len(places):
        expected = torch.softmax(x.double(), -1)
        torch.testing.assert_close(matmuls.softmax_(x).double(), expected, atol=1e-6, rtol=1e-5)
    else:
        with pytest.raises(RuntimeError, match="expected out to have one memory location per element"):
            matmuls.softmax_(x)


@pytest.mark.parametrize("op", [matmuls.softmax_, matmuls.layer_norm_, matmuls.rms_norm_])
def test_one_byte_dtypes_are_refused(op, device):
    x = torch.ones(4, 8, device=device).to(torch.float8_e4m3fn)
    with pytest.raises(
        RuntimeError, match=rf"^{op.__name__}: expected x of a floating-point dtype, got Float8_e4m3fn$"
    ):
        op(x)
    assert (x.float() == 1).all()


@pytest.mark.parametrize("masked", ["bytes", "causal", "both"])
@pytest.mark.parametrize("columns", [40, 256, 1160, 5000])
@every_dtype
def test_special_values_with_masks_that_hide_nothing(columns, dtype, masked, device):
    """The last row of a causal mask and a mask of zeros hide nothing."""
    x = special_rows(columns, dtype, device)
    rows = x[:, None].expand(-1, 2 if masked == "bytes" else columns if columns < 300 else 1, -1).contiguous()
    causal = masked != "bytes" and rows.shape[1] == columns
    mask = None if masked == "causal" else torch.zeros(columns, dtype=torch.bool, device=device)
    ours = matmuls.scaled_masked_softmax(rows, mask, causal=causal)[:, -1]
    assert_special_alike(ours, x.softmax(-1))
    tiny = matmuls.scaled_masked_softmax(x[:1], None if mask is None else mask.clone().fill_(True), 1e-50)
    assert (tiny == (1 / columns if mask is None else 0)).all() or mask is None


def test_a_causal_vector_is_refused_while_tracing(device):
    x = torch.empty(5, device="meta")
    for inplace in (False, True):
        with pytest.raises(RuntimeError, match="scaled_masked_softmax: expected x of at least two dimensions"):
            matmuls.scaled_masked_softmax(x, causal=True, inplace=inplace)


def test_an_infinite_gradient_gives_infinite_sums(device):
    x = draw(300, 40, device=device, dtype=torch.float32)
    weight, bias = (torch.ones(40, device=device, requires_grad=True) for _ in range(2))
    grad = torch.ones_like(x)
    grad[3, 7] = INF
    matmuls.layer_norm_(x.clone(), weight, bias).backward(grad)
    assert bias.grad[7] == INF
    assert weight.grad[7].isinf()
    assert bias.grad.isfinite().sum() == 39


@pytest.mark.parametrize("norm", [matmuls.layer_norm_, matmuls.rms_norm_], ids=lambda f: f.__name__)
@every_dtype
def test_nan_stays_in_its_row_of_a_norm(norm, dtype, device):
    for columns in (3, 40, 5003):
        x = draw(3, columns, device=device, dtype=dtype)
        expected = norm(x.clone())
        for value in (NAN, INF):
            y = x.clone()
            y[1, columns // 2] = value
            norm(y)
            assert torch.equal(y[::2], expected[::2])
            assert y[1].isnan().all() if value != value or norm is matmuls.layer_norm_ else y[1].isnan().any()


@every_dtype
def test_rows_of_equal_numbers_normalize_to_zero(dtype, device):
    """Exactly: the mean is correct to the last bit however threads split the row; on a GPU if its sums are exact."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for columns in (2, 40, 1001, 5003, 8191, 20_001):
        x = torch.full((3, columns), 1000.0, dtype=dtype, device=device)
        assert not matmuls.layer_norm_(x).any()
        of_one = draw(50, 1, dtype=dtype, device=device)
        y = matmuls.layer_norm_(of_one.expand(-1, columns).contiguous())
        roundings = 0 if device == "cpu" else 2 * torch.finfo(wide).eps * of_one.abs().to(wide) / 1e-5**0.5
        assert (y.abs() <= roundings).all()


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_norms_of_numbers_whose_squares_overflow(dtype, affine, device):
    """The squares of their distances from the mean do not overflow."""
    top = 2e154 if dtype == torch.float64 else 2e19
    for columns in (3, 40, 1000, 1024, 5003, 8192, 16_384, 40_000):
        x = (top * (1 + 1e-3 * draw(5, columns, device=device, dtype=torch.float64))).to(dtype)
        weights = [draw(columns, device=device, dtype=dtype, seed=i) for i in (1, 2)] if affine else []
        wide = x.double() / top  # the norm is that of numbers of moderate size, except for eps
        truth = F.layer_norm(wide, (columns,), *(w.double() for w in weights), eps=1e-300)
        ours = matmuls.layer_norm_(x.clone(), *weights)
        assert error(ours, truth) <= (2**-7 if dtype == torch.bfloat16 else 1e-3)


def test_float16_sums_do_not_overflow_in_a_norm(device):
    """x + residual exceeds 65504, and so do its squares."""
    x, residual = ((draw(5, 1000, device=device, seed=i) * 3000 + 50_000).half() for i in range(2))
    h = x.double() + residual.double()
    for ours, truth in (
        (matmuls.layer_norm_(x.clone(), residual=residual), layer_norm(h)),
        (matmuls.rms_norm_(x.clone(), residual=residual), rms_norm(h)),
    ):
        assert error(ours, truth) <= torch.finfo(torch.float16).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_masked_by_the_lowest_number_are_uniform(dtype, device):
    """Masking by the lowest finite number instead of -inf gives torch's result: uniform in fully masked rows."""
    x = draw(3, 4, 64, device=device, dtype=dtype)
    mask = torch.zeros(4, 64, dtype=dtype, device=device)
    mask[1], mask[2, 1:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    y = matmuls.scaled_masked_softmax(x, mask)
    assert (y[:, 1] == 1 / 64).all()
    assert_special_alike(y, (x + mask).softmax(-1))
