"""Arguments that are no tensors, and masks of integers: errors name operation, argument and type."""

import re

import numpy as np
import pytest
import torch

import custom_mm
import matmuls
from matmuls import attention, blocks, nn

ARRAY = np.ones((4, 4), np.float32)
KEPT = np.ones(4, bool)
X, MASK = torch.ones(4, 4), torch.ones(4, dtype=torch.bool)
CSR = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([0, 1, 2, 3]), torch.ones(4)

CALLS = {
    ("softmax_", "x"): lambda: matmuls.softmax_(ARRAY),
    ("softmax", "x"): lambda: matmuls.softmax(ARRAY),
    ("softmax", "out"): lambda: matmuls.softmax(X, out=ARRAY),
    ("softmax_backward", "grad"): lambda: matmuls.softmax_backward(X, ARRAY),
    ("softmax_backward_", "y"): lambda: matmuls.softmax_backward_(ARRAY, X),
    ("layer_norm_", "weight"): lambda: matmuls.layer_norm_(X, ARRAY),
    ("rms_norm_", "residual"): lambda: matmuls.rms_norm_(X, residual=ARRAY),
    ("inplace_softmax", "x"): lambda: matmuls.inplace_softmax(ARRAY, 4, 4),
    ("inplace_softmax_backward", "output"): lambda: matmuls.inplace_softmax_backward(ARRAY, X, X, 4, 4, 4),
    ("inplace_softmax_backward", "values"): lambda: matmuls.inplace_softmax_backward(X, X, ARRAY, 4, 4, 4),
    ("layernorm", "x"): lambda: matmuls.layernorm(ARRAY, 4, 4),
    ("matmul", "a"): lambda: matmuls.matmul(ARRAY, X),
    ("matmul", "bias"): lambda: matmuls.matmul(X, X, bias=ARRAY),
    ("matmul", "b"): lambda: matmuls.cublasMM.apply(X, ARRAY),
    ("matmul_", "b"): lambda: matmuls.matmul_(X, ARRAY),
    ("linear_", "weight"): lambda: matmuls.linear_(X, ARRAY),
    ("linear_", "x"): lambda: nn.InplaceLinear(4)(ARRAY),
    ("feed_forward_", "down_bias"): lambda: matmuls.feed_forward_(X, X, None, X, ARRAY),
    ("square_matmul", "a"): lambda: matmuls.square_matmul(ARRAY, X, 4, 4),
    ("square_matmul_T", "b"): lambda: matmuls.square_matmul_T(X, ARRAY, 4, 4),
    ("scaled_masked_softmax", "x"): lambda: matmuls.scaled_masked_softmax(ARRAY, inplace=True),
    ("scaled_masked_softmax", "mask"): lambda: matmuls.scaled_masked_softmax(X, ARRAY),
    ("scaled_masked_softmax_backward", "y"): lambda: matmuls.scaled_masked_softmax_backward(X, ARRAY, 1.0),
    ("mask_plan", "mask"): lambda: matmuls.mask_plan(KEPT),
    ("masked_linear", "w2"): lambda: matmuls.masked_linear(X, X, ARRAY, MASK),
    ("masked_ffn", "u3"): lambda: matmuls.masked_ffn(X, X, X, X, X, X, ARRAY, MASK),
    ("attention", "k"): lambda: attention.attend(X.view(1, 1, 4, 4), ARRAY, X, None, 1.0),
    ("bsr_spmm", "dense"): lambda: blocks.bsr_spmm(*CSR[:2], torch.ones(4, 1, 1), ARRAY, 4),
    ("bsr_sddmm", "b"): lambda: blocks.bsr_sddmm(*CSR[:2], X, ARRAY, 4, 1, 1),
    ("bias_act_", "bias"): lambda: custom_mm.bias_act_(X, ARRAY),
    ("cublas_mmul", "b"): lambda: custom_mm.cublas_mmul(X, ARRAY),
    ("cublas_mmul", "c"): lambda: custom_mm.cublas_mmul(X, X, ARRAY),
    ("cublas_bmm", "a"): lambda: custom_mm.cublas_bmm(ARRAY, X),
    ("cublaslt_matmul", "a"): lambda: custom_mm.cublaslt_matmul(ARRAY, X),
    ("cusparse_spmm", "b"): lambda: custom_mm.cusparse_spmm(*CSR, ARRAY, 4, 4),
    ("cusparse_prepare", "b"): lambda: custom_mm.cusparse_prepare(*CSR, ARRAY, 4, 4),
    ("cusparse_sddmm", "a"): lambda: custom_mm.cusparse_sddmm(*CSR[:2], ARRAY, X),
}


@pytest.mark.parametrize(("name", "what"), CALLS)
def test_arrays_are_refused_by_name(name, what):
    with pytest.raises(TypeError, match=rf"^{name}: expected a torch.Tensor for {what}, got numpy.ndarray$"):
        CALLS[name, what]()


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
