"""The weights' gradients of masked products, p^T @ q over each expert's rows, in equal shares of work (stream-K).

Problem: one program per tile takes as long as whole waves. With 132 multiprocessors, 288 tiles per expert take 3 waves
instead of 2.18 if one expert has all rows, and 5 waves of half the length instead of 4.36 if both have as many.

Each program, one per multiprocessor, computes as many whole tiles as there are full waves of each expert's tiles, and
then an equal share of the steps (a step is BR rows of a tile) of both experts' last tiles:

   program              0            1            2         ...
   full waves     | tile 0     | tile 1     | tile 2     |        first expert, then second: in step, so that they
                  | tile 132   | tile 133   | tile 134   |        share rows and columns in the L2
   last tiles     | a a a a a a|a a b b b b b b|c c c c c c|      steps of tiles a, b, c ...: first expert, then second

A tile within one share is stored at once. Any other is a float32 sum per share, in the slot program + tile; both rise
along the shares, so the slots differ, and a tile's are neighbours. `fixup_kernel` adds them in order: no atomics,
bitwise reproducible. All of it follows from the counts on the device: any mask, one grid.

All tiles in shares, without full waves, would save no more steps, but programs would be at different rows of different
tiles: at 6,000 x 1,536 x 6,144 they would together read up to 92 MB at a time, more than the L2 holds.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float32

from .configs import Gpu, Tiles
from .launch import launch, wait_for_earlier
from .weight_tiles import part_of, product_of_rows, slots_sum, store_sum

# us of a program's step of 128 x 256 x 64 in 16 bits: 0.7 to 1.0 on an H100, 190 and 228 us for the two masks above,
# whose waves have 235 and 267 steps
STEP = 0.8
# us of the second kernel and of writing and reading the slots, 24 MB for the example above: an estimate
FIXUP = 12.0
MOST_AT_ONCE = 16  # slots whose loads the second kernel issues together


@triton.jit
def steps_of(n1, M, last, programs, BR: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The number of steps in a tile of the first and of the second expert, 0 if its gradient is not wanted, and in a
    program's share of the `last` tiles of each."""
    steps1 = tl.cdiv(n1, BR) if FIRST else n1 * 0
    steps2 = tl.cdiv(M - n1, BR) if SECOND else n1 * 0
    return steps1, steps2, tl.maximum(tl.cdiv(last * (steps1 + steps2), programs), 1)


@triton.jit
def first_step(tile, last, steps1, steps2):
    """The first step of a tile among the last ones."""
    return tl.minimum(tile, last) * steps1 + tl.maximum(tile - last, 0) * steps2


@triton.jit
def tile_with(step, last, steps1, steps2):
    """The tile among the last ones that contains a step."""
    first = last * steps1
    after = last + (step - first) // tl.maximum(steps2, 1)
    return tl.where(step < first, step // tl.maximum(steps1, 1), after)


@triton.jit(do_not_specialize=["M"])
def stream_k_kernel(
    p, q, of_p, of_q, part, d1, d2, rows, counts, P, Q, sp, sq, M,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr, GATHER: tl.constexpr,
    TRANSPOSED: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, PIECES: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `sorted_weights_kernel`, but a tile that is in more than one share goes to part[slot, BM * BN], in the order
    of its elements in d."""
    wait_for_earlier(EARLY)
    n1 = tl.load(counts)
    program, programs = tl.program_id(0), tl.num_programs(0)
    high, wide = P // BM, Q // BN
    waves = high * wide // programs
    last = high * wide - waves * programs
    steps1, steps2, share = steps_of(n1, M, last, programs, BR, FIRST, SECOND)
    low, top = program * share, tl.minimum((program + 1) * share, last * (steps1 + steps2))
    lowest = tile_with(low, last, steps1, steps2)
    whole = waves * (FIRST + SECOND)
    for item in range(whole + tl.where(low < top, tile_with(top - 1, last, steps1, steps2) - lowest + 1, 0)):
        # a tile of a full wave, or one of the last ones
        tile = lowest + item - whole
        full = item < whole
        piece = tl.where(full, item // tl.maximum(waves, 1) + (0 if FIRST else 1), (tile >= last).to(tl.int32))
        place = tl.where(full, item % tl.maximum(waves, 1) * programs + program, waves * programs + tile - piece * last)
        steps = tl.where(piece == 0, steps1, steps2)
        before = first_step(tile, last, steps1, steps2)
        begin = tl.where(full, 0, tl.maximum(low - before, 0))
        end = tl.where(full, steps, tl.minimum(top - before, steps))

        _, row, column = part_of(place, high, wide, GROUP)
        row *= BM
        column *= BN
        start = tl.where(piece == 0, 0, n1)
        stop = tl.minimum(start + end * BR, tl.where(piece == 0, n1, M))
        acc = product_of_rows(
            p, q, of_p, of_q, rows, sp, sq, row, column, start + begin * BR, stop, BM, BN, BR, GATHER, PRECISION
        )
        if end - begin == steps:
            si, sj = (1, P) if TRANSPOSED else (Q, 1)
            store_sum(d1 if piece == 0 else d2, acc, row, column, P, Q, si, sj, BM, BN, True, PIECES)
        else:
            si, sj = (1, BM) if TRANSPOSED else (BN, 1)
            slot = part + (program + tile).to(tl.int64) * (BM * BN)
            store_sum(slot, acc, 0, 0, BM, BN, si, sj, BM, BN, True, PIECES)


@triton.jit(do_not_specialize=["M"])
def fixup_kernel(
    part, d1, d2, counts, P, Q, programs, M,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """d1, d2 = the slots of each of the last tiles added up; exactly 0 for an expert without rows."""
    wait_for_earlier(EARLY)
    n1, tile = tl.load(counts), tl.program_id(0)
    high, wide = P // BM, Q // BN
    waves = high * wide // programs
    last = high * wide - waves * programs
    steps1, steps2, share = steps_of(n1, M, last, programs, BR, FIRST, SECOND)
    first = tile < last
    before = first_step(tile, last, steps1, steps2)
    end = before + tl.where(first, steps1, steps2)
    low = before // share
    top = tl.where(before < end, (end - 1) // share + 1, low)
    if (top - low != 1) & ((first & FIRST) | ((first == 0) & SECOND)):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for program in range(low, top, SLOTS):
            total += slots_sum(part, program + tile, top + tile, at, BM * BN, SLOTS, BLOCK)
        place = waves * programs + tl.where(first, tile, tile - last)
        _, row, column = part_of(place, high, wide, GROUP)
        if TRANSPOSED:
            to = (column * BN + at // BM).to(tl.int64) * P + row * BM + at % BM
        else:
            to = (row * BM + at // BN).to(tl.int64) * Q + column * BN + at % BN
        d = d1 if first else d2
        tl.store(d + to, total.to(d.dtype.element_ty))


def saves(t: Tiles, m: int, tiles: int, experts: int, size: int, gpu: Gpu) -> bool:
    """True if equal shares are estimated to take less time than a program per tile, for m rows, `tiles` of each wanted
    expert and elements of `size` bytes: on average over two masks, one expert with all rows and two with as many."""

    def idle(programs: int) -> float:
        """Waves that the last one's empty places are worth."""
        return -programs % gpu.multiprocessors / gpu.multiprocessors

    whole = m / t.depth * STEP * t.rows * t.columns * t.depth * size / (128 * 256 * 64 * 2)  # us of all rows of a tile
    even = idle(2 * tiles) / 2 if experts == 2 else idle(tiles) / 2
    alone = 2 * t.stages * t.depth * (t.rows + t.columns) * size > gpu.kilobytes << 10  # one program per multiprocessor
    steps = 2 * tiles * (-(-m // t.depth) + 1)
    return alone and steps < 1 << 31 and whole * (idle(tiles) + even) / 2 > FIXUP


def in_shares(
    t: Tiles,
    operands: tuple[Any, ...],
    d1: Tensor,
    d2: Tensor,
    rows: Tensor,
    counts: Tensor,
    sizes: tuple[int, int, int, int],
    layout: tuple[bool, bool],
    wanted: tuple[bool, bool],
    precision: str,
    multiprocessors: int,
) -> None:
    """Writes d1 and d2. operands: p, q and their descriptors; sizes: P, Q and the row strides of p and q; layout:
    GATHER and TRANSPOSED; wanted: FIRST and SECOND."""
    (P, Q, *_), M, sides = sizes, rows.shape[0], (t.rows, t.columns, t.depth, t.group)
    last = P // t.rows * (Q // t.columns) % multiprocessors
    size = t.rows * t.columns
    part = d1.new_empty(multiprocessors + 2 * last, size, dtype=float32)
    args = (*operands, part, d1, d2, rows, counts, *sizes)
    constants = (*sides, *layout, *wanted, t.pieces, precision)
    launch(stream_k_kernel, multiprocessors, args, (M,), constants, t.warps, t.stages)
    if last:
        block = min(1024, size)
        # a tile has less than multiprocessors / last shares' steps
        slots = min(multiprocessors // last + 2, MOST_AT_ONCE)
        fixed = (*sides, layout[1], *wanted, slots, block)
        launch(
            fixup_kernel, (2 * last, size // block), (part, d1, d2, counts, P, Q, multiprocessors), (M,), fixed, 4, 3
        )
