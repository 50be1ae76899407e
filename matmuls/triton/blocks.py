"""Triton kernels of bsr_spmm and bsr_sddmm for blocks [h, w], h and w from 16 to 128.

A program owns a tile of the result and adds up in the order of the indices: bitwise reproducible, no atomics.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .configs import gpu
from .launch import launch, wait_for_earlier
from .masked_linear import power, precision_of, read_rows


@triton.jit
def fetch(indices, p, end):
    """The index at a place p (or several places); 0 from `end` on."""
    return tl.load(indices + p, mask=p < end, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    c, crow, col, order, values, b, units, sb, rows,
    BM: tl.constexpr, INNER: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TRANSPOSED: tl.constexpr,
    ORDERED: tl.constexpr, EVEN_N: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BM rows and BN columns of c: a block row [BM, INNER], as stored, times the rows of b at the blocks' columns.

    The blocks are concatenated along the sum, BK of it per step: several narrow blocks at a time, wide ones in parts.
    """
    wait_for_earlier(EARLY)
    program, N = tl.program_id(0), tl.cast(units, tl.int64) * UNIT
    row = program % rows
    columns = (program // rows).to(tl.int64) * BN + tl.arange(0, BN)
    begin, end = tl.load(crow + row), tl.load(crow + row + 1)
    NARROW: tl.constexpr = INNER < BK
    PARTS: tl.constexpr = 1 if NARROW else INNER // BK  # parts per block
    TAKEN: tl.constexpr = BK // INNER if NARROW else 1  # blocks per step
    SI: tl.constexpr = 1 if TRANSPOSED else INNER
    SK: tl.constexpr = BM if TRANSPOSED else 1
    ks = tl.arange(0, BK)
    inside = ks % INNER if NARROW else ks  # position within a block, along the sum
    which = ks // INNER if NARROW else 0  # which block of the step
    from_block = values + tl.arange(0, BM)[:, None] * SI + inside[None, :] * SK
    from_b = b + columns[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    # Indices are loaded one step ahead: no load waits for another.
    column = fetch(col, begin + which, end)
    place = fetch(order, begin + which, end) if ORDERED else column
    for step in range(tl.cdiv(end - begin, TAKEN) * PARTS):
        first = begin + step // PARTS * TAKEN
        part = step % PARTS * BK
        block = (first + which).to(tl.int64)
        if ORDERED:
            block = tl.max_constancy(place, INNER) if NARROW else place
        at_block = from_block + (block[None, :] if NARROW else block) * (BM * INNER) + part * SK
        at_b = from_b + (column * INNER + part + inside)[:, None] * (tl.cast(sb, tl.int64) * UNIT)
        if NARROW:
            there = first + which < end
            left = tl.load(at_block, mask=there[None, :], other=0.0)
            if EVEN_N:
                right = tl.load(at_b, mask=there[:, None], other=0.0)
            else:
                right = tl.load(at_b, mask=there[:, None] & (columns < N)[None, :], other=0.0)
        else:
            left = tl.load(at_block)
            if EVEN_N:
                right = tl.load(at_b)
            else:
                right = tl.load(at_b, mask=(columns < N)[None, :], other=0.0)
        following = begin + (step + 1) // PARTS * TAKEN + which
        column = fetch(col, following, end)
        place = fetch(order, following, end) if ORDERED else column
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    at = c + (row.to(tl.int64) * BM + tl.arange(0, BM))[:, None] * N + columns[None, :]
    if EVEN_N:
        tl.store(at, acc.to(c.dtype.element_ty))
    else:
        tl.store(at, acc.to(c.dtype.element_ty), mask=(columns < N)[None, :])


@triton.jit
def row_of(crow, p, rows):
    """The block row that contains block p."""
    low, high = p * 0, p * 0 + rows
    while low < high:
        middle = (low + high) // 2
        after = tl.load(crow + middle + 1) <= p
        low = tl.where(after, middle + 1, low)
        high = tl.where(after, high, middle)
    return low


@triton.jit(do_not_specialize=["rows"])
def sampled_kernel(
    values, crow, col, order, a, b, units, sa, sb, rows,
    H: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ORDERED: tl.constexpr,
    EVEN_D: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile [BM, BN] of one block [H, W] of a @ b^T: the sum over D of its rows of a and b."""
    wait_for_earlier(EARLY)
    ACROSS: tl.constexpr = W // BN
    TILES: tl.constexpr = H // BM * ACROSS
    p, tile, D = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.cast(units, tl.int64) * UNIT
    i, j, ds = tile // ACROSS * BM + tl.arange(0, BM), tile % ACROSS * BN + tl.arange(0, BN), tl.arange(0, BK)
    from_a = a + (row_of(crow, p, rows).to(tl.int64) * H + i)[:, None] * (tl.cast(sa, tl.int64) * UNIT) + ds[None, :]
    from_b = b + (tl.load(col + p).to(tl.int64) * W + j)[None, :] * (tl.cast(sb, tl.int64) * UNIT) + ds[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for d in range(0, D, BK):
        if EVEN_D:
            left, right = tl.load(from_a), tl.load(from_b)
        else:
            there = d + ds < D
            left = tl.load(from_a, mask=there[None, :], other=0.0)
            right = tl.load(from_b, mask=there[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        from_a += BK
        from_b += BK
    block = p.to(tl.int64)
    if ORDERED:
        block = tl.load(order + p).to(tl.int64)
    at = values + block * (H * W) + i[:, None] * W + j[None, :]
    tl.store(at, acc.to(values.dtype.element_ty))


# Bytes of shared memory: two programs per multiprocessor on sm_90, one where a block may have 99 KB.
STAGES_BYTES = 96 << 10


class Tile(NamedTuple):
    height: int
    width: int
    depth: int  # of the sum per step
    warps: int
    stages: int


def _largest(itemsize: int, precision: str) -> int:
    """Side of a tile. Without tensor cores operands also pass through registers, which fill up sooner."""
    return 64 if itemsize == 4 and precision == "ieee" else 128


def _tile(height: int, width: int, itemsize: int, precision: str) -> Tile:
    """Depth of a step: 128 bytes along the sum, a full row of shared memory; of narrow blocks several."""
    depth = 128 // itemsize
    stages = min(4, STAGES_BYTES // ((height + width) * depth * itemsize))
    return Tile(height, width, depth, 8 if height * width >= _largest(itemsize, precision) ** 2 else 4, stages)


def product_tile(rows: int, height: int, n: int, itemsize: int, precision: str, multiprocessors: int) -> Tile:
    """Tiles of bsr_spmm. A program processes a whole block row, so a product takes at least the time of the longest.

    A block row reads its rows of b once, whatever the tile width. So if tiles of 128 columns give fewer than two
    programs per multiprocessor, tiles are narrowed, to 32 columns at least: 64 bytes of 16-bit elements.
    """
    width = min(_largest(itemsize, precision), max(16, power(n)))
    while width > 32 and rows * -(-n // width) < 2 * multiprocessors:
        width //= 2
    return _tile(height, width, itemsize, precision)


def sampled_tile(blocks: int, height: int, width: int, itemsize: int, precision: str, multiprocessors: int) -> Tile:
    """Tiles of bsr_sddmm: a block, or part of one if there are fewer than two programs per multiprocessor."""
    tiles, largest = blocks, _largest(itemsize, precision)
    while max(height, width) > 32 and (tiles < 2 * multiprocessors or max(height, width) > largest):
        height, width = (height // 2, width) if height >= width else (height, width // 2)
        tiles *= 2
    return _tile(height, width, itemsize, precision)


def unit_of(itemsize: int, *sizes: int) -> int:
    """Elements in 16 bytes if all sizes are multiples of it, else 1. Triton recognizes only divisibility by 16."""
    unit = 16 // itemsize
    return unit if all(n % unit == 0 for n in sizes) else 1


def _side_by_side(crow: Tensor, col: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return crow.contiguous(), col.contiguous(), None if order is None else order.contiguous()


def product(
    crow: Tensor, col: Tensor, values: Tensor, dense: Tensor, order: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """A @ dense: [block rows * h, N] for crow [block rows + 1], col [blocks], values [blocks, h, w], dense [K, N]; h
    and w powers of two from 16 to 128, nothing empty.

    order: block p's elements are values[order[p]]. transposed: they are read as [w, h].
    """
    crow, col, order = _side_by_side(crow, col, order)
    values, dense, N = values.contiguous(), read_rows(dense), dense.shape[1]
    height, inner = values.shape[1:] if not transposed else (values.shape[2], values.shape[1])
    rows = crow.shape[0] - 1
    c = dense.new_empty(rows * height, N)
    precision = precision_of(dense.dtype)
    t = product_tile(rows, height, N, dense.element_size(), precision, gpu(dense.device.index).multiprocessors)
    unit = unit_of(dense.element_size(), N, dense.stride(0))
    args = (c, crow, col, order, values, dense, N // unit, dense.stride(0) // unit)
    constants = (t.height, inner, t.width, t.depth, transposed, order is not None, N % t.width == 0, unit, precision)
    launch(product_kernel, rows * -(-N // t.width), args, (rows,), constants, t.warps, t.stages)
    return c


def sampled(
    crow: Tensor, col: Tensor, a: Tensor, b: Tensor, height: int, width: int, order: Tensor | None = None
) -> Tensor:
    """The blocks [height, width] of a @ b^T at crow and col: [blocks, height, width] for a [rows, D], b [columns, D];
    sizes as `product`.

    order: block p is written to [order[p]].
    """
    crow, col, order = _side_by_side(crow, col, order)
    a, b, D, blocks = read_rows(a), read_rows(b), a.shape[1], col.shape[0]
    values = a.new_empty(blocks, height, width)
    precision = precision_of(a.dtype)
    t = sampled_tile(blocks, height, width, a.element_size(), precision, gpu(a.device.index).multiprocessors)
    tiles = blocks * (height // t.height) * (width // t.width)
    unit = unit_of(a.element_size(), D, a.stride(0), b.stride(0))
    args = (values, crow, col, order, a, b, D // unit, a.stride(0) // unit, b.stride(0) // unit)
    constants = (height, width, t.height, t.width, t.depth, order is not None, D % t.depth == 0, unit, precision)
    launch(sampled_kernel, tiles, args, (crow.shape[0] - 1,), constants, t.warps, t.stages)
    return values
