"""Softmax and norms of rows, in place, with gradients.

Operators: src/rows/softmax_ops.cpp, softmax_backward.cu, norm_ops.cpp and norm_backward.cu.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from custom_mm.arguments import clearer

_ops = torch.ops.custom_mm
_softmax: Callable[..., torch.Tensor] = _ops.softmax.default
_softmax_out: Callable[..., None] = _ops.softmax.out
_softmax_: Callable[..., None] = _ops.softmax_.default
_softmax_backward: Callable[..., torch.Tensor] = _ops.softmax_backward.default
_softmax_backward_: Callable[..., None] = _ops.softmax_backward_.default
_scores_backward_: Callable[..., None] = _ops.scores_backward_.default
_layer_norm_: Callable[..., None] = _ops.layer_norm_.default
_rms_norm_: Callable[..., None] = _ops.rms_norm_.default

_NORM_OPTIONAL = "weight", "bias", "residual"  # arguments of the norms that may be None
PIECE_BYTES = 8 << 20  # bytes of the probabilities' gradient that inplace_softmax_backward holds at a time


def softmax_(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Computes x <- softmax of x along `dim`, in place.

    Values are those of torch.softmax, NaN and inf included; statistics are in float32, or float64 for float64. The
    operation is differentiable any number of times. Backward needs only the result in x, and raises an error if x was
    overwritten after the call.

    Args:
        x: any shape, float64, float32, float16 or bfloat16, any non-overlapping strides.
        dim: the dimension along which the result sums to 1.

    Returns:
        x.

    Raises:
        RuntimeError: before anything is written, if the dtype or layout of x is not supported, if x overlaps itself, or
            if x is a leaf that requires a gradient.
        IndexError: if x has no such dimension.
        TypeError: if x is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> x = torch.tensor([[0.0, 0.0], [0.0, float("-inf")]])
        >>> matmuls.softmax_(x) is x
        True
        >>> x
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000]])
    """
    try:
        _softmax_(x, dim)
    except RuntimeError as error:
        raise clearer(error, "softmax_", x=x) from None
    return x


def softmax(x: torch.Tensor, dim: int = -1, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the softmax of x along `dim`, in a new tensor or in `out`.

    Values, statistics and gradients are those of `softmax_`. Under autocast it behaves as torch.softmax: the result is
    float32 on a GPU and has x's dtype on a CPU.

    Args:
        x: any shape, float64, float32, float16 or bfloat16, any strides.
        dim: the dimension along which the result sums to 1.
        out: a tensor of x's shape, dtype and device, with any non-overlapping strides; no gradient is recorded through
            it.

    Returns:
        A tensor of x's shape, or `out`.

    Raises:
        RuntimeError: before anything is written, if the dtype or layout of x is not supported, or if shape, dtype or
            device of out is not that of x.
        IndexError: if x has no such dimension.
        TypeError: if x or out is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.softmax(torch.zeros(2, 4), dim=0)
        tensor([[0.5000, 0.5000, 0.5000, 0.5000],
                [0.5000, 0.5000, 0.5000, 0.5000]])
    """
    try:
        if out is None:
            return _softmax(x, dim)
        _softmax_out(x, dim, out=out)
    except RuntimeError as error:
        raise clearer(error, "softmax", ("out",), x=x, out=out) from None
    return out


def softmax_backward(y: torch.Tensor, grad: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Computes the gradient of a softmax's input: y * (grad - sum(y * grad)) along `dim`.

    The operation is differentiable any number of times. The order of y and grad is the opposite of that of
    `scaled_masked_softmax_backward`.

    Args:
        y: the softmax's result, any shape; float64, float32, float16 or bfloat16.
        grad: the gradient of y; shape, dtype and device of y.
        dim: the dimension of the softmax.

    Returns:
        A tensor of y's shape.

    Raises:
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if y or grad is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.softmax_backward(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]))
        tensor([ 0.2500, -0.2500])
    """
    try:
        return _softmax_backward(y, grad, dim)
    except RuntimeError as error:
        raise clearer(error, "softmax_backward", y=y, grad=grad) from None


def softmax_backward_(y: torch.Tensor, grad: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Computes y <- y * (grad - sum(y * grad)) along `dim`: the gradient of a softmax's input, written over its result.

    Args:
        y: the softmax's result, any shape and non-overlapping strides; float64, float32, float16 or bfloat16.
        grad: the gradient of y; shape, dtype and device of y.
        dim: the dimension of the softmax.

    Returns:
        y.

    Raises:
        RuntimeError: before anything is written, if shapes, dtypes or devices do not match, or if a gradient would be
            recorded.
        TypeError: if y or grad is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> y = torch.tensor([0.5, 0.5])
        >>> matmuls.softmax_backward_(y, torch.tensor([1.0, 0.0])) is y
        True
    """
    try:
        _softmax_backward_(y, grad, dim)
    except RuntimeError as error:
        raise clearer(error, "softmax_backward_", y=y, grad=grad) from None
    return y


def layer_norm_(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes x <- layer_norm(x + residual) * weight + bias over the last dimension, in place.

    Statistics are those of the unrounded x + residual, in float32, or float64 for float64. The operation is
    differentiable any number of times in all arguments; once only if x is a view of another tensor. For backward, the
    normalized rows and one number for each row are saved. Without weight and bias the normalized rows are x itself, and
    no copy is made.

    Args:
        x: [..., N] float64, float32, float16 or bfloat16, any non-overlapping strides.
        weight: [N] or None, dtype and device of x.
        bias: [N] or None, dtype and device of x.
        eps: added to the variance.
        residual: x's shape, dtype and device, or None.

    Returns:
        x.

    Raises:
        RuntimeError: before anything is written, if shapes, dtypes or devices do not match, if x overlaps itself or
            another argument, or if x is a leaf that requires a gradient.
        TypeError: if an argument is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> x = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
        >>> matmuls.layer_norm_(x, weight=torch.tensor([2.0, 2.0]), residual=torch.ones(2, 2))
        tensor([[-2.0000,  2.0000],
                [ 0.0000,  0.0000]])
    """
    try:
        _layer_norm_(x, weight, bias, eps, residual)
    except RuntimeError as error:
        raise clearer(error, "layer_norm_", _NORM_OPTIONAL, x=x, weight=weight, bias=bias, residual=residual) from None
    return x


def rms_norm_(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes x <- (x + residual) / sqrt(mean((x + residual)^2) + eps) * weight over the last dimension, in place.

    Gradients and precision are those of `layer_norm_`.

    Args:
        x: [..., N] float64, float32, float16 or bfloat16, any non-overlapping strides.
        weight: [N] or None, dtype and device of x.
        eps: added to the mean square.
        residual: x's shape, dtype and device, or None.

    Returns:
        x.

    Raises:
        RuntimeError: as `layer_norm_`.
        TypeError: if an argument is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.rms_norm_(torch.tensor([[3.0, 4.0]]), eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    try:
        _rms_norm_(x, weight, eps, residual)
    except RuntimeError as error:
        raise clearer(error, "rms_norm_", _NORM_OPTIONAL, x=x, weight=weight, residual=residual) from None
    return x


# The upstream document's functions; the caller passes the numbers of rows and columns.


def _rows(name: str, x: torch.Tensor, n_rows: int, n_cols: int, what: str = "x") -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise clearer(TypeError(), name, **{what: x})
    if not x.is_contiguous() or x.numel() != n_rows * n_cols or min(n_rows, n_cols) < 0:
        raise RuntimeError(
            f"{name}: expected a contiguous tensor of {n_rows} x {n_cols} elements, "
            f"got sizes {list(x.shape)} with strides {list(x.stride())}"
        )
    return x.view(n_rows, n_cols)


def inplace_softmax(x: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
    """Computes x <- softmax of each row of x, in place. It is `softmax_` with explicit numbers of rows and columns.

    Args:
        x: contiguous, n_rows * n_cols elements in any shape; dtypes as `softmax_`.
        n_rows: number of rows.
        n_cols: number of columns.

    Returns:
        x.

    Raises:
        RuntimeError: if x is not contiguous, if its number of elements is not n_rows * n_cols, or if its dtype is not
            supported.
        TypeError: if x is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.inplace_softmax(torch.zeros(4), 2, 2)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    softmax_(_rows("inplace_softmax", x, n_rows, n_cols))
    return x


def layernorm(x: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
    """Computes x <- (x - mean) / sqrt(variance + 1e-5) for each row of x, in place.

    It is `layer_norm_` without weight and bias, with explicit numbers of rows and columns.

    Args:
        x: contiguous, n_rows * n_cols elements in any shape; dtypes as `layer_norm_`.
        n_rows: number of rows.
        n_cols: number of columns.

    Returns:
        x.

    Raises:
        RuntimeError: if x is not contiguous, if its number of elements is not n_rows * n_cols, or if its dtype is not
            supported.
        TypeError: if x is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.layernorm(torch.tensor([[1.0, 3.0]]), 1, 2)
        tensor([[-1.0000,  1.0000]])
    """
    rows = _rows("layernorm", x, n_rows, n_cols)
    # pass x rather than a view if possible: a view has no second derivative
    layer_norm_(x if x.shape[-1:] == rows.shape[-1:] else rows)
    return x


@torch.no_grad()
def inplace_softmax_backward(
    output: torch.Tensor, d_ov: torch.Tensor, values: torch.Tensor, rows: int, cols_output: int, cols_values: int
) -> torch.Tensor:
    """Computes the gradient of attention scores from their softmax, and writes it over the softmax.

    On entry `output` is softmax(scores), and d_ov is the gradient of output @ values. The gradient of the
    probabilities, d_ov @ values^T, is computed in pieces of at most 8 MiB (but at least one row) and never stored as a
    whole. No gradient is recorded.

    Args:
        output: [..., Q, K] the probabilities, contiguous, overwritten; float64, float32, float16 or bfloat16.
        d_ov: [..., Q, C] the gradient of output @ values; dtype and device of output.
        values: [..., K, C]; dtype and device of output.
        rows: the product of the leading dimensions of output, Q included.
        cols_output: K.
        cols_values: C.

    Returns:
        output, which holds the gradient of the scores.

    Raises:
        RuntimeError: before anything is written, if shapes, dtypes or devices do not match.
        TypeError: if an argument is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> probabilities, values = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0], [0.0]])
        >>> matmuls.inplace_softmax_backward(probabilities, torch.ones(1, 1), values, 1, 2, 1)
        tensor([[ 0.2500, -0.2500]])
    """
    name = "inplace_softmax_backward"
    _rows(name, output, rows, cols_output, "output")
    if not isinstance(d_ov, torch.Tensor) or not isinstance(values, torch.Tensor):
        raise clearer(TypeError(), name, d_ov=d_ov, values=values)
    if output.dim() < 2 or output.shape[-1] != cols_output:
        raise RuntimeError(
            f"{name}: expected output of at least two dimensions and {cols_output} columns, "
            f"got shape {list(output.shape)}"
        )
    lead, (queries, keys) = output.shape[:-2], output.shape[-2:]
    expected = [*lead, queries, cols_values], [*lead, keys, cols_values]
    if list(d_ov.shape) != expected[0] or list(values.shape) != expected[1]:
        raise RuntimeError(
            f"{name}: expected d_ov of shape {expected[0]} and values of shape {expected[1]} "
            f"for output of shape {list(output.shape)}, got {list(d_ov.shape)} and {list(values.shape)}"
        )
    _scores_backward_(output, d_ov, values, PIECE_BYTES)
    return output


@register_flop_formula(_ops.scores_backward_)
def _product_flops(y: torch.Size, grad: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * y.numel() * grad[-1]
