"""Products written over their left operand: A <- A @ B, with a workspace of a few MiB whatever the size of A."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from custom_mm.arguments import clearer
from custom_mm.literals import Activation

_matmul_: Callable[..., None] = torch.ops.custom_mm.matmul_.default
_feed_forward_: Callable[..., None] = torch.ops.custom_mm.feed_forward_.default

WORKSPACE = 16 << 20  # bytes
CHUNK_BYTES = 32 << 20  # bytes of a feed-forward network's intermediate rows


def matmul_(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    transb: bool = False,
    bias: torch.Tensor | None = None,
    keep_input: bool = False,
    workspace: int = WORKSPACE,
) -> torch.Tensor:
    """Computes a[..., :N] <- a @ b + bias in a's own memory, with a workspace of a few MiB for any size of a.

    The operation is differentiable any number of times in a and bias; only b is saved for backward. The gradient of b
    needs the overwritten a, so a call that would record it raises an error, unless `keep_input` saves a copy of a.
    float32 uses TF32 if torch's switch for products allows it.

    Args:
        a: [..., K] float64, float32, float16 or bfloat16, any non-overlapping strides. The product is fastest if each
            row is contiguous.
        b: [K, N] with N <= K, or [N, K] with transb, any strides; dtype and device of a.
        transb: transpose b first.
        bias: [N], dtype and device of a.
        keep_input: save a copy of a if the gradient of b is recorded.
        workspace: maximum bytes of extra memory; at least one row of a is allocated.

    Returns:
        a[..., :N], a view of a, or a itself if N = K.

    Raises:
        RuntimeError: before anything is written, if shapes, dtypes or devices do not match, if a overlaps itself, b or
            bias, or if the gradient of b would be recorded without keep_input.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> matmuls.matmul_(a, torch.tensor([[0.0, 1.0], [1.0, 0.0]])) is a
        True
        >>> a
        tensor([[2., 1.],
                [4., 3.]])
    """
    try:
        _matmul_(a, b, transb, bias, keep_input, workspace)
    except RuntimeError as error:
        raise clearer(error, "matmul_", ("bias",), a=a, b=b, bias=bias) from None
    columns = b.shape[0 if transb else 1]
    return a if columns == a.shape[-1] else a[..., :columns]


def linear_(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    keep_input: bool = False,
    workspace: int = WORKSPACE,
) -> torch.Tensor:
    """Computes x[..., :N] <- torch.nn.functional.linear(x, weight, bias) in x's own memory.

    It is `matmul_` with `transb=True`, with the same gradients, dtypes and use of memory.

    Args:
        x: [..., K] float64, float32, float16 or bfloat16, any non-overlapping strides.
        weight: [N, K] with N <= K, any strides; dtype and device of x.
        bias: [N], dtype and device of x.
        keep_input: save a copy of x if the gradient of weight is recorded.
        workspace: maximum bytes of extra memory; at least one row of x is allocated.

    Returns:
        x[..., :N], a view of x, or x itself if N = K.

    Raises:
        RuntimeError: as `matmul_`.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> matmuls.linear_(x, torch.tensor([[1.0, 1.0]]), torch.tensor([0.5]))
        tensor([[3.5000],
                [7.5000]])
    """
    try:
        return matmul_(x, weight, transb=True, bias=bias, keep_input=keep_input, workspace=workspace)
    except TypeError as error:
        raise clearer(error, "linear_", ("bias",), x=x, weight=weight, bias=bias) from None
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # no memory, or torch's own: made in other ways than of a message
            raise
        raise RuntimeError(f"linear_, with x as a and weight as b: {error}") from None


def feed_forward_(
    x: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: Activation | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """Computes x <- layer_norm(x + linear(activation(linear(x, up, up_bias)), down, down_bias), weight, bias) in place.

    This is the second half of a transformer layer, for inference. It is computed in chunks of rows, so that the
    intermediate activations of a chunk take at most `chunk_bytes`. A chunk has at least one row.

    Args:
        x: [..., H] float64, float32, float16 or bfloat16, any non-overlapping strides.
        up: [I, H], weight of the first linear layer. All parameters have the dtype and device of x.
        up_bias: [I] or None.
        down: [H, I], weight of the second linear layer.
        down_bias: [H] or None.
        weight: [H], weight of the layer norm, or None.
        bias: [H], bias of the layer norm, or None.
        eps: added to the variance.
        activation: None, "relu", "gelu" (by erf) or "gelu_tanh".
        chunk_bytes: maximum bytes of the intermediate activations of a chunk.

    Returns:
        x.

    Raises:
        RuntimeError: before anything is written, if shapes, dtypes or devices do not match, if x overlaps itself or
            another argument, or if a gradient would be recorded.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> x, up, down = torch.tensor([[1.0, 3.0]]), torch.eye(2), torch.zeros(2, 2)
        >>> matmuls.feed_forward_(x, up, None, down, None, activation="gelu")
        tensor([[-1.0000,  1.0000]])
    """
    try:
        _feed_forward_(x, up, up_bias, down, down_bias, weight, bias, eps, activation, chunk_bytes)
    except RuntimeError as error:
        raise clearer(
            error,
            "feed_forward_",
            ("up_bias", "down_bias", "weight", "bias"),
            x=x,
            up=up,
            up_bias=up_bias,
            down=down,
            down_bias=down_bias,
            weight=weight,
            bias=bias,
        ) from None
    return x


@register_flop_formula(torch.ops.custom_mm.matmul_)
def _product_flops(a: torch.Size, b: torch.Size, transb: bool = False, *args: Any, **kwargs: Any) -> int:
    return 2 * a.numel() * b[0 if transb else 1]


@register_flop_formula(torch.ops.custom_mm.feed_forward_)
def _network_flops(x: torch.Size, up: torch.Size, *args: Any, **kwargs: Any) -> int:
    """FLOPs of the two products."""
    return 4 * x.numel() * up[0]


# The upstream document's functions. They accept any b: if b needs a gradient, a copy of a is saved for it.


def _square(name: str, a: torch.Tensor, b: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        raise clearer(TypeError(), name, a=a, b=b)
    if not a.is_contiguous() or a.numel() != n_rows * n_cols or list(b.shape) != [n_cols, n_cols]:
        raise RuntimeError(
            f"{name}: expected a contiguous tensor of {n_rows} x {n_cols} elements and a square one of {n_cols} x "
            f"{n_cols}, got shapes {list(a.shape)} with strides {list(a.stride())} and {list(b.shape)}"
        )
    return a if a.shape[-1:] == (n_cols,) else a.view(n_rows, n_cols)


def square_matmul(a: torch.Tensor, b: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
    """Computes a <- a @ b in place, for a seen as a matrix of n_rows rows and a square b.

    It is `matmul_` with keep_input: a copy of a is saved if the gradient of b is recorded.

    Args:
        a: contiguous, n_rows * n_cols elements in any shape; float64, float32, float16 or bfloat16.
        b: [n_cols, n_cols], dtype and device of a.
        n_rows: number of rows.
        n_cols: number of columns.

    Returns:
        a.

    Raises:
        RuntimeError: if a is not contiguous, or if shapes, dtypes or devices do not match.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.square_matmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0], [2.0, 0.0]]), 1, 2)
        tensor([[4., 1.]])
    """
    matmul_(_square("square_matmul", a, b, n_rows, n_cols), b, keep_input=True)
    return a


def square_matmul_T(a: torch.Tensor, b: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
    """Computes a <- a @ b^T in place, for a seen as a matrix of n_rows rows and a square b.

    It is `square_matmul` with b transposed.

    Args:
        a: contiguous, n_rows * n_cols elements in any shape; float64, float32, float16 or bfloat16.
        b: [n_cols, n_cols], dtype and device of a.
        n_rows: number of rows.
        n_cols: number of columns.

    Returns:
        a.

    Raises:
        RuntimeError: if a is not contiguous, or if shapes, dtypes or devices do not match.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.square_matmul_T(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0], [2.0, 0.0]]), 1, 2)
        tensor([[2., 2.]])
    """
    matmul_(_square("square_matmul_T", a, b, n_rows, n_cols), b, transb=True, keep_input=True)
    return a
