"""Tests of softmax and the norms beyond the table: row lengths, layouts, special values, saved tensors, memory,
writes.
"""

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from test_table import batch_innermost, error, off_by_one_element, padded_rows, stepped, transposed

import matmuls
from matmuls.measure import graph_of, peak_memory
from matmuls.specs import Draw

INF, NAN = float("inf"), float("nan")
SIXTEEN = [torch.bfloat16, torch.float16]
SCALE = 0.125  # exact in every dtype: torch's rounding of scale * x would widen the bound

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN, torch.float64], ids=str)


def draw(*shape, device="cpu", dtype=torch.float32, seed=0):
    return Draw(dtype, device, seed)(*shape)


def assert_as_good_as_torch(ours, theirs, truth, scale=None):
    """At most twice torch's error against float64, plus one rounding; in float64, where torch is the reference,
    sixteen.
    """
    assert ours.dtype == theirs.dtype
    roundings = 16 if ours.dtype == torch.float64 else 1
    bound = 2 * error(theirs, truth, scale) + roundings * torch.finfo(ours.dtype).eps
    assert error(ours, truth, scale) <= bound


# ---------------------------------------------------------------------------------------- operations, and torch's ways


@dataclass(frozen=True)
class Operation:
    """ours and reference map the random tensors to tuples of results; ours may overwrite its arguments."""

    draw: Callable
    ours: Callable
    reference: Callable
    least_columns: int = 1

    def check(self, tensors, layouts=(torch.clone,)):
        """As accurate as torch with one tensor after another in each of the layouts, whose gaps stay NaN."""
        laid = [layouts[i % len(layouts)](t) for i, t in enumerate(tensors)]
        bases = [(t._base, t._base.numel() - t.numel()) for t in laid if t._base is not None and t.is_floating_point()]
        theirs = self.reference(*tensors)
        truths = self.reference(*(t.double() if t.is_floating_point() else t for t in tensors))
        for triple in zip(self.ours(*laid), theirs, truths, strict=True):
            assert_as_good_as_torch(*triple)
        assert all(base.isnan().sum() == gaps for base, gaps in bases)


def with_gradients(function):
    """The result of function(x, ...), which may overwrite x, and the gradients for a given gradient of the first
    result.
    """

    def run(grad, *tensors):
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        y = function(leaves[0] * 1, *leaves[1:])
        return y.detach(), *torch.autograd.grad(y, [t for t in leaves if t.requires_grad], grad)

    return run


def layer_norm(x, weight=None, bias=None, residual=None):
    return F.layer_norm(x if residual is None else x + residual, x.shape[-1:], weight, bias)


def rms_norm(x, weight=None, residual=None):
    return F.rms_norm(x if residual is None else x + residual, x.shape[-1:], weight, 1e-5)


def masked_softmax(x, mask=None, scale=SCALE, causal=False):
    """softmax(scale * x + mask) as matmuls defines it, in torch operations: 0 in fully masked rows."""
    z, hidden = x * scale, torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if mask is not None and mask.is_floating_point():
        z, hidden = z + mask, hidden | (mask == -INF)
    elif mask is not None:
        hidden = hidden | (mask != 0)
    if causal:
        hidden = hidden | torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    dead = hidden.all(-1, keepdim=True)
    z = z.masked_fill(hidden, -INF).masked_fill(dead, 0)
    return z.softmax(-1).masked_fill(dead, 0).to(x.dtype)


def masked(**kwargs):
    def ours(grad, x, *masks):
        return with_gradients(lambda x: matmuls.scaled_masked_softmax(x, *(masks or [None]), SCALE, **kwargs))(grad, x)

    def reference(grad, x, *masks):
        causal = kwargs.get("causal", False)
        return with_gradients(lambda x: masked_softmax(x, *(masks or [None]), causal=causal))(grad, x)

    return ours, reference


def like(n, *others):
    """A function that draws n tensors of the shape, then those that `others` make of the draw and the shape."""
    return lambda d, *shape: (*(d(*shape) for _ in range(n)), *(other(d, shape) for other in others))


def a_row(d, shape):
    return d(shape[-1])


def probabilities(d, *shape):
    return d(*shape).softmax(-1), d(*shape)


def softmax_backward(y, grad):
    return (torch._softmax_backward_data(grad, y, -1, y.dtype),) * 2


def sees_few(d, shape):
    return d(*shape[:-2], 1, shape[-1]) > 0.5


def for_all_rows(d, shape):
    return d(*shape[-2:])


def everything(x, residual, weight, bias):
    return matmuls.layer_norm_(x, weight, bias, residual=residual)


OPERATIONS = {
    "softmax_": Operation(like(1), lambda x: (matmuls.softmax_(x),), lambda x: (x.softmax(-1),)),
    "softmax out": Operation(
        like(2), lambda x, out: (matmuls.softmax(x, out=out), out), lambda x, _: (x.softmax(-1),) * 2
    ),
    "softmax_backward": Operation(
        probabilities, lambda y, g: (matmuls.softmax_backward(y, g), matmuls.softmax_backward_(y, g)), softmax_backward
    ),
    "layer_norm_": Operation(
        like(2, a_row, a_row), lambda *t: (everything(*t),), lambda x, r, w, b: (layer_norm(x, w, b, r),)
    ),
    "layer_norm_ without residual": Operation(
        like(1, a_row, a_row), lambda *t: (matmuls.layer_norm_(*t),), lambda *t: (layer_norm(*t),)
    ),
    "layer_norm_ of x alone": Operation(like(1), lambda x: (matmuls.layer_norm_(x),), lambda x: (layer_norm(x),)),
    "rms_norm_": Operation(like(1, a_row), lambda x, w: (matmuls.rms_norm_(x, w),), lambda x, w: (rms_norm(x, w),)),
    "layer_norm_ gradients": Operation(
        like(3, a_row, a_row),
        with_gradients(everything),
        with_gradients(lambda x, r, w, b: layer_norm(x, w, b, r)),
        least_columns=3,
    ),
    "layer_norm_ gradient of x alone": Operation(
        like(2), with_gradients(matmuls.layer_norm_), with_gradients(layer_norm), least_columns=3
    ),
    "rms_norm_ gradients": Operation(
        like(3, a_row),
        with_gradients(lambda x, r, w: matmuls.rms_norm_(x, w, residual=r)),
        with_gradients(lambda x, r, w: rms_norm(x, w, r)),
        least_columns=3,
    ),
    "masked": Operation(like(2, sees_few), *masked()),
    "mask added, in place": Operation(like(2, for_all_rows), *masked(inplace=True)),
    "causal, in place": Operation(like(2), *masked(inplace=True, causal=True)),
}
every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)

COLUMNS = [1, 2, 3, 31, 32, 33, 127, 128, 256, 384, 512, 600, 768, 1000, 1024, 1025, 2048, 4096]
COLUMNS += [8191, 8192, 16384, 24584, 65536, 100003, 100352, 262144]
# Column counts whose last round of vectors has one vector, some vectors, or one for each thread of a row, with 5 to 8
# vectors per thread (with a residual 3 and 4).
COLUMNS += [72, 136, 264, 392, 520, 640, 1032, 1152, 1280, 1536, 1792, 2056, 2304, 2560, 3080, 5120, 6152, 8200]
COLUMNS += [10240, 14344]


@pytest.mark.gpu_memory(12)
@every_operation
@every_dtype
def test_rows_of_any_length(operation, dtype, device):
    """On a GPU with enough rows that each group of threads has several."""
    elements, most = (2**26, 300_000) if device == "cuda" else (2**17, 64)
    for columns in COLUMNS if dtype != torch.float64 else COLUMNS[3::3]:
        if columns < operation.least_columns:
            continue
        rows = max(3, min(elements // columns, most))
        operation.check(operation.draw(Draw(dtype, device, seed=columns), rows, columns))


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=str)
def test_gradients_of_norms_of_few_columns(columns, dtype, device):
    """Such a row hardly depends on x: dx is left over from cancellation, and its error is relative to the terms that
    cancel.
    """
    draws = Draw(dtype, device)
    grad, weight = draws(64, columns), draws(columns)
    x = draws(64, columns) + 8 * torch.arange(columns, dtype=dtype, device=device)
    for norm, reference in ((matmuls.layer_norm_, layer_norm), (matmuls.rms_norm_, rms_norm)):
        wide = grad.double(), x.double(), weight.double()
        ours, theirs = (with_gradients(f)(grad, x, weight) for f in (norm, reference))
        truths = with_gradients(reference)(*wide)
        h = wide[1] - (wide[1].mean(-1, keepdim=True) if norm is matmuls.layer_norm_ else 0)
        dx_terms = wide[0] * wide[2] / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        for triple, terms in zip(zip(ours, theirs, truths, strict=True), (wide[2], dx_terms, wide[0]), strict=True):
            assert_as_good_as_torch(*triple, torch.linalg.vector_norm(terms).item())


@every_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 33), (7, 33), (100_000, 5), (100_000, 20)], ids=str)
def test_any_number_of_rows(operation, dtype, shape, device):
    operation.check(operation.draw(Draw(dtype, device), *shape))


@pytest.mark.cuda
@every_operation
@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 520), (torch.bfloat16, 1032)], ids=str)
def test_enough_rows_that_threads_process_four_at_a_time(operation, dtype, columns):
    operation.check(operation.draw(Draw(dtype, "cuda"), 200_001, columns))


def permuted(t):
    """A tensor with its leading dimensions in another order than in memory."""
    order = (*range(2, t.dim() - 1), 0, 1, t.dim() - 1) if t.dim() > 3 else range(t.dim())
    return (
        t.permute(*order)
        .clone(memory_format=torch.contiguous_format)
        .permute(*(list(order).index(d) for d in range(t.dim())))
    )


LAYOUTS = {
    "transposed": [transposed],
    "padded rows": [padded_rows],
    "stepped": [stepped],
    "off by one element": [off_by_one_element],
    "batch innermost": [batch_innermost],
    "permuted": [permuted],
    "aligned apart": [torch.clone, off_by_one_element],
    "each another": [off_by_one_element, padded_rows, transposed, stepped, torch.clone],
}


@every_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout_and_no_write_outside(operation, dtype, layouts, device):
    for shape in ((2, 3, 2, 5, 37), (3, 6, 64), (3, 1280), (3, 5003), (3, 8191)):
        operation.check(operation.draw(Draw(dtype, device), *shape), layouts)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("layout", [torch.clone, transposed, padded_rows], ids=lambda f: f.__name__)
def test_softmax_along_any_dimension(dim, layout, device):
    x, grad = (layout(draw(5, 33, 17, device=device, seed=i)) for i in range(2))
    expected = with_gradients(lambda x: x.softmax(dim))(grad, x)
    for function in (matmuls.softmax, matmuls.softmax_):
        torch.testing.assert_close(with_gradients(lambda x, f=function: f(x, dim))(grad, x), expected)
    y = layout(expected[0])
    torch.testing.assert_close(matmuls.softmax(x, dim, out=torch.empty_like(x)), expected[0])
    torch.testing.assert_close(matmuls.softmax_backward(y, grad, dim), expected[1])
    torch.testing.assert_close(matmuls.softmax_backward_(y, grad, dim), expected[1])
    torch.testing.assert_close(y, expected[1])
    torch.testing.assert_close(matmuls.softmax_(x, dim), expected[0])
    torch.testing.assert_close(x, expected[0])


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
    """Of any sign and payload."""
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
    with pytest.raises(NotImplementedError, match="'Float8_e4m3fn'"):
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


# --------------------------------------------------------------------------------- in place: what autograd must see

IN_PLACE = {
    "softmax_": (matmuls.softmax_, lambda x: x.softmax(-1)),
    "layer_norm_": (matmuls.layer_norm_, layer_norm),
    "layer_norm_ affine": (
        lambda x: matmuls.layer_norm_(x, x.detach()[0] * 0 + 2, x.detach()[0] * 0 + 1),
        lambda x: layer_norm(x) * 2 + 1,
    ),
    "rms_norm_": (matmuls.rms_norm_, rms_norm),
    "scaled_masked_softmax": (
        lambda x: matmuls.scaled_masked_softmax(x, None, SCALE, inplace=True),
        lambda x: (x * SCALE).softmax(-1),
    ),
    "inplace_softmax": (lambda x: matmuls.inplace_softmax(x, *x.shape), lambda x: x.softmax(-1)),
    "layernorm": (lambda x: matmuls.layernorm(x, *x.shape), layer_norm),
}
in_place = pytest.mark.parametrize(("function", "reference"), IN_PLACE.values(), ids=IN_PLACE)


@in_place
def test_x_is_returned_and_its_version_increases(function, reference, device):
    x = draw(4, 9, device=device)
    expected, version = reference(x), x._version
    assert function(x) is x
    assert x._version > version
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("name", [name for name in IN_PLACE if name != "layer_norm_ affine"])
def test_overwriting_the_result_raises_in_backward(name, device):
    """Backward needs it."""
    leaf = draw(4, 9, device=device).requires_grad_()
    x = IN_PLACE[name][0](leaf * 1)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_norms_with_weight_allow_overwriting_the_result(device):
    """They save the normalized rows separately."""
    leaf, weight = draw(4, 9, device=device).requires_grad_(), draw(9, device=device)
    x = matmuls.layer_norm_(leaf * 1, weight)
    x.mul_(2).sum().backward()
    expected = leaf.detach().requires_grad_()
    layer_norm(expected, weight).mul(2).sum().backward()
    torch.testing.assert_close(leaf.grad, expected.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
@in_place
def test_overwriting_a_saved_tensor_raises_in_backward(function, reference, mode, device):
    x, saved = draw(4, 9, device=device).requires_grad_(), draw(4, 9, device=device, seed=1)
    y = x * saved
    with mode():
        function(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "write", [lambda x: matmuls.softmax(x * 1, out=x), lambda x: matmuls.softmax_backward_(x, x * 1)]
)
def test_writes_to_out_are_seen_by_autograd(write, device):
    x, saved = draw(4, 9, device=device).requires_grad_(), draw(4, 9, device=device, seed=1)
    y = x * saved
    with torch.inference_mode():
        write(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@in_place
def test_a_leaf_is_refused_before_any_write(function, reference, device):
    x = draw(4, 9, device=device).requires_grad_()
    before, version = x.detach().clone(), x._version
    for t in (x, x.view(4, 9)):
        with pytest.raises(RuntimeError, match=r"leaf Variable that requires grad .*is being used in an in-place op"):
            function(t)
    assert torch.equal(x, before)
    assert x._version == version
    with torch.no_grad():
        assert function(x) is x
    torch.testing.assert_close(x, reference(before))


def test_inference_tensors_are_refused_before_any_write(device):
    """If a gradient is recorded: autograd cannot save them."""
    with torch.inference_mode():
        x, weight = draw(4, 9, device=device), draw(9, device=device, seed=1)
    before, leaf = x.clone(), draw(9, device=device).requires_grad_()
    for write in (
        lambda: matmuls.layer_norm_(x, leaf),
        lambda: matmuls.rms_norm_(x, leaf),
        lambda: matmuls.scaled_masked_softmax(x, leaf, inplace=True),
        lambda: matmuls.matmul_(x, draw(9, 9, device=device).requires_grad_(), keep_input=True),
    ):
        with pytest.raises(
            RuntimeError, match=r"expected tensors that autograd knows, .* got one made under torch.inf"
        ):
            write()
    assert torch.equal(x, before)
    x = leaf * 1
    with pytest.raises(RuntimeError, match="layer_norm_: expected tensors that autograd knows"):
        matmuls.layer_norm_(x, weight)
    assert torch.equal(x, leaf)


VIEWS = {
    "another shape": lambda t: t.view(8, 9),
    "some rows": lambda t: t[1:3],
    "every other column": lambda t: t[:, ::2],
    "transposed": lambda t: t.mT,
}


@in_place
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_a_non_leaf(function, reference, view, device):
    """After a write through the view, the base has the new values and the correct graph."""
    leaf, weights = draw(4, 18, device=device).requires_grad_(), draw(4, 18, device=device, seed=1)
    base, expected = leaf * 1, leaf * 1
    if not view(base).is_contiguous() and function in (IN_PLACE["inplace_softmax"][0], IN_PLACE["layernorm"][0]):
        pytest.skip("rows and columns are counted by the caller, in contiguous memory")
    function(view(base))
    view(expected).copy_(reference(view(expected).clone()))
    torch.testing.assert_close(base, expected)
    grads = [torch.autograd.grad((t * weights).sum(), leaf)[0] for t in (base, expected)]
    torch.testing.assert_close(*grads)


@in_place
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_dropped_graph_is_freed(function, reference, view, device):
    """Without a backward: tensors saved for x must not keep alive the graph that produced x."""
    leaf = draw(4, 18, device=device).requires_grad_()
    base = leaf * 1
    if not view(base).is_contiguous() and function in (IN_PLACE["inplace_softmax"][0], IN_PLACE["layernorm"][0]):
        pytest.skip("rows and columns are counted by the caller, in contiguous memory")
    held = torch.nn.Module()
    base.register_hook(lambda grad, held=held: None)
    seen = weakref.ref(held)
    function(view(base))
    del base, held
    gc.collect()
    assert seen() is None


@in_place
def test_compiled_over_an_input_of_the_graph(function, reference, device):
    """Gradients flow through the in-place write."""
    torch._dynamo.reset()
    leaf, grad = draw(4, 9, device=device).requires_grad_(), draw(4, 9, device=device, seed=1)
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        (found,) = torch.autograd.grad(f(leaf * 1), leaf, grad)
        torch.testing.assert_close(found, torch.autograd.grad(reference(leaf), leaf, grad)[0])


@in_place
def test_batched_gradients(function, reference, device):
    leaf, grads = draw(4, 9, device=device).requires_grad_(), draw(3, 4, 9, device=device, seed=1)
    found, expected = (
        torch.autograd.grad(f(leaf * 1).sin(), leaf, grads, is_grads_batched=True)[0] for f in (function, reference)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("norm", [matmuls.layer_norm_, matmuls.rms_norm_], ids=lambda f: f.__name__)
def test_a_norm_of_a_view_is_differentiable_once(norm, device):
    leaf = draw(4, 18, device=device, dtype=torch.float64).requires_grad_()
    reference = layer_norm if norm is matmuls.layer_norm_ else rms_norm

    def first(function, x):
        (grad,) = torch.autograd.grad(function(x).pow(3).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    torch.testing.assert_close(first(norm, leaf * 1), first(reference, leaf * 1))
    match = f"{norm.__name__}: expected first derivatives only, x being a view of another tensor"
    with pytest.raises(RuntimeError, match=match):
        first(norm, (leaf * 1).view(8, 9))


@in_place
def test_backward_twice_through_one_graph(function, reference, device):
    """Backward does not overwrite saved tensors."""
    leaf, grad = draw(4, 9, device=device).requires_grad_(), draw(4, 9, device=device, seed=1)
    y = function(leaf * 1) * 1
    first, second = (torch.autograd.grad(y, leaf, grad, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.autograd.grad(reference(leaf), leaf, grad)[0])


SOFTMAXES = [
    matmuls.softmax,
    matmuls.softmax_,
    matmuls.scaled_masked_softmax,
    lambda x: matmuls.scaled_masked_softmax(x, inplace=True),
]
softmaxes = pytest.mark.parametrize("softmax", SOFTMAXES, ids=["softmax", "softmax_", "masked", "masked in place"])


def test_a_softmax_of_a_view_is_differentiable_twice(device):
    leaf = draw(4, 18, device=device, dtype=torch.float64).requires_grad_()

    def second(function):
        base = leaf * 1
        function(base.view(8, 9)[1:4])
        (grad,) = torch.autograd.grad(base.pow(3).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    expected = second(lambda x: x.copy_(x.clone().softmax(-1)))
    torch.testing.assert_close(second(matmuls.softmax_), expected)
    torch.testing.assert_close(second(lambda x: matmuls.scaled_masked_softmax(x, inplace=True)), expected)


@softmaxes
def test_a_gradient_that_the_caller_holds_is_not_overwritten(softmax, device):
    leaf, grad = draw(4, 9, device=device).requires_grad_(), draw(4, 9, device=device, seed=1)
    before = grad.clone()
    torch.autograd.grad(softmax(leaf * 1), leaf, grad)
    torch.autograd.grad(softmax(leaf * 1).view(-1), leaf, grad.view(-1))
    assert torch.equal(grad, before)


@softmaxes
def test_a_shared_gradient_is_not_overwritten(softmax, device):
    """The gradient of the other summand is the same tensor or shares its memory; also gradients of hooks and retained
    ones.
    """
    leaf, other = (draw(4, 9, device=device, seed=i).requires_grad_() for i in range(2))
    weights = draw(4, 9, device=device, seed=2)
    for join in (lambda y, z: y + z, lambda y, z: z + y, lambda y, z: (y.view(-1) + z.view(-1)).view(4, 9)):
        seen = []
        y = softmax(leaf * 1)
        y.register_hook(seen.append)
        y.retain_grad()
        (join(y, other * 1) * weights).sum().backward()
        assert torch.equal(other.grad, weights)
        assert torch.equal(seen[0], weights)
        assert torch.equal(y.grad, weights)
        (expected,) = torch.autograd.grad((torch.softmax(leaf, -1) * weights).sum(), leaf)
        torch.testing.assert_close(leaf.grad, expected)
        leaf.grad = other.grad = None


def test_softmax_backward_in_place_is_refused_under_autograd(device):
    y = draw(4, 9, device=device).requires_grad_()
    for args in ((y * 1, y.detach()), (y.detach().clone(), y)):
        before = args[0].detach().clone()
        with pytest.raises(RuntimeError, match="softmax_backward_: expected no gradient to be recorded"):
            matmuls.softmax_backward_(*args)
        assert torch.equal(args[0], before)


# ------------------------------------------------------------------------------------------------------ what is kept


def kept_by(function):
    """The tensors that function saves for backward."""
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return kept


@pytest.mark.parametrize("norm", [matmuls.layer_norm_, matmuls.rms_norm_], ids=lambda f: f.__name__)
def test_a_norm_without_weight_saves_its_result_and_a_number_per_row(norm, device):
    x = draw(64, 100, device=device).requires_grad_() * 1
    kept = kept_by(lambda: norm(x))
    assert sorted(tuple(t.shape) for t in kept) == [(64,), (64, 100)]
    assert any(t.data_ptr() == x.data_ptr() for t in kept)
    y = draw(64, 100, device=device).requires_grad_() * 1
    assert 64 * 4 <= peak_memory(lambda: norm(y), device) <= 64 * 4 + 512


def test_a_norm_with_weight_saves_the_normalized_rows(device):
    x, weight = draw(64, 100, device=device).requires_grad_() * 1, draw(100, device=device).requires_grad_()
    kept = kept_by(lambda: matmuls.layer_norm_(x, weight))
    assert sorted(tuple(t.shape) for t in kept) == [(64,), (64, 100), (100,)]
    assert all(t.data_ptr() != x.data_ptr() for t in kept)


@softmaxes
def test_a_softmax_saves_only_its_result(softmax, device):
    x = draw(4, 9, device=device).requires_grad_() * 1
    results = []
    kept = kept_by(lambda: results.append(softmax(x)))
    assert [t.data_ptr() for t in kept] == [results[0].data_ptr()]


def test_a_scale_with_a_gradient_is_refused(device):
    """A missing gradient would be silent: backward saves the result only."""
    x, scale = draw(4, 9, device=device).requires_grad_(), torch.tensor(0.5, requires_grad=True)
    expected = "scaled_masked_softmax: expected a scale without a gradient"
    for function in (matmuls.scaled_masked_softmax, matmuls.scaled_masked_softmax_forward):
        with pytest.raises(RuntimeError, match=expected):
            function(x, None, scale)
        torch.testing.assert_close(function(x, None, scale.detach()), (0.5 * x).softmax(-1))
    with torch.no_grad():
        torch.testing.assert_close(matmuls.FusedSoftmax.apply(x, None, scale), (0.5 * x).softmax(-1))
    with pytest.raises(RuntimeError, match=expected):
        matmuls.FusedSoftmax.apply(x, None, scale).sum().backward()


def test_frozen_tensors_have_no_gradient(device):
    for needed in range(4):
        tensors = [
            draw(*shape, device=device).requires_grad_(i == needed)
            for i, shape in enumerate([(4, 9), (9,), (9,), (4, 9)])
        ]
        x, weight, bias, residual = tensors
        matmuls.layer_norm_(x * 1, weight, bias, residual=residual).sum().backward()
        assert [t.grad is not None for t in tensors] == [i == needed for i in range(4)]


# -------------------------------------------------------------------------------------------------------------- memory

IN_NO_MEMORY = {
    "softmax_": lambda x: matmuls.softmax_(x),
    "softmax_ of columns": lambda x: matmuls.softmax_(x, 0),
    "softmax out": lambda x: matmuls.softmax(x, out=x),
    "softmax_backward_": lambda x: matmuls.softmax_backward_(x, x),
    "layer_norm_": lambda x: matmuls.layer_norm_(x),
    "rms_norm_": lambda x: matmuls.rms_norm_(x),
    "scaled_masked_softmax": lambda x: matmuls.scaled_masked_softmax(x, scale=SCALE, causal=True, inplace=True),
    "layernorm": lambda x: matmuls.layernorm(x, *x.shape),
    "inplace_softmax": lambda x: matmuls.inplace_softmax(x, *x.shape),
}


@pytest.mark.parametrize("function", IN_NO_MEMORY.values(), ids=IN_NO_MEMORY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [100, 70_000])
def test_in_place_takes_no_memory(function, dtype, columns, device):
    x = draw(16, columns, device=device, dtype=dtype)
    assert peak_memory(lambda: torch.empty_like(x), device) >= x.nbytes  # checks that the measurement sees allocations
    assert peak_memory(lambda: function(x), device) == 0


def test_weights_masks_and_outputs_of_any_stride_are_not_copied(device):
    """Nor is other memory needed for a weight, a residual or a mask."""
    x, other, weight = (draw(*s, device=device) for s in ((64, 100), (64, 200), (100,)))
    mask = torch.zeros(1, 100, dtype=torch.bool, device=device)
    for call in (
        lambda: matmuls.softmax(x, out=other[:, ::2]),
        lambda: matmuls.layer_norm_(x, weight, weight, residual=other[:, ::2]),
        lambda: matmuls.scaled_masked_softmax(x, mask, SCALE, inplace=True),
        lambda: matmuls.scaled_masked_softmax(x, other[:, 100:], SCALE, inplace=True),
        lambda: matmuls.softmax_backward_(x, other[:, ::2]),
    ):
        assert peak_memory(call, device) == 0


def test_attention_with_gradients_needs_two_tensors_of_the_scores_size(device):
    """The probabilities, and their gradient, which the gradient of the scores overwrites."""
    inputs = [draw(2, 4, 64, 8, device=device, seed=i).requires_grad_() for i in range(3)]
    grad = draw(2, 4, 64, 8, device=device, seed=3)
    small, scores = grad.nbytes, 2 * 4 * 64 * 64 * 4

    def attention(inplace=True):
        q, k, v = inputs
        weights = matmuls.scaled_masked_softmax(matmuls.matmul(q, k, transb=True), None, 8**-0.5, inplace=inplace)
        return torch.autograd.grad(matmuls.matmul(weights, v), inputs, grad)

    torch.testing.assert_close(attention(), attention(inplace=False))
    # the context, the gradients of q, k and v
    assert peak_memory(attention, device) <= 2 * scores + 4 * small + 1024
    assert peak_memory(lambda: attention(inplace=False), device) > 3 * scores


# --------------------------------------------------------------------------------------------- inplace_softmax_backward


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("piece", [1, 4 * 11 * 3, 4 * 7 * 11, 4 * 7 * 11 * 2 + 8, 8 << 20])
def test_inplace_softmax_backward_matches_autograd(lead, piece, device, monkeypatch):
    """In pieces of one row, a few rows, one matrix, two matrices, and all at once."""
    monkeypatch.setattr("matmuls.rowwise.PIECE_BYTES", piece)
    scores, values = draw(*lead, 7, 11, device=device).requires_grad_(), draw(*lead, 11, 6, device=device, seed=1)
    d_ov = draw(*lead, 7, 6, device=device, seed=2)
    probabilities = scores.softmax(-1)
    (expected,) = torch.autograd.grad(probabilities @ values, scores, d_ov)
    output = probabilities.detach().clone()
    rows = output.numel() // 11
    assert matmuls.inplace_softmax_backward(output, d_ov, values, rows, 11, 6) is output
    torch.testing.assert_close(output, expected)
    output = probabilities.detach().clone()
    matmuls.inplace_softmax_backward(output, transposed(d_ov), padded_rows(values), rows, 11, 6)
    torch.testing.assert_close(output, expected)


def test_inplace_softmax_backward_under_autocast(device):
    output, d_ov, values = (draw(2, *shape, device=device) for shape in ((3, 4), (3, 5), (4, 5)))
    expected = matmuls.inplace_softmax_backward(output.clone(), d_ov, values, 6, 4, 5)
    with torch.autocast(device):
        assert torch.equal(matmuls.inplace_softmax_backward(output, d_ov, values, 6, 4, 5), expected)
    with pytest.raises(RuntimeError, match="expected output of at least two dimensions and 3 columns"):
        matmuls.inplace_softmax_backward(output, d_ov, values, 8, 3, 5)


def test_inplace_softmax_backward_allocates_pieces_of_8_mib(device):
    draws = Draw(torch.float32, device)
    output, d_ov, values = draws(1, 3, 1500, 1500), draws(1, 3, 1500, 4), draws(1, 3, 1500, 4)

    def backward():
        matmuls.inplace_softmax_backward(output, d_ov, values, 4500, 1500, 4)

    backward()  # allocates cuBLAS's workspace
    assert 4 << 20 < peak_memory(backward, device) <= 8 << 20 < output.nbytes


def test_inplace_softmax_backward_refuses_mismatched_operands(device):
    draws = Draw(torch.float32, device)
    output, d_ov, values = draws(2, 7, 11), draws(2, 7, 6), draws(2, 11, 6)
    before = output.clone()

    def refused(match, output=output, d_ov=d_ov, values=values, rows=14, keys=11, columns=6):
        with pytest.raises(RuntimeError, match=match):
            matmuls.inplace_softmax_backward(output, d_ov, values, rows, keys, columns)

    name = "inplace_softmax_backward: expected"
    refused(f"{name} a contiguous tensor of 7 x 11 elements, got sizes", rows=7)
    refused(f"{name} a contiguous tensor of 14 x 10 elements", keys=10)
    refused(f"{name} a contiguous tensor of 14 x 11 elements", output=transposed(output))
    refused(rf"{name} d_ov of shape \[2, 7, 5\] and values of shape \[2, 11, 5\]", columns=5)
    refused(rf"{name} .* got \[2, 7, 6\] and \[2, 6, 11\]", values=values.mT)
    refused(rf"{name} .* got \[7, 6\] and", d_ov=d_ov[0])
    refused(f"{name} a contiguous tensor of 14 x 7 elements", output=output.view(-1), keys=7)
    refused("expected .* of dtype", d_ov=d_ov.double())
    refused("expected grad to be a strided tensor in Float", d_ov=d_ov.double(), values=values.double())
    assert torch.equal(output, before)


def test_inplace_softmax_backward_refuses_a_vector(device):
    output = draw(22, device=device)
    with pytest.raises(RuntimeError, match="inplace_softmax_backward: expected"):
        matmuls.inplace_softmax_backward(output, draw(2, 6, device=device), draw(11, 6, device=device), 2, 11, 6)


# ------------------------------------------------------------------------------------------ the same bits, every time


@pytest.mark.parametrize("shape", [(5000, 64), (300, 1000), (33, 20_000), (40, 140_000)], ids=str)
def test_gradients_of_a_norm_are_bitwise_reproducible(shape, device):
    grad, x = (draw(*shape, device=device, seed=i) for i in range(2))
    weight, bias = (draw(shape[-1], device=device, seed=i) for i in (2, 3))
    first, *others = [with_gradients(matmuls.layer_norm_)(grad, x, weight, bias) for _ in range(3)]
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("shape", [(5000, 64), (300, 5000), (33, 200_000)], ids=str)
def test_softmax_is_bitwise_reproducible(shape, device):
    x = draw(*shape, device=device)
    first, *others = [matmuls.softmax_(x.clone()) for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)


# --------------------------------------------------------------------------------------------------- graphs, streams


def both(x, weight, grad):
    """softmax_ and layer_norm_ with their gradients."""
    y = matmuls.softmax_(x * 1)
    (dx,) = torch.autograd.grad(y, x, grad)
    z = matmuls.layer_norm_(x * 1, weight)
    return y.detach(), dx, z.detach(), *torch.autograd.grad(z, (x, weight), grad)


def inputs_of_both(rows, columns, seed):
    x, weight, grad = (
        draw(*shape, device="cuda", seed=seed + i)
        for i, shape in enumerate([(rows, columns), (columns,), (rows, columns)])
    )
    return x.requires_grad_(), weight.requires_grad_(), grad


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(700, 100), (64, 5000), (16, 100_000)], ids=str)
def test_a_graph_replayed_with_new_inputs(shape):
    x, weight, grad = inputs_of_both(*shape, seed=0)
    results = {}
    graph = graph_of([lambda: results.update(enumerate(both(x, weight, grad)))])
    for n in range(1, 5):
        with torch.no_grad():
            for t, other in zip((x, weight, grad), inputs_of_both(*shape, seed=10 * n), strict=True):
                t.copy_(other)
        graph.replay()
        replayed = [results[i].clone() for i in range(len(results))]
        for ours, eager in zip(replayed, both(x, weight, grad), strict=True):
            assert torch.equal(ours, eager)
        y, _, z, *_ = replayed
        torch.testing.assert_close(y, x.detach().softmax(-1))
        torch.testing.assert_close(z, layer_norm(x.detach(), weight.detach()))


@pytest.mark.cuda
def test_four_streams_at_once():
    inputs = [inputs_of_both(600, 5000, seed=10 * n) for n in range(4)]
    expected = [both(*tensors) for tensors in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for ours, right in zip(both(*inputs[n]), expected[n], strict=True):
                    wrong[n] += (ours != right).sum()
    torch.cuda.synchronize()
    assert [w.item() for w in wrong] == [0] * 4


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(4000, 128), (20_000, 1024), (1000, 16_384), (200, 65_536), (60, 262_144)], ids=str)
def test_dependent_launches_wait_for_earlier_kernels(shape):
    """Producers, row operations and consumers of the same memory give the same bits as calls with a synchronization
    after each.
    """
    sources = [draw(*shape, device="cuda", dtype=torch.bfloat16, seed=n) for n in range(4)]
    weight = draw(shape[-1], device="cuda", dtype=torch.bfloat16, seed=4)
    rstd = draw(shape[0], device="cuda", seed=5).abs()
    x, z = (torch.empty_like(sources[0]) for _ in range(2))

    def calls(n):
        yield torch.mul(sources[n % 4], 1.5, out=x)
        yield matmuls.softmax_(x)
        yield torch.add(x, sources[(n + 1) % 4], out=z)
        yield matmuls.layer_norm_(z, weight)
        yield matmuls.rms_norm_(x, weight)
        yield torch.mul(z, x, out=z)
        dz, *sums = torch.ops.custom_mm.norm_backward(z, x, rstd, weight, False)
        yield matmuls.softmax_(dz)
        yield torch.add(dz, z, out=x)
        yield (x, *sums)

    def results(n, wait=False):
        last = ()
        for step in calls(n):
            last = step
            if wait:
                torch.cuda.synchronize()
        return last

    expected = [[t.clone() for t in results(n, wait=True)] for n in range(4)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def check():
        for n in range(8):
            for ours, right in zip(results(n), expected[n % 4], strict=True):
                wrong.add_((ours != right).sum())

    graph = graph_of([check])
    for _ in range(20):
        check()
        graph.replay()
    assert wrong.item() == 0


@pytest.mark.cuda
@pytest.mark.gpu_memory(16)
def test_more_than_2_31_elements():
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free memory")
    x = torch.empty(2_100_000, 1024, dtype=torch.bfloat16, device="cuda").normal_()
    rows = torch.tensor([0, 1, 1_048_575, 2_097_151, 2_097_152, 2_099_999], device="cuda")
    for function, reference in ((matmuls.softmax_, lambda t: t.softmax(-1)), (matmuls.layer_norm_, layer_norm)):
        before = x[rows]
        function(x)
        assert_as_good_as_torch(x[rows], reference(before), reference(before.double()))


# ---------------------------------------------------------------------------- second derivatives, transforms, aliases


def test_future_columns_do_not_affect_causal_gradients():
    backward = torch.ops.custom_mm.softmax_backward.default
    y, grad = torch.randn(2, 4, 4).double().softmax(-1), torch.randn(2, 4, 4).double()
    leaves = y.requires_grad_(), grad.requires_grad_()
    assert torch.autograd.gradcheck(lambda y, g: backward(y, g, -1, 0.5, True), leaves)
    assert torch.autograd.gradgradcheck(lambda y, g: backward(y, g, -1, 0.5, True), leaves)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(4, 4, dtype=torch.float64).masked_fill(torch.ones(4, 4).triu(1) > 0, math.nan)
    (first,) = torch.autograd.grad(matmuls.scaled_masked_softmax(x, causal=True), x, grad, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert first.isfinite().all()
    assert second.isfinite().all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: matmuls.layer_norm_(x * 1, w[0]),
        lambda x, w: matmuls.rms_norm_(x * 1, w[0]),
        lambda x, w: matmuls.matmul_(x * 1, w, keep_input=True),
    ],
    ids=["layer_norm_", "rms_norm_", "matmul_"],
)
def test_vectorized_jacobians_and_hessians(function, device):
    x, w = torch.randn(2, 3, 4, dtype=torch.float64, device=device), torch.randn(4, 4, dtype=torch.float64).to(device)
    jacobian = torch.autograd.functional.jacobian
    one_by_one = jacobian(function, (x, w))
    at_once = jacobian(function, (x, w), vectorize=True)
    for a, b in zip(one_by_one, at_once, strict=True):
        torch.testing.assert_close(a, b)
    hessian = torch.autograd.functional.hessian
    scalar = lambda x, w: function(x, w).square().sum()  # noqa: E731
    for a, b in zip(hessian(scalar, (x, w)), hessian(scalar, (x, w), vectorize=True), strict=True):
        torch.testing.assert_close(a, b)


def test_transforms_that_miss_in_place_writes_are_refused():
    x, mask = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda m: matmuls.scaled_masked_softmax(x, m, inplace=True).square().sum())(mask)


def test_inplace_softmax_backward_refuses_an_out_that_aliases_its_inputs(device):
    y = torch.randn(5, 5, device=device).softmax(-1)
    d = torch.randn(5, 5, device=device)
    for arguments in ((y, d, y), (y, y, d)):
        with pytest.raises(RuntimeError, match="inplace_softmax_backward: expected out"):
            matmuls.inplace_softmax_backward(*arguments, 5, 5, 5)
    none = torch.empty(5, 0, device=device)
    assert torch.equal(matmuls.inplace_softmax_backward(y, none, none, 5, 5, 0), torch.zeros_like(y))
    for function in (matmuls.inplace_softmax, matmuls.layernorm):
        with pytest.raises(RuntimeError, match="expected a contiguous tensor of -5 x -5 elements"):
            function(d, -5, -5)


@pytest.mark.parametrize("columns", [7, 131, 1000])
def test_sums_of_squares_that_overflow(columns, device):
    x = torch.full((3, columns), 1e20, device=device)
    assert torch.equal(matmuls.rms_norm_(x), torch.zeros_like(x))


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [1536, 1792, 3072, 577, 1031])
def test_a_mask_written_by_the_previous_kernel(columns):
    """That kernel allows programmatic dependent launch, as ours and Triton's do."""
    x = torch.randn(64, 4, columns, device="cuda", dtype=torch.float16)
    masks = (torch.rand(8, 64, 1, columns, device="cuda") > 0.5).byte().view(torch.uint8)
    expected = [matmuls.scaled_masked_softmax(x, m.bool()) for m in masks]
    mask = torch.zeros_like(masks[0])
    for _ in range(20):
        for m, y in zip(masks, expected, strict=True):
            mask.copy_(m)
            matmuls.softmax_(x[:1].clone())
            assert torch.equal(matmuls.scaled_masked_softmax(x, mask), y)
