"""The last wave of a persistent product, split along K where it would leave most multiprocessors idle.

    24 tiles left for 132 programs:   programs 0 .. 4   a fifth of K each of the first of these tiles
                                      programs 5 .. 9   the same of the second ...
                                      partial sums [program, BM, BN] -> add_parts_kernel -> y

The number of tiles depends on the mask, which stays on the GPU: both kernels compute the parts there.
"""

import triton
import triton.language as tl

from ..device import is_batch_invariant
from .configs import Tiles
from .launch import wait_for_earlier
from .tiles import rows_at, store_product, tile_at, tiles_of

MOST = tl.constexpr(8)  # parts of a tile
HEIGHT = tl.constexpr(8)  # rows of a tile that a program of add_parts_kernel adds up
# Multiply-adds of a program that the split must save: those of 10 us, for the workspace's traffic and a second launch.
# H200, half of the rows in each expert, us of a product of [M, K] and [K, N] with and without the split: 6000 x 6144 x
# 1536 160 and 202, 1500 x 4096 x 512 21 and 41, 2048 x 2048 x 2048 37 and 46; below WORTH, 3000 x 3072 x 768 35 and 32,
# 2048 x 1024 x 1024 15 and 13 (benchmarks/results/cuda/masked-choices.json).
WORTH = 1 << 25


@triton.jit
def parts_of(tiles, programs, steps):
    """The number of tiles that are not split, and of parts of the others, along K; 1: none is split."""
    rest = tiles % programs
    parts = tl.minimum(tl.minimum(programs // tl.maximum(rest, 1), MOST), steps)
    return tl.where(parts > 1, tiles - rest, tiles), parts


@triton.jit
def part_at(program, parts, K, BK: tl.constexpr):
    """The program's tile among the split ones, and its range of K."""
    part, size = program % parts, tl.cdiv(tl.cdiv(K, BK), parts) * BK
    return program // parts, tl.minimum(part * size, K), tl.minimum((part + 1) * size, K)


@triton.jit(do_not_specialize=["M"])
def add_parts_kernel(
    partial, b1, b2, y, rows, counts, N, K, sym, programs, M,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SCATTER: tl.constexpr,
    EVEN_N: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y's tiles of the last wave: the sums of their parts, in order, plus the bias. programs: of the product."""
    wait_for_earlier(EARLY)
    n1 = tl.load(counts)
    tiles = tiles_of(n1, M, N, BM, BN)
    whole, parts = parts_of(tiles, programs, tl.cdiv(K, BK))
    place = tl.program_id(0) // (BM // HEIGHT)
    if whole + place < tiles:
        start, end, column, first = tile_at(whole + place, n1, M, N, BM, BN, GROUP)
        within = tl.program_id(0) % (BM // HEIGHT) * HEIGHT + tl.arange(0, HEIGHT)
        at = partial + (place * parts * BM + within)[:, None] * BN + tl.arange(0, BN)[None, :]
        total = tl.zeros((HEIGHT, BN), tl.float32)
        for part in tl.static_range(MOST):  # all loads are issued at once
            total += tl.load(at + part * BM * BN, mask=(within < tl.where(part < parts, BM, 0))[:, None], other=0.0)
        bias = b1
        if BIAS:
            bias = b1 if first else b2
        places = start + within
        target = rows_at(rows, places, start, M, SCATTER)
        store_product(y, total, bias, target * sym, places < end, column, N, HEIGHT, BN, EVEN_N, BIAS, 1)


def is_split(t: Tiles, tiles: int, k: int, pairs: int, programs: int) -> bool:
    """True if a split of the last wave of these tiles, over K = k of `pairs` operands, saves time. It depends on the
    number of rows."""
    rest, steps = tiles % programs, -(-k // t.depth)
    if not t.persistent or not rest or is_batch_invariant():
        return False
    saved = steps - -(-steps // min(programs // rest, int(MOST.value), steps))
    return pairs * saved * t.rows * t.columns * t.depth >= WORTH
