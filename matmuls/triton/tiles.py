"""Shared by the masked kernels: the rows of a tile, and the loop over K.

The plan lists the rows of the first expert, then those of the second. A tile contains rows of one expert only, so any
mask has at most ceil(M / BM) + 1 row tiles: a grid of that size serves every mask, the counts stay on the device, and a
CUDA graph replays with another mask.
"""

import triton
import triton.language as tl


@triton.jit
def tiles_of(n1, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """The number of tiles of this mask, over rows and columns."""
    return (tl.cdiv(n1, BM) + tl.cdiv(M - n1, BM)) * tl.cdiv(N, BN)


@triton.jit
def tile_at(tile, n1, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The tile's first place in the plan, the end of its expert's places, its first column, and its expert.

    GROUP row tiles are traversed column by column, so that concurrent programs share rows and weights in the L2.
    """
    t1 = tl.cdiv(n1, BM)
    high = t1 + tl.cdiv(M - n1, BM)
    wide = tl.cdiv(N, BN)
    group = tile // (GROUP * wide) * GROUP
    height = tl.minimum(high - group, GROUP)
    within = tile % (GROUP * wide)
    row = group + within % height
    first = row < t1
    start = tl.where(first, row * BM, n1 + (row - t1) * BM)
    end = tl.where(first, n1, M)
    return start, end, within // height * BN, first


@triton.jit
def rows_at(rows, places, start, M, LISTED: tl.constexpr):
    """The rows at these places of the plan. Places past a tile's end give other rows, which are read but not used.

    They differ on purpose: programs that all read one row at once take up to three times as long. Without LISTED the
    operand is already in the plan's order.
    """
    inside = tl.where(places < M, places, tl.minimum(places - start, M - 1))
    if LISTED:
        return tl.load(rows + inside).to(tl.int64)
    return inside.to(tl.int64)


@triton.jit
def weight_of(
    first, w1, w2, sw1, sw2, column, BN: tl.constexpr, BK: tl.constexpr, K_INNER: tl.constexpr, TMA: tl.constexpr
):
    """Source of the expert's weight columns for the loop over K, and its stride.

    With TMA, w1 and w2 are descriptors made on the host: making them in a kernel would take a microsecond each.
    Otherwise the sources are pointers [BK, BN].
    """
    if first:
        w, sw = w1, sw1
    else:
        w, sw = w2, sw2
    if TMA:
        return w, sw
    else:
        ks = tl.arange(0, BK).to(tl.int64)[:, None]
        columns = (column + tl.arange(0, BN)).to(tl.int64)[None, :]
        if K_INNER:
            return w + columns * sw + ks, sw
        else:
            return w + ks * sw + columns, sw


@triton.jit
def load_weight(
    source, sw, column, k, N, K, BN: tl.constexpr, BK: tl.constexpr, K_INNER: tl.constexpr, TMA: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """[BK, BN] of the weight; zero outside of it."""
    if TMA:
        if K_INNER:
            return source.load([column, k]).T
        else:
            return source.load([k, column])
    else:
        at = source + (k if K_INNER else k * tl.cast(sw, tl.int64))
        if EVEN_K and EVEN_N:
            return tl.load(at)
        elif EVEN_N:
            return tl.load(at, mask=(k + tl.arange(0, BK) < K)[:, None], other=0.0)
        elif EVEN_K:
            return tl.load(at, mask=(column + tl.arange(0, BN) < N)[None, :], other=0.0)
        else:
            inside = (k + tl.arange(0, BK) < K)[:, None] & (column + tl.arange(0, BN) < N)[None, :]
            return tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_rows(at, k, K, BK: tl.constexpr, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(at)
    else:
        return tl.load(at, mask=(k + tl.arange(0, BK) < K)[None, :], other=0.0)


@triton.jit
def accumulate(
    acc, x, offsets, source, sw, column, begin, end, N, K,
    BN: tl.constexpr, BK: tl.constexpr, K_INNER: tl.constexpr, TMA: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + x[rows] @ w[columns]^T over k from begin to end; the loads gather the rows."""
    at = x + offsets[:, None] + (begin + tl.arange(0, BK))[None, :]
    for k in range(begin, end, BK):
        a = load_rows(at, k, K, BK, EVEN_K)
        b = load_weight(source, sw, column, k, N, K, BN, BK, K_INNER, TMA, EVEN_K, EVEN_N)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        at += BK
    return acc


@triton.jit
def store_tile(y, value, offsets, there, column, N, BN: tl.constexpr, EVEN_N: tl.constexpr):
    columns = column + tl.arange(0, BN)
    at = y + offsets[:, None] + columns[None, :]
    if EVEN_N:
        tl.store(at, value.to(y.dtype.element_ty), mask=there[:, None])
    else:
        tl.store(at, value.to(y.dtype.element_ty), mask=there[:, None] & (columns < N)[None, :])


@triton.jit
def store_product(
    y, acc, bias, offsets, there, column, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN_N: tl.constexpr, BIAS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Stores acc + bias to rows of y. With PIECES a tile passes through shared memory piece by piece, which leaves room
    for another stage."""
    if PIECES == 1:
        if BIAS:
            columns = column + tl.arange(0, BN)
            acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        store_tile(y, acc, offsets, there, column, N, BN, EVEN_N)
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        store_product(y, left, bias, offsets, there, column, N, BM, BN // 2, EVEN_N, BIAS, PIECES // 2)
        store_product(y, right, bias, offsets, there, column + BN // 2, N, BM, BN // 2, EVEN_N, BIAS, PIECES // 2)
