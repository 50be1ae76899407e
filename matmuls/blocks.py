"""Products of block-sparse matrices (BSR): with a dense matrix (bsr_spmm), and of two dense matrices at the blocks of a
pattern (bsr_sddmm).

Blocks lie as torch's BSR has them: offsets of the rows of blocks, the column of each block, values [blocks, h, w].
Whoever calls has checked the indices (csr_pattern.py). Triton on a GPU for blocks of tensor cores' sizes, torch else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.flop_counter import register_flop_formula

from custom_mm.arguments import clearer

from .registration import check_permutation, fail, register, register_autocast, register_gradient

__all__ = ["bsr_sddmm", "bsr_spmm"]

KERNEL_SIZES = (16, 32, 64, 128)  # heights and widths of blocks that triton/blocks.py supports
REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# -------------------------------------------------------------------------------------------------------------- checks


def _check_dense(name: str, which: str, t: Tensor, rows: int, like: Tensor) -> None:
    if t.layout != torch.strided or t.dim() != 2 or t.shape[0] != rows:
        fail(name, f"{which} to be strided, of shape [{rows}, n]", f"{t.layout} of shape {list(t.shape)}")
    if t.dtype not in REAL or t.dtype != like.dtype:
        fail(name, f"{which} in one dtype with the others, float64, float32, float16 or bfloat16", t.dtype)
    if t.device != like.device:
        fail(name, f"{which} on {like.device} as the others are", t.device)


def _check_indices(
    name: str, crow: Tensor, col: Tensor, columns: int, width: int, order: Tensor | None, device: torch.device
) -> None:
    if crow.dim() != 1 or col.dim() != 1 or crow.shape[0] == 0:
        fail(name, "offsets [rows + 1] and columns [blocks]", f"{list(crow.shape)} and {list(col.shape)}")
    if crow.dtype not in (torch.int32, torch.int64) or col.dtype != crow.dtype:
        fail(name, "indices in int32 or in int64", f"{crow.dtype} and {col.dtype}")
    if width < 1 or columns % width != 0:
        fail(name, "columns in whole blocks", f"{columns} for blocks of {width}")
    if order is not None and (order.shape != col.shape or order.dtype not in (torch.int32, torch.int64)):
        fail(name, f"order to be whole numbers of shape {list(col.shape)}", f"{order.dtype} {list(order.shape)}")
    for t in (crow, col) if order is None else (crow, col, order):
        if t.device != device:
            fail(name, f"indices on {device} as the others are", t.device)


def _check_reverse(
    name: str, t_crow: Tensor | None, t_col: Tensor | None, t_order: Tensor | None, places: int, col: Tensor
) -> None:
    if (t_crow is None) != (t_col is None):
        fail(name, "both t_crow and t_col or neither", "t_col alone" if t_crow is None else "t_crow alone")
    shape = list(col.shape)
    for what, t, sizes in (("t_crow", t_crow, [places + 1]), ("t_col", t_col, shape), ("t_order", t_order, shape)):
        if t is None:
            continue
        if list(t.shape) != sizes:
            fail(name, f"{what} of shape {sizes}", list(t.shape))
        if t.dtype not in (torch.int32, torch.int64) or (what == "t_col" and t.dtype != t_crow.dtype):  # type: ignore[union-attr]
            fail(name, f"{what} in int32 or int64, t_col as t_crow", t.dtype)
        if t.device != col.device:
            fail(name, f"{what} on {col.device} as the others are", t.device)


def _check_spmm(
    crow: Tensor,
    col: Tensor,
    values: Tensor,
    dense: Tensor,
    columns: int,
    order: Tensor | None,
    transposed: bool,
    t_crow: Tensor | None,
    t_col: Tensor | None,
    t_order: Tensor | None,
) -> None:
    name = "bsr_spmm"
    if values.layout != torch.strided or values.dim() != 3 or values.shape[0] != col.shape[0]:
        expected = f"values to be strided, of shape [{col.shape[0]}, height, width]"
        fail(name, expected, f"{values.layout} of shape {list(values.shape)}")
    width = values.shape[1 if transposed else 2]
    _check_indices(name, crow, col, columns, width, order, values.device)
    _check_reverse(name, t_crow, t_col, t_order, columns // width, col)
    _check_dense(name, "dense", dense, columns, values)


def _check_sddmm(
    crow: Tensor,
    col: Tensor,
    a: Tensor,
    b: Tensor,
    columns: int,
    height: int,
    width: int,
    order: Tensor | None,
    t_crow: Tensor | None,
    t_col: Tensor | None,
    t_order: Tensor | None,
) -> None:
    name = "bsr_sddmm"
    if height < 0:
        fail(name, "height of 0 or more", height)
    _check_indices(name, crow, col, columns, width, order, a.device)
    _check_reverse(name, t_crow, t_col, t_order, columns // width, col)
    _check_dense(name, "a", a, (crow.shape[0] - 1) * height, a)
    _check_dense(name, "b", b, columns, a)
    if a.shape[1] != b.shape[1]:
        fail(name, f"b of {a.shape[1]} columns as a has", b.shape[1])


# --------------------------------------------------------------- kernels: Triton or torch, and shapes only (Meta)


def _by_triton(x: Tensor, height: int, width: int) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and height in KERNEL_SIZES and width in KERNEL_SIZES


def _look(name: str, crow: Tensor, col: Tensor, across: int, order: Tensor | None) -> Tensor | None:
    """order in int64. On a CPU raises ValueError on an index out of bounds, even if written after an earlier check."""
    order = None if order is None else order.long()
    if crow.device.type == "cpu":
        problem, where, found = torch.ops.custom_mm.csr_check(crow, col, across)[:3].tolist()
        if problem:
            what = f"columns of blocks from 0 to {across - 1}" if problem == 4 else "offsets of blocks that rise"
            raise ValueError(f"{name}: expected {what}, got {found} at {where}")
        if order is not None and len(order) and not 0 <= int(order.min()) <= int(order.max()) < len(order):
            raise ValueError(f"{name}: expected order from 0 to {len(order) - 1}, got {order.tolist()[:8]}")
    return order


def _plain_spmm(
    crow: Tensor, col: Tensor, values: Tensor, dense: Tensor, order: Tensor | None, transposed: bool
) -> Tensor:
    """Multiplies every block by its rows of dense and adds up each block row in order; in float32 or wider."""
    order = _look("bsr_spmm", crow, col, dense.shape[0] // values.shape[1 if transposed else 2], order)
    blocks = values if order is None else values[order]
    blocks = blocks.mT if transposed else blocks
    wide = torch.promote_types(values.dtype, torch.float32)
    (_, height, width), (K, N) = blocks.shape, dense.shape
    parts = torch.bmm(blocks.to(wide), dense.reshape(K // width, width, N)[col].to(wide))
    summed = torch.segment_reduce(parts, "sum", offsets=crow, axis=0)
    return summed.to(values.dtype).view((crow.shape[0] - 1) * height, N)


def _plain_sddmm(
    crow: Tensor, col: Tensor, a: Tensor, b: Tensor, height: int, width: int, order: Tensor | None
) -> Tensor:
    rows, D = crow.shape[0] - 1, a.shape[1]
    order = _look("bsr_sddmm", crow, col, b.shape[0] // width, order)
    if order is not None and order.device.type == "cpu":
        check_permutation("bsr_sddmm", "order", order)
    row = torch.repeat_interleave(torch.arange(rows, device=a.device), crow.diff(), output_size=col.shape[0])
    wide = torch.promote_types(a.dtype, torch.float32)
    left, right = a.reshape(rows, height, D)[row], b.reshape(b.shape[0] // width, width, D)[col]
    found = torch.bmm(left.to(wide), right.to(wide).mT).to(a.dtype)
    return found if order is None else torch.empty_like(found).index_copy_(0, order, found)


def _spmm_kernel(
    crow: Tensor,
    col: Tensor,
    values: Tensor,
    dense: Tensor,
    columns: int,
    order: Tensor | None = None,
    transposed: bool = False,
    t_crow: Tensor | None = None,
    t_col: Tensor | None = None,
    t_order: Tensor | None = None,
) -> Tensor:
    _check_spmm(crow, col, values, dense, columns, order, transposed, t_crow, t_col, t_order)
    height, width = values.shape[1:]
    rows, N = (crow.shape[0] - 1) * (width if transposed else height), dense.shape[1]
    if col.shape[0] == 0 or N == 0 or height == 0:
        return dense.new_zeros(rows, N)
    if _by_triton(dense, height, width):
        from .triton.blocks import product

        return product(crow, col, values, dense, order, transposed)
    return _plain_spmm(crow, col, values, dense, order, transposed)


def _spmm_meta(
    crow: Tensor,
    col: Tensor,
    values: Tensor,
    dense: Tensor,
    columns: int,
    order: Tensor | None = None,
    transposed: bool = False,
    t_crow: Tensor | None = None,
    t_col: Tensor | None = None,
    t_order: Tensor | None = None,
) -> Tensor:
    _check_spmm(crow, col, values, dense, columns, order, transposed, t_crow, t_col, t_order)
    return dense.new_empty((crow.shape[0] - 1) * values.shape[2 if transposed else 1], dense.shape[1])


def _sddmm_kernel(
    crow: Tensor,
    col: Tensor,
    a: Tensor,
    b: Tensor,
    columns: int,
    height: int,
    width: int,
    order: Tensor | None = None,
    t_crow: Tensor | None = None,
    t_col: Tensor | None = None,
    t_order: Tensor | None = None,
) -> Tensor:
    _check_sddmm(crow, col, a, b, columns, height, width, order, t_crow, t_col, t_order)
    if col.shape[0] == 0 or a.shape[1] == 0 or height == 0:
        return a.new_zeros(col.shape[0], height, width)
    if _by_triton(a, height, width):
        from .triton.blocks import sampled

        return sampled(crow, col, a, b, height, width, order)
    return _plain_sddmm(crow, col, a, b, height, width, order)


def _sddmm_meta(
    crow: Tensor,
    col: Tensor,
    a: Tensor,
    b: Tensor,
    columns: int,
    height: int,
    width: int,
    order: Tensor | None = None,
    t_crow: Tensor | None = None,
    t_col: Tensor | None = None,
    t_order: Tensor | None = None,
) -> Tensor:
    _check_sddmm(crow, col, a, b, columns, height, width, order, t_crow, t_col, t_order)
    return a.new_empty(col.shape[0], height, width)


_reverse = "Tensor? t_crow=None, Tensor? t_col=None, Tensor? t_order=None"
register(
    "bsr_spmm(Tensor crow, Tensor col, Tensor values, Tensor dense, SymInt columns, Tensor? order=None, "
    f"bool transposed=False, {_reverse}) -> Tensor",
    _spmm_kernel,
    _spmm_meta,
)
register(
    "bsr_sddmm(Tensor crow, Tensor col, Tensor a, Tensor b, SymInt columns, SymInt height, SymInt width, "
    f"Tensor? order=None, {_reverse}) -> Tensor",
    _sddmm_kernel,
    _sddmm_meta,
)
_ops = torch.ops.custom_mm
_transpose: Callable[..., tuple[Tensor, Tensor, Tensor]] = _ops.csr_transpose.default
_spmm: Callable[..., Tensor] = _ops.bsr_spmm.default
_sddmm: Callable[..., Tensor] = _ops.bsr_sddmm.default


# ---------------------------------------------------------------------------------------------------------- gradients
#
# The gradients of each operator are the two operators again, over the blocks by rows or by columns, so they are
# differentiable.

Blocks = tuple[Tensor, Tensor, Tensor | None]  # offsets, columns, order


def _by_columns(blocks: Blocks, across: int, t_crow: Tensor | None, t_col: Tensor | None, t_order: Any) -> Blocks:
    """The blocks by columns, as given or computed; `across`: number of block columns."""
    if t_crow is not None and t_col is not None:
        return t_crow, t_col, t_order
    crow, col, order = blocks
    t_crow, t_col, t_order = _transpose(crow, col, across)
    return t_crow, t_col, t_order if order is None else order[t_order.long()]


class _Spmm(Function):
    @staticmethod
    def forward(ctx: Any, crow: Tensor, col: Tensor, values: Tensor, dense: Tensor, *rest: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            c = _spmm(crow, col, values, dense, *rest)
        ctx.columns, order, ctx.transposed, *reverse = rest
        ctx.sizes = values.shape[1:]
        _, _, need_values, need_dense, *_ = ctx.needs_input_grad
        kept = dense if need_values else None, values if need_dense else None
        ctx.save_for_backward(crow, col, order, *reverse, *kept)
        return c

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        crow, col, order, *reverse, dense, values = ctx.saved_tensors
        _, _, need_values, need_dense, *_ = ctx.needs_input_grad
        own, columns, (height, width) = (crow, col, order), ctx.columns, ctx.sizes
        d_values = d_dense = None
        if need_dense or ctx.transposed:
            other = _by_columns(own, columns // (height if ctx.transposed else width), *reverse)
        if need_dense:
            d_dense = _spmm(*other[:2], values, g, g.shape[0], other[2], not ctx.transposed, *own)
        if need_values and ctx.transposed:  # in the blocks' memory order: their rows are those of dense
            d_values = _sddmm(*other[:2], dense, g, g.shape[0], height, width, other[2], *own)
        elif need_values:
            d_values = _sddmm(crow, col, g, dense, columns, height, width, order, *reverse)
        return None, None, d_values, d_dense, *[None] * 6


class _Sddmm(Function):
    @staticmethod
    def forward(ctx: Any, crow: Tensor, col: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            values = _sddmm(crow, col, a, b, *rest)
        ctx.columns, _, ctx.width, order, *reverse = rest
        _, _, need_a, need_b, *_ = ctx.needs_input_grad
        ctx.rows = a.shape[0]
        ctx.save_for_backward(crow, col, order, *reverse, a if need_b else None, b if need_a else None)
        return values

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        crow, col, order, *reverse, a, b = ctx.saved_tensors
        _, _, need_a, need_b, *_ = ctx.needs_input_grad
        own = crow, col, order
        da = db = None
        if need_a:
            da = _spmm(crow, col, g, b, ctx.columns, order, False, *reverse)
        if need_b:
            other = _by_columns(own, ctx.columns // ctx.width, *reverse)
            db = _spmm(*other[:2], g, a, ctx.rows, other[2], True, *own)
        return None, None, da, db, *[None] * 7


for _name, _function in (("bsr_spmm", _Spmm), ("bsr_sddmm", _Sddmm)):
    register_gradient(_name, _function)
    register_autocast(_name)


@register_flop_formula(_ops.bsr_spmm)
def _spmm_flops(
    crow: torch.Size, col: torch.Size, values: torch.Size, dense: torch.Size, *args: Any, **kwargs: Any
) -> int:
    return 2 * values.numel() * dense[1]


@register_flop_formula(_ops.bsr_sddmm)
def _sddmm_flops(
    crow: torch.Size,
    col: torch.Size,
    a: torch.Size,
    b: torch.Size,
    columns: int,
    height: int,
    width: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    return 2 * col[0] * height * width * a[1]


# -------------------------------------------------------------------------------------------------------------- public


def bsr_spmm(
    crow: Tensor,
    col: Tensor,
    values: Tensor,
    dense: Tensor,
    columns: int,
    order: Tensor | None = None,
    transposed: bool = False,
    t_crow: Tensor | None = None,
    t_col: Tensor | None = None,
    t_order: Tensor | None = None,
) -> Tensor:
    """Computes A @ dense for a matrix A stored in blocks of h x w (BSR).

    Products are summed in float32, or float64 for float64; TF32 is used only if torch's switch allows it. The sums run
    in the order of `col`, so that the result has the same bits every time. Duplicate blocks are added. Rows of the
    result without a block are 0. The operation is differentiable any number of times in values and dense. Under
    autocast it behaves as torch.matmul. On a GPU, Triton kernels multiply blocks with sides of 16, 32, 64 or 128; torch
    multiplies all others.

    Args:
        crow: [block rows + 1] int32 or int64, the offsets of the rows of blocks in `col`. Offsets and columns are
            checked on a CPU, but not on a GPU.
        col: [blocks], dtype of crow: the column of each block, counted in blocks.
        values: [blocks, h, w] float64, float32, float16 or bfloat16.
        dense: [columns, N], read in place if each row is contiguous, otherwise copied; dtype and device of values.
        columns: the number of columns of A, a multiple of w.
        order: [blocks] or None; block p has the elements values[order[p]].
        transposed: read each block transposed, as [w, h].
        t_crow: [block columns + 1] or None. This and the next two are the pattern of A^T, for the gradient of dense;
            they are computed if not given. t_crow has the offsets of the columns of blocks in `t_col`.
        t_col: [blocks] or None: the block row of each block of A^T's pattern.
        t_order: [blocks] or None: the index of each of these blocks in values.

    Returns:
        [block rows * h, N].

    Raises:
        RuntimeError: before anything is computed, if shapes, dtypes or devices do not match.
        ValueError: if an index does not fit the shape (checked on a CPU only).
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch
        >>> from matmuls import blocks
        >>> crow, col = torch.tensor([0, 1]), torch.tensor([1])
        >>> blocks.bsr_spmm(crow, col, torch.eye(2)[None], torch.tensor([[1.0], [2.0], [3.0], [4.0]]), 4)
        tensor([[3.],
                [4.]])
    """
    try:
        return _spmm(crow, col, values, dense, columns, order, transposed, t_crow, t_col, t_order)
    except RuntimeError as error:
        raise clearer(
            error, "bsr_spmm", ("order",), crow=crow, col=col, values=values, dense=dense, order=order
        ) from None


def bsr_sddmm(
    crow: Tensor,
    col: Tensor,
    a: Tensor,
    b: Tensor,
    columns: int,
    height: int,
    width: int,
    order: Tensor | None = None,
    t_crow: Tensor | None = None,
    t_col: Tensor | None = None,
    t_order: Tensor | None = None,
) -> Tensor:
    """Computes a @ b^T at the blocks [height, width] of a pattern only.

    b is transposed here, unlike in `matmuls.sddmm`. Precision, gradients and kernels are those of `bsr_spmm`.

    Args:
        crow: [block rows + 1] int32 or int64, the offsets of the rows of blocks in `col`.
        col: [blocks], dtype of crow: the column of each block, counted in blocks.
        a: [block rows * height, D] float64, float32, float16 or bfloat16.
        b: [columns, D], dtype and device of a.
        columns: the number of columns of the product, a multiple of width.
        height: the number of rows of a block.
        width: the number of columns of a block.
        order: [blocks] or None; block p is stored at order[p].
        t_crow: as `bsr_spmm`.
        t_col: as `bsr_spmm`.
        t_order: as `bsr_spmm`.

    Returns:
        [blocks, height, width].

    Raises:
        RuntimeError: before anything is computed, if shapes, dtypes or devices do not match.
        ValueError: if an index does not fit the shape (checked on a CPU only).
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch
        >>> from matmuls import blocks
        >>> a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [10.0], [3.0], [4.0]])
        >>> blocks.bsr_sddmm(torch.tensor([0, 1]), torch.tensor([1]), a, b, 4, 2, 2)
        tensor([[[3., 4.],
                 [6., 8.]]])
    """
    try:
        return _sddmm(crow, col, a, b, columns, height, width, order, t_crow, t_col, t_order)
    except RuntimeError as error:
        raise clearer(error, "bsr_sddmm", ("order",), crow=crow, col=col, a=a, b=b, order=order) from None
