"""Scale, mask and softmax of attention scores in one pass."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import Function
from torch.compiler import is_dynamo_compiling

from custom_mm import _C
from custom_mm.arguments import clearer, type_name

from .registration import Applied, fail, number, signature_of_apply

_NAME = "scaled_masked_softmax"
_ops = torch.ops.custom_mm
_call: Callable[..., torch.Tensor] = _C.scaled_masked_softmax  # the operator below without what torch.ops adds
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
    """Computes softmax(scale * x + mask) over the last dimension, in one pass over x.

    A masked column is 0 in the result. If all columns of a row are masked, the row and its gradient are 0. If the
    columns that are not masked are all -inf, the row is NaN, as in torch.softmax. The operation is differentiable any
    number of times in x and in a float mask; only the result is saved for backward. Under autocast it behaves as
    torch.softmax, but in place it keeps x's dtype.

    Args:
        x: [..., Q, K], in attention [B, H, Q, K]; float64, float32, float16 or bfloat16, any non-overlapping strides.
        mask: a tensor whose shape broadcasts to x's, such as [B, 1, 1, K] or [1, 1, Q, K]; it is not materialized. In
            a mask of bool or uint8, a nonzero element masks its column. A float mask, in x's dtype or (unless x is
            float64) float32, is added to the scaled scores, so that -inf masks a column. A mask of another integer
            dtype raises an error, because a 1 may mean masked or kept; convert it.
        scale: multiplies x in float32, or float64 for float64.
        causal: row q sees columns 0 to q. The others are not read, and no mask tensor is needed.
        inplace: write the result over x. Backward then writes over the incoming gradient, if nothing else refers to it.

    Returns:
        A tensor of x's shape, or x with `inplace`.

    Raises:
        RuntimeError: before anything is written, if shapes, dtypes or devices do not match.
        TypeError: if x or mask is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> scores, padding = torch.zeros(2, 4), torch.tensor([False, False, True, True])
        >>> matmuls.scaled_masked_softmax(scores, padding, scale=0.125)
        tensor([[0.5000, 0.5000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000]])
        >>> matmuls.scaled_masked_softmax(scores, causal=True)
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000]])
    """
    if isinstance(scale, torch.Tensor):
        scale = number(_NAME, "a scale", scale)
    try:
        if not inplace:
            return (_masked if is_dynamo_compiling() else _call)(x, mask, scale, causal)
        _masked_(x, mask, scale, causal)
    except RuntimeError as error:
        found = about_mask(clearer(error, _NAME, ("mask",), x=x, mask=mask), mask)
        if found is error and not hasattr(scale, "__float__"):
            found = RuntimeError(f"{_NAME}: expected a scale to be a number, got {type_name(scale)}")
        raise found from None
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
    """Computes softmax(scale * x) over the last dimension without the columns where mask is nonzero.

    Here a nonzero element of a float mask masks its column. In `scaled_masked_softmax` a float mask is added instead.

    Args:
        x: [..., Q, K] float64, float32, float16 or bfloat16.
        mask: any dtype and any shape that broadcasts to x's; nonzero masks a column. None masks nothing.
        scale: a number, or a tensor of one element without a gradient.

    Returns:
        A tensor of x's shape.

    Raises:
        RuntimeError: if shapes or devices do not match, or scale is no number.
        TypeError: if x or mask is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.scaled_masked_softmax_forward(torch.zeros(1, 3), torch.tensor([0, 0, 1]), 0.5)
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    try:
        return scaled_masked_softmax(x, _seed_mask(mask), number(_NAME, "a scale", scale))
    except AttributeError as error:
        raise clearer(error, _NAME, ("mask",), mask=mask) from None


def scaled_masked_softmax_backward(
    grad: torch.Tensor, y: torch.Tensor, scale: float | torch.Tensor, *, inplace: bool = False
) -> torch.Tensor:
    """Computes scale * y * (grad - sum(y * grad)) over the last dimension: the gradient of
    `scaled_masked_softmax_forward`.

    The order of grad and y is the opposite of that of `softmax_backward`.

    Args:
        grad: the gradient of y.
        y: the result of the forward pass; shape, dtype and device of grad.
        scale: a number, or a tensor of one element without a gradient.
        inplace: write the result over y; no gradient is recorded.

    Returns:
        A tensor of y's shape, or y with `inplace`.

    Raises:
        RuntimeError: if shapes, dtypes or devices do not match, or scale is no number.
        TypeError: if grad or y is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.scaled_masked_softmax_backward(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]), 2.0)
        tensor([[ 0.5000, -0.5000]])
    """
    try:
        if not inplace:
            return _backward(y, grad, -1, number(_NAME, "a scale", scale))
        _backward_(y, grad, -1, number(_NAME, "a scale", scale))
    except RuntimeError as error:
        raise clearer(error, "scaled_masked_softmax_backward", grad=grad, y=y) from None
    return y


class FusedSoftmax(Applied, Function):
    """`FusedSoftmax.apply(src, mask, factor)` computes `scaled_masked_softmax_forward` as an autograd Function.

    Args:
        src: [..., Q, K] float64, float32, float16 or bfloat16.
        mask: any dtype and any shape that broadcasts to src's; nonzero masks a column. None masks nothing.
        factor: the scale, a number or a tensor of one element, which gets no gradient.

    Returns:
        A tensor of src's shape, with a gradient to src.

    Raises:
        RuntimeError: as `scaled_masked_softmax_forward`, and in the backward pass if factor requires a gradient.
        TypeError: if src or mask is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> scores = torch.zeros(1, 3, requires_grad=True)
        >>> probabilities = matmuls.FusedSoftmax.apply(scores, torch.tensor([0, 0, 1]), 0.5)
        >>> probabilities[0, 0].backward()
        >>> probabilities.tolist(), scores.grad[0, :2]
        ([[0.5, 0.5, 0.0]], tensor([ 0.1250, -0.1250]))
    """

    __signature__ = signature_of_apply("src", "mask", "factor")

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
