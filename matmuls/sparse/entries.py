"""The entries of an uncoalesced COO matrix on a CPU: in any order, and several at one place. They are sorted by
counting, once for a tensor; torch's coalesce compares them at every call."""

from collections.abc import Callable
from typing import NamedTuple

import torch

_csr_transpose: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = (
    torch.ops.custom_mm.csr_transpose.default
)

COUNTERS = 2**16  # a sort by counting may always take so many, and else a few for each entry


def _counted(index: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Offsets [size + 1] of the entries by their index, and the entries in that order: a stable sort. None if there are
    too few entries for so many counters."""
    if size > max(COUNTERS, 4 * index.shape[0]):
        return None
    # The transposed matrix of a single row whose columns are the index.
    offsets, _, order = _csr_transpose(index.new_tensor([0, index.shape[0]]), index, size)
    return offsets, order


def by_rows(row: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of the rows [rows + 1], and the entries in the order of their rows [entries]; a stable sort."""
    if (counted := _counted(row, rows)) is not None:
        return counted
    sorted_rows, order = torch.sort(row, stable=True)
    return torch.searchsorted(sorted_rows, torch.arange(rows + 1, dtype=row.dtype, device=row.device)), order


def _order(index: torch.Tensor, size: int) -> torch.Tensor:
    counted = _counted(index, size)
    return torch.sort(index, stable=True)[1] if counted is None else counted[1]


class Coalesced(NamedTuple):
    """Row and column of each nonzero, in the order of rows and columns; for each entry, the nonzero it belongs to."""

    row: torch.Tensor
    col: torch.Tensor
    nonzero: torch.Tensor


def coalesced(row: torch.Tensor, col: torch.Tensor, shape: tuple[int, int]) -> Coalesced:
    """The nonzeros of the entries at (row, col), as torch's coalesce orders them."""
    order = _order(col, shape[1])
    order = order.index_select(0, _order(row.index_select(0, order), shape[0]))
    row, col = row.index_select(0, order), col.index_select(0, order)
    begins = torch.ones_like(row, dtype=torch.bool)
    torch.logical_or(row[1:] != row[:-1], col[1:] != col[:-1], out=begins[1:])
    nonzero = torch.empty_like(order).scatter_(0, order, begins.cumsum(0) - 1)
    return Coalesced(row[begins], col[begins], nonzero)


def added_up(values: torch.Tensor, nonzero: torch.Tensor, nonzeros: int) -> torch.Tensor:
    """[nonzeros]: the sum of the values of each nonzero's entries; in 16 bits rounded once."""
    wide = values.float() if values.dtype.itemsize == 2 else values
    return wide.new_zeros(nonzeros).index_add_(0, nonzero, wide).to(values.dtype)
