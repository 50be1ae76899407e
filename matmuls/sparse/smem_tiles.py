"""How A is cut for the products that keep part of B in shared memory (src/sparse/spmm/smem_tiles/).

            columns of A                  A block holds one tile's rows of B, 32 columns of them, and multiplies
        tile 0   tile 1   ...             a panel's part in that tile; a cluster has a block for each tile and
panel 0 [block 0][block 1] cluster 0      adds up the panel's sums.
panel 1 [block 0][block 1] cluster 1
"""

from typing import NamedTuple

from ..device import CLUSTERS, SHARED_BYTES
from .csr_pattern import CsrPattern

TILE_ROWS = 1024  # of B in a tile, at most
SLICE = 32  # columns of B in a tile
PANEL_ROWS = 1024  # of A, at most
WARPS = 20  # of a block, at most
MAX_ROWS = 2**27  # of A: the kernel counts the rows of all tiles in 32 bits
MAX_COLUMNS = TILE_ROWS * len(CLUSTERS)  # of A


class TileLayout(NamedTuple):
    tiles: int  # of A's columns
    panels: int  # of A's rows
    lanes: int  # that share a row of A


def layout_of(s: CsrPattern, n: int) -> TileLayout | None:
    """The layout for a B of n columns: a panel for each cluster of blocks that an H200 runs at once, and lanes so that
    a warp does not take a second slice of rows. None if the kernel does not take the sizes."""
    tiles, across = -(-s.columns // TILE_ROWS), -(-n // SLICE)
    if not 1 <= s.rows <= MAX_ROWS or not 1 <= tiles <= len(CLUSTERS):
        return None
    if tiles > 1 and across > 1:  # tiles would be read again for each slice of B
        return None
    room = PANEL_ROWS
    if tiles > 1:  # shared memory holds a panel's sums next to the tile
        room = (SHARED_BYTES - (TILE_ROWS + 1) * SLICE * 4) // (SLICE * 4 * tiles) * tiles
    at_once = max(CLUSTERS[tiles - 1] // across, 1)
    panels = min(at_once * -(-s.rows // (at_once * room)), s.rows)
    rows = -(-s.rows // panels)
    lanes = next((lanes for lanes in (16, 8, 4) if -(-rows * lanes // 32) <= WARPS), 2)
    return TileLayout(tiles, panels, lanes)
