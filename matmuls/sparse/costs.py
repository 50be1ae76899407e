"""Cost models of the products A @ B, in microseconds from the sizes alone, and the limits that several modules share.

A [rows, columns] sparse, B [columns, n] dense. All models were fitted to measurements on an H200 with its clock of
1755 MHz; they hold for rows of about equal length (`is_even`).
"""

import math
from functools import lru_cache

from custom_mm import _C

from ..device import CLUSTERS, H200, SHARED_BYTES, Memory
from .csr_pattern import CsrPattern
from .names import FP16X2, SPARSE24
from .packed_mma import TILE, UNIT, expected_units
from .smem_tiles import SLICE, layout_of

# Two limits on the longest row, as a multiple of the mean row (in nonzeros). Each decides something else; a third, from
# which the row kernel cuts rows, is kSkewed in src/sparse/spmm/choose.h.
EVEN_RATIO = 4  # up to it the cost models hold, so a kernel may be selected by size without measuring
CHUNKS_SKEW = 4  # above it the default product takes chunks from fewer products on, and rows are not reordered

MIN_MEAN_FP16X2 = _C.kernel_limits["fewest_in_fp16x2"]  # nonzeros a row: sums of fewer round by less than fp16x2
MIN_ROWS = 1024  # rows of A: with fewer, the row kernel splits rows longer than LONG_ROW, which takes up to 2x as long
MIN_ROWS_16BIT = 512  # the same for 16-bit products, whose model knows of that
LONG_ROW = 128  # nonzeros a row
# 2:4 sparsity in float32: elements of A for each nonzero from which it is considered, and most columns of A.
SPARSE24_FILL, SPARSE24_COLUMNS = 3, 8192
MOST_SPARSE24_COLUMNS = 32768  # of A, that the layout takes
PACKED_COLUMNS = 32768  # of A, at most
CYCLES = 1755  # a microsecond


def is_skewed(s: CsrPattern) -> bool:
    """True if the longest row is more than CHUNKS_SKEW times the mean."""
    return s.longest * s.rows > CHUNKS_SKEW * s.nonzeros


def is_even(s: CsrPattern, min_rows: int = MIN_ROWS) -> bool:
    """True if the cost models hold: rows of about equal length, and not too few."""
    return s.rows >= min_rows and s.longest * s.rows <= EVEN_RATIO * s.nonzeros


# float32


def us_by_rows(s: CsrPattern, n: int) -> float:
    """The row kernel in float32."""
    return 4.3 + max(s.nonzeros * max(n, 16) / 3.6e6, s.nonzeros / s.rows * 0.022) + s.rows * n * 1e-6


@lru_cache(4096)
def _fp16x2_steps(rows: int, columns: int, n: int, width: int) -> tuple[float, float, int, int]:
    """(steps of all waves, waves, steps of one tile, width), for tiles of `width` columns of B and the number of blocks
    that share K which takes fewest steps."""
    tiles, narrow = -(-rows // 128) * -(-n // width), 1.0 if width == 128 else 0.64
    waves = ((narrow * -(-tiles // at_once), -(-columns // (64 * k))) for k, at_once in enumerate(CLUSTERS, 1))
    return min((w * (4 + steps), w, steps, width) for w, steps in waves)


def us_fp16x2(s: CsrPattern, n: int) -> dict[str, float]:
    """A float32 product of the densified matrix on tensor cores, without and, where considered, with 2:4 sparsity.

    Follows how fp16x2_sm90.cu splits the work: steps of 64 columns of A, and four more for a tile's begin and end.
    """
    widths = (64, 128) if n > 64 else (64,) if n > 32 else (32,)
    steps, waves, each, width = min(_fp16x2_steps(s.rows, s.columns, n, width) for width in widths)
    begin = 4.9 + s.columns / 1150 + n / 256
    us = {FP16X2: begin + steps * 1.02}
    if s.distinct and s.columns <= SPARSE24_COLUMNS and s.rows * s.columns >= SPARSE24_FILL * s.nonzeros:
        # Each nonzero beyond two of four reads a row of B: 6 TB/s, from the L2.
        per_wave = 4.4 + 0.76 * each if width == 128 else 6 + 0.55 * each
        us[SPARSE24] = begin + waves * per_wave + s.beyond_two * max(n, 32) / 1.5e6
    return us


def us_smem_tiles(s: CsrPattern, n: int) -> float:
    """A float32 product with part of B in shared memory; inf where the layout does not apply."""
    layout = layout_of(s, n)
    if layout is None:
        return math.inf
    across = -(-n // SLICE)
    rounds = -(-across * layout.panels // CLUSTERS[layout.tiles - 1])
    products = s.nonzeros * SLICE * rounds / layout.panels / layout.tiles  # of one block
    return (6.6 if layout.tiles > 1 else 4.5) + products * 1.85e-5 + s.rows * n * 1.5e-6


# float16 and bfloat16


def us_default_16bit(s: CsrPattern, n: int) -> float:
    """The default product in 16 bits; up to twice as long where few rows are split."""
    products, longer = s.nonzeros * max(n, 32), 2 if s.rows < MIN_ROWS and s.nonzeros > LONG_ROW * s.rows else 1
    return longer * (4.9 + max(products / (4.5e6 if n > 32 else 4e6), s.nonzeros / s.rows * 0.02))


def us_dense_16bit(s: CsrPattern, n: int, memory: Memory = H200) -> float:
    """The dense product in 16 bits: bound by launch and K, by tensor cores, or by reading A."""
    elements = s.rows * s.columns
    l2_rate = 3.4e6 if 32 < n <= 64 else 3.8e6
    rate = l2_rate if 2 * elements <= 0.75 * memory.l2 else 0.8 * memory.rate  # bytes of A a microsecond
    return max(
        4 + min(s.columns / 600, 4.3), 4.7 + elements * n / (3e8 if n <= 256 else 4.3e8), 2.5 + 2 * elements / rate
    )


@lru_cache(4096)
def _sparse24_cycles(rows: int, columns: int, n: int) -> int:
    """Cycles of the 2:4 part in 16 bits. Follows how sparse24_sm90.cu splits the work: tiles of 128 rows and 64 columns
    of the result, or of 256 and 128, over `peers` blocks of a cluster and `shares` of K."""
    found = []
    for peers, shares in ((p, s) for p in (1, 2, 4) for s in range(1, 8 // p + 1)):
        steps, at_once = -(-columns // (64 * shares)), CLUSTERS[peers * shares - 1]
        waves = -(-(-(-rows // (128 * peers)) * -(-n // 64)) // at_once)
        found.append(waves * (3000 + 1000 * shares + steps * (455 + 20 // peers)))
        if n > 64 and peers <= 2:
            waves = -(-(-(-rows // 256) * -(-n // (128 * peers))) // at_once)
            found.append(waves * (6000 * shares + steps * (940 - 25 * peers)))
    return min(found)


def us_sparse24_16bit(s: CsrPattern, n: int, memory: Memory = H200) -> float:
    """The 2:4 product in 16 bits and the row kernel for the nonzeros beyond two of four; inf if it does not apply."""
    if not s.distinct or s.columns > MOST_SPARSE24_COLUMNS:
        return math.inf
    nbytes = 1.125 * (s.rows * s.columns)
    from_memory = nbytes / (0.75 * memory.rate) if nbytes > 0.75 * memory.l2 else 0
    pairs = max(_sparse24_cycles(s.rows, s.columns, n) / CYCLES, from_memory)
    return 2.5 + pairs + s.beyond_two * max(n, 32) / 0.5e6


LAUNCH_US = 2.2  # before a product of the packed matrix begins
BARRIER_BYTES = 528  # of shared memory in a block of packed_mma


def us_packed_mma(s: CsrPattern, n: int, memory: Memory = H200) -> float:
    """A 16-bit product of the packed matrix, within 6 % on average of 432 on an H100; inf if it does not apply."""
    if not s.rows or not s.columns or s.columns > PACKED_COLUMNS or s.columns % 8:
        return math.inf
    units, steps = expected_units(s), -(-s.columns // (4 * TILE)) * 4
    nbytes = -(-s.rows // (4 * TILE)) * 4 * steps * units * UNIT
    # Read once for each 128 columns of B, unless it stays in the L2.
    from_memory = nbytes * -(-n // 128) / (0.8 * memory.rate) if nbytes > 0.75 * memory.l2 else 0
    return LAUNCH_US + max(_packed_mma_cycles(s.rows, steps, n, units) / CYCLES, from_memory)


@lru_cache(4096)
def _packed_mma_cycles(rows: int, steps: int, n: int, units: int) -> float:
    """Follows how packed_mma/kernel_sm90.cu splits the work (its cluster_of)."""
    side_by_side = 64 // n if n in (8, 16, 32) else 1  # rows of B in a row of shared memory
    width = n if side_by_side > 1 else 32 if n <= 32 else 64 if n <= 64 else 128
    boxes, unpack = max(width // 64, 1), 550 if width <= 32 else 710 if width == 64 else 1140
    row = 3.6 if side_by_side > 1 or n > 64 else 3 if n > 32 else 4 if n > 16 else 7.5
    found = []
    for parts in (1, 2, 4):
        groups, stages = 4 // parts, steps // parts
        tiles = -(-rows // (TILE * groups)) * -(-n // width)
        stage_bytes = parts * TILE // side_by_side * 128 * boxes + -(-4 * units * UNIT // 1024) * 1024
        for shares in range(1, min(8, stages) + 1):
            sent_bytes = (shares - 1) * -(-TILE * groups // 8 // shares) * 8 * width * 4
            room = min(16, (SHARED_BYTES - BARRIER_BYTES - sent_bytes) // stage_bytes)
            if room < 2 or room * stage_bytes < 4 * TILE * (width + 8) * 4:
                continue
            at_once = CLUSTERS[shares - 1]
            active = min(tiles, at_once) / at_once
            fetch = 4 * units * UNIT / 26 + parts * TILE // side_by_side * boxes * row * (1 + active) / 2
            sent = 33 * width * groups if shares > 1 else 0
            each = 3700 + (-(-stages // shares) - 1) * max(unpack, fetch) + sent + 17 * width
            found.append(-(-tiles // at_once) * each)
    return min(found)


# Reordered rows


def us_by_reads(s: CsrPattern, row_bytes: int, itemsize: int, reads: int, memory: Memory) -> float:
    """A product that reads `reads` rows of B, of `row_bytes` each, from memory."""
    return ((s.rows + reads) * row_bytes + s.nonzeros * (4 + itemsize)) / (0.8 * memory.rate)


def us_saved_by_reordering(s: CsrPattern, row_bytes: int, memory: Memory) -> float:
    """What reordering saves a product, estimated before the order is known. For a mesh of 258569 rows in their original
    numbering (mdual) 0.4 of what reading every row of B once would save, and less where the cache holds much of B."""
    dense = s.columns * row_bytes
    beyond = min(2 - 2 * memory.l2 / dense, 1) if dense else 0
    return 0.4 * beyond * max(s.nonzeros - s.columns, 0) * row_bytes / memory.rate


def us_to_reorder(s: CsrPattern) -> float:
    """Making the order, once."""
    return 600 + s.nonzeros / 2000
