"""masked_linear for few rows: one wave of tiles for any mask; all operands load by TMA from rows in the plan's order.

Problem: 512 rows of two experts give 5 row tiles of 128, times 32 columns on 132 multiprocessors: two waves, the second
with 28 tiles. But 4 row tiles hold all rows except the smaller of the two experts' rests, which is at most half a tile.
So each of the 128 programs also multiplies a strip of that rest, in the loop of its own tile: a tenth more time, not
twice.

   rows in the plan's order:  [ first: full tiles | rest | pad | second: full tiles | rest ]
   programs:                  full tiles of both experts and the larger rest, each plus a strip of the smaller rest

Measured alternatives:

- Strips in a kernel of their own, concurrent with tiles that gather their rows without a copy: 40 us against 40.
- Tile order: row tiles first, so that neighbours share weights. By 2 columns first: 0.4 us less to 0.7 more; by 4 to
  32: 0.5 to 10 more; by one expert's tiles after the other: no less.
- Programs run best in step. K starting at a different place for each column: 39 us against 38; for each row too: 47.
- Weights' gradient next to the product by programmatic dependent launch, without a second stream: 4 of 78 us more.
  The gradient's copy next to the product in this way: 1 to 3 us more.
- The product's programs become resident while the copy runs and prefetch their first weights to the L2: 0.9 to 1.1
  us less of 34 to 38 forward, 1.5 to 4.4 of 111 to 117 forward and backward. This needs the copy to prefer as much
  shared memory as the product; otherwise they wait for each multiprocessor to be idle and start in another order:
  0.6 to 5 us more. Starting the gradient's copy when the sums are done, not before: 0.4 us less of 107 forward and
  backward.
- DRAM is not the bound: with one weight for both experts, or with it in the L2, 33 us against 34; with lines
  prefetched to the L2 48.
- A rest of 32 rows by mma.sync, which queues behind wgmma in flight: 8 us more forward and backward.
- A strip costs its wgmma, 4.5 of 47 thousand cycles; with all its loads from one place it takes 0 to 1.3 us less.
- Two programs sharing a strip: half of K each, 34.0 us against 33.7, of which their exchange takes 1.0; half of the
  rows each, 32.4 against 32.9, but backward no less.
- Two or four of the weights' tiles per program, as one pipeline: 3 us more or worse.
- In CUDA, with loading and multiplying warps, no faster: 37 us against 32 to 36 with these tiles; 37 with x shared by
  a cluster of two; 39 with K halved between them; 38 with rows gathered by cp.async; 190 by TMA, where each row's 128
  bytes take 47 cycles; without strips, by a row tile that holds both rests, 43 against 35: the fourth of the programs
  that have it load 56 KB a step instead of 32. Weights' gradient by two alternating warpgroups: 44 us against 46
  alone, 83 against 79 next to the product. The chip is at its power limit then: 1.4 to 1.7 GHz, in torch.mm too.
- A dense CUDA product of these sizes is bound by its epilogue: results stored by the threads that hold them 26.6 to
  27.6 us, staged and stored by TMA 23.5 against cuBLAS's 23.3, with a cluster's multicast or without. This product in
  that form (loading warps, two warpgroups, each row stored by a bulk copy) is no faster: 34.8 us against 34.7 without
  a strip, 38.5 against 37.6 with one; forward and backward 112 against 111 and 121 against 116; with its first
  weights prefetched while the copy runs, 35.3 and 42.8.
- Steps of 32 K: 47 us against 36, whatever the number of stages.
- Row indices loaded before the loop over K: 0.1 to 0.3 us less forward, within the noise forward and backward.
- Weights' gradient at once, gathering its rows of g by pointers while others are copied: 5 to 8 us more of 109 to 118
  at best.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import fetch_ahead, launch, let_next_begin, wait_for_earlier
from .tiles import store_product

PAD = tl.constexpr(64)
# Rows past the last one that a tile of 128 rows may read without using them: TMA is slow past a tensor's end, 54 us
# instead of 31.
TAIL = 128
ORDERED = 1, 4096  # rows and columns that a program sorts
AHEAD = tl.constexpr(2)  # lines of 128 bytes along K of the weights to prefetch; 4 and 8 are no better


@triton.jit(do_not_specialize=["M"])
def order_kernel(x, y, rows, counts, K, sxm, M, BR: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr):
    """y = x's rows in the plan's order, with PAD rows of zeros between the first expert's and the second's."""
    wait_for_earlier(EARLY)
    let_next_begin(EARLY)
    n1 = tl.load(counts)
    at = tl.program_id(0) * BR + tl.arange(0, BR)
    one = tl.load(rows + at, mask=at < M, other=0)  # both loads start before n1 arrives
    other = tl.load(rows + at - PAD, mask=(at >= PAD) & (at < M + PAD), other=0)
    listed = tl.where(at < n1, one, other).to(tl.int64)
    there = (at < n1) | ((at >= n1 + PAD) & (at < M + PAD))
    ks = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (at < M + PAD)[:, None] & (ks < K)[None, :]
    value = tl.load(x + listed[:, None] * sxm + ks[None, :], mask=there[:, None] & (ks < K)[None, :], other=0.0)
    tl.store(y + at.to(tl.int64)[:, None] * K + ks[None, :], value, mask=inside)


@triton.jit
def tile_of(of_w, column, k, K_INNER: tl.constexpr):
    if K_INNER:
        return of_w.load([column, k]).T
    else:
        return of_w.load([k, column])


@triton.jit
def store_rows(
    y, acc, b1, b2, first, rows, place, count, sym, column, N,
    BM: tl.constexpr, BN: tl.constexpr, EVEN_N: tl.constexpr, BIAS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Stores acc plus the expert's bias to the rows at `count` places of the plan."""
    bias = b1
    if BIAS:
        bias = b1 if first else b2
    there = tl.arange(0, BM) < count
    to = tl.load(rows + place + tl.arange(0, BM), mask=there, other=0).to(tl.int64)
    store_product(y, acc, bias, to * sym, there, column, N, BM, BN, EVEN_N, BIAS, PIECES)


@triton.jit
def first_lines(w1, w2, step1, step2, N, K, high, BN: tl.constexpr, K_INNER: tl.constexpr):
    """Addresses of a program's first weights, of the expert that it probably works for. Covers half of its tile; the
    next row tile's program prefetches the other half."""
    LINE: tl.constexpr = 1024 // w1.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    row, column = tl.program_id(0) % high, tl.program_id(0) // high * BN
    if row < high // 2:
        w, step = w1, step1
    else:
        w, step = w2, step2
    if K_INNER:
        ns = column + row % 2 * (BN // 2) + tl.arange(0, BN // 2)[:, None]
        ks = tl.arange(0, AHEAD)[None, :] * LINE
        return w + tl.minimum(ns, N - 1).to(tl.int64) * step + tl.minimum(ks, K - 1)
    ns = column + tl.arange(0, (BN + LINE - 1) // LINE)[None, :] * LINE
    ks = row % 2 * (AHEAD * LINE // 2) + tl.arange(0, AHEAD * LINE // 2)[:, None]
    return w + tl.minimum(ks, K - 1).to(tl.int64) * step + tl.minimum(ns, N - 1)


@triton.jit(do_not_specialize=["M", "high"])
def few_product_kernel(
    y, of_x, of_rest, w1, w2, strip1, strip2, whole1, whole2, b1, b2, rows, counts, N, K, sym, step1, step2, M, high,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, REST: tl.constexpr, STRIP: tl.constexpr,
    K_INNER: tl.constexpr, EVEN_N: tl.constexpr, BIAS: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """high: ceil(M / BM) row tiles. of_x, of_rest: descriptors of the sorted x, by BM and by REST = BM / 2 rows.
    whole1, whole2: the weights themselves; step1, step2: their row strides in memory."""
    fetch_ahead(first_lines(whole1, whole2, step1, step2, N, K, high, BN, K_INNER), EARLY)
    wait_for_earlier(EARLY)
    n1, program = tl.load(counts), tl.program_id(0)
    n2, second = M - n1, n1 + PAD
    full1, full2 = n1 // BM, n2 // BM
    rest1, rest2 = n1 - full1 * BM, n2 - full2 * BM
    full, rest = full1 + full2, tl.minimum(rest1, rest2)
    # row tiles: the first expert's full ones, the second's, the larger rest, and the smaller one if there is room
    row, column = program % high, program // high * BN
    first = (row < full1) | ((row == full) & (rest1 >= rest2)) | ((row == full + 1) & (rest1 < rest2))
    begin = tl.where(row < full1, row, tl.where(row < full, row - full1, tl.where(first, full1, full2))) * BM
    count = tl.where(row < full + 2, tl.where(first, n1, n2) - begin, 0)
    if first:
        w = w1
    else:
        w = w2
    source = begin + tl.where(first, 0, second)
    acc = tl.zeros((BM, BN), tl.float32)
    if (full + 2 > high) & (rest > 0):
        of_first = rest1 < rest2
        if of_first:
            strip = strip1
        else:
            strip = strip2
        low = tl.where(of_first, full1, full2) * BM
        from_row, narrow = low + tl.where(of_first, 0, second), program * STRIP
        sums = tl.zeros((REST, STRIP), tl.float32)
        for k in range(0, K, BK):
            # the strip first: 1.6 of 120 us less, forward and backward, than the tile first
            sums = tl.dot(
                of_rest.load([from_row, k]), tile_of(strip, narrow, k, K_INNER), sums, input_precision=PRECISION
            )
            acc = tl.dot(of_x.load([source, k]), tile_of(w, column, k, K_INNER), acc, input_precision=PRECISION)
        place = low + tl.where(of_first, 0, n1)
        store_rows(y, sums, b1, b2, of_first, rows, place, rest, sym, narrow, N, REST, STRIP, False, BIAS, 1)
    else:
        for k in range(0, K, BK):
            acc = tl.dot(of_x.load([source, k]), tile_of(w, column, k, K_INNER), acc, input_precision=PRECISION)
    let_next_begin(EARLY)
    place = begin + tl.where(first, 0, n1)
    store_rows(y, acc, b1, b2, first, rows, place, count, sym, column, N, BM, BN, EVEN_N, BIAS, PIECES)


@triton.jit
def store_described(to, acc, row, column, BM: tl.constexpr, BN: tl.constexpr, PIECES: tl.constexpr):
    """Stores acc by TMA, piece by piece; `to` is a descriptor of a piece."""
    if PIECES == 1:
        to.store([row, column], acc.to(to.dtype))
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        store_described(to, left, row, column, BM, BN // 2, PIECES // 2)
        store_described(to, right, row, column + BN // 2, BM, BN // 2, PIECES // 2)


@triton.jit(do_not_specialize=["M"])
def few_weights_kernel(
    counts, d1, d2, of_g, of_x, N, K, M,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """d[N, K] = g^T @ x over each expert's rows, both sorted. The expert with more rows starts first."""
    wait_for_earlier(EARLY)
    n1, high, wide = tl.load(counts), N // BM, K // BN
    piece, within = tl.program_id(0) // (high * wide), tl.program_id(0) % (high * wide)
    group = within // (GROUP * wide) * GROUP
    height = tl.minimum(high - group, GROUP)
    row, column = (group + within % (GROUP * wide) % height) * BM, within % (GROUP * wide) // height * BN
    first = (piece == 0) == (2 * n1 >= M)
    if (first & FIRST) | ((first == 0) & SECOND):
        start = tl.where(first, 0, n1 + PAD)
        acc = tl.zeros((BM, BN), tl.float32)
        for place in range(start, start + tl.where(first, n1, M - n1), BR):  # past the end it reads zeros
            acc = tl.dot(of_g.load([place, row]).T, of_x.load([place, column]), acc, input_precision=PRECISION)
        if first:
            to = d1
        else:
            to = d2
        store_described(to, acc, row, column, BM, BN, PIECES)


def of_rows(x: Tensor, height: int, width: int) -> TensorDescriptor:
    """TMA descriptor of x, with boxes of the given rows and columns."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [height, width])


def room(x: Tensor) -> Tensor:
    """An empty tensor for `in_order`'s result."""
    return x.new_empty(x.shape[0] + int(PAD.value) + TAIL, x.shape[1])


def in_order(x: Tensor, rows: Tensor, counts: Tensor, y: Tensor | None = None) -> Tensor:
    """x's rows in the plan's order, padded as the kernels here need; written to y if given.

    A product that gathers by pointers instead takes 34 us against 36 without a rest, but 43 against 39 with one.
    """
    y, (height, width) = room(x) if y is None else y, ORDERED
    grid = -(-(x.shape[0] + int(PAD.value)) // height), -(-x.shape[1] // width)
    args = (x, y, rows, counts, x.shape[1], x.stride(0))
    launch(order_kernel, grid, args, (x.shape[0],), ORDERED, 4, 1, shares=True)
    return y
