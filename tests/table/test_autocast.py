"""Under autocast every operation returns the dtype of torch's counterpart; in-place operations are not affected."""

import pytest
import torch

import matmuls
from matmuls import attention
from matmuls_bench.table import TABLE, Call, Draw

WIDTHS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# The forward half of attend; attend itself casts.
ROWS = [spec for spec in TABLE if spec.name != "attention_forward"]

for_every_width = pytest.mark.parametrize(
    ("spec", "dtype"),
    [pytest.param(s, d, id=f"{s.name}-{d}".replace("torch.", "")) for s in ROWS for d in WIDTHS if d in s.dtypes],
)
for_every_target = pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=str)


def copies(call: Call) -> Call:
    return call.map(lambda t: t.clone() if t.layout == torch.strided else t)


def run(function, call, device, target=None):
    call = copies(call)
    with torch.autocast(device, dtype=target or torch.bfloat16, enabled=target is not None):
        return function(*call.args, **call.kwargs)


@for_every_width
@for_every_target
def test_result_dtypes_match_torch(spec, dtype, target, device):
    for call in spec.samples(Draw(dtype, device)):
        try:
            ours = run(spec.call, call, device, target)
        except RuntimeError as error:
            if "NOT_SUPPORTED" not in str(error):
                raise
            pytest.skip(str(error))  # cuSPARSE does not support this dtype
        if spec.in_place or call.kwargs.get("inplace"):
            assert ours.dtype == call.args[0].dtype
            torch.testing.assert_close(ours, run(spec.call, call, device), rtol=0, atol=0, equal_nan=True)
        else:
            try:
                theirs = run(spec.reference, call, device, target).dtype
            except RuntimeError as error:  # torch's sparse products reject mixed 16-bit dtypes
                if "prioritize" not in str(error):
                    raise
                theirs = target
            assert ours.dtype == theirs


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@for_every_target
def test_out_keeps_its_dtype(dtype, target, device):
    draw = Draw(dtype, device)
    x, w, bias = draw(3, 4), draw(4, 5), draw(5)
    for function, args, out in (
        (matmuls.softmax, (x,), torch.empty_like(x)),
        (matmuls.matmul, (x, w), draw(3, 5)),
        (lambda *a, out: matmuls.matmul(*a, bias=bias, activation="gelu", out=out), (x, w), draw(3, 5)),
    ):
        expected = function(*args, out=out).clone()
        with torch.autocast(device, dtype=target):
            assert torch.equal(function(*args, out=out), expected)


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@for_every_target
def test_attention(dtype, target, device):
    draw = Draw(dtype, device)
    q, k, v = (draw(2, 3, 4, 8) for _ in range(3))
    with torch.autocast(device, dtype=target):
        context, _ = attention.attend(q, k, v, None, 0.3)
        assert context.dtype == torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype


@pytest.mark.parametrize("mask_dtype", WIDTHS[1:], ids=str)
@pytest.mark.parametrize("dtype", WIDTHS[1:], ids=str)
def test_an_added_mask_of_another_width(dtype, mask_dtype, device):
    """As under autocast: a float32 mask with 16-bit scores, and the reverse."""
    draw = Draw(torch.float32, device)
    x, mask = draw(2, 3, 4, 8).to(dtype), draw(2, 1, 1, 8).to(mask_dtype)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = matmuls.scaled_masked_softmax(x, mask, 0.5)
        assert y.dtype == torch.softmax(x, -1).dtype
    torch.testing.assert_close(y.float(), (x.float() * 0.5 + mask).softmax(-1), rtol=2**-7, atol=2**-9)
