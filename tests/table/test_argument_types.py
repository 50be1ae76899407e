"""Arguments that are no tensors, and masks of integers: errors name operation, argument and type."""

import re

import numpy as np
import pytest
import torch

import custom_mm
import matmuls
from custom_mm.arguments import type_name
from matmuls import attention, blocks, nn

ARRAY = np.ones((4, 4), np.float32)
X, MASK = torch.ones(4, 4), torch.ones(4, dtype=torch.bool)
SPARSE = nn.SparseLinear.from_linear(torch.nn.Linear(4, 4), sparsity=0.5)
CSR = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 1, 2, 3]), torch.ones(4)

CALLS = {
    ("softmax_", "x"): lambda no: matmuls.softmax_(no),
    ("softmax", "x"): lambda no: matmuls.softmax(no),
    ("softmax", "out"): lambda no: matmuls.softmax(X, out=no),
    ("softmax_backward", "grad"): lambda no: matmuls.softmax_backward(X, no),
    ("softmax_backward_", "y"): lambda no: matmuls.softmax_backward_(no, X),
    ("layer_norm_", "weight"): lambda no: matmuls.layer_norm_(X, no),
    ("rms_norm_", "residual"): lambda no: matmuls.rms_norm_(X, residual=no),
    ("inplace_softmax", "x"): lambda no: matmuls.inplace_softmax(no, 4, 4),
    ("inplace_softmax_backward", "output"): lambda no: matmuls.inplace_softmax_backward(no, X, X, 4, 4, 4),
    ("inplace_softmax_backward", "values"): lambda no: matmuls.inplace_softmax_backward(X, X, no, 4, 4, 4),
    ("layernorm", "x"): lambda no: matmuls.layernorm(no, 4, 4),
    ("matmul", "a"): lambda no: matmuls.matmul(no, X),
    ("matmul", "bias"): lambda no: matmuls.matmul(X, X, bias=no),
    ("matmul", "b"): lambda no: matmuls.cublasMM.apply(X, no),
    ("matmul_", "b"): lambda no: matmuls.matmul_(X, no),
    ("linear_", "weight"): lambda no: matmuls.linear_(X, no),
    ("linear_", "x"): lambda no: nn.InplaceLinear(4)(no),
    ("feed_forward_", "down_bias"): lambda no: matmuls.feed_forward_(X, X, None, X, no),
    ("square_matmul", "a"): lambda no: matmuls.square_matmul(no, X, 4, 4),
    ("square_matmul_T", "b"): lambda no: matmuls.square_matmul_T(X, no, 4, 4),
    ("scaled_masked_softmax", "x"): lambda no: matmuls.scaled_masked_softmax(no, inplace=True),
    ("scaled_masked_softmax", "mask"): lambda no: matmuls.scaled_masked_softmax(X, no),
    ("scaled_masked_softmax_backward", "y"): lambda no: matmuls.scaled_masked_softmax_backward(X, no, 1.0),
    ("mask_plan", "mask"): lambda no: matmuls.mask_plan(no),
    ("masked_linear", "x"): lambda no: matmuls.masked_linear(no, X, X, MASK),
    ("masked_linear", "w2"): lambda no: matmuls.masked_linear(X, X, no, MASK),
    ("masked_ffn", "x"): lambda no: matmuls.masked_ffn(no, X, X, X, X, X, X, MASK),
    ("SparseLinear", "x"): lambda no: SPARSE(no),
    ("cusparse_sddmm", "offsets"): lambda no: custom_mm.cusparse_sddmm(no, CSR[1], X, X),
    ("cusparse_sddmm", "b"): lambda no: custom_mm.cusparse_sddmm(*CSR[:2], X, no),
    ("masked_ffn", "u3"): lambda no: matmuls.masked_ffn(X, X, X, X, X, X, no, MASK),
    ("attention", "k"): lambda no: attention.attend(X.view(1, 1, 4, 4), no, X, None, 1.0),
    ("bsr_spmm", "dense"): lambda no: blocks.bsr_spmm(*CSR[:2], torch.ones(4, 1, 1), no, 4),
    ("bsr_sddmm", "b"): lambda no: blocks.bsr_sddmm(*CSR[:2], X, no, 4, 1, 1),
    ("bias_act_", "bias"): lambda no: custom_mm.bias_act_(X, no),
    ("cublas_mmul", "b"): lambda no: custom_mm.cublas_mmul(X, no),
    ("cublas_mmul", "c"): lambda no: custom_mm.cublas_mmul(X, X, no),
    ("cublas_bmm", "a"): lambda no: custom_mm.cublas_bmm(no, X),
    ("cublaslt_matmul", "a"): lambda no: custom_mm.cublaslt_matmul(no, X),
    ("cusparse_spmm", "b"): lambda no: custom_mm.cusparse_spmm(*CSR, no, 4, 4),
    ("cusparse_prepare", "b"): lambda no: custom_mm.cusparse_prepare(*CSR, no, 4, 4),
    ("cusparse_sddmm", "a"): lambda no: custom_mm.cusparse_sddmm(*CSR[:2], no, X),
}

MAY_BE_NONE = {
    *(("softmax", "out"), ("layer_norm_", "weight"), ("rms_norm_", "residual"), ("matmul", "bias")),
    *(("feed_forward_", "down_bias"), ("scaled_masked_softmax", "mask"), ("bias_act_", "bias"), ("cublas_mmul", "c")),
}


@pytest.mark.parametrize(("name", "what"), CALLS)
def test_arrays_are_refused_by_name(name, what):
    with pytest.raises(TypeError, match=rf"^{name}: expected a torch.Tensor for {what}, got numpy.ndarray$"):
        CALLS[name, what](ARRAY)


@pytest.mark.parametrize(("name", "what"), [call for call in CALLS if call not in MAY_BE_NONE])
def test_none_is_refused_by_name(name, what):
    with pytest.raises(TypeError, match=rf"^{name}: expected a torch.Tensor for {what}, got NoneType$"):
        CALLS[name, what](None)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_product_of_an_empty_matrix_by_none(place):
    """Its inner size, 0, is that of an undefined tensor."""
    with pytest.raises(TypeError, match=r"^matmul: expected a torch.Tensor for b, got NoneType$"):
        matmuls.matmul(torch.zeros(3, 0, device=place), None)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32], ids=str)
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_dtypes_without_kernels_are_refused(place, dtype):
    """ATen counts them as floating-point or complex. The check is the same on all devices."""
    x, rows = torch.ones(4, 4).to(dtype).to(place), torch.ones(4).to(dtype).to(place)
    calls = {
        "matmul": lambda: matmuls.matmul(x, x),
        "matmul_": lambda: matmuls.matmul_(x, x),
        "cublaslt_matmul": lambda: custom_mm.cublaslt_matmul(x, x, rows),
        "bias_act_": lambda: custom_mm.bias_act_(x, rows),
        "feed_forward_": lambda: matmuls.feed_forward_(x, x, None, x, None),
        "softmax": lambda: matmuls.softmax(x),
        "layer_norm_": lambda: matmuls.layer_norm_(x),
        "scaled_masked_softmax": lambda: matmuls.scaled_masked_softmax(x),
        "softmax_backward": lambda: matmuls.softmax_backward(x, x),
        "attention_forward": lambda: attention.attend(*[x.view(1, 1, 4, 4)] * 3, None, 1.0),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"^{name}: expected .*floating-point.* got ") as raised:
            call()
        assert "not implemented" not in str(raised.value)


@pytest.mark.parametrize("given", [[1.0, 2.0], 1.0, "x"], ids=str)
def test_other_types_are_named(given):
    with pytest.raises(TypeError, match=rf"^softmax_: expected a torch.Tensor for x, got {type(given).__name__}$"):
        matmuls.softmax_(given)


def test_an_array_times_a_plan():
    with pytest.raises(TypeError, match=r"spmm: expected x to be a dense tensor, got ndarray"):
        ARRAY @ matmuls.plan(X.to_sparse_csr())


def test_errors_about_tensors_stay():
    with pytest.raises(RuntimeError, match=r"^softmax_: expected"):
        matmuls.softmax_(X.long())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda x, mask: matmuls.scaled_masked_softmax(x, mask),
        lambda x, mask: matmuls.scaled_masked_softmax(x, mask, inplace=True),
        lambda x, mask: attention.attend(x, x, x, mask, 1.0)[0],
    ],
)
def test_masks_of_integers_are_refused_with_the_ways_to_convert_them(call, dtype):
    """They are ambiguous: a tokenizer's attention_mask has 1 for what is kept, a mask here for what is masked."""
    x = torch.randn(1, 1, 4, 4)
    mask = torch.tensor([0, 0, 1, 1], dtype=dtype).expand(1, 1, 4, 4)
    convert = "; convert it: mask.bool() where nonzero masks, mask == 0 where 0 masks, as in a tokenizer's"
    with pytest.raises(RuntimeError, match=rf"expected a .*mask in Bool, .* got .*{re.escape(convert)}"):
        call(x.clone(), mask)
    torch.testing.assert_close(call(x.clone(), mask.bool()), call(x.clone(), mask != 0))


@pytest.mark.parametrize("scale", ["a", "1.5", b"1", None, [1.0]], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda scale: matmuls.scaled_masked_softmax(X, None, scale),
        lambda scale: matmuls.scaled_masked_softmax(X.clone(), None, scale, inplace=True),
        lambda scale: matmuls.scaled_masked_softmax_forward(X, None, scale),
        lambda scale: matmuls.scaled_masked_softmax_backward(X, X, scale),
        lambda scale: matmuls.FusedSoftmax.apply(X, None, scale),
    ],
)
def test_scales_that_are_no_numbers_are_named(call, scale):
    expected = rf"^scaled_masked_softmax(_backward)?: expected (a scale|factor) to be a number, got {type_name(scale)}$"
    with pytest.raises(RuntimeError, match=expected):
        call(scale)


def test_errors_of_linear_say_which_operands_they_mean():
    expected = r"^linear_, with x as a and weight as b: matmul_: expected b without a gradient"
    with pytest.raises(RuntimeError, match=expected):
        matmuls.linear_(X.clone(), X.clone().requires_grad_())


def test_complex_scales_are_refused():
    with pytest.raises(
        RuntimeError, match=r"^scaled_masked_softmax: expected a scale to be a number, got a tensor of "
    ):
        matmuls.scaled_masked_softmax_forward(X, None, torch.tensor(1j))
