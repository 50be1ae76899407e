"""The tile size of a packed matrix: 16 bits, pairs of nonzeros as mma reads them (src/sparse/spmm/packed_mma/)."""

import math

from .csr_pattern import CsrPattern

TILE = 64  # rows and columns of a tile; the number of tiles in a row and in a column is a multiple of four
PAIRS, HEADS, UNIT = TILE * TILE // 2, 512, 16  # pairs of a tile; bytes of its heads; bytes its size is a multiple of
MAX_UNITS_RATIO = 1.25  # times expected_units: all tiles take the room of the largest, which products read


def expected_units(s: CsrPattern) -> int:
    """Units of the largest tile if the nonzeros are spread at random: pairs four standard deviations above the mean."""
    elements = s.rows * s.columns
    share = 1 - (1 - min(s.nonzeros / elements, 1)) ** 2 if elements else 0
    pairs = PAIRS * share + 4 * math.sqrt(PAIRS * share * (1 - share))
    return -(-(HEADS + 4 * min(math.ceil(pairs), PAIRS)) // UNIT)
