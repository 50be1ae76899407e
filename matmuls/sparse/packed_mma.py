"""How long a product of a packed sparse matrix takes, and how much of it is packed (src/sparse/spmm/packed_mma/)."""

import math
from functools import lru_cache

from .device import CLUSTERS, H200, Memory
from .structure import Structure

MOST_COLUMNS = 32768
TILE = 64  # rows and columns; their number in a row and in a column is a multiple of four
PAIRS, HEADS, UNIT = TILE * TILE // 2, 512, 16  # of a tile; its bytes beside the pairs; that it is a multiple of
ROOM, BARRIERS = 226 * 1024, 528  # bytes of a block, and of what it waits for
LAUNCH = 2.2  # microseconds before a product begins


def expected_units(s: Structure) -> int:
    """Of the largest tile, if nonzeros lie anywhere: as many pairs as four standard deviations are above the mean."""
    elements = s.rows * s.columns
    share = 1 - (1 - min(s.nonzeros / elements, 1)) ** 2 if elements else 0
    pairs = PAIRS * share + 4 * math.sqrt(PAIRS * share * (1 - share))
    return -(-(HEADS + 4 * min(math.ceil(pairs), PAIRS)) // UNIT)


def us_packed(s: Structure, n: int, memory: Memory = H200) -> float:
    """Microseconds, about, of a product of such a matrix in 16 bits: 432 of them on an H100 within 6 % on average."""
    if not s.rows or not s.columns or s.columns > MOST_COLUMNS or s.columns % 8:
        return math.inf
    units, steps = expected_units(s), -(-s.columns // (4 * TILE)) * 4
    nbytes = -(-s.rows // (4 * TILE)) * 4 * steps * units * UNIT
    # For each 128 columns once, unless it stays in the L2.
    of_memory = nbytes * -(-n // 128) / (0.8 * memory.rate) if nbytes > 0.75 * memory.l2 else 0
    return LAUNCH + max(_cycles(s.rows, steps, n, units) / 1755, of_memory)


@lru_cache(4096)
def _cycles(rows: int, steps: int, n: int, units: int) -> float:
    """As sparse/spmm/packed_mma/kernel_sm90.cu shares a product out, cluster_of."""
    aside = 64 // n if n in (8, 16, 32) else 1  # rows of the dense side
    width = n if aside > 1 else 32 if n <= 32 else 64 if n <= 64 else 128
    boxes, unpack = max(width // 64, 1), 550 if width <= 32 else 710 if width == 64 else 1140
    row = 3.6 if aside > 1 or n > 64 else 3 if n > 32 else 4 if n > 16 else 7.5
    found = []
    for parts in (1, 2, 4):
        groups, stages = 4 // parts, steps // parts
        tiles = -(-rows // (TILE * groups)) * -(-n // width)
        stage_bytes = parts * TILE // aside * 128 * boxes + -(-4 * units * UNIT // 1024) * 1024
        for shares in range(1, min(8, stages) + 1):
            sent_bytes = (shares - 1) * -(-TILE * groups // 8 // shares) * 8 * width * 4
            room = min(16, (ROOM - BARRIERS - sent_bytes) // stage_bytes)
            if room < 2 or room * stage_bytes < 4 * TILE * (width + 8) * 4:
                continue
            at_once = CLUSTERS[shares - 1]
            active = min(tiles, at_once) / at_once
            fetch = 4 * units * UNIT / 26 + parts * TILE // aside * boxes * row * (1 + active) / 2
            sent = 33 * width * groups if shares > 1 else 0
            each = 3700 + (-(-stages // shares) - 1) * max(unpack, fetch) + sent + 17 * width
            found.append(-(-tiles // at_once) * each)
    return min(found)
