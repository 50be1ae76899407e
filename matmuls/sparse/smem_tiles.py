"""How a sparse matrix is laid out for products that keep part of the dense side in shared memory:
src/sparse/spmm/smem_tiles/."""

from typing import NamedTuple

from .device import CLUSTERS
from .structure import Structure

TILE_ROWS = 1024  # of b in a tile, at most
SLICE = 32  # columns of b in a tile
SHARED = 226 * 1024  # bytes of a block
PANEL_ROWS = 1024
WARPS = 20  # of a block, at most
MOST_ROWS = 2**27  # those of all tiles are counted in 32 bits
MOST_COLUMNS = TILE_ROWS * len(CLUSTERS)


class TileLayout(NamedTuple):
    tiles: int  # of the columns
    panels: int  # of the rows
    lanes: int  # of a row


def layout_of(s: Structure, n: int) -> TileLayout | None:
    """That of products with n columns, or None where they are not made so: a panel for each cluster of blocks that an
    H200 runs at once, and a warp for each slice of it."""
    tiles, across = -(-s.columns // TILE_ROWS), -(-n // SLICE)
    if (
        not 1 <= s.rows <= MOST_ROWS or not 1 <= tiles <= len(CLUSTERS) or (tiles > 1 and across > 1)
    ):  # or tiles are fetched anew
        return None
    room = PANEL_ROWS
    if tiles > 1:  # a panel's sums beside the tile
        room = (SHARED - (TILE_ROWS + 1) * SLICE * 4) // (SLICE * 4 * tiles) * tiles
    at_once = max(CLUSTERS[tiles - 1] // across, 1)
    panels = min(at_once * -(-s.rows // (at_once * room)), s.rows)
    rows = -(-s.rows // panels)
    lanes = next((lanes for lanes in (16, 8, 4) if -(-rows * lanes // 32) <= WARPS), 2)
    return TileLayout(tiles, panels, lanes)


def us_by_tiles(s: Structure, n: int) -> float:
    """Microseconds, about, of a product so laid out, on an H200."""
    layout = layout_of(s, n)
    if layout is None:
        return float("inf")
    across = -(-n // SLICE)
    rounds = -(-across * layout.panels // CLUSTERS[layout.tiles - 1])
    products = s.nonzeros * SLICE * rounds / layout.panels / layout.tiles  # of a block
    return (6.6 if layout.tiles > 1 else 4.5) + products * 1.85e-5 + s.rows * n * 1.5e-6
