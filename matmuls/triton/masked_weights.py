"""The weights' gradients of masked products, g^T @ x over each expert's rows, and sums of these rows for the biases."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import is_batch_invariant
from .configs import Tiles, gpu, run
from .few import of_rows
from .launch import launch, wait_for_earlier
from .masked_linear import by_tma, precision_of, read_rows
from .stream_k import in_shares, saves
from .weight_tiles import part_of, product_of_rows, slots_sum, store_sum


@triton.jit
def halved(n1, M, chunk, SPLIT: tl.constexpr):
    """True if there are two chunks, one per expert, of its length: their sums are whole gradients, not parts."""
    return (SPLIT == 2) & (chunk < M) & (tl.abs(n1 - chunk) <= chunk // 8)


@triton.jit
def segment_of(piece, side, n1, M, chunk, SPLIT: tl.constexpr):
    """A program's range of one expert's rows in the plan, which expert, and whether the range is used.

    With SPLIT a piece is a chunk of the same number of rows for any mask: those of the first expert, then the second's.
    Otherwise a piece is all rows of one expert, possibly none; the expert with more rows starts first, the other fills
    the gaps.
    """
    if SPLIT > 1:
        begin = piece * chunk
        stop = tl.minimum(begin + chunk, M)
        if halved(n1, M, chunk, SPLIT):
            begin = tl.where(piece == 0, 0, n1)
            stop = tl.where(piece == 0, n1, M)
        first = side == 0
        start = tl.where(first, begin, tl.maximum(begin, n1))
        end = tl.where(first, tl.minimum(stop, n1), stop)
        return start, end, first, start < end
    else:
        first = (piece == 0) == (2 * n1 >= M)
        return tl.where(first, 0, n1), tl.where(first, n1, M), first, M > 0


@triton.jit
def store_gradient(
    part, d1, d2, acc, piece, side, first, start, end, n1, M, row, column, height, wide, si, sj,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Stores the sum over an expert's rows from start to end: to its gradient if these are all of its rows, else as a
    partial sum of chunk c to slot c or c + 1."""
    if (start == tl.where(first, 0, n1)) & (end == tl.where(first, n1, M)):
        store_sum(d1 if first else d2, acc, row, column, height, wide, si, sj, BM, BN, EVEN, PIECES)
    elif SPLIT > 1:
        slot = part + (piece + side).to(tl.int64) * height * wide
        store_sum(slot, acc, row, column, height, wide, si, sj, BM, BN, EVEN, PIECES)


@triton.jit(do_not_specialize=["M", "chunk"])
def weights_kernel(
    g, x, part, d1, d2, rows, counts, N, K, sgm, sxm, M, chunk,
    BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr, GATHER_G: tl.constexpr,
    GATHER_X: tl.constexpr, SPLIT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, PIECES: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dw[N, K] = g^T @ x over each expert's rows. No atomics: bitwise reproducible."""
    wait_for_earlier(EARLY)
    n1 = tl.load(counts)
    piece, row, column = part_of(tl.program_id(0), tl.cdiv(N, BN), tl.cdiv(K, BK), GROUP)
    row *= BN
    column *= BK
    ns, ks, rs = row + tl.arange(0, BN), column + tl.arange(0, BK), tl.arange(0, BR)
    for side in range(2 if SPLIT > 1 else 1):
        start, end, first, used = segment_of(piece, side, n1, M, chunk, SPLIT)
        if used & ((first & FIRST) | ((first == 0) & SECOND)):
            acc = tl.zeros((BN, BK), tl.float32)
            ahead = tl.load(rows + start + rs, mask=start + rs < end, other=0)  # loaded one step ahead
            for place in range(start, end, BR):
                there = place + rs < end
                listed = ahead.to(tl.int64)
                ahead = tl.load(rows + place + BR + rs, mask=place + BR + rs < end, other=0)
                in_plan = (place + rs).to(tl.int64)
                from_g = g + (listed if GATHER_G else in_plan)[None, :] * sgm + ns[:, None]
                from_x = x + (listed if GATHER_X else in_plan)[:, None] * sxm + ks[None, :]
                left = tl.load(from_g, mask=there[None, :] if EVEN_N else there[None, :] & (ns < N)[:, None], other=0.0)
                right = tl.load(
                    from_x, mask=there[:, None] if EVEN_K else there[:, None] & (ks < K)[None, :], other=0.0
                )
                acc = tl.dot(left, right, acc, input_precision=PRECISION)
            EVEN: tl.constexpr = EVEN_N and EVEN_K
            store_gradient(
                part, d1, d2, acc, piece, side, first, start, end, n1, M, row, column, N, K, K, 1, BN, BK, SPLIT, EVEN,
                PIECES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M", "chunk"])
def sorted_weights_kernel(
    p, q, of_p, of_q, part, d1, d2, rows, counts, P, Q, sp, sq, M, chunk,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr, GATHER: tl.constexpr,
    TRANSPOSED: tl.constexpr, SPLIT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, PIECES: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """d[P, Q], or [Q, P] if TRANSPOSED, = p^T @ q over each expert's rows; q is in the plan's order and loads by TMA.

    A multiprocessor loads half as much again by TMA as by pointers. of_p, of_q: descriptors of p, if it is sorted too,
    and of q. P and Q are multiples of the tile's sides.
    """
    wait_for_earlier(EARLY)
    n1 = tl.load(counts)
    piece, row, column = part_of(tl.program_id(0), P // BM, Q // BN, GROUP)
    row *= BM
    column *= BN
    for side in range(2 if SPLIT > 1 else 1):
        start, end, first, used = segment_of(piece, side, n1, M, chunk, SPLIT)
        if used & ((first & FIRST) | ((first == 0) & SECOND)):
            acc = product_of_rows(
                p, q, of_p, of_q, rows, sp, sq, row, column, start, end, BM, BN, BR, GATHER, PRECISION
            )
            si, sj = (1, P) if TRANSPOSED else (Q, 1)
            store_gradient(
                part, d1, d2, acc, piece, side, first, start, end, n1, M, row, column, P, Q, si, sj, BM, BN, SPLIT,
                True, PIECES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M", "chunk"])
def sum_kernel(x, part, rows, counts, N, sxm, M, chunk, BR: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr):
    """part[slot, N] = sums of x's rows: chunk c's rows of the first expert in slot c, those of the second in c + 1."""
    wait_for_earlier(EARLY)
    n1, piece = tl.load(counts), tl.program_id(1)
    first = piece * chunk < n1
    start = tl.where(first, piece * chunk, tl.maximum((piece - 1) * chunk, n1))
    end = tl.where(first, tl.minimum((piece + 1) * chunk, n1), tl.minimum(piece * chunk, M))
    ns, rs = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BR)
    total = tl.zeros((BN,), tl.float32)
    for place in range(start, end, BR):
        there = place + rs < end
        listed = tl.load(rows + place + rs, mask=there, other=0).to(tl.int64)
        tile = tl.load(x + listed[:, None] * sxm + ns[None, :], mask=there[:, None] & (ns < N)[None, :], other=0.0)
        total += tl.sum(tile.to(tl.float32), 0)
    tl.store(part + piece.to(tl.int64) * N + ns, total, mask=ns < N)


@triton.jit(do_not_specialize=["M", "chunk"])
def reduce_kernel(
    part, d1, d2, counts, size, M, chunk,
    SPLIT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """d1, d2 = each expert's slots of part[slots, size] added up in order; exactly 0 for an expert without rows.

    The sum of an expert with a single chunk is already in place, except with SPLIT = 0: then all sums are in slots.
    """
    wait_for_earlier(EARLY)
    n1 = tl.load(counts)
    if halved(n1, M, chunk, SPLIT):
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    last = tl.cdiv(M, chunk)
    if FIRST:
        low, high = 0, tl.cdiv(n1, chunk)
        if (high != 1) | (SPLIT == 0):
            tl.store(d1 + at, slots_sum(part, low, high, at, size, SPLIT, BLOCK), mask=inside)
    if SECOND:
        low, high = n1 // chunk + 1, tl.where(n1 < M, last, n1 // chunk) + 1
        if (high - low != 1) | (SPLIT == 0):
            tl.store(d2 + at, slots_sum(part, low, high, at, size, SPLIT, BLOCK), mask=inside)


@triton.jit(do_not_specialize=["M"])
def sort_kernel(x, y, rows, K, sxm, M, BR: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr):
    """y = x's rows in the plan's order."""
    wait_for_earlier(EARLY)
    wide = tl.cdiv(K, BK)
    for block in range(tl.program_id(0), tl.cdiv(M, BR) * wide, tl.num_programs(0)):
        places, ks = block // wide * BR + tl.arange(0, BR), block % wide * BK + tl.arange(0, BK)
        listed = tl.load(rows + places, mask=places < M, other=0).to(tl.int64)
        inside = (places < M)[:, None] & (ks < K)[None, :]
        value = tl.load(x + listed[:, None] * sxm + ks[None, :], mask=inside)
        tl.store(y + places.to(tl.int64)[:, None] * K + ks[None, :], value, mask=inside)


def sorted_rows(x: Tensor, rows: Tensor, y: Tensor | None = None, programs: int | None = None) -> Tensor:
    """x's rows in the plan's order, in y if given; by the given number of programs, or by as many as fill the GPU."""
    (M, K), (height, width) = x.shape, (8 if programs else 16, 512)
    y = x.new_empty(M, K) if y is None else y
    count = -(-M // height) * -(-K // width)
    launch(sort_kernel, min(count, programs or count), (x, y, rows, K, x.stride(0)), (M,), (height, width), 4, 1)
    return y


def weight_gradients(
    g: Tensor,
    x: Tensor,
    rows: Tensor,
    counts: Tensor,
    first: bool = True,
    second: bool = True,
    *,
    gather_g: bool = True,
    gather_x: bool = True,
) -> tuple[Tensor, Tensor]:
    """g^T @ x over the rows of each expert, [N, K] each for g [M, N], x [M, K]; M, N, K > 0.

    An expert's result is empty, and not computed, if it is not needed.
    """
    g, x, M, N, K = read_rows(g), read_rows(x), x.shape[0], g.shape[1], x.shape[1]
    d1, d2 = (x.new_empty(N if wanted else 0, K) for wanted in (first, second))
    precision = precision_of(x.dtype)

    # the wide operand loads by TMA from sorted rows: sort the one with fewer columns if neither is sorted
    transposed = gather_x and (not gather_g or N < K)
    narrow, wide = (x, g) if transposed else (g, x)

    def attempt(t: Tiles) -> None:
        chunk = -(-M // t.split)
        split = t.split > 1
        pieces = -(-M // chunk) if split else 2
        part = x.new_empty(pieces + 1, N, K, dtype=torch.float32) if split else None
        sides = -(-narrow.shape[1] // t.rows), -(-wide.shape[1] // t.columns)
        even = narrow.shape[1] % t.rows == 0, wide.shape[1] % t.columns == 0
        if all(even) and by_tma(t, (narrow, wide), (narrow.stride(0), wide.stride(0))):
            q = sorted_rows(wide, rows) if gather_g and gather_x else wide
            gather = gather_g or gather_x
            of_p = None if gather else of_rows(narrow, t.depth, t.rows)
            operands = narrow, q, of_p, of_rows(q, t.depth, t.columns)
            sizes = narrow.shape[1], q.shape[1], narrow.stride(0), q.stride(0)
            count, device = sides[0] * sides[1], gpu(x.device.index)
            # shares depend on the number of rows
            shares = not split and not is_batch_invariant()
            if shares and saves(t, M, count, first + second, x.element_size(), device):
                layout, wanted, S = (gather, transposed), (first, second), device.multiprocessors
                in_shares(t, operands, d1, d2, rows, counts, sizes, layout, wanted, precision, S)
                return
            args: tuple[Any, ...] = (*operands, part, d1, d2, rows, counts, *sizes)
            shape = (t.rows, t.columns, t.depth, t.group, gather, transposed, t.split)
            constants = (*shape, first, second, t.pieces, precision)
            launch(sorted_weights_kernel, pieces * count, args, (M, chunk), constants, t.warps, t.stages)
        else:
            args = (g, x, part, d1, d2, rows, counts, N, K, g.stride(0), x.stride(0))
            shape = (t.rows, t.columns, t.depth, t.group, gather_g, gather_x, t.split)
            grid = pieces * -(-N // t.rows) * -(-K // t.columns)
            masks = (N % t.rows == 0, K % t.columns == 0)
            launch(
                weights_kernel, grid, args, (M, chunk), (*shape, first, second, t.pieces, *masks, precision),
                t.warps, t.stages,
            )  # fmt: skip
        if part is not None:
            _reduce(part, d1, d2, counts, M, chunk, t.split, first, second)

    if gather_g and gather_x:
        run("masked_weights", M, N, K, x, precision == "tf32", attempt)
    else:  # in both layers of the network the operand of hidden rows is sorted
        run("masked_ffn_weights", M, wide.shape[1], narrow.shape[1], x, precision == "tf32", attempt)
    return d1, d2


def _reduce(
    part: Tensor,
    d1: Tensor,
    d2: Tensor,
    counts: Tensor,
    M: int,
    chunk: int,
    split: int = 0,
    first: bool = True,
    second: bool = True,
) -> None:
    size, block = part[0].numel(), 1024
    args = (part, d1, d2, counts, size)
    launch(reduce_kernel, -(-size // block), args, (M, chunk), (split, first, second, block), 4, 3)


def sums(x: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """[2, N]: the sum of each expert's rows of x [M, N], in float32 and then rounded; M, N > 0."""
    x, (M, N) = read_rows(x), x.shape
    chunk = max(256, -(-M // 64))
    chunks, columns = -(-M // chunk) + 1, 128
    part = x.new_empty(chunks, N, dtype=torch.float32)
    y = x.new_empty(2, N)
    launch(
        sum_kernel, (-(-N // columns), chunks), (x, part, rows, counts, N, x.stride(0)), (M, chunk), (32, columns), 4, 3
    )
    _reduce(part, y[0], y[1], counts, M, chunk)
    return y
