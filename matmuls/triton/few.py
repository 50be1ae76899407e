"""Few rows: the tiles of any mask are one round, and all operands come by TMA, from rows in the plan's order.

512 rows of two experts are 5 row tiles of 128, times 32 columns on 132 multiprocessors: two rounds, the second for 28
tiles. But 4 row tiles hold all rows except the smaller of the two experts' rests, which is half a tile at most: each of
the 128 programs multiplies a strip of its columns too, in the loop of its own tile. A tenth more time, not twice.
A kernel of its own for the strips, beside tiles that gather their rows without a copy: 40 us for 40.
Row tiles are walked first, so that neighbours share weights: by 2 columns first 0.4 us less to 0.7 more, by 4 to 32
0.5 to 10 more; by an expert's tiles one after the other no less.
Programs do best in step: with K begun elsewhere for each column 39 us for 38, for each row too 47. The weights'
gradient let in beside the product by programmatic launch, without a second stream: 4 of 78 us more; the copy of the
gradient let in beside the product: 1 to 3 us more.
The programs of the product take their places while the copy runs and ask for their first weights to the L2: 0.9 to 1.1
us less of 34 to 38 forward, 1.5 to 4.4 of 111 to 117 both ways, if the copy wants as much of the cache to be shared
memory as they do; else they wait for each multiprocessor to be idle, and find it in another order: 0.6 to 5 us more.
The copy of the gradient let in when the sums are done, not before: 0.4 us less of 107 both ways.
They do not wait for DRAM: with one weight for both experts, or with it in the L2, 33 us for 34; with lines fetched
to the L2 ahead 48. A rest of 32 rows by mma.sync, which queues behind wgmma in flight: 8 us more, both ways.
A strip costs its wgmma, 4.5 of 47 thousand cycles; with all its loads from one place it takes 0 to 1.3 us less. Two
programs that share one: half of K each, 34.0 us for 33.7, of which their meeting takes 1.0; half of the rows each, 32.4
for 32.9, but backward no less. Two or four of the weights' tiles a program, as one pipeline: 3 us more or worse.
CUDA, by warps that fetch and warps that multiply, is no faster: 37 us for 32 to 36 with these tiles, 37 with x shared
by a cluster of two, 39 with K in halves between them; 38 with rows gathered by cp.async, 190 by a TMA copy of 47 cycles
for each row's 128 bytes; without strips, by a row tile for both rests with as many rows as they have, 43 for 35: the
fourth of the programs that have it load 56 KB a step for 32. The weights by two warpgroups in turns: 44 us for 46
alone, 83 for 79 beside the product. By then the chip is at its power: 1.4 to 1.7 GHz, in torch.mm too.
What a dense product in CUDA of these sizes waits for is its end: results stored by the threads that hold them 26.6 to
27.6 us, staged and by TMA 23.5 for cuBLAS's 23.3, with a cluster's multicast or without.
But this product so made, warps that fetch and two warpgroups, each row sent by a bulk copy, is no faster: 34.8 us for
34.7 without a strip, 38.5 for 37.6 with one, both ways 112 for 111 and 121 for 116; its first weights asked for while
the copy still runs, 35.3 and 42.8.
Steps of 32 K: 47 us for 36, however many stages. Rows' places asked for before the loop over K: 0.1 to 0.3 us less
forward, of both within the noise. The weights' gradient at once, its rows of g gathered by pointers while others are
copied: 5 to 8 us more of 109 to 118 at best.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import fetch_ahead, launch, let_next_begin, wait_for_earlier
from .tiles import store_product

PAD = tl.constexpr(64)
# Rows past the last that a tile of 128 rows may read and not use: past its end TMA is slow, 54 us instead of 31.
TAIL = 128
ORDERED = 1, 4096  # rows and columns of them that a program brings into order
AHEAD = tl.constexpr(2)  # lines of 128 bytes along K of the weights that are asked for ahead; 4 and 8 are no better


@triton.jit(do_not_specialize=["M"])
def order_kernel(x, y, rows, counts, K, sxm, M, BR: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr):
    """y = x's rows in the plan's order, PAD rows of zeros between the first expert's and the second's."""
    wait_for_earlier(EARLY)
    let_next_begin(EARLY)
    n1 = tl.load(counts)
    at = tl.program_id(0) * BR + tl.arange(0, BR)
    one = tl.load(rows + at, mask=at < M, other=0)  # both are on their way before n1 has come
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
    """acc and the expert's bias to the rows that `count` places of the plan name."""
    bias = b1
    if BIAS:
        bias = b1 if first else b2
    there = tl.arange(0, BM) < count
    to = tl.load(rows + place + tl.arange(0, BM), mask=there, other=0).to(tl.int64)
    store_product(y, acc, bias, to * sym, there, column, N, BM, BN, EVEN_N, BIAS, PIECES)


@triton.jit
def first_lines(w1, w2, step1, step2, N, K, high, BN: tl.constexpr, K_INNER: tl.constexpr):
    """Where a program's first weights lie, of the expert that it is likely to work for: half of its tile, of which the
    next row tile's program asks for the other half."""
    LINE: tl.constexpr = 1024 // w1.dtype.element_ty.primitive_bitwidth  # numbers in 128 bytes
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
    """high: ceil(M / BM) row tiles. of_x, of_rest: x in order, by BM and by REST = BM / 2 rows at one time. whole1,
    whole2: the weights themselves, step1 and step2 from one of their rows in memory to the next."""
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
    """acc by TMA, piece by piece: to is a descriptor of a piece."""
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
    """d[N, K] = g^T @ x over each expert's rows, both in order. The expert with more rows begins."""
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
    """x by TMA, in so many rows and columns at one time."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [height, width])


def room(x: Tensor) -> Tensor:
    """For x `in_order`."""
    return x.new_empty(x.shape[0] + int(PAD.value) + TAIL, x.shape[1])


def in_order(x: Tensor, rows: Tensor, counts: Tensor, y: Tensor | None = None) -> Tensor:
    """x's rows in the plan's order, as the kernels here take them; in y if given.

    A product that gathers by pointers instead takes 34 us for 36 without a rest, but 43 for 39 with one.
    """
    y, (height, width) = room(x) if y is None else y, ORDERED
    grid = -(-(x.shape[0] + int(PAD.value)) // height), -(-x.shape[1] // width)
    args = (x, y, rows, counts, x.shape[1], x.stride(0))
    launch(order_kernel, grid, args, (x.shape[0],), ORDERED, 4, 1, shares=True)
    return y
