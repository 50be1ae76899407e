"""The nonzeros of a sparse matrix in chunks of about equal size, for products on a GPU (src/sparse/spmm/chunks/)."""

from dataclasses import dataclass

import torch

_csr_chunks = torch.ops.custom_mm.csr_chunks.default


@dataclass(frozen=True)
class Chunks:
    """begins: [chunks + 1], where each begins. ends: [nonzeros], what ends there: a row, rows + slot for a piece of a
    long row, or -1. cut: [long rows, 3], a row, its first slot and how many it has. empty: rows without nonzeros.
    All int32. tensors: that hold them."""

    begins: torch.Tensor
    ends: torch.Tensor
    cut: torch.Tensor
    empty: torch.Tensor
    slots: int
    tensors: list[torch.Tensor]


def chunks_of(
    crow: torch.Tensor, col: torch.Tensor, size: int, piece: int, names: torch.Tensor | None = None
) -> Chunks:
    """Rows of more than `piece` nonzeros in pieces; a chunk is what begins within `size` nonzeros. Waits for the GPU.

    crow: [rows + 1], col: [nonzeros], names: [rows], what each row is told as, int32.
    """
    begins, ends, cut, empty, counts = _csr_chunks(crow, col, size, piece, names)
    empties, cuts, slots = counts.tolist()
    return Chunks(begins, ends, cut[:cuts], empty[:empties], slots, [begins, ends, cut, empty])
