"""Softmax and norms of rows, in place, with gradients."""

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

PIECE_BYTES = 8 << 20  # bytes of the probabilities' gradient that inplace_softmax_backward holds at a time


def softmax_(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """x <- softmax of x along `dim`, in place: each element is read once and written once. Returns x.

    x: any shape, any non-overlapping strides, float64, float32, float16 or bfloat16; statistics in float32 (float64 for
    float64). Values as torch.softmax, including NaN and inf. Differentiable any number of times: backward needs only
    the result in x, and autograd detects later writes to x. A leaf that requires grad is refused, as by torch. Raises
    RuntimeError, before anything is written, on any other dtype or layout.
    """
    try:
        _softmax_(x, dim)
    except RuntimeError as error:
        raise clearer(error, "softmax_", x=x) from None
    return x


def softmax(x: torch.Tensor, dim: int = -1, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax of x along `dim`, in a new tensor or in `out`. Shapes, dtypes, values and errors as `softmax_`.

    out: x's shape, dtype and device, any non-overlapping strides; no gradient is recorded through it. Under autocast as
    torch.softmax: float32 on a GPU, x's dtype on a CPU.
    """
    try:
        if out is None:
            return _softmax(x, dim)
        _softmax_out(x, dim, out=out)
    except RuntimeError as error:
        raise clearer(error, "softmax", x=x, out=out) from None
    return out


def softmax_backward(y: torch.Tensor, grad: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The gradient of a softmax's input: y * (grad - sum(y * grad)) along `dim`. Differentiable.

    y: the softmax's result; grad: the gradient of y, the same shape, dtype and device; dtypes as `softmax_`.
    """
    try:
        return _softmax_backward(y, grad, dim)
    except RuntimeError as error:
        raise clearer(error, "softmax_backward", y=y, grad=grad) from None


def softmax_backward_(y: torch.Tensor, grad: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """`softmax_backward` written over y. Returns y. Shapes, dtypes and errors as there; also raises RuntimeError if a
    gradient would be recorded."""
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
    """x <- layer norm of x + residual over the last dimension, times weight, plus bias, in place. Returns x.

    x: [..., N] in float64, float32, float16 or bfloat16, any non-overlapping strides; weight, bias: [N]; residual: x's
    shape; one dtype and device for all. Statistics in float32 (float64 for float64) of the unrounded x + residual.
    Differentiable any number of times in all arguments (once if x is a view of another tensor). Saves the normalized
    rows, which without weight and bias are x itself, and one number per row.

    Raises RuntimeError, before anything is written, on shapes, dtypes or devices that do not match, on overlap, and on
    a leaf that requires grad.
    """
    try:
        _layer_norm_(x, weight, bias, eps, residual)
    except RuntimeError as error:
        raise clearer(error, "layer_norm_", x=x, weight=weight, bias=bias, residual=residual) from None
    return x


def rms_norm_(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x <- (x + residual) / sqrt(mean((x + residual)^2) + eps) * weight over the last dimension, in place. Returns x.

    Shapes, dtypes, gradients and errors as `layer_norm_`.
    """
    try:
        _rms_norm_(x, weight, eps, residual)
    except RuntimeError as error:
        raise clearer(error, "rms_norm_", x=x, weight=weight, residual=residual) from None
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
    """`softmax_` over the rows of x, contiguous and of n_rows * n_cols elements. Returns x. dtypes as `softmax_`;
    raises RuntimeError on another number of elements and if x is not contiguous."""
    softmax_(_rows("inplace_softmax", x, n_rows, n_cols))
    return x


def layernorm(x: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
    """x <- (x - E(x)) / sqrt(V(x) + 1e-5) over the rows of x, contiguous and of n_rows * n_cols elements. Returns x.
    dtypes as `layer_norm_`; errors as `inplace_softmax`."""
    rows = _rows("layernorm", x, n_rows, n_cols)
    # pass x rather than a view if possible: a view has no second derivative
    layer_norm_(x if x.shape[-1:] == rows.shape[-1:] else rows)
    return x


@torch.no_grad()
def inplace_softmax_backward(
    output: torch.Tensor, d_ov: torch.Tensor, values: torch.Tensor, rows: int, cols_output: int, cols_values: int
) -> torch.Tensor:
    """output <- gradient of the scores s, for output = softmax(s), in place. Returns output.

    output: [..., Q, K] probabilities, contiguous; d_ov: [..., Q, C], the gradient of output @ values; values: [..., K,
    C]; rows: product of the leading dimensions of output and d_ov; cols_output: K; cols_values: C. One of float64,
    float32, float16, bfloat16 for all three. The gradient of the probabilities, d_ov @ values^T, is computed and used
    in pieces of at most 8 MiB (or one row). No gradient is recorded. Raises RuntimeError, before anything is written,
    on shapes that do not match.
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
            f"beside output of shape {list(output.shape)}, got {list(d_ov.shape)} and {list(values.shape)}"
        )
    _scores_backward_(output, d_ov, values, PIECE_BYTES)
    return output


@register_flop_formula(_ops.scores_backward_)
def _product_flops(y: torch.Size, grad: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * y.numel() * grad[-1]
