"""masked_linear where the tiles fill the GPU once and a bit: those of the last, half empty round are cut along K.

512 rows of both experts are 9 row tiles of 64, times 16 columns on 132 multiprocessors: two rounds, the second for 12
tiles. Each of these is cut into 11 parts, whose sums a second launch adds up in order.
"""

import triton
import triton.language as tl

from .tiles import accumulate, rows_at, store_product, store_tile, tile_at, tiles_of, weight_of


@triton.jit
def last_round(tiles, programs):
    """Tiles of all whole rounds, those that are left, and how many parts each of these is cut into."""
    whole = tiles // programs * programs
    return whole, tiles - whole, tl.maximum(programs // tl.maximum(tiles - whole, 1), 1)


@triton.jit(do_not_specialize=["M"])
def cut_product_kernel(
    x, w1, w2, b1, b2, y, part, rows, counts, N, K, sxm, sw1, sw2, sym, M,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, PIECES: tl.constexpr,
    K_INNER: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """part[p] is program p's part of a tile of the last round."""
    n1, program = tl.load(counts), tl.program_id(0)
    steps = tl.cdiv(K, BK)
    whole, rest, parts = last_round(tiles_of(n1, M, N, BM, BN), tl.num_programs(0))
    rounds = whole // tl.num_programs(0)
    for turn in range(rounds + (program < rest * parts).to(tl.int32)):
        cut = (turn == rounds) & (parts > 1)
        tile = tl.where(turn == rounds, whole + program // parts, turn * tl.num_programs(0) + program)
        low = tl.where(cut, program % parts * steps // parts, 0)
        high = tl.where(cut, (program % parts + 1) * steps // parts, steps)
        start, end, column, first = tile_at(tile, n1, M, N, BM, BN, GROUP)
        places = start + tl.arange(0, BM)
        listed = rows_at(rows, places, start, end, True)
        w, sw = weight_of(first, w1, w2, sw1, sw2, column, BN, BK, K_INNER, TMA)
        acc = tl.zeros((BM, BN), tl.float32)
        acc = accumulate(
            acc, x, listed * sxm, w, sw, column, low * BK, high * BK, N, K,
            BN, BK, K_INNER, TMA, EVEN_K, EVEN_N, PRECISION,
        )  # fmt: skip
        if cut:
            offsets = (program * BM + tl.arange(0, BM)).to(tl.int64) * BN
            store_product(part, acc, None, offsets, places < end, 0, BN, BM, BN, True, False, PIECES)
        else:
            bias = b1
            if BIAS:
                bias = b1 if first else b2
            store_product(y, acc, bias, listed * sym, places < end, column, N, BM, BN, EVEN_N, BIAS, PIECES)


@triton.jit(do_not_specialize=["M", "programs"])
def cut_sum_kernel(
    y, b1, b2, part, rows, counts, N, sym, M, programs,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, EVEN_N: tl.constexpr, BIAS: tl.constexpr,
    HEIGHT: tl.constexpr,
):  # fmt: skip
    """y's tiles of the last round, HEIGHT rows a program."""
    n1, left = tl.load(counts), tl.program_id(0)
    whole, rest, parts = last_round(tiles_of(n1, M, N, BM, BN), programs)
    if (left < rest) & (parts > 1):
        start, end, column, first = tile_at(whole + left, n1, M, N, BM, BN, GROUP)
        line = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
        there = start + line < end
        acc = tl.zeros((HEIGHT, BN), tl.float32)
        for begin in range(0, parts, 4):
            for n in tl.static_range(4):  # so many loads on their way at once
                slot = tl.minimum(begin + n, parts - 1)
                at = part + ((left * parts + slot) * BM + line).to(tl.int64)[:, None] * BN + tl.arange(0, BN)[None, :]
                limit = tl.where(begin + n < parts, end, start)
                acc += tl.load(at, mask=(start + line < limit)[:, None], other=0.0)
        if BIAS:
            bias = b1 if first else b2
            columns = column + tl.arange(0, BN)
            acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        target = rows_at(rows, start + line, start, end, True) * sym
        store_tile(y, acc, target, there, column, N, BN, EVEN_N)
