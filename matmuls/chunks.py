"""The nonzeros of a sparse matrix in chunks of about equal size, for products on a GPU (src/spmm_chunks.cuh)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunks:
    """begins: [chunks + 1], where each begins. ends: [nonzeros], what ends there: a row, rows + slot for a piece of a
    long row, or -1. cut: [long rows, 3], a row, its first slot and how many it has. empty: rows without nonzeros.
    All int32."""

    begins: torch.Tensor
    ends: torch.Tensor
    cut: torch.Tensor
    empty: torch.Tensor
    slots: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.begins, self.ends, self.cut, self.empty]


def chunks_of(crow: torch.Tensor, nonzeros: int, longest: int, size: int, piece: int) -> Chunks:
    """Rows of more than `piece` nonzeros in pieces; a chunk is what begins within `size` nonzeros. Waits for the GPU.

    crow: [rows + 1] in int32, nonzeros: its last, not 0; longest: of the rows.
    """
    rows, device = crow.shape[0] - 1, crow.device
    lengths = crow.diff()
    filled = lengths.nonzero().squeeze(1)
    empty = (lengths == 0).nonzero().squeeze(1).int() if filled.shape[0] < rows else crow.new_empty(0)
    ends = torch.full((nonzeros,), -1, dtype=torch.int32, device=device)
    ends[crow[1:][filled].long() - 1] = filled.int()
    targets = torch.arange(0, nonzeros + size, size, device=device, dtype=torch.int32).clamp_(max=nonzeros)
    after = torch.searchsorted(crow, targets, out_int32=True)  # the first row that begins there or later
    begins = crow[after]
    cut, slots = crow.new_empty(0, 3), 0
    if longest > piece:
        long = (lengths > piece).nonzero().squeeze(1)
        count = (lengths[long] + (piece - 1)) // piece
        last = count.cumsum(0, dtype=torch.int32)
        slots = int(last[-1])
        cut = torch.stack([long.int(), last - count, count], 1)
        which = torch.repeat_interleave(count, output_size=slots)
        slot = torch.arange(slots, device=device, dtype=torch.int32)
        row = long[which]
        end = torch.minimum(crow[row] + (slot - cut[which, 1] + 1) * piece, crow[row + 1])
        ends[end.long() - 1] = rows + slot
        # Where a target lies within a long row, its next piece begins.
        before = (after - 1).clamp_(min=0)
        begin = crow[before]
        next_piece = torch.minimum(begin + (targets - begin + (piece - 1)) // piece * piece, begins)
        begins = torch.where(lengths[before] > piece, next_piece, begins)
    return Chunks(begins.contiguous(), ends, cut.contiguous(), empty, slots)
