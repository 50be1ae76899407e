"""Library handles, build facts, and low-level products under their libraries' names; wraps the compiled module.

Importing it loads `custom_mm._C`, which registers every operator under `torch.ops.custom_mm`.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import _C
from .arguments import clearer
from .indices import check_parts
from .literals import Activation, Algorithm, Layout

__all__ = [
    "bias_act_",
    "build_info",
    "cublas_bmm",
    "cublas_mmul",
    "cublaslt_matmul",
    "cusparse_mmul",
    "cusparse_prepare",
    "cusparse_sddmm",
    "cusparse_spmm",
    "destroy_cublas",
    "destroy_cublaslt",
    "destroy_cusparse",
    "handle_info",
    "init_cublas",
    "init_cublaslt",
    "init_cusparse",
    "set_workspace_size",
    "workspace_size",
]


_matmul: Callable[..., torch.Tensor] = torch.ops.custom_mm.matmul.default
_cublaslt_matmul: Callable[..., torch.Tensor] = torch.ops.custom_mm.cublaslt_matmul.default
_cusparse_spmm: Callable[..., torch.Tensor] = torch.ops.custom_mm.cusparse_spmm.default
_cusparse_prepare: Callable[..., torch.Tensor] = torch.ops.custom_mm.cusparse_prepare.default
_cusparse_sddmm: Callable[..., torch.Tensor] = torch.ops.custom_mm.cusparse_sddmm.default


@functools.cache
def _warn_no_cuda() -> None:
    why = "this build has no CUDA" if _C.build_info()["cuda"] is None else "no CUDA device is visible"
    warnings.warn(f"custom_mm: {why}; CPU tensors need no handle and work as they are", stacklevel=4)


def _init(library: str) -> int:
    devices: int = getattr(_C, f"init_{library}")()
    if devices == 0:
        _warn_no_cuda()
    return devices


def init_cublas() -> int:
    """Creates this thread's cuBLAS handle and workspace on every visible GPU, ahead of the first product.

    Idempotent. Without CUDA it does nothing, with one warning per process: CPU tensors need no handle.

    Returns:
        The number of GPUs; 0 without CUDA.

    Examples:
        >>> import custom_mm
        >>> custom_mm.init_cublas() >= 0
        True
    """
    return _init("cublas")


def init_cublaslt() -> int:
    """Creates this thread's cuBLASLt handle and workspace on every visible GPU, as `init_cublas`.

    Returns:
        The number of GPUs; 0 without CUDA.

    Examples:
        >>> import custom_mm
        >>> custom_mm.init_cublaslt() >= 0
        True
    """
    return _init("cublaslt")


def init_cusparse() -> int:
    """Creates this thread's cuSPARSE handle on every visible GPU, as `init_cublas`.

    Returns:
        The number of GPUs; 0 without CUDA.

    Examples:
        >>> import custom_mm
        >>> custom_mm.init_cusparse() >= 0
        True
    """
    return _init("cusparse")


def destroy_cublas() -> None:
    """Destroys the cuBLAS handles and workspaces of every thread on every GPU; a later product creates new ones.

    Idempotent.

    Raises:
        RuntimeError: while a CUDA graph that uses one is being captured.

    Examples:
        >>> import custom_mm
        >>> custom_mm.destroy_cublas()
        >>> [handle for handle in custom_mm.handle_info() if handle["library"] == "cublas"]
        []
    """
    _C.destroy_cublas()


def destroy_cublaslt() -> None:
    """Destroys the cuBLASLt handles, plans and workspaces of every thread on every GPU, as `destroy_cublas`.

    Raises:
        RuntimeError: while a CUDA graph that uses one is being captured.

    Examples:
        >>> import custom_mm
        >>> custom_mm.destroy_cublaslt()
    """
    _C.destroy_cublaslt()


def destroy_cusparse() -> None:
    """Destroys the cuSPARSE handles of every thread on every GPU, as `destroy_cublas`.

    Raises:
        RuntimeError: while a CUDA graph that uses one is being captured.

    Examples:
        >>> import custom_mm
        >>> custom_mm.destroy_cusparse()
    """
    _C.destroy_cusparse()


def handle_info() -> "list[_C.Handle]":
    """Lists the live handles of all threads.

    Returns:
        For each its `library`, `device`, `thread` ("free" if its thread has ended) and `workspaces`, each of which has
        the id of its `stream` and `nbytes`.

    Examples:
        >>> import custom_mm
        >>> custom_mm.destroy_cublas(), custom_mm.destroy_cublaslt(), custom_mm.destroy_cusparse()
        (None, None, None)
        >>> custom_mm.handle_info()
        []
    """
    return _C.handle_info()


def set_workspace_size(nbytes: int) -> None:
    """Sets the bytes of workspace of each handle and stream from the next call on.

    Workspaces are allocated by the driver, outside torch's caching allocator; under graph capture from the capture's
    pool.

    Args:
        nbytes: 0 is the default: 32 MiB from sm_90 on, 8 MiB before.

    Raises:
        RuntimeError: on a size below 0.

    Examples:
        >>> import custom_mm
        >>> custom_mm.set_workspace_size(16 << 20)
        >>> custom_mm.workspace_size()
        16777216
        >>> custom_mm.set_workspace_size(0)
    """
    _C.set_workspace_size(nbytes)


def workspace_size() -> int:
    """Tells the value given to `set_workspace_size`.

    Returns:
        Bytes; 0 is the default.

    Examples:
        >>> import custom_mm
        >>> custom_mm.workspace_size()
        0
    """
    return _C.workspace_size()


def build_info() -> dict[str, Any]:
    """Tells what the extension was built with.

    Returns:
        torch, the compiler, and with CUDA its version, architectures and libraries.

    Examples:
        >>> import custom_mm
        >>> "torch" in custom_mm.build_info()
        True
    """
    return _C.build_info()


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
    """Computes op(a) @ op(b) for two matrices by cublasGemmEx, and by torch's BLAS on a CPU.

    Args:
        a: [M, K], or [K, M] with transa; float64, float32, float16, bfloat16, complex64 or complex128.
        b: [K, N], or [N, K] with transb; dtype and device of a.
        c: [M, N], written and returned, or None.
        transa: transpose a.
        transb: transpose b.

    Returns:
        [M, N], differentiable, or c.

    Raises:
        RuntimeError: on any other shape, dtype or device, and if c overlaps a or b.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> custom_mm.cublas_mmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), transb=True)
        tensor([[11.]])
    """
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        raise clearer(TypeError(), "cublas_mmul", a=a, b=b)
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
    """Computes op(a) @ op(b) for batches of matrices by cublasGemmStridedBatchedEx, and by torch's BLAS on a CPU.

    Args:
        a: [..., M, K], or [..., K, M] with transa, at least three dimensions; dtypes as `cublas_mmul`.
        b: [..., K, N], or [..., N, K] with transb, as many dimensions; batch sizes are equal or 1.
        c: [..., M, N], written and returned, or None.
        dim: the number of dimensions, checked if given.
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
        raise clearer(TypeError(), "cublas_bmm", a=a, b=b)
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
    """Computes activation(op(a) @ op(b) + bias) by cublasLtMatmul, all in its epilogue, and by torch on a CPU.

    A repeated shape costs one look-up in the handle's cache of plans. cuBLASLt has no epilogue for "gelu": a second
    kernel applies it.

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
        raise clearer(error, "cublaslt_matmul", a=a, b=b, bias=bias, c=c) from None
    return c


def bias_act_(x: torch.Tensor, bias: torch.Tensor | None = None, activation: Activation | None = None) -> torch.Tensor:
    """Computes x <- activation(x + bias) in place, in one pass over x.

    Arithmetic is in float32 or wider. There is no gradient: it needs the overwritten values.

    Args:
        x: [..., N] float64, float32, float16 or bfloat16, any non-overlapping strides.
        bias: [N], dtype and device of x, or None.
        activation: None, "relu", "gelu" (by erf) or "gelu_tanh".

    Returns:
        x.

    Raises:
        RuntimeError: before anything is written, if shapes, dtypes or devices do not match, on overlap, and if a
            gradient would be recorded.
        TypeError: if x or bias is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> custom_mm.bias_act_(torch.tensor([[1.0, -2.0]]), torch.tensor([1.0, 1.0]), "relu")
        tensor([[2., 0.]])
    """
    try:
        torch.ops.custom_mm.bias_act_.default(x, bias, activation)
    except RuntimeError as error:
        raise clearer(error, "bias_act_", x=x, bias=bias) from None
    return x


def _check_parts(
    name: str, layout: str, offsets: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, rows: int, columns: int
) -> None:
    height, width = values.shape[1:] if layout == "bsr" and values.dim() == 3 else (1, 1)
    if layout in ("csr", "csc", "coo", "bsr"):  # the operator raises for other layouts
        check_parts(name, layout, offsets, indices, rows, columns, height, width)


def cusparse_mmul(
    values: torch.Tensor,
    columns: torch.Tensor,
    offsets: torch.Tensor,
    nnz: int,
    rows: int,
    cols: int,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes A @ b for a CSR matrix A by cusparseSpMM, and by this project's kernel on a CPU.

    As `cusparse_spmm`, with the values first.

    Args:
        values: [nnz] float64, float32, float16 or bfloat16.
        columns: [nnz] int32 or int64.
        offsets: [rows + 1], dtype of columns.
        nnz: the number of nonzeros.
        rows: of A.
        cols: of A.
        b: [cols, N], dtype and device of values.
        c: [rows, N], written and returned, or None.

    Returns:
        [rows, N], differentiable in values and b, or c.

    Raises:
        ValueError: on bad indices and another number of nonzeros.
        RuntimeError: if shapes, dtypes or devices do not match, and on overlap.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> values, columns, offsets = torch.tensor([1.0, 2.0]), torch.tensor([1, 0]), torch.tensor([0, 1, 2])
        >>> custom_mm.cusparse_mmul(values, columns, offsets, 2, 2, 2, torch.tensor([[3.0], [4.0]]))
        tensor([[4.],
                [6.]])
    """
    if not isinstance(columns, torch.Tensor) or not isinstance(values, torch.Tensor):
        raise TypeError(
            f"cusparse_mmul: expected tensors of values and columns, got {type(values).__name__} and "
            f"{type(columns).__name__}"
        )
    if columns.shape != (nnz,) or values.shape != (nnz,):
        raise ValueError(
            f"cusparse_mmul: expected values and columns of shape [{nnz}], got {list(values.shape)} and "
            f"{list(columns.shape)}"
        )
    return cusparse_spmm(offsets, columns, values, b, rows, cols, out=c)


def cusparse_spmm(
    offsets: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    b: torch.Tensor,
    rows: int,
    columns: int,
    *,
    layout: Layout = "csr",
    algorithm: Algorithm = "default",
    transa: bool = False,
    transb: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: torch.Tensor | None = None,
    prepared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes alpha * op(A) @ op(b) by cusparseSpMM, or out <- that + beta * out; by this project's kernel on a CPU.

    A [rows, columns] has one of four layouts:

    | layout | offsets | indices | values | |---|---|---|---| | "csr" | [rows + 1] | [nnz]: columns | [nnz] | | "csc" |
    [columns + 1] | [nnz]: rows | [nnz] | | "coo" | [nnz]: rows, not decreasing | [nnz]: columns | [nnz] | | "bsr" |
    [rows / height + 1] | [blocks]: columns of blocks | [blocks, height, width] |

    Differentiable in values and b, by this project's kernels. Indices are validated once, for as long as they live and
    are not written to; validation waits for the GPU. 16-bit types are summed in float32. cuSPARSE has the same bits
    every time only for "csr_alg3", "coo_alg2" and "bsr_alg1", and for none with transa.

    Args:
        offsets: int32 or int64, as the table says.
        indices: dtype of offsets, as the table says.
        values: float64, float32, float16 or bfloat16, as the table says.
        b: [K, N], or [N, K] with transb, row- or column-major without a copy; dtype and device of values.
        rows: of A.
        columns: of A.
        layout: "csr", "csc", "coo" or "bsr".
        algorithm: "default"; "csr_alg1" to "csr_alg3" for csr and csc; "coo_alg1" to "coo_alg4" for coo; "bsr_alg1".
        transa: multiply by A^T.
        transb: transpose b.
        alpha: multiplies the product.
        beta: multiplies out.
        out: [M, N], any strides, written and returned.
        prepared: the result of `cusparse_prepare` for such a call.

    Returns:
        [M, N], or out.

    Raises:
        ValueError: on bad indices, layouts and algorithms, and on beta without out.
        RuntimeError: if shapes, dtypes or devices do not match, on overlap, and, naming the call, on what cuSPARSE does
            not support.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> offsets, columns, values = torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([1.0, 2.0])
        >>> custom_mm.cusparse_spmm(offsets, columns, values, torch.tensor([[3.0], [4.0]]), 2, 2, alpha=10)
        tensor([[40.],
                [60.]])
    """
    if out is None and beta != 0:
        raise ValueError(f"cusparse_spmm: expected out= beside beta={beta}, which multiplies it")
    if out is not None and prepared is not None:
        raise ValueError("cusparse_spmm: expected out= or prepared=, got both")
    _check_parts("cusparse_spmm", layout, offsets, indices, values, rows, columns)
    arguments = offsets, indices, values, b, rows, columns, layout, algorithm, transa, transb, alpha
    try:
        if out is None:
            return _cusparse_spmm(*arguments, prepared)
        torch.ops.custom_mm.cusparse_spmm.out(*arguments, beta, out=out)
    except RuntimeError as error:
        raise clearer(error, "cusparse_spmm", values=values, b=b, out=out, prepared=prepared) from None
    return out


def cusparse_prepare(
    offsets: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    b: torch.Tensor,
    rows: int,
    columns: int,
    *,
    layout: Layout = "csr",
    algorithm: Algorithm = "default",
    transa: bool = False,
    transb: bool = False,
) -> torch.Tensor:
    """Computes what cusparseSpMM_preprocess keeps for a matrix, for `cusparse_spmm(..., prepared=)` with the same
    arguments.

    The values of A and b and the scalars may change, but not the indices, the algorithm, the number of columns or the
    order (row- or column-major) of b. Only one stream at a time may use it.

    Args:
        offsets: contiguous, as in `cusparse_spmm`.
        indices: contiguous, as in `cusparse_spmm`.
        values: as in `cusparse_spmm`.
        b: as in `cusparse_spmm`.
        rows: of A.
        columns: of A.
        layout: as in `cusparse_spmm`.
        algorithm: as in `cusparse_spmm`.
        transa: multiply by A^T.
        transb: transpose b.

    Returns:
        An empty tensor whose storage is cuSPARSE's buffer.

    Raises:
        ValueError: on bad indices, layouts and algorithms, and if offsets or indices are not contiguous.
        RuntimeError: if shapes, dtypes or devices do not match, and on what cuSPARSE does not support.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> matrix = torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([1.0, 2.0])
        >>> b = torch.tensor([[3.0], [4.0]])
        >>> prepared = custom_mm.cusparse_prepare(*matrix, b, 2, 2)
        >>> custom_mm.cusparse_spmm(*matrix, b, 2, 2, prepared=prepared).flatten()
        tensor([4., 6.])
    """
    _check_parts("cusparse_prepare", layout, offsets, indices, values, rows, columns)
    try:
        return _cusparse_prepare(offsets, indices, values, b, rows, columns, layout, algorithm, transa, transb)
    except RuntimeError as error:
        raise clearer(error, "cusparse_prepare", values=values, b=b) from None


def cusparse_sddmm(
    offsets: torch.Tensor, columns: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alpha: float = 1.0
) -> torch.Tensor:
    """Computes alpha * (a @ b) at the nonzeros of a CSR matrix by cusparseSDDMM, and by this project's kernel on a CPU.

    Differentiable in a and b.

    Args:
        offsets: [M + 1] int32 or int64.
        columns: [nnz], dtype of offsets.
        a: [M, D], read without a copy; float64 or float32, and 16-bit types where cuSPARSE supports them.
        b: [D, K], read without a copy; dtype and device of a.
        alpha: multiplies the product.

    Returns:
        [nnz].

    Raises:
        ValueError: on bad indices.
        RuntimeError: if shapes, dtypes or devices do not match, and on what cuSPARSE does not support.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]])
        >>> custom_mm.cusparse_sddmm(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), a, b)
        tensor([4., 6.])
    """
    if offsets.dim() == 1 and offsets.shape[0] > 0 and b.dim() == 2:
        check_parts("cusparse_sddmm", "csr", offsets, columns, offsets.shape[0] - 1, b.shape[1], 1, 1)
    try:
        return _cusparse_sddmm(offsets, columns, a, b, alpha)
    except RuntimeError as error:
        raise clearer(error, "cusparse_sddmm", offsets=offsets, columns=columns, a=a, b=b) from None
