"""Dense products and an activation under the names of cuBLAS and cuBLASLt."""

from collections.abc import Callable

import torch

from .arguments import clearer, type_name
from .literals import Activation

_matmul: Callable[..., torch.Tensor] = torch.ops.custom_mm.matmul.default
_cublaslt_matmul: Callable[..., torch.Tensor] = torch.ops.custom_mm.cublaslt_matmul.default


def _product(
    name: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, transa: bool, transb: bool
) -> torch.Tensor:
    if c is None:
        return _matmul(a, b, transa, transb)
    try:
        torch.ops.custom_mm.matmul.out(a, b, transa, transb, out=c)
    except RuntimeError as error:
        raise clearer(error, name, c=c) from None
    return c


def cublas_mmul(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, transa: bool = False, transb: bool = False
) -> torch.Tensor:
    """Computes op(a) @ op(b) for two matrices by cublasGemmEx, or by torch's BLAS on a CPU.

    Args:
        a: [M, K], or [K, M] with transa; float64, float32, float16, bfloat16, complex64 or complex128.
        b: [K, N], or [N, K] with transb; dtype and device of a.
        c: [M, N], written and returned, or None.
        transa: transpose a.
        transb: transpose b.

    Returns:
        [M, N], differentiable, or c.

    Raises:
        RuntimeError: if shapes, dtypes or devices do not match, or if c overlaps a or b.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> custom_mm.cublas_mmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), transb=True)
        tensor([[11.]])
    """
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        error = TypeError(f"cublas_mmul: expected two tensors for a and b, got {type_name(a)} and {type_name(b)}")
        raise clearer(error, "cublas_mmul", a=a, b=b)
    if a.dim() != 2 or b.dim() != 2:
        raise RuntimeError(f"cublas_mmul: expected two matrices, got shapes {list(a.shape)} and {list(b.shape)}")
    return _product("cublas_mmul", a, b, c, transa, transb)


def cublas_bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    dim: int | None = None,
    transa: bool = False,
    transb: bool = False,
) -> torch.Tensor:
    """Computes op(a) @ op(b) for batches of matrices by cublasGemmStridedBatchedEx, or by torch's BLAS on a CPU.

    Args:
        a: [..., M, K], or [..., K, M] with transa, at least three dimensions; dtypes as `cublas_mmul`.
        b: [..., K, N], or [..., N, K] with transb, as many dimensions as a. Corresponding batch sizes must be equal, or
            one of them 1.
        c: [..., M, N], written and returned, or None.
        dim: the number of dimensions of a and b; if given, it is checked.
        transa: transpose the last two dimensions of a.
        transb: transpose the last two dimensions of b.

    Returns:
        [..., M, N], differentiable, or c.

    Raises:
        RuntimeError: as `cublas_mmul`.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> custom_mm.cublas_bmm(torch.ones(2, 1, 3), torch.ones(2, 3, 1)).flatten()
        tensor([3., 3.])
    """
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        error = TypeError(f"cublas_bmm: expected two tensors for a and b, got {type_name(a)} and {type_name(b)}")
        raise clearer(error, "cublas_bmm", a=a, b=b)
    if a.dim() != b.dim() or a.dim() < 3 or dim not in (None, a.dim()):
        expected = "at least 3 dimensions each, equally many" if dim is None else f"{dim} dimensions each"
        raise RuntimeError(f"cublas_bmm: expected {expected}, got shapes {list(a.shape)} and {list(b.shape)}")
    return _product("cublas_bmm", a, b, c, transa, transb)


def cublaslt_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    transa: bool = False,
    transb: bool = False,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes activation(op(a) @ op(b) + bias) by cublasLtMatmul, or by torch on a CPU.

    cuBLASLt applies bias and activation in its epilogue if it has one: for "relu" in float32 and 16 bits, for
    "gelu_tanh" in 16 bits. In all other cases, also "gelu" and float64, a second kernel applies them. The algorithm for
    a shape is found in the first call and cached with the handle. On Hopper the kernels `linear_rows` and
    `linear_tiles` compute products in 16 bits with "gelu", and those of few rows, where they were measured to be
    faster.

    Args:
        a: any shape that torch.matmul accepts; dtypes as `cublas_mmul`.
        b: any shape that torch.matmul accepts; dtype and device of a.
        bias: [N] or None.
        activation: None, "relu", "gelu" (by erf) or "gelu_tanh"; None for complex dtypes.
        transa: transpose the last two dimensions of a.
        transb: transpose the last two dimensions of b.
        c: written and returned, or None.

    Returns:
        The product, differentiable, or c.

    Raises:
        RuntimeError: as `cublas_mmul`.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> custom_mm.cublaslt_matmul(torch.eye(2), torch.tensor([[1.0], [-1.0]]), torch.tensor([0.5]), "relu")
        tensor([[1.5000],
                [0.0000]])
    """
    try:
        if c is None:
            return _cublaslt_matmul(a, b, bias, activation, transa, transb)
        torch.ops.custom_mm.cublaslt_matmul.out(a, b, bias, activation, transa, transb, out=c)
    except RuntimeError as error:
        raise clearer(error, "cublaslt_matmul", ("bias", "c"), a=a, b=b, bias=bias, c=c) from None
    return c


def bias_act_(x: torch.Tensor, bias: torch.Tensor | None = None, activation: Activation | None = None) -> torch.Tensor:
    """Computes x <- activation(x + bias) in place, in one pass over x.

    Arithmetic is in float32 or wider. There is no gradient, because it would need the overwritten values.

    Args:
        x: [..., N] float64, float32, float16 or bfloat16, any non-overlapping strides.
        bias: [N], dtype and device of x, or None.
        activation: None, "relu", "gelu" (by erf) or "gelu_tanh".

    Returns:
        x.

    Raises:
        RuntimeError: before anything is written, if shapes, dtypes or devices do not match, if x overlaps itself or
            bias, or if a gradient would be recorded.
        TypeError: if x or bias is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> custom_mm.bias_act_(torch.tensor([[1.0, -2.0]]), torch.tensor([1.0, 1.0]), "relu")
        tensor([[2., 0.]])
    """
    try:
        torch.ops.custom_mm.bias_act_.default(x, bias, activation)
    except RuntimeError as error:
        raise clearer(error, "bias_act_", ("bias",), x=x, bias=bias) from None
    return x
