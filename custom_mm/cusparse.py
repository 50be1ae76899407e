"""Products of a sparse matrix, given as its parts, under the names of cuSPARSE."""

from collections.abc import Callable

import torch

from .arguments import clearer
from .indices import check_parts
from .literals import Algorithm, Layout

_cusparse_spmm: Callable[..., torch.Tensor] = torch.ops.custom_mm.cusparse_spmm.default
_cusparse_prepare: Callable[..., torch.Tensor] = torch.ops.custom_mm.cusparse_prepare.default
_cusparse_sddmm: Callable[..., torch.Tensor] = torch.ops.custom_mm.cusparse_sddmm.default
_OPTIONAL = "out", "prepared"  # arguments that may be None


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
    """Computes A @ b for a CSR matrix A by cusparseSpMM, or by this project's kernel on a CPU.

    It is `cusparse_spmm` with its arguments in another order.

    Args:
        values: [nnz] float64, float32, float16 or bfloat16.
        columns: [nnz] int32 or int64.
        offsets: [rows + 1], dtype of columns.
        nnz: the number of nonzeros.
        rows: the number of rows of A.
        cols: the number of columns of A.
        b: [cols, N], dtype and device of values.
        c: [rows, N], written and returned, or None.

    Returns:
        [rows, N], differentiable in values and b, or c.

    Raises:
        ValueError: if an index does not fit the shape, or nnz is not the number of values.
        RuntimeError: if shapes, dtypes or devices do not match, or if c overlaps an operand.
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
    """Computes alpha * op(A) @ op(b) by cusparseSpMM, or by this project's kernel on a CPU.

    With `out`, it computes out <- alpha * op(A) @ op(b) + beta * out. A [rows, columns] has one of four layouts:

    | layout | offsets | indices | values |
    |---|---|---|---|
    | "csr" | [rows + 1] | [nnz]: columns | [nnz] |
    | "csc" | [columns + 1] | [nnz]: rows | [nnz] |
    | "coo" | [nnz]: rows, not decreasing | [nnz]: columns | [nnz] |
    | "bsr" | [rows / height + 1] | [blocks]: columns of blocks | [blocks, height, width] |

    The operation is differentiable in values and b; this project's kernels compute the gradients. The first call with
    an index tensor checks it and waits for the GPU; later calls check it again only if it was written to. 16-bit
    products are summed in float32. The result has the same bits every time only for "csr_alg3", "coo_alg2" and
    "bsr_alg1" without transa.

    Args:
        offsets: int32 or int64, as the table says.
        indices: dtype of offsets, as the table says.
        values: float64, float32, float16 or bfloat16, as the table says.
        b: [K, N], or [N, K] with transb; dtype and device of values. It is read in place if it is row- or column-major,
            otherwise copied.
        rows: the number of rows of A.
        columns: the number of columns of A.
        layout: "csr", "csc", "coo" or "bsr".
        algorithm: "default"; "csr_alg1" to "csr_alg3" for csr and csc; "coo_alg1" to "coo_alg4" for coo; "bsr_alg1".
        transa: multiply by A^T.
        transb: transpose b.
        alpha: multiplies the product.
        beta: multiplies out.
        out: [M, N], any strides, written and returned.
        prepared: the result of `cusparse_prepare` with the same arguments.

    Returns:
        [M, N], or out.

    Raises:
        ValueError: if an index does not fit the shape, if layout or algorithm is unknown, or if beta is given without
            out.
        RuntimeError: if shapes, dtypes or devices do not match, if out overlaps an operand, or if cuSPARSE does not
            support the call; the message then names the function of cuSPARSE.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> offsets, columns, values = torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([1.0, 2.0])
        >>> custom_mm.cusparse_spmm(offsets, columns, values, torch.tensor([[3.0], [4.0]]), 2, 2, alpha=10)
        tensor([[40.],
                [60.]])
    """
    if out is None and beta != 0:
        raise ValueError(f"cusparse_spmm: expected out= with beta={beta}, which multiplies it")
    if out is not None and prepared is not None:
        raise ValueError("cusparse_spmm: expected out= or prepared=, got both")
    _check_parts("cusparse_spmm", layout, offsets, indices, values, rows, columns)
    arguments = offsets, indices, values, b, rows, columns, layout, algorithm, transa, transb, alpha
    try:
        if out is None:
            return _cusparse_spmm(*arguments, prepared)
        torch.ops.custom_mm.cusparse_spmm.out(*arguments, beta, out=out)
    except RuntimeError as error:
        raise clearer(error, "cusparse_spmm", _OPTIONAL, values=values, b=b, out=out, prepared=prepared) from None
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
    """Runs cusparseSpMM_preprocess and returns its buffer, for `cusparse_spmm(..., prepared=)` with the same arguments.

    Between the two calls the values of A and b may change, and so may alpha. The indices, the algorithm, and b's number
    of columns and order (row- or column-major) must stay the same. Only one stream at a time may use the buffer.

    Args:
        offsets: contiguous, as in `cusparse_spmm`.
        indices: contiguous, as in `cusparse_spmm`.
        values: as in `cusparse_spmm`.
        b: as in `cusparse_spmm`.
        rows: the number of rows of A.
        columns: the number of columns of A.
        layout: as in `cusparse_spmm`.
        algorithm: as in `cusparse_spmm`.
        transa: multiply by A^T.
        transb: transpose b.

    Returns:
        An empty tensor whose storage is cuSPARSE's buffer.

    Raises:
        ValueError: if an index does not fit the shape, if layout or algorithm is unknown, or if offsets or indices are
            not contiguous.
        RuntimeError: if shapes, dtypes or devices do not match, or if cuSPARSE does not support the call.
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
    """Computes alpha * (a @ b) at the nonzeros of a CSR matrix by cusparseSDDMM, or by this project's kernel on a CPU.

    The operation is differentiable in a and b.

    Args:
        offsets: [M + 1] int32 or int64.
        columns: [nnz], dtype of offsets.
        a: [M, D], read without a copy; float64 or float32. float16 and bfloat16 on a CPU, and where cuSPARSE supports
            them.
        b: [D, K], read without a copy; dtype and device of a.
        alpha: multiplies the product.

    Returns:
        [nnz].

    Raises:
        ValueError: if an index does not fit the shape.
        RuntimeError: if shapes, dtypes or devices do not match, or if cuSPARSE does not support the call.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, custom_mm
        >>> a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]])
        >>> custom_mm.cusparse_sddmm(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), a, b)
        tensor([4., 6.])
    """
    try:
        if offsets.dim() == 1 and offsets.shape[0] > 0 and b.dim() == 2:
            check_parts("cusparse_sddmm", "csr", offsets, columns, offsets.shape[0] - 1, b.shape[1], 1, 1)
        return _cusparse_sddmm(offsets, columns, a, b, alpha)
    except (RuntimeError, AttributeError) as error:
        raise clearer(error, "cusparse_sddmm", offsets=offsets, columns=columns, a=a, b=b) from None
