"""The product of two sparse matrices as a sparse matrix (SpGEMM): its size, its pattern, its values."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from custom_mm import _C

from .csr_pattern import CsrPattern, is_transformed
from .foreign import native
from .tensor_pattern import pattern_of

_ops = torch.ops.custom_mm
_size: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _ops.csr_spgemm_size.default
_pattern: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = _ops.csr_spgemm_pattern.default


class Operand(NamedTuple):
    """A sparse matrix as its pattern and values [nonzeros], differentiable."""

    pattern: CsrPattern
    values: torch.Tensor
    shape: torch.Size


def operand(name: str, which: str, a: Any) -> Operand:
    """The operand of a sparse tensor, a matrix of another library or a SparsePlan; TypeError for anything else."""
    a = native(name, a)
    if isinstance(a, torch.Tensor):
        if a.layout == torch.strided:
            raise TypeError(f"{name}: expected {which} to be a sparse tensor or a plan, got a dense tensor")
        made = Operand(*pattern_of(name, a), a.shape)
    elif hasattr(a, "_pattern"):
        if not torch.compiler.is_compiling():
            a._expect_same_indices(name)
        made = Operand(a._pattern, a.values, a.shape)
    else:
        raise TypeError(f"{name}: expected {which} to be a sparse tensor or a plan, got {type(a).__name__}")
    if made.pattern.batch is not None:
        raise ValueError(f"{name}: expected {which} to be one matrix, got a batch of shape {list(a.shape)}")
    return made


def expect_operands(name: str, a: Operand, b: Operand) -> None:
    """RuntimeError unless A @ B is defined."""
    if a.shape[1] != b.shape[0]:
        raise RuntimeError(
            f"{name}: expected B of {a.shape[1]} rows for A of shape {list(a.shape)}, got {list(b.shape)}"
        )
    if (a.values.dtype, a.values.device) != (b.values.dtype, b.values.device):
        raise RuntimeError(
            f"{name}: expected B in {a.values.dtype} on {a.values.device} as A is, "
            f"got {b.values.dtype} on {b.values.device}"
        )


def listed(pattern: CsrPattern, index: torch.dtype, transposed: bool = False) -> list[torch.Tensor]:
    """The pattern as operators take it (src/sparse/spgemm.h), perhaps with that of the transposed matrix."""
    parts = [pattern.crow, pattern.col, pattern.order, *(pattern.transposed() if transposed else ())]
    none = pattern.crow.new_empty(0)
    return [(none if t is None else t).to(index) for t in parts]


def _listed_both(a: Operand, b: Operand) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    index = torch.promote_types(a.pattern.crow.dtype, b.pattern.crow.dtype)
    left = listed(a.pattern, index)
    return left, left if b.pattern is a.pattern else listed(b.pattern, index)


class Sizes(NamedTuple):
    """What is known of C before it takes memory."""

    a: list[torch.Tensor]
    b: list[torch.Tensor]
    columns: int
    offsets: torch.Tensor
    state: torch.Tensor
    nnz: int
    nbytes: int


def sizes(name: str, a: Operand, b: Operand, max_nnz: int | None) -> Sizes:
    """The size of A @ B; ValueError if it has more than max_nnz nonzeros. Waits for the GPU."""
    expect_operands(name, a, b)
    parts, columns = _listed_both(a, b), b.shape[1]
    offsets, state = _size(*parts, columns)
    nnz, index = int(offsets[-1]), parts[0][0].dtype
    nbytes = nnz * (index.itemsize + a.values.dtype.itemsize) + offsets.numel() * index.itemsize
    if max_nnz is not None and nnz > max_nnz:
        raise ValueError(f"{name}: expected a product of at most {max_nnz} nonzeros, got {nnz}, {nbytes} bytes")
    return Sizes(*parts, columns, offsets, state, nnz, nbytes)


def _uncounted(a: Operand, b: Operand) -> torch.Tensor:
    """A @ B with no limit on its size: on a CPU in one pass where memory allows."""
    expect_operands("spgemm", a, b)
    parts = _listed_both(a, b)
    none = parts[0][0].new_empty(0)
    made = _pattern(*parts, b.shape[1], none, none, -1, a.values, b.values)
    return as_csr(*made, (a.shape[0], b.shape[1]))


def as_csr(crow: torch.Tensor, col: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    if values.requires_grad and not torch.compiler.is_compiling() and not is_transformed():
        return _C.sparse_of_values(crow, col, values, shape)
    return torch.sparse_csr_tensor(crow, col, values, shape, check_invariants=False)


def spgemm(a: Any, b: Any, *, max_nnz: int | None = None) -> torch.Tensor:
    """Computes A @ B for two sparse matrices, as a sparse CSR tensor.

    C has a nonzero wherever a product of two nonzeros falls, also where their sum is 0. Its columns rise within each
    row. With max_nnz, and on a GPU, its nonzeros are counted before it is allocated; else a CPU takes address space for
    as many nonzeros as there are products, up to 2^27, and memory for C alone. The operation is differentiable any
    number of times in the values of A and B; gradients are computed on the patterns of A and B, without a dense matrix.
    16-bit products are summed in float32, in the order of A's nonzeros, so that equal calls have the same bits, on a
    CPU for every number of threads. For many products of the same patterns, make a plan with `plan_spgemm`.
    `plan(A) @ B` with a sparse B calls this function.

    On a GPU the call waits for the GPU, and takes memory for a column for each product, up to 1 GiB; with more products
    it finds the columns twice.

    Args:
        a: [M, K] a sparse tensor in CSR, CSC, COO, BSR or BSC, or a plan; float64, float32, float16 or bfloat16,
            indices int32 or int64. Columns may be unsorted, and duplicates are added. A matrix of scipy.sparse or CuPy
            is taken as by `plan`.
        b: [K, N] as a, in its dtype and on its device.
        max_nnz: the most nonzeros that C may have; None for no limit.

    Returns:
        [M, N] a sparse CSR tensor. Its indices are int32 if both patterns' are (a plan's are, where they fit), else
        int64.

    Raises:
        ValueError: before C is allocated, if C would have more than max_nnz nonzeros, or more than int32 indices reach;
            if an index does not fit the shape, or a or b is a batch.
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if a or b is neither a sparse tensor nor a plan.

    Examples:
        >>> import torch, matmuls
        >>> a = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]).to_sparse_csr()
        >>> c = matmuls.spgemm(a, a.mT)
        >>> c.layout, c.to_dense()
        (torch.sparse_csr, tensor([[5., 0.],
                [0., 9.]]))
    """
    left = operand("spgemm", "A", a)
    right = left if b is a else operand("spgemm", "B", b)
    if max_nnz is None and not torch.compiler.is_compiling():  # whose shapes depend on the number of nonzeros
        return _uncounted(left, right)
    s = sizes("spgemm", left, right, max_nnz)
    made = _pattern(s.a, s.b, s.columns, s.offsets, s.state, s.nnz, left.values, right.values)
    return as_csr(*made, (left.shape[0], right.shape[1]))
