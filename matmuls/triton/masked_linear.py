"""masked_linear: y[r] = x[r] @ w[r]^T + b[r], where the plan selects w[r] and b[r] of the first or the second expert.

The load gathers x and the store scatters y: one launch, with the memory traffic of one product. The gradient of x is
the same kernel on transposed weights; the weights' gradients are products over each expert's rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import takes_tf32
from .configs import Tiles, gpu, run
from .few import PAD, TAIL, few_product_kernel, few_weights_kernel, in_order, of_rows, room
from .launch import INTERPRETED, launch, wait_for_earlier
from .streams import beside
from .tiles import accumulate, rows_at, store_product, tile_at, tiles_of, weight_of


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x, w1, w2, v1, v2, b1, b2, y, rows, counts, N, K, sxm, sw1, sw2, sv1, sv2, sym, M,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WALK: tl.constexpr, TMA: tl.constexpr,
    PIECES: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, PAIRS: tl.constexpr, K_INNER: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(EARLY)
    n1 = tl.load(counts)
    for tile in tl.range(tl.program_id(0), tiles_of(n1, M, N, BM, BN), tl.num_programs(0), flatten=WALK == 2):
        start, end, column, first = tile_at(tile, n1, M, N, BM, BN, GROUP)
        places = start + tl.arange(0, BM)
        listed = rows_at(rows, places, start, M, GATHER)
        at = listed * sxm
        acc = tl.zeros((BM, BN), tl.float32)
        w, sw = weight_of(first, w1, w2, sw1, sw2, column, BN, BK, K_INNER, TMA)
        acc = accumulate(acc, x, at, w, sw, column, 0, K, N, K, BN, BK, K_INNER, TMA, EVEN_K, EVEN_N, PRECISION)
        if PAIRS == 2:  # x holds two operands side by side, each with its own weights
            v, sv = weight_of(first, v1, v2, sv1, sv2, column, BN, BK, K_INNER, TMA)
            acc = accumulate(acc, x + K, at, v, sv, column, 0, K, N, K, BN, BK, K_INNER, TMA, EVEN_K, EVEN_N, PRECISION)
        bias = b1
        if BIAS:
            bias = b1 if first else b2
        target = rows_at(rows, places, start, M, SCATTER) if SCATTER != GATHER else listed
        store_product(y, acc, bias, target * sym, places < end, column, N, BM, BN, EVEN_N, BIAS, PIECES)


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
def part_of(tile, height_of_all, wide, GROUP: tl.constexpr):
    """A program's piece, and its tile's row and column."""
    within = tile % (wide * height_of_all)
    group = within // (GROUP * wide) * GROUP
    height = tl.minimum(height_of_all - group, GROUP)
    row = group + within % (GROUP * wide) % height
    return tile // (wide * height_of_all), row, within % (GROUP * wide) // height


@triton.jit
def store_sum(
    to, acc, row, column, height, wide, si, sj, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Stores acc[i, j] to to[(row + i) * si + (column + j) * sj], through shared memory, piece by piece."""
    if PIECES == 1:
        rows, columns = (row + tl.arange(0, BM)).to(tl.int64), (column + tl.arange(0, BN)).to(tl.int64)
        at = to + rows[:, None] * si + columns[None, :] * sj
        if EVEN:
            tl.store(at, acc.to(to.dtype.element_ty))
        else:
            tl.store(at, acc.to(to.dtype.element_ty), mask=(rows < height)[:, None] & (columns < wide)[None, :])
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        store_sum(to, left, row, column, height, wide, si, sj, BM, BN // 2, EVEN, PIECES // 2)
        store_sum(to, right, row, column + BN // 2, height, wide, si, sj, BM, BN // 2, EVEN, PIECES // 2)


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
    ms, ns, rs = row + tl.arange(0, BM), column + tl.arange(0, BN), tl.arange(0, BR)
    for side in range(2 if SPLIT > 1 else 1):
        start, end, first, used = segment_of(piece, side, n1, M, chunk, SPLIT)
        if used & ((first & FIRST) | ((first == 0) & SECOND)):
            acc = tl.zeros((BM, BN), tl.float32)
            whole = end - (end - start) % BR
            if GATHER:
                ahead = tl.load(rows + start + rs, mask=start + rs < end, other=0)  # loaded one step ahead
            for place in range(start, whole, BR):
                if GATHER:
                    listed = ahead.to(tl.int64)
                    ahead = tl.load(rows + place + BR + rs, mask=place + BR + rs < end, other=0)
                    left = tl.load(p + listed[None, :] * sp + ms[:, None])
                else:
                    left = of_p.load([place, row]).T
                acc = tl.dot(left, of_q.load([place, column]), acc, input_precision=PRECISION)
            if whole < end:  # TMA would also read rows of the other expert past the end
                there = whole + rs < end
                places = (whole + rs).to(tl.int64)
                listed = places
                if GATHER:
                    listed = tl.load(rows + places, mask=there, other=0).to(tl.int64)
                left = tl.load(p + listed[None, :] * sp + ms[:, None], mask=there[None, :], other=0.0)
                right = tl.load(q + places[:, None] * sq + ns[None, :], mask=there[:, None], other=0.0)
                acc = tl.dot(left, right, acc, input_precision=PRECISION)
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


@triton.jit
def slots_sum(part, low, high, at, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """part[low, at] + ... + part[high - 1, at]; with at most SPLIT slots all loads are issued at once."""
    total = tl.zeros((BLOCK,), tl.float32)
    if SPLIT > 0:
        for n in tl.static_range(SPLIT):
            slot = tl.cast(low + n, tl.int64)
            total += tl.load(part + slot * size + at, mask=at < tl.where(high > slot, size, 0), other=0.0)
    else:
        for n in range(low, high):
            total += tl.load(part + tl.cast(n, tl.int64) * size + at, mask=at < size, other=0.0)
    return total


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


LARGEST_BLOCK = 226 << 10  # bytes of shared memory that a block on sm_90 may have, rounded down


def power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def precision_of(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float32 and takes_tf32() else "ieee"


def read_rows(x: Tensor) -> Tensor:
    """x itself if each row is contiguous, with any row stride; else a copy."""
    return x if x.stride(1) == 1 else x.contiguous()


def oriented(*weights: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...], bool]:
    """Weights [N, K] all contiguous along K, or all along N; their other strides; and True for K."""
    if all(w.stride(1) == 1 for w in weights):
        return weights, tuple(w.stride(0) for w in weights), True
    if all(w.stride(0) == 1 for w in weights):
        return weights, tuple(w.stride(1) for w in weights), False
    weights = tuple(w.contiguous() for w in weights)
    return weights, tuple(w.stride(0) for w in weights), True


def by_tma(tiles: Tiles, weights: tuple[Tensor, ...], strides: tuple[int, ...]) -> bool:
    """True if TMA is to be used and can be: it needs addresses and strides that are multiples of 16 bytes."""
    return (
        tiles.tma
        and gpu(weights[0].device.index).capability >= (9, 0)
        and all(w.data_ptr() % 16 == 0 for w in weights)
        and all(s > 0 and s * w.element_size() % 16 == 0 for w, s in zip(weights, strides, strict=True))
    )


def described(tiles: Tiles, weights: tuple[Tensor, ...], strides: tuple[int, ...], k_inner: bool) -> Sequence[Any]:
    """The weights as kernel arguments: TMA descriptors with a tile as box, or the tensors."""
    if not by_tma(tiles, weights, strides):
        return weights
    sides = 1 if k_inner else -1  # in memory [N, K] or [K, N]
    block = [tiles.columns, tiles.depth][::sides]
    return [TensorDescriptor(w, list(w.shape)[::sides], [s, 1], block) for w, s in zip(weights, strides, strict=True)]


def most_tiles(tiles: Tiles, m: int, n: int) -> int:
    """The largest number of tiles of any mask."""
    return (-(-m // tiles.rows) + 1) * -(-n // tiles.columns)


def programs(tiles: Tiles, m: int, n: int, index: int | None) -> int:
    """Programs to launch: one per tile, or as many as are resident at once."""
    count = most_tiles(tiles, m, n)
    return min(count, gpu(index).multiprocessors) if tiles.persistent else count


def product(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    pair: tuple[Tensor, Tensor] | None = None,
    operator: str | None = None,
    ordered: Tensor | None = None,
) -> Tensor:
    """x[r] @ w[r]^T + b[r] for x [M, K], w1, w2 [N, K]; M, N, K > 0.

    pair: second weights, for a second operand next to the first in x [M, 2K]. operator "masked_ffn_down" and
    "masked_ffn_input" take x in the plan's order. ordered: x `in_order`, if available.
    """
    x, M, (N, K) = read_rows(x), x.shape[0], w1.shape
    weights, strides, k_inner = oriented(w1, w2, *(pair or ()))
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    operator = operator or ("masked_linear" if k_inner else "masked_linear_t")
    gather = operator in ("masked_linear", "masked_linear_t")
    precision = precision_of(x.dtype)
    if b1 is not None and b2 is not None:
        b1, b2 = b1.contiguous(), b2.contiguous()

    def few_product(t: Tiles, xs: Tensor) -> None:
        t = replace(t, rows=min(t.rows, max(64, power(M) // 4)))
        high, wide, rest = -(-M // t.rows), -(-N // t.columns), max(16, t.rows // 2)
        strip = max(16, power(-(-N // (high * wide))))
        stage = (t.rows + t.columns + rest + strip) * t.depth * x.element_size()
        given = (d for n in (t.columns, strip) for d in described(replace(t, columns=n), weights, strides, k_inner))
        of_x = (of_rows(xs, height, t.depth) for height in (t.rows, rest))
        args = (y, *of_x, *given, *weights, b1, b2, rows, counts, N, K, N, *strides)
        constants = (t.rows, t.columns, t.depth, rest, strip, k_inner, N % t.columns == 0, b1 is not None, t.pieces)
        stages = max(1, min(t.stages, LARGEST_BLOCK // stage))
        launch(few_product_kernel, high * wide, args, (M, high), (*constants, precision), t.warps, stages)

    def attempt(t: Tiles) -> None:
        given = described(t, weights, strides, k_inner)
        sides, tma, bias = (t.rows, t.columns, t.depth, t.group), given is not weights, b1 is not None
        even = K % t.depth == 0, N % t.columns == 0
        if t.split > 1 and gather and tma and K * x.element_size() % 16 == 0:
            few_product(t, in_order(x, rows, counts) if ordered is None else ordered)
            return
        none = (None, None) if pair is None else ()
        args = (x, *given, *none, b1, b2, y, rows, counts, N, K, x.stride(0), *strides, *none, N)
        layout = (gather, True, 1 if pair is None else 2, k_inner, *even, bias, precision)
        grid = programs(t, M, N, x.device.index)
        launch(product_kernel, grid, args, (M,), (*sides, t.walk, tma, t.pieces, *layout), t.warps, t.stages)

    run(operator, M, N, K, x, precision == "tf32", attempt)
    return y


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
            tensors = (narrow, q, of_p, of_rows(q, t.depth, t.columns), part, d1, d2, rows, counts)
            args: tuple[Any, ...] = (*tensors, narrow.shape[1], q.shape[1], narrow.stride(0), q.stride(0))
            shape = (t.rows, t.columns, t.depth, t.group, gather, transposed, t.split)
            constants = (*shape, first, second, t.pieces, precision)
            launch(sorted_weights_kernel, pieces * sides[0] * sides[1], args, (M, chunk), constants, t.warps, t.stages)
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


FEW, LITTLE, WIDE = 256, 1024, 2048


def from_copies(m: int, n: int, k: int, size: int) -> str | None:
    """The training kernel that computes the weights' gradients from copies in the plan's order, on sm_90; or None."""
    if size != 2 or n % 256 or k % 256:
        return None
    if m > LITTLE:
        return "masked_ffn_weights"
    return "masked_few_weights" if m >= FEW and min(n, k) >= WIDE else None


def rows_kept(m: int, n: int, k: int, x: Tensor) -> int:
    """Rows of x `in_order` to save for backward, [m, k] @ [k, n], if both forward and backward read them; else 0."""
    if gpu(x.device.index).capability < (9, 0) or from_copies(m, n, k, x.dtype.itemsize) != "masked_few_weights":
        return 0
    return m + int(PAD.value) + TAIL


def _beside(device: torch.device, one: Callable[[], Tensor], other: Callable[[], None]) -> Tensor:
    """Runs one() and, concurrently on a second stream, other(), which allocates nothing."""
    if INTERPRETED:
        y = one()
        other()
        return y
    main = torch.cuda.current_stream(device)
    side = beside(main)
    side.wait_stream(main)
    y = one()
    try:
        with torch.cuda.stream(side):
            other()
    finally:  # work already started may still use memory that would be reused
        main.wait_stream(side)
    return y


def gradients(
    g: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    first: bool = True,
    second: bool = True,
    ordered: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and of the weights for g [M, N], x [M, K], w1, w2 [N, K]; M, N, K > 0. ordered: x `in_order`,
    if available.

    On sm_90 loading sorted rows by TMA is worth a copy of g and x if the copy is free: while the product for x
    computes, it leaves registers for two small programs per multiprocessor, which copy on a second stream. With few
    rows it leaves room for the weights' products too.
    """
    device, M, sides = gpu(x.device.index), len(x), (g.shape[1], x.shape[1])
    kernel = from_copies(M, *sides, x.dtype.itemsize) if device.capability >= (9, 0) else None
    if kernel == "masked_few_weights" and (first or second):
        return _few_gradients(read_rows(g), read_rows(x), w1, w2, rows, counts, first, second, ordered)
    if kernel != "masked_ffn_weights":
        return product(g, w1.T, w2.T, rows, counts), *weight_gradients(g, x, rows, counts, first, second)
    g, x = read_rows(g), read_rows(x)
    gs, xs = g.new_empty(g.shape), x.new_empty(x.shape)

    def copies() -> None:
        for t, ordered in ((g, gs), (x, xs)):
            sorted_rows(t, rows, ordered, 2 * device.multiprocessors)

    dx = _beside(x.device, lambda: product(g, w1.T, w2.T, rows, counts), copies)
    return dx, *weight_gradients(gs, xs, rows, counts, first, second, gather_g=False, gather_x=False)


def _few_gradients(
    g: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    first: bool,
    second: bool,
    ordered: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `gradients`. Both products need the copy of g; the weights' products run concurrently with the one for x."""
    M, N, K = len(x), g.shape[1], x.shape[1]
    d1, d2 = (x.new_empty(N if wanted else 0, K) for wanted in (first, second))
    gs, xs, last = in_order(g, rows, counts), room(x) if ordered is None else ordered, M + int(PAD.value)
    precision = precision_of(x.dtype)

    def weights(t: Tiles) -> None:
        if ordered is None:
            in_order(x, rows, counts, xs)
        one, other = (of_rows(d, t.rows, t.columns // t.pieces) for d in (d1 if first else d2, d2 if second else d1))
        operands = of_rows(gs[:last], t.depth, t.rows), of_rows(xs[:last], t.depth, t.columns)
        constants = (t.rows, t.columns, t.depth, t.group, first, second, t.pieces, precision)
        args = (counts, one, other, *operands, N, K)
        launch(few_weights_kernel, 2 * (N // t.rows) * (K // t.columns), args, (M,), constants, t.warps, t.stages)

    def attempt(t: Tiles) -> Tensor:
        t = replace(t, depth=min(t.depth, int(PAD.value)))
        return _beside(x.device, lambda: product(g, w1.T, w2.T, rows, counts, ordered=gs), lambda: weights(t))

    return run("masked_few_weights", M, N, K, x, precision == "tf32", attempt), d1, d2


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
