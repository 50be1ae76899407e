"""The rows of A in an order in which rows that are multiplied at about the same time read the same rows of B, from the
cache rather than from memory (src/sparse/spmm/reordered/layout.h).

For meshes and other graphs whose vertices have arbitrary numbers. The sum of a row is unchanged, term by term.
"""

from typing import NamedTuple

import torch

from .chunks import Chunks, chunks_of

_ops = torch.ops.custom_mm
_regions, _reads, _reorder = _ops.csr_regions.default, _ops.csr_reads.default, _ops.csr_reorder.default

REGION_ROWS, ROUNDS = 2048, 24  # rows of a region on average; its largest distance from its seed row, in edges
AT_ONCE, WINDOWS = 8192, 8  # rows in flight on a GPU, about; windows of as many rows in which reads are counted
MAX_READS = 0.7  # of the reads in the original order: an order that saves less is not kept


class Reordered(NamedTuple):
    """The nonzeros by the rows in their new order: nonzero p was nonzero place[p] of the matrix."""

    chunks: Chunks  # with the matrix's own row numbers
    col: torch.Tensor
    place: torch.Tensor
    reads: tuple[int, int]  # rows of B read from memory, about: in the original order and in this one

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.chunks.tensors, self.col, self.place]


def reorder(crow: torch.Tensor, col: torch.Tensor, size: int, piece: int) -> Reordered | None:
    """The reordered matrix, or None if the order does not save enough reads. Waits for the GPU.

    crow [rows + 1], col [nonzeros], both int32, of a square matrix. size, piece: of chunks, in nonzeros.
    """
    rows = crow.shape[0] - 1
    every = max(-(-rows // AT_ONCE) // WINDOWS, 1)
    order = torch.sort(_regions(crow, col, rows, REGION_ROWS, ROUNDS), stable=True).indices.int()
    counts = [_reads(crow, col, rows, AT_ONCE, every, given) for given in (None, order)]
    before, after = (every * int(count) for count in torch.cat(counts).tolist())
    if after > MAX_READS * before:
        return None
    moved_crow, moved, place = _reorder(crow, col, order)
    return Reordered(chunks_of(moved_crow, moved, size, piece, order), moved, place, (before, after))
