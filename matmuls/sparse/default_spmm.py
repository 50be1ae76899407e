"""The default product A @ B, by the pattern itself: chunks where those are faster, else the row kernel."""

from collections.abc import Callable
from typing import Any

import torch

from custom_mm import _C
from custom_mm.kernel_switch import is_any_off, is_off
from custom_mm.literals import Reduce

from ..device import multiprocessors
from ..registration import expect_dense
from .chunks import Chunks
from .costs import is_skewed
from .csr_pattern import CsrPattern, is_capturing
from .names import BY_ROWS, CHUNKS, DEFAULT, SHARES, SPLIT_ROWS
from .prepared import PreparedOp

_ops = torch.ops.custom_mm
_spmm, _spmm_chunks, _linear = _ops.csr_spmm.default, _ops.csr_spmm_chunks.default, _ops.csr_linear.default
_spmm_out: Callable[..., None] = _ops.csr_spmm.out
_sddmm = _ops.csr_sddmm.default

# Chunks rather than rows (src/sparse/spmm/chunks/kernel.h), as measured on an H200.
CHUNKED_MEAN = 32  # nonzeros of a row, on average: longer rows keep their lanes busy
CHUNKED_PRODUCTS = 2**20  # of a nonzero and a column of B, for skewed rows
ROW_KERNELS = BY_ROWS, SPLIT_ROWS, SHARES
COUNTED = 2**31  # rows and nonzeros together: the kernel counts them in 32 bits
# For rows that are not skewed, at least: rows of A, bytes of a row of B, bytes read of B.
CHUNKED_ROWS, CHUNKED_ROW_BYTES, CHUNKED_BYTES = 2**13, 512, 2**24


def takes_chunks(pattern: CsrPattern, n: int, row_bytes: int) -> bool:
    """True if chunks are faster, or the row kernels switched off. row_bytes: of a row of B, n columns."""
    nonzeros, rows = pattern.nonzeros, pattern.rows
    if is_any_off():
        if is_off(CHUNKS):
            return False
        if all(map(is_off, ROW_KERNELS)):
            return nonzeros + rows < COUNTED and row_bytes % 16 == 0
    if nonzeros >= CHUNKED_MEAN * rows or nonzeros + rows >= COUNTED:
        return False
    if is_skewed(pattern):
        return nonzeros * n >= CHUNKED_PRODUCTS
    return rows >= CHUNKED_ROWS and row_bytes >= CHUNKED_ROW_BYTES and nonzeros * row_bytes >= CHUNKED_BYTES


def chunk_sizes(pattern: CsrPattern, row_bytes: int) -> tuple[int, int]:
    """Nonzeros of a chunk, and of a piece of a long row."""
    if pattern.longest <= 64:
        return 16 if pattern.nonzeros < 2**17 else 32, 64
    if pattern.nonzeros >= 2**20:
        return 128, 128
    return 32, 32 if row_bytes < 512 else 64


def kernel_of(pattern: CsrPattern, n: int, dtype: torch.dtype, device: torch.device) -> str:
    """The name of the kernel that multiplies by n columns; DEFAULT if all that could are switched off. What only the
    launch knows is left out: that B or the result is not aligned to 16 bytes (then rows, not chunks), or that csr_spmm
    densifies A for this one product."""
    if device.type != "cuda":
        return DEFAULT if is_off(BY_ROWS) else BY_ROWS
    row_bytes = n * dtype.itemsize
    if dtype.itemsize <= 4 and pattern.nonzeros and takes_chunks(pattern, n, row_bytes):
        return CHUNKS
    if n == 0:
        return BY_ROWS  # nothing runs
    try:
        choice = _C.choose_spmm(
            rows=pattern.rows,
            columns=pattern.columns,
            nonzeros=pattern.nonzeros,
            longest=pattern.longest,
            n=row_bytes // dtype.to_real().itemsize,  # pairs of real numbers, if complex
            element_bytes=dtype.to_real().itemsize,
            vectors=row_bytes % 16 == 0,
            multiprocessors=multiprocessors(device),
        )
    except ValueError:  # the kernels that are on do not take it, or no grid has as many blocks
        return DEFAULT if is_any_off() else BY_ROWS
    kernel: str = choice["kernel"]
    return kernel


def _may_use_chunks(pattern: CsrPattern, b: torch.Tensor) -> bool:
    return (
        b.is_cuda
        and b.dim() == 2
        and b.dtype.itemsize <= 4
        and pattern.nonzeros > 0
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cuda")
    )


def _takes_chunks(pattern: CsrPattern, b: torch.Tensor) -> bool:
    return takes_chunks(pattern, b.shape[1], b.shape[1] * b.element_size())


def _chunks(pattern: CsrPattern, b: torch.Tensor) -> Chunks | None:
    """The chunks for products with b, or None if rows are as fast or the only way."""
    sizes = chunk_sizes(pattern, b.shape[1] * b.element_size())
    return pattern.chunks(*sizes) if _takes_chunks(pattern, b) else None


def chunks_op(
    pattern: CsrPattern, made: Chunks, values: torch.Tensor, b: torch.Tensor, *moved: torch.Tensor
) -> PreparedOp:
    """moved: columns and values in the order of the chunks, where it is not that of the rows."""
    s, cuts = pattern, (made.begins, made.ends, made.cut, made.empty)
    parts = s.crow, s.col, values, b, s.columns, made.slots, s.order, s.longest
    return PreparedOp(_spmm_chunks, (*cuts, *parts, *moved), 7, reads_values=not moved)


class Recorded(torch.autograd.Function):
    """A product whose gradient to b is `product` too, by the transposed matrix; the operators' own gradients take the
    row kernel."""

    @staticmethod
    def forward(
        values: torch.Tensor,
        b: torch.Tensor,
        pattern: CsrPattern,
        product: Callable[[CsrPattern, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        return product(pattern, values, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        values, b, ctx.pattern, ctx.product = inputs
        to_values, to_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(values if to_b else None, b if to_values else None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        s: CsrPattern = ctx.pattern
        values, b = ctx.saved_tensors
        to_values = to_b = None
        if b is not None:
            to_values = _sddmm(s.crow, s.col, grad, b, s.columns, 1, *s.arguments(torch.is_grad_enabled()))
        if values is not None:
            to_b = ctx.product(s.t, values, grad)
        return to_values, to_b, None, None


def default_product(
    pattern: CsrPattern, values: torch.Tensor, b: torch.Tensor, reduce: Reduce = "sum", alpha: float = 1.0
) -> torch.Tensor:
    return default_op(pattern, values, b, reduce, alpha).run()


def _recorded(pattern: CsrPattern, values: torch.Tensor, b: torch.Tensor) -> PreparedOp | None:
    """The chunks of both matrices are made now: the backward pass may run under CUDA-graph capture."""
    if b.requires_grad and not pattern.has_t:
        return None
    made = [_chunks(pattern, b), _chunks(pattern.t, b) if b.requires_grad else None]
    if all(chunks is None for chunks in made):
        return None
    return PreparedOp(Recorded.apply, (values, b, pattern, default_product), 1, reusable=False)


def _by_chunks(pattern: CsrPattern, values: torch.Tensor, b: torch.Tensor) -> PreparedOp | None:
    """The sum by chunks, or None if rows are as fast or the only way."""
    if not _may_use_chunks(pattern, b):
        return None
    if pattern.crow.dtype == torch.int64:
        if is_capturing(b.device) or not _takes_chunks(pattern, b):
            return None
        pattern = pattern.in_int32()  # made once
        if pattern.crow.dtype == torch.int64:
            return None  # the matrix is too large for chunks
    if torch.is_grad_enabled() and (values.requires_grad or b.requires_grad):
        return _recorded(pattern, values, b)
    made = _chunks(pattern, b)
    return None if made is None else chunks_op(pattern, made, values, b)


def default_op(
    pattern: CsrPattern, values: torch.Tensor, b: torch.Tensor, reduce: Reduce = "sum", alpha: float = 1.0
) -> PreparedOp:
    """alpha * reduce(A @ b) as an operator and its arguments."""
    if reduce == "sum" and alpha == 1:
        op = _by_chunks(pattern, values, b)
        if op is not None:
            return op
    parts = pattern.crow, pattern.col, values, b, pattern.columns, reduce, alpha
    reverse = pattern.arguments(b.requires_grad and torch.is_grad_enabled())
    beside = None, False, pattern.longest, pattern.longest_column
    return PreparedOp(_spmm, (*parts, *reverse, *beside), 3, reads_values=True)


def linear_op(
    pattern: CsrPattern, values: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
) -> PreparedOp | None:
    """x A^T + bias, [..., rows], by the row kernel as one operator with gradients; None where another may be faster. x:
    [..., columns]."""
    s = pattern
    if s.batch is not None or (bias is not None and bias.dtype != values.dtype):
        return None
    if x.is_cuda and x.dtype.itemsize <= 4:
        n = x.numel() // max(x.shape[-1], 1)
        if takes_chunks(s, n, n * x.element_size()):
            return None
    parts = s.crow, s.col, values, x, bias
    reverse = s.arguments(x.requires_grad and torch.is_grad_enabled())
    return PreparedOp(_linear, (*parts, *reverse, s.longest, s.longest_column), 3, reads_values=True)


def default_product_into(
    out: torch.Tensor,
    pattern: CsrPattern,
    values: torch.Tensor,
    b: torch.Tensor,
    reduce: Reduce,
    alpha: float,
    beta: float,
) -> torch.Tensor:
    """out <- alpha * reduce(A @ b) + beta * out."""
    parts = pattern.crow, pattern.col, values, b, pattern.columns, reduce, alpha, pattern.order, beta
    _spmm_out(*parts, pattern.longest, out=out)
    return out


def folded(name: str, pattern: CsrPattern, leading: tuple[int, ...], x: torch.Tensor, what: str) -> torch.Tensor:
    """The dense operand of a batch [*leading, M, K] of sparse matrices as that of their block-diagonal matrix."""
    if pattern.batch is None:
        return x
    if x.dim() == 2:
        x = x.expand(*leading, *x.shape)
    if x.shape[:-2] != leading:
        raise ValueError(
            f"{name}: expected {what} with leading dimensions {list(leading)}, a matrix for each sparse one, "
            f"got {list(x.shape)}"
        )
    return x.flatten(0, -2)


def check_operands(shape: tuple[int, ...], b: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """Errors of spmm about b and out alone. shape: of A."""
    expect_dense("spmm", b=b)
    if out is not None:
        expect_dense("spmm", out=out)
    if b.dim() == 0:
        raise RuntimeError(f"spmm: expected dense of shape [..., {shape[-1]}, n], got []")


def multiply_batch(
    pattern: CsrPattern,
    values: torch.Tensor,
    shape: tuple[int, ...],
    b: torch.Tensor,
    reduce: Reduce = "sum",
    alpha: float = 1.0,
    beta: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """spmm of a batch of sparse matrices, shape [..., M, K], as one block-diagonal matrix."""
    expected = [*shape[:-1], b.shape[-1]]
    if b.shape[-2] != shape[-1] or (b.dim() > 2 and b.shape[:-2] != shape[:-2]):
        raise RuntimeError(f"spmm: expected dense of shape {[*shape[:-2], shape[-1]]} and n, got {list(b.shape)}")
    dense = folded("spmm", pattern, shape[:-2], b, "dense")
    if out is None:
        return default_product(pattern, values, dense, reduce, alpha).view(expected)
    if list(out.shape) != expected:
        raise RuntimeError(f"spmm: expected out of shape {expected}, got {list(out.shape)}")
    if not torch.compiler.is_compiling():  # below, a copy of out may stand for it, which overlaps nothing
        _C.check_no_overlap("spmm", out, values, b)
    contiguous = out.is_contiguous()
    flat = default_product_into(out.contiguous().flatten(0, -2), pattern, values, dense, reduce, alpha, beta)
    return out if contiguous else out.copy_(flat.view(expected))
