"""Solutions of sparse triangular systems."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _functorch as functorch

from ..registration import expect_dense
from .csr_pattern import is_capturing
from .spgemm import Operand, operand

_solve: Callable[..., torch.Tensor] = torch.ops.custom_mm.csr_solve_triangular.default


def _expect_diagonal(a: Operand) -> None:
    """ValueError unless no element of the diagonal is missing or 0, as the operator raises on a CPU. Waits for the
    GPU."""
    s = a.pattern
    on_diagonal = s.row == s.col
    values = s.by_rows(a.values.detach()).where(on_diagonal, 0)
    zeros = torch.zeros(s.rows, dtype=values.dtype, device=values.device)
    missing = zeros.index_add(0, s.row.long(), values) == 0
    while functorch.is_functorch_wrapped_tensor(missing):  # under vmap: [samples, rows]
        missing = functorch.get_unwrapped(missing)
    if bool(missing.any()):
        first = int(missing.nonzero()[0, -1])
        what = "0" if bool((s.row[on_diagonal] == first).any()) else "no nonzero"
        raise ValueError(f"solve_triangular: expected a diagonal without zeros, got {what} in row {first}")


def solve_triangular(
    a: Any, b: torch.Tensor, *, upper: bool, transpose: bool = False, unit_diagonal: bool = False
) -> torch.Tensor:
    """Computes x of T x = b, or T^T x = b, for the upper or lower triangle T of a sparse matrix.

    The operation is differentiable any number of times in b and in the values of A: the gradient of b is another
    solution, and that of A has A's pattern and is 0 beyond the triangle. Sums are float32, or float64 for float64. On a
    CPU the result has the same bits for every number of threads, which share the columns of b. If one matrix is used
    many times, make a `plan` of it: it checks the indices once and keeps those of the transposed matrix, for
    `transpose` and for gradients.

    On a GPU, cuSPARSE's SpSM computes it, and the check of the diagonal waits for the GPU. Duplicates are added on a
    CPU only.

    Args:
        a: [n, n] a sparse tensor in CSR, CSC, COO, BSR or BSC, or a plan; float64, float32, float16 or bfloat16.
            Nonzeros beyond the triangle are ignored.
        b: [n] or [n, k], dense; dtype and device of a.
        upper: True for the upper triangle, False for the lower one.
        transpose: solve T^T x = b.
        unit_diagonal: take 1 for each element of the diagonal, whatever A has there.

    Returns:
        x, of b's shape.

    Raises:
        ValueError: if an element of the diagonal is missing or 0, if A is not square or a batch, or if an index does
            not fit the shape.
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if a is neither a sparse tensor nor a plan, or b is not a dense tensor.

    Examples:
        >>> import torch, matmuls
        >>> a = torch.tensor([[2.0, 0.0], [1.0, 4.0]]).to_sparse_csr()
        >>> matmuls.solve_triangular(a, torch.tensor([2.0, 5.0]), upper=False)
        tensor([1., 1.])
    """
    made = operand("solve_triangular", "A", a)
    expect_dense("solve_triangular", b=b)
    if made.shape[0] != made.shape[1]:
        raise ValueError(f"solve_triangular: expected a square A, got shape {list(made.shape)}")
    if b.dim() not in (1, 2) or b.shape[0] != made.shape[0]:
        raise RuntimeError(
            f"solve_triangular: expected b of shape [{made.shape[0]}] or [{made.shape[0]}, k], got {list(b.shape)}"
        )
    compiling = torch.compiler.is_compiling()
    if b.is_cuda and not unit_diagonal and not compiling and not is_capturing(b.device):
        _expect_diagonal(made)
    s = made.pattern
    gradient = torch.is_grad_enabled() and (b.requires_grad or made.values.requires_grad)
    columns = b.unsqueeze(-1) if b.dim() == 1 else b
    arguments = s.arguments(transpose or gradient)
    return _solve(s.crow, s.col, made.values, columns, upper, transpose, unit_diagonal, *arguments).view(b.shape)
