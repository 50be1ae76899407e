"""The rows of a sparse matrix in an order in which those that are multiplied at about the same time read the same rows
of the dense side, out of a GPU's cache rather than its memory (src/sparse/spmm/reordered/layout.h).

For meshes and other graphs whose vertices are numbered as they came. A row's sum is added up as before.
"""

from typing import NamedTuple

import torch

from .chunks import Chunks, chunks_of

_ops = torch.ops.custom_mm
_regions, _reads, _reorder = _ops.csr_regions.default, _ops.csr_reads.default, _ops.csr_reorder.default

REGION_ROWS, ROUNDS = 2048, 24  # a region on average, and how far from its first row any other is
AT_ONCE, WINDOWS = 8192, 8  # rows that are on their way at once, about, and how often that many are looked at
FEWER = 0.7  # rows read of those read before: an order that saves less is not kept


class Reordered(NamedTuple):
    """The nonzeros by the rows in their new order: place[p] is where nonzero p is among those of the matrix."""

    chunks: Chunks  # which name the rows as the matrix does
    col: torch.Tensor
    place: torch.Tensor
    reads: tuple[int, int]  # rows of the dense side, each once for all on their way at once: before and now, about

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.chunks.tensors, self.col, self.place]


def reorder(crow: torch.Tensor, col: torch.Tensor, size: int, piece: int) -> Reordered | None:
    """None where another order does not save much. Waits for the GPU.

    crow: [rows + 1], col: [nonzeros], both int32, of a square matrix. size, piece: of chunks, in nonzeros.
    """
    rows = crow.shape[0] - 1
    every = max(-(-rows // AT_ONCE) // WINDOWS, 1)
    order = torch.sort(_regions(crow, col, rows, REGION_ROWS, ROUNDS), stable=True).indices.int()
    counts = [_reads(crow, col, rows, AT_ONCE, every, given) for given in (None, order)]
    before, after = (every * int(count) for count in torch.cat(counts).tolist())
    if after > FEWER * before:
        return None
    moved_crow, moved, place = _reorder(crow, col, order)
    return Reordered(chunks_of(moved_crow, moved, size, piece, order), moved, place, (before, after))
