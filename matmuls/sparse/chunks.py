"""The nonzeros of A cut into chunks of about equal size, for products on a GPU (src/sparse/spmm/chunks/)."""

from dataclasses import dataclass

import torch

_csr_chunks = torch.ops.custom_mm.csr_chunks.default


@dataclass(frozen=True)
class Chunks:
    """All int32:

    begins [chunks + 1]: the first nonzero of each chunk.
    ends [nonzeros]: the row that ends with this nonzero; rows + slot where a piece of a long row ends; else -1.
    cut [long rows, 3]: a row in pieces, its first slot and its number of slots.
    empty [empty rows]: the rows without nonzeros.

    slots: pieces in all. tensors: those that own the memory.
    """

    begins: torch.Tensor
    ends: torch.Tensor
    cut: torch.Tensor
    empty: torch.Tensor
    slots: int
    tensors: list[torch.Tensor]


def chunks_of(
    crow: torch.Tensor, col: torch.Tensor, size: int, piece: int, row_ids: torch.Tensor | None = None
) -> Chunks:
    """Cut rows of more than `piece` nonzeros into pieces; a chunk has all that begins within its `size` nonzeros.

    crow [rows + 1], col [nonzeros], row_ids [rows] int32: the number under which a row appears in the result, by
    default its own. Waits for the GPU.
    """
    begins, ends, cut, empty, counts = _csr_chunks(crow, col, size, piece, row_ids)
    empties, cuts, slots = counts.tolist()
    return Chunks(begins, ends, cut[:cuts], empty[:empties], slots, [begins, ends, cut, empty])
