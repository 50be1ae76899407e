"""Scale, mask and softmax of attention scores in one pass."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import Function

from custom_mm.arguments import clearer

from .registration import fail, number

_NAME = "scaled_masked_softmax"
_ops = torch.ops.custom_mm
_masked: Callable[..., torch.Tensor] = _ops.scaled_masked_softmax.default
_masked_: Callable[..., None] = _ops.scaled_masked_softmax_.default
_backward: Callable[..., torch.Tensor] = _ops.softmax_backward.default
_backward_: Callable[..., None] = _ops.softmax_backward_.default


def scaled_masked_softmax(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float = 1.0,
    *,
    causal: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    """softmax(scale * x + mask) over the last dimension, in one pass; with `inplace` written over x, which is returned.

    x: [..., Q, K] (in attention [B, H, Q, K]) in float64, float32, float16 or bfloat16, any non-overlapping strides.
    mask: bool or uint8, where nonzero masks a column; or float in x's dtype or float32 (not for float64 x), added to
    the scaled scores, where -inf masks. The mask has any shape that broadcasts to x's: [B, 1, 1, K], [1, 1, Q, K], [B,
    1, Q, K], [B, H, Q, K]; it is read through its strides, never expanded. causal: row q sees columns 0 to q; the
    others are not even read, and no mask tensor is needed. scale stays float32 (float64 for float64).

    A masked column gives 0; a row with all columns masked is 0 with gradient 0; otherwise NaN propagates.
    Differentiable any number of times in x and in a float mask; saves only the result. With `inplace` backward writes
    over the incoming gradient if no other reference to it exists. Under autocast as torch.softmax; in place the dtype
    stays. Raises RuntimeError, before anything is written, on shapes, dtypes or devices that do not match.
    """
    if isinstance(scale, torch.Tensor):
        scale = number(_NAME, "a scale", scale)
    try:
        if not inplace:
            return _masked(x, mask, scale, causal)
        _masked_(x, mask, scale, causal)
    except RuntimeError as error:
        raise about_mask(clearer(error, _NAME, x=x, mask=mask), mask) from None
    return x


def about_mask(error: Exception, mask: object) -> Exception:
    """`error` with what to do about a mask of integers: 1 may mean that a column is masked, or that it is kept."""
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
        return error
    ways = "mask.bool() where nonzero masks, mask == 0 where 0 masks, as in a tokenizer's attention_mask"
    return RuntimeError(f"{error}; convert it: {ways}")


# The upstream document's functions. Its formula is `mask == 1` in any dtype; here any nonzero masks, in floats too.


def _seed_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    return mask if mask is None or mask.dtype in (torch.bool, torch.uint8) else mask.ne(0)


def scaled_masked_softmax_forward(
    x: torch.Tensor, mask: torch.Tensor | None, scale: float | torch.Tensor
) -> torch.Tensor:
    """softmax(scale * x) over the last dimension, masking columns where mask, of any dtype, is nonzero.

    Shapes and errors as `scaled_masked_softmax`, which adds a float mask instead. scale: a number, or a tensor of one.
    """
    try:
        return scaled_masked_softmax(x, _seed_mask(mask), number(_NAME, "a scale", scale))
    except AttributeError as error:
        raise clearer(error, _NAME, mask=mask) from None


def scaled_masked_softmax_backward(
    grad: torch.Tensor, y: torch.Tensor, scale: float | torch.Tensor, *, inplace: bool = False
) -> torch.Tensor:
    """scale * y * (grad - sum(y * grad)) over the last dimension; y is the forward's result.

    grad, y: one shape, dtype and device. With `inplace` the result is written over y and returned; no gradient is
    recorded.
    """
    try:
        if not inplace:
            return _backward(y, grad, -1, number(_NAME, "a scale", scale))
        _backward_(y, grad, -1, number(_NAME, "a scale", scale))
    except RuntimeError as error:
        raise clearer(error, "scaled_masked_softmax_backward", grad=grad, y=y) from None
    return y


class FusedSoftmax(Function):
    """`FusedSoftmax.apply(src, mask, factor)`: `scaled_masked_softmax_forward` with its gradient.

    factor: the scale, a number or a tensor of one element, which gets no gradient. Shapes, dtypes and errors as there.
    """

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, src: torch.Tensor, mask: torch.Tensor | None, factor: torch.Tensor | float) -> torch.Tensor: ...

    @staticmethod
    def forward(ctx: Any, src: torch.Tensor, mask: torch.Tensor | None, factor: torch.Tensor | float) -> torch.Tensor:
        ctx.scale = number(_NAME, "factor", factor)
        y = scaled_masked_softmax_forward(src, mask, ctx.scale)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.needs_input_grad[2]:
            fail(_NAME, "a scale without a gradient", "one that requires grad; multiply by it instead")
        (y,) = ctx.saved_tensors
        return scaled_masked_softmax_backward(grad, y, ctx.scale), None, None
