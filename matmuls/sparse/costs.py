"""How long products take by the size of the matrix alone, as measured on an H200."""

from functools import lru_cache

from .device import CLUSTERS, H200, Memory
from .forms import DENSE, HALVES, OURS, PACKED, TWO_OF_FOUR
from .packed import us_packed
from .structure import Structure

CUT, CUT_ROW = 1024, 128  # rows: of fewer those that are so long are cut, and take up to twice as long
FEWEST_ROWS = 512  # of products in 16 bits
EVEN = 4  # times the average: the longest row of a matrix whose product takes as long as its size says
PAIRED_FILL = 3  # elements for each nonzero from where on two of four are considered in float32
PAIRED_COLUMNS = 8192  # the most of them; and in 16 bits
NARROW_PAIRED_COLUMNS = 32768


def is_even(s: Structure, fewest: int = CUT) -> bool:
    """Whether rows are about as long as each other, and not too few: products take as long as their size says."""
    return s.rows >= fewest and s.longest * s.rows <= EVEN * s.nonzeros


def us_by_rows(s: Structure, n: int) -> float:
    """Microseconds, about, of a float32 product by rows of about the same length."""
    return 4.3 + max(s.nonzeros * max(n, 16) / 3.6e6, s.nonzeros / s.rows * 0.022) + s.rows * n * 1e-6


@lru_cache(4096)
def _cost_in_halves(rows: int, columns: int, n: int, width: int) -> tuple[float, float, int, int]:
    """Steps and waves in all, of tiles `width` wide, steps of one, and width."""
    tiles, narrow = -(-rows // 128) * -(-n // width), 1.0 if width == 128 else 0.64
    waves = ((narrow * -(-tiles // at_once), -(-columns // (64 * k))) for k, at_once in enumerate(CLUSTERS, 1))
    return min((w * (4 + steps), w, steps, width) for w, steps in waves)


def us_in_halves(s: Structure, n: int) -> dict[str, float]:
    """Microseconds, about, of a float32 product on tensor cores, as fp16x2_sm90.cu shares it out: steps of 64 columns,
    and four for a tile's begin and end."""

    widths = (64, 128) if n > 64 else (64,) if n > 32 else (32,)
    steps, waves, each, width = min(_cost_in_halves(s.rows, s.columns, n, width) for width in widths)
    begin = 4.9 + s.columns / 1150 + n / 256
    us = {HALVES: begin + steps * 1.02}
    if s.distinct and s.columns <= PAIRED_COLUMNS and s.rows * s.columns >= PAIRED_FILL * s.nonzeros:
        # Of the rest each nonzero reads a row of the dense side: 6 TB/s, out of the L2.
        of_pairs = 4.4 + 0.76 * each if width == 128 else 6 + 0.55 * each
        us[TWO_OF_FOUR] = begin + waves * of_pairs + s.beyond_two * max(n, 32) / 1.5e6
    return us


@lru_cache(4096)
def _cycles_of_pairs(rows: int, columns: int, n: int) -> int:
    """Cycles, about, of what two of four keep in 16 bits, as sparse24_sm90.cu shares it out: tiles of 128 rows and
    64 columns of the result, or of 256 and 128, for `peers` of a cluster and its shares of K."""
    found = []
    for peers, shares in ((p, s) for p in (1, 2, 4) for s in range(1, 8 // p + 1)):
        steps, at_once = -(-columns // (64 * shares)), CLUSTERS[peers * shares - 1]
        waves = -(-(-(-rows // (128 * peers)) * -(-n // 64)) // at_once)
        found.append(waves * (3000 + 1000 * shares + steps * (455 + 20 // peers)))
        if n > 64 and peers <= 2:
            waves = -(-(-(-rows // 256) * -(-n // (128 * peers))) // at_once)
            found.append(waves * (6000 * shares + steps * (940 - 25 * peers)))
    return min(found)


def us_narrow(s: Structure, n: int, memory: Memory = H200) -> dict[str, float]:
    """Microseconds, about, of a 16-bit product."""
    wide, elements = max(n, 32), s.rows * s.columns
    of_l2 = 3.4e6 if 32 < n <= 64 else 3.8e6
    rate = of_l2 if 2 * elements <= 0.75 * memory.l2 else 0.8 * memory.rate  # bytes of the dense matrix
    products, longer = s.nonzeros * wide, 2 if s.rows < CUT and s.nonzeros > CUT_ROW * s.rows else 1
    us = {
        OURS: longer * (4.9 + max(products / (4.5e6 if n > 32 else 4e6), s.nonzeros / s.rows * 0.02)),
        DENSE: max(
            4 + min(s.columns / 600, 4.3), 4.7 + elements * n / (3e8 if n <= 256 else 4.3e8), 2.5 + 2 * elements / rate
        ),
    }
    if s.distinct and s.columns <= NARROW_PAIRED_COLUMNS:
        paired = 1.125 * elements  # bytes
        of_memory = paired / (0.75 * memory.rate) if paired > 0.75 * memory.l2 else 0
        of_pairs = max(_cycles_of_pairs(s.rows, s.columns, n) / 1755, of_memory)
        us[TWO_OF_FOUR] = 2.5 + of_pairs + s.beyond_two * wide / 0.5e6
    if s.distinct:
        us[PACKED] = us_packed(s, n, memory)
    return us


def us_by_reads(s: Structure, row_bytes: int, itemsize: int, reads: int, memory: Memory) -> float:
    """Microseconds, about, of a product that reads so many rows of the dense side from memory."""
    return ((s.rows + reads) * row_bytes + s.nonzeros * (4 + itemsize)) / (0.8 * memory.rate)


def us_saved_by_reordering(s: Structure, row_bytes: int, memory: Memory) -> float:
    """Microseconds of a product, before it is known: of a mesh of 258569 rows with their numbers as they came (mdual)
    0.4 of what reading every row of the dense side once would save, and less where the cache holds much of it."""
    dense = s.columns * row_bytes
    beyond = min(2 - 2 * memory.l2 / dense, 1) if dense else 0
    return 0.4 * beyond * max(s.nonzeros - s.columns, 0) * row_bytes / memory.rate


def us_to_reorder(s: Structure) -> float:
    return 600 + s.nonzeros / 2000
