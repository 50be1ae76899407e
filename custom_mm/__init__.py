"""Library handles, build facts, and low-level products under their libraries' names; wraps the compiled module.

Importing it loads `custom_mm._C`, which registers every operator under `torch.ops.custom_mm`.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .compiled import _C
from .indices import check_parts

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
    """Create this thread's cuBLAS handle and workspace on every visible GPU, ahead of the first product.

    Returns the number of devices; 0 without CUDA, with one warning per process. Idempotent.
    """
    return _init("cublas")


def init_cublaslt() -> int:
    """Create this thread's cuBLASLt handle and workspace on every visible GPU; as `init_cublas`."""
    return _init("cublaslt")


def init_cusparse() -> int:
    """Create this thread's cuSPARSE handle on every visible GPU; as `init_cublas`."""
    return _init("cusparse")


def destroy_cublas() -> None:
    """Destroy the cuBLAS handles and workspaces of every thread on every GPU; a later product creates new ones.

    Idempotent. Raises RuntimeError while a CUDA graph that uses one is being captured.
    """
    _C.destroy_cublas()


def destroy_cublaslt() -> None:
    """Destroy the cuBLASLt handles, plans and workspaces; as `destroy_cublas`."""
    _C.destroy_cublaslt()


def destroy_cusparse() -> None:
    """Destroy the cuSPARSE handles; as `destroy_cublas`."""
    _C.destroy_cusparse()


def handle_info() -> "list[_C.Handle]":
    """The live handles of all threads: library, device, thread ("free" if its thread has ended) and workspaces, each
    with its stream and bytes."""
    return _C.handle_info()


def set_workspace_size(nbytes: int) -> None:
    """Bytes of workspace per (handle, stream) from the next call on; 0: 32 MiB from sm_90 on, 8 MiB before.

    Workspaces are allocated by the driver, outside torch's caching allocator; under graph capture from the capture's
    pool. Raises RuntimeError on a size below 0.
    """
    _C.set_workspace_size(nbytes)


def workspace_size() -> int:
    """The value given to `set_workspace_size`, in bytes; 0 is the default."""
    return _C.workspace_size()


def build_info() -> dict[str, Any]:
    """What the module was built with: torch, compiler, and with CUDA its version, architectures and libraries."""
    return _C.build_info()


def _product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, transa: bool, transb: bool) -> torch.Tensor:
    if c is None:
        return _matmul(a, b, transa, transb)
    torch.ops.custom_mm.matmul.out(a, b, transa, transb, out=c)
    return c


def cublas_mmul(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, transa: bool = False, transb: bool = False
) -> torch.Tensor:
    """op(a) @ op(b) for two matrices by cublasGemmEx; torch's BLAS on the CPU.

    a: [M, K], or [K, M] with transa; b: [K, N], or [N, K] with transb; c: [M, N], written and returned if given.
    float64, float32, float16, bfloat16, complex64, complex128, one dtype and device for all. Raises RuntimeError on any
    other shape, dtype or device, and if c overlaps a or b.
    """
    if a.dim() != 2 or b.dim() != 2:
        raise RuntimeError(f"cublas_mmul: expected two matrices, got shapes {list(a.shape)} and {list(b.shape)}")
    return _product(a, b, c, transa, transb)


def cublas_bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    dim: int | None = None,
    transa: bool = False,
    transb: bool = False,
) -> torch.Tensor:
    """op(a) @ op(b) for batches of matrices by cublasGemmStridedBatchedEx; torch's BLAS on the CPU.

    a: [..., M, K], or [..., K, M] with transa; b: [..., K, N], or [..., N, K] with transb; both with the same number of
    dimensions, at least 3, and batch sizes equal or 1; c: [..., M, N], written and returned if given. dim: the number
    of dimensions, checked if given. dtypes and errors as `cublas_mmul`.
    """
    if a.dim() != b.dim() or a.dim() < 3 or dim not in (None, a.dim()):
        expected = "at least 3 dimensions each, equally many" if dim is None else f"{dim} dimensions each"
        raise RuntimeError(f"cublas_bmm: expected {expected}, got shapes {list(a.shape)} and {list(b.shape)}")
    return _product(a, b, c, transa, transb)


def cublaslt_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    transa: bool = False,
    transb: bool = False,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(op(a) @ op(b) + bias) by cublasLtMatmul, bias and activation in its epilogue; torch's on the CPU.

    a, b: any shapes that torch.matmul accepts; bias: [N]; activation: None, "relu", "gelu" (by erf) or "gelu_tanh"; c:
    written and returned if given. A repeated shape costs one lookup in the handle's plan cache. "gelu" has no epilogue
    in cuBLASLt: a second kernel applies it to the result. dtypes and errors as `cublas_mmul`; complex dtypes accept a
    bias but no activation.
    """
    if c is None:
        return _cublaslt_matmul(a, b, bias, activation, transa, transb)
    torch.ops.custom_mm.cublaslt_matmul.out(a, b, bias, activation, transa, transb, out=c)
    return c


def bias_act_(x: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None) -> torch.Tensor:
    """x <- activation(x + bias) in place, one pass over x. Returns x.

    x: [..., N] in float64, float32, float16 or bfloat16, any non-overlapping strides; bias: [N] or None; activation: as
    `cublaslt_matmul`. Arithmetic in float32 or wider. No gradient: raises RuntimeError if one would be recorded, since
    it needs the overwritten values.
    """
    torch.ops.custom_mm.bias_act_.default(x, bias, activation)
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
    """A @ b by cusparseSpMM for a CSR matrix A; this project's kernel on the CPU. As `cusparse_spmm`, values first.

    values, columns: [nnz]; offsets: [rows + 1]; b: [cols, N]; c: [rows, N], written and returned if given.
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
    layout: str = "csr",
    algorithm: str = "default",
    transa: bool = False,
    transb: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: torch.Tensor | None = None,
    prepared: torch.Tensor | None = None,
) -> torch.Tensor:
    """alpha * op(A) @ op(b) by cusparseSpMM, or out <- that + beta * out; this project's kernel on the CPU.

    A: [rows, columns] in one of four layouts, with offsets and indices both int32 or both int64.

      layout  offsets                        indices                         values
      "csr"   [rows + 1]                     [nnz]: columns                  [nnz]
      "csc"   [columns + 1]                  [nnz]: rows                     [nnz]
      "coo"   [nnz]: non-decreasing rows     [nnz]: columns                  [nnz]
      "bsr"   [rows / height + 1]            [blocks]: block columns         [blocks, height, width]

    b: [K, N], or [N, K] with transb, row- or column-major without a copy; out: [M, N], any strides. float64, float32,
    float16 or bfloat16, one dtype and device for all; 16-bit types accumulate in float32. algorithm: "default", or for
    csr and csc "csr_alg1" to "csr_alg3", for coo "coo_alg1" to "coo_alg4", for bsr "bsr_alg1". cuSPARSE guarantees
    bitwise reproducible results only for "csr_alg3", "coo_alg2" and "bsr_alg1", and for none with transa. prepared: the
    result of `cusparse_prepare` for such a call.

    Differentiable in values and b, by this project's kernels. Indices are validated once, for as long as they live and
    are not written to; validation waits for the GPU. Raises ValueError on bad indices, layouts and algorithms, and
    RuntimeError on shapes, dtypes and devices that do not match, on overlap, and, naming the call, on what cuSPARSE
    does not support.
    """
    if out is None and beta != 0:
        raise ValueError(f"cusparse_spmm: expected out= beside beta={beta}, which multiplies it")
    if out is not None and prepared is not None:
        raise ValueError("cusparse_spmm: expected out= or prepared=, got both")
    _check_parts("cusparse_spmm", layout, offsets, indices, values, rows, columns)
    arguments = offsets, indices, values, b, rows, columns, layout, algorithm, transa, transb, alpha
    if out is None:
        return _cusparse_spmm(*arguments, prepared)
    torch.ops.custom_mm.cusparse_spmm.out(*arguments, beta, out=out)
    return out


def cusparse_prepare(
    offsets: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    b: torch.Tensor,
    rows: int,
    columns: int,
    *,
    layout: str = "csr",
    algorithm: str = "default",
    transa: bool = False,
    transb: bool = False,
) -> torch.Tensor:
    """The result of cusparseSpMM_preprocess for a matrix, for `cusparse_spmm(..., prepared=)` with the same arguments.

    The values of A and b and the scalars may change, but not the indices, the algorithm, the number of columns or the
    order (row- or column-major) of b. Only one stream at a time may use it. Returns an empty tensor whose storage is
    cuSPARSE's buffer. dtypes and errors as `cusparse_spmm`; also raises ValueError on non-contiguous offsets and
    indices.
    """
    _check_parts("cusparse_prepare", layout, offsets, indices, values, rows, columns)
    return _cusparse_prepare(offsets, indices, values, b, rows, columns, layout, algorithm, transa, transb)


def cusparse_sddmm(
    offsets: torch.Tensor, columns: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alpha: float = 1.0
) -> torch.Tensor:
    """alpha * (a @ b) at the nonzeros of a CSR matrix, by cusparseSDDMM; this project's kernel on the CPU. Returns
    [nnz].

    offsets: [M + 1]; columns: [nnz]; a: [M, D]; b: [D, K], both read without a copy. float64 or float32, 16-bit types
    where cuSPARSE supports them. Gradients and errors as `cusparse_spmm`.
    """
    if offsets.dim() == 1 and offsets.shape[0] > 0 and b.dim() == 2:
        check_parts("cusparse_sddmm", "csr", offsets, columns, offsets.shape[0] - 1, b.shape[1], 1, 1)
    return _cusparse_sddmm(offsets, columns, a, b, alpha)
