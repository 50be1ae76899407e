"""How long a product of a packed sparse matrix takes, and how much of it is packed (src/packed.h)."""

import math
from functools import lru_cache

from .device import CLUSTERS
from .structure import Structure

MOST_COLUMNS = 32768
TILE = 64  # rows and columns; their number in a row and in a column is a multiple of four
PAIRS, HEADS, UNIT = TILE * TILE // 2, 512, 16  # of a tile; its bytes beside the pairs; that it is a multiple of
ROOM, BARRIERS = 226 * 1024, 528  # bytes of a block, and of what it waits for
LAUNCH, BYTES = 2.2, 2.33e6  # microseconds before a product begins; bytes in one, out of memory


def expected_units(s: Structure) -> int:
    """Of the largest tile, if nonzeros lie anywhere: as many pairs as four standard deviations are above the mean."""
    elements = s.rows * s.columns
    share = 1 - (1 - min(s.nonzeros / elements, 1)) ** 2 if elements else 0
    pairs = PAIRS * share + 4 * math.sqrt(PAIRS * share * (1 - share))
    return -(-(HEADS + 4 * min(math.ceil(pairs), PAIRS)) // UNIT)


def us_packed(s: Structure, n: int) -> float:
    """Microseconds, about, of a product of such a matrix in 16 bits: within 9 % on an H100."""
    if not s.rows or not s.columns or s.columns > MOST_COLUMNS:
        return math.inf
    units, steps = expected_units(s), -(-s.columns // (4 * TILE)) * 4
    of_memory = -(-s.rows // (4 * TILE)) * 4 * steps * units * UNIT / BYTES
    return LAUNCH + max(_cycles(s.rows, steps, n, units) / 1755, of_memory)


@lru_cache(4096)
def _cycles(rows: int, steps: int, n: int, units: int) -> float:
    """As spmm_packed_sm90.cu shares a product out, cluster_of."""
    width = 32 if n <= 32 else 64 if n <= 64 else 128
    boxes, unpack = max(width // 64, 1), {32: 605, 64: 715, 128: 990}[width]
    row = 7.5 if n <= 16 else 4 if n <= 32 else 3.8
    found = []
    for parts in (1, 2, 4):
        groups, stages = 4 // parts, steps // parts
        tiles = -(-rows // (TILE * groups)) * -(-n // width)
        stage_bytes = parts * TILE * 128 * boxes + -(-4 * units * UNIT // 1024) * 1024
        for shares in range(1, min(8, stages) + 1):
            sent_bytes = (shares - 1) * -(-TILE * groups // shares) * width * 4
            room = min(16, (ROOM - BARRIERS - sent_bytes) // stage_bytes)
            if room < 2 or room * stage_bytes < 4 * TILE * (width + 8) * 4:
                continue
            at_once = CLUSTERS[shares - 1]
            active = min(tiles, at_once) / at_once
            fetch = 4 * units * UNIT / 33 + parts * TILE * boxes * row * (1 + active) / 2
            sent = 33 * width * groups if shares > 1 else 0
            each = 4360 + (-(-stages // shares) - 1) * max(unpack, fetch) + sent + 12 * width
            found.append(-(-tiles // at_once) * each)
    return min(found)
