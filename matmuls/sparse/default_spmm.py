"""Our own product as the call of an operator: by chunks where that is faster, else by rows."""

from collections.abc import Callable
from typing import Any

import torch

from .calls import Call
from .chunks import Chunks
from .structure import Structure, is_capturing

_ops = torch.ops.custom_mm
_spmm, _spmm_chunks = _ops.csr_spmm.default, _ops.csr_spmm_chunks.default
_sddmm = _ops.csr_sddmm.default

# By chunks rather than by rows (src/sparse/spmm/chunks/kernel.h), as measured on an H200.
CHUNKED_MEAN = 32  # nonzeros of a row, on average: longer ones keep their lanes busy as rows
SKEWED = 4  # times the average: the longest row of a matrix whose rows wait for one another
CHUNKED_PRODUCTS = 2**20  # of a nonzero and a column, where rows are skewed
COUNTED = 2**31  # rows and nonzeros: in 32 bits
# Where they are not: rows, bytes of a row of the dense side, and bytes read of it.
CHUNKED_ROWS, CHUNKED_ROW_BYTES, CHUNKED_BYTES = 2**13, 512, 2**24


def is_skewed(structure: Structure) -> bool:
    """Whether the longest row is much longer than others."""
    return structure.longest * structure.rows > SKEWED * structure.nonzeros


def takes_chunks(structure: Structure, n: int, row_bytes: int) -> bool:
    """Whether chunks are faster. row_bytes: of the dense side, n columns."""
    nonzeros, rows = structure.nonzeros, structure.rows
    if nonzeros >= CHUNKED_MEAN * rows or nonzeros + rows >= COUNTED:
        return False
    if is_skewed(structure):
        return nonzeros * n >= CHUNKED_PRODUCTS
    return rows >= CHUNKED_ROWS and row_bytes >= CHUNKED_ROW_BYTES and nonzeros * row_bytes >= CHUNKED_BYTES


def chunk_sizes(structure: Structure, row_bytes: int) -> tuple[int, int]:
    """Nonzeros of a chunk and of a piece of a long row."""
    if structure.longest <= 64:
        return 16 if structure.nonzeros < 2**17 else 32, 64
    if structure.nonzeros >= 2**20:
        return 128, 128
    return 32, 32 if row_bytes < 512 else 64


def _may_go_by_chunks(structure: Structure, b: torch.Tensor) -> bool:
    return (
        b.is_cuda
        and b.dim() == 2
        and b.dtype != torch.float64
        and structure.nonzeros > 0
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cuda")
    )


def _takes_chunks(structure: Structure, b: torch.Tensor) -> bool:
    return takes_chunks(structure, b.shape[1], b.shape[1] * b.element_size())


def _chunks(structure: Structure, b: torch.Tensor) -> Chunks | None:
    """Those of products with as many columns as b, or None where rows are as good or the only way."""
    sizes = chunk_sizes(structure, b.shape[1] * b.element_size())
    return structure.chunks(*sizes) if _takes_chunks(structure, b) else None


def call_by_chunks(
    structure: Structure, made: Chunks, values: torch.Tensor, b: torch.Tensor, *moved: torch.Tensor
) -> Call:
    """moved: columns and values of the nonzeros in the chunks' order, where it is not that of the rows."""
    s, cuts = structure, (made.begins, made.ends, made.cut, made.empty)
    parts = s.crow, s.col, values, b, s.columns, made.slots, s.order, s.longest
    return Call(_spmm_chunks, (*cuts, *parts, *moved), 7)


class Recorded(torch.autograd.Function):
    """A product and that to b's gradient, by the matrix and the transposed one, both by `product`: the operators'
    gradients go by rows."""

    @staticmethod
    def forward(
        values: torch.Tensor,
        b: torch.Tensor,
        structure: Structure,
        product: Callable[[Structure, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        return product(structure, values, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        values, b, ctx.structure, ctx.product = inputs
        to_values, to_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(values if to_b else None, b if to_values else None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        s: Structure = ctx.structure
        values, b = ctx.saved_tensors
        to_values = to_b = None
        if b is not None:
            to_values = _sddmm(s.crow, s.col, grad, b, s.columns, 1, *s.arguments(torch.is_grad_enabled()))
        if values is not None:
            to_b = ctx.product(s.t, values, grad)
        return to_values, to_b, None, None


def our_product(structure: Structure, values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return our_call(structure, values, b).run()


def _recorded(structure: Structure, values: torch.Tensor, b: torch.Tensor) -> Call | None:
    """Chunks are made now: the backward pass may be in a graph's capture."""
    if b.requires_grad and not structure.has_t:
        return None
    made = [_chunks(structure, b), _chunks(structure.t, b) if b.requires_grad else None]
    if all(chunks is None for chunks in made):
        return None
    return Call(Recorded.apply, (values, b, structure, our_product), 1, lasting=False)


def _by_chunks(structure: Structure, values: torch.Tensor, b: torch.Tensor) -> Call | None:
    """The sum by chunks of nonzeros, or None where that by rows is as good or the only one."""
    if not _may_go_by_chunks(structure, b):
        return None
    if structure.crow.dtype == torch.int64:
        if is_capturing(b.device) or not _takes_chunks(structure, b):
            return None
        structure = structure.in_int32()  # made once
        if structure.crow.dtype == torch.int64:
            return None  # a matrix too large for them
    if torch.is_grad_enabled() and (values.requires_grad or b.requires_grad):
        return _recorded(structure, values, b)
    made = _chunks(structure, b)
    return None if made is None else call_by_chunks(structure, made, values, b)


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
