"""Products written over their left operand: A <- A @ B, with a workspace of a few MiB whatever the size of A."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from custom_mm.arguments import clearer
from custom_mm.literals import Activation

_matmul_: Callable[..., None] = torch.ops.custom_mm.matmul_.default
_feed_forward_: Callable[..., None] = torch.ops.custom_mm.feed_forward_.default

WORKSPACE = 8 << 20  # bytes
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
    """a[..., :N] <- a @ b + bias over a's own memory; with `transb` b is transposed first. Returns a[..., :N].

    a: [..., K] in float64, float32, float16 or bfloat16, any non-overlapping strides (fastest if each row is
    contiguous); b: [K, N] with N <= K, or [N, K] with transb, any strides; bias: [N]. workspace: bytes of extra memory
    at most, but at least one row of a. float32 uses TF32 if torch's switch for products allows it.

    Differentiable any number of times in a and bias, saving only b. b's gradient needs the overwritten a: raises
    RuntimeError if one would be recorded, unless `keep_input` saves a copy of a. Raises RuntimeError, before anything
    is written, on shapes, dtypes or devices that do not match and if a overlaps itself, b or bias.
    """
    try:
        _matmul_(a, b, transb, bias, keep_input, workspace)
    except RuntimeError as error:
        raise clearer(error, "matmul_", a=a, b=b, bias=bias) from None
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
    """x[..., :N] <- F.linear(x, weight, bias) over x's own memory; weight: [N, K], N <= K. Otherwise as `matmul_`."""
    try:
        return matmul_(x, weight, transb=True, bias=bias, keep_input=keep_input, workspace=workspace)
    except TypeError as error:
        raise clearer(error, "linear_", x=x, weight=weight, bias=bias) from None


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
    """x <- layer_norm(x + F.linear(activation(F.linear(x, up, up_bias)), down, down_bias), weight, bias). Returns x.

    The second half of a transformer layer, for inference. Works on chunks of rows, with at most chunk_bytes of
    intermediate rows (or one row) at a time. x: [..., H] in float64, float32, float16 or bfloat16, any non-overlapping
    strides; up: [I, H]; up_bias: [I]; down: [H, I]; down_bias, weight, bias: [H]. activation: as in `matmul`. Raises
    RuntimeError, before anything is written, on shapes, dtypes or devices that do not match, if x overlaps itself or
    another argument, and if a gradient would be recorded.
    """
    try:
        _feed_forward_(x, up, up_bias, down, down_bias, weight, bias, eps, activation, chunk_bytes)
    except RuntimeError as error:
        raise clearer(
            error,
            "feed_forward_",
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
    """a <- a @ b over the rows of a, contiguous and of n_rows * n_cols elements; b: [n_cols, n_cols]. Returns a. dtypes
    and errors as `matmul_`, except that a copy of a is saved if b's gradient is recorded."""
    matmul_(_square("square_matmul", a, b, n_rows, n_cols), b, keep_input=True)
    return a


def square_matmul_T(a: torch.Tensor, b: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
    """a <- a @ b^T over the rows of a; otherwise as `square_matmul`. Returns a."""
    matmul_(_square("square_matmul_T", a, b, n_rows, n_cols), b, transb=True, keep_input=True)
    return a
