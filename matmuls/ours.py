"""Our own product as the call of an operator: by chunks where that is faster, else by rows."""

import torch

from .calls import Call
from .structure import Structure

_ops = torch.ops.custom_mm
_spmm, _spmm_chunks = _ops.csr_spmm.default, _ops.csr_spmm_chunks.default

# By chunks rather than by rows (src/spmm_chunks.h), as measured on an H200.
CHUNKED_MEAN = 32  # nonzeros of a row, on average: longer ones keep their lanes busy as rows
SKEWED = 4  # times the average: the longest row of a matrix whose rows wait for one another
CHUNKED_PRODUCTS = 2**20  # of a nonzero and a column, where rows are skewed
# Where they are not: rows, bytes of a row of the dense side, and bytes read of it.
CHUNKED_ROWS, CHUNKED_ROW_BYTES, CHUNKED_BYTES = 2**13, 512, 2**24


def _is_skewed(structure: Structure) -> bool:
    return structure.longest * structure.rows > SKEWED * structure.nonzeros


def takes_chunks(structure: Structure, n: int, row_bytes: int) -> bool:
    """Whether chunks are faster. row_bytes: of the dense side, n columns."""
    nonzeros, rows = structure.nonzeros, structure.rows
    if nonzeros >= CHUNKED_MEAN * rows:
        return False
    if _is_skewed(structure):
        return nonzeros * n >= CHUNKED_PRODUCTS
    return rows >= CHUNKED_ROWS and row_bytes >= CHUNKED_ROW_BYTES and nonzeros * row_bytes >= CHUNKED_BYTES


def chunk_sizes(structure: Structure, row_bytes: int) -> tuple[int, int]:
    """Nonzeros of a chunk and of a piece of a long row."""
    if structure.longest <= 64:
        return 16 if structure.nonzeros < 2**17 else 32, 64
    if structure.nonzeros >= 2**20:
        return 128, 128
    return 32, 32 if row_bytes < 512 else 64


def _by_chunks(structure: Structure, values: torch.Tensor, b: torch.Tensor) -> Call | None:
    """The sum by chunks of nonzeros, or None where that by rows is as good or the only one."""
    if (
        not b.is_cuda
        or b.dim() != 2
        or b.dtype == torch.float64
        or structure.crow.dtype != torch.int32
        or structure.nonzeros == 0
        or (torch.is_grad_enabled() and (values.requires_grad or b.requires_grad))
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cuda")
        or not takes_chunks(structure, b.shape[1], b.shape[1] * b.element_size())
    ):
        return None
    made = structure.chunks(*chunk_sizes(structure, b.shape[1] * b.element_size()))
    if made is None:
        return None
    parts = structure.crow, structure.col, values, b, structure.columns, made.slots, structure.order, structure.longest
    return Call(_spmm_chunks, (made.begins, made.ends, made.cut, made.empty, *parts), 7)


def our_call(
    structure: Structure, values: torch.Tensor, b: torch.Tensor, reduce: str = "sum", alpha: float = 1.0
) -> Call:
    if reduce == "sum" and alpha == 1:
        call = _by_chunks(structure, values, b)
        if call is not None:
            return call
    parts = structure.crow, structure.col, values, b, structure.columns, reduce, alpha
    reverse = structure.arguments(b.requires_grad and torch.is_grad_enabled())
    return Call(_spmm, (*parts, *reverse, None, False, structure.longest, structure.longest_column), 3)
