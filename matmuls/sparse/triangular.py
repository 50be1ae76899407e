"""Solutions of sparse triangular systems."""

from collections.abc import Callable
from typing import Any

import torch

from ..registration import expect_dense
from .spgemm import Operand, operand

_solve: Callable[..., torch.Tensor] = torch.ops.custom_mm.csr_solve_triangular.default


def solve(
    name: str,
    a: Operand,
    b: torch.Tensor,
    ways: tuple[bool, bool, bool],
    state: torch.Tensor | None = None,
    version: int = 0,
) -> torch.Tensor:
    """x of b's shape. ways: upper, transpose, unit_diagonal. state, version: as src/sparse/solve.h has them."""
    expect_dense(name, b=b)
    if b.dim() not in (1, 2) or b.shape[0] != a.shape[0]:
        raise RuntimeError(f"{name}: expected b of shape [{a.shape[0]}] or [{a.shape[0]}, k], got {list(b.shape)}")
    s, columns = a.pattern, b.unsqueeze(-1) if b.dim() == 1 else b
    if torch.compiler.is_compiling():
        version = -1
    # cuSPARSE solves with the transpose by the indices of A.
    transposed = not b.is_cuda and (
        ways[1] or (torch.is_grad_enabled() and (b.requires_grad or a.values.requires_grad))
    )
    return _solve(s.crow, s.col, a.values, columns, *ways, *s.arguments(transposed), state, version).view(b.shape)


def square(name: str, a: Any) -> Operand:
    """The operand; ValueError if it is not square."""
    made = operand(name, "A", a)
    if made.shape[0] != made.shape[1]:
        raise ValueError(f"{name}: expected a square A, got shape {list(made.shape)}")
    return made


def solve_triangular(
    a: Any, b: torch.Tensor, *, upper: bool, transpose: bool = False, unit_diagonal: bool = False
) -> torch.Tensor:
    """Computes x of T x = b, or T^T x = b, for the upper or lower triangle T of a sparse matrix.

    The operation is differentiable any number of times in b and in the values of A: the gradient of b is another
    solution, and that of A has A's pattern and is 0 beyond the triangle. Sums are float32, or float64 for float64. On a
    CPU the result has the same bits for every number of threads, which share the columns of b. To solve with one matrix
    many times, use `plan_solve`.

    On a GPU, cuSPARSE's SpSV computes it for one column and its SpSM for more, with an analysis at every call, and the
    check of the diagonal waits for the GPU. CUDA-graph capture and torch.compile leave out the check. Duplicates are
    added on a CPU only.

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
    return solve("solve_triangular", square("solve_triangular", a), b, (upper, transpose, unit_diagonal))
