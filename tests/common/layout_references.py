"""Functions that only GPUs have, in torch: what tests compare them with, and CPU kernels for tests of the Python code
that calls them."""

import warnings
from contextlib import contextmanager

import torch

_ops = torch.ops.custom_mm


def rows_of(crow):
    """The row of each nonzero."""
    return torch.repeat_interleave(torch.arange(len(crow) - 1), crow.diff().long())


def chunks(crow, col, size, piece, names=None):
    """csr_chunks, as src/sparse/spmm/chunks/layout.h describes it."""
    rows, nonzeros, lengths = len(crow) - 1, len(col), crow.diff().long()
    names = torch.arange(rows) if names is None else names
    whole, long = (lengths > 0) & (lengths <= piece), lengths > piece
    many = -(-lengths[long] // piece)
    first, slots = many.cumsum(0) - many, int(many.sum())
    of_piece = torch.repeat_interleave(torch.arange(len(many)), many)
    starts = crow[:-1][long][of_piece] + (torch.arange(slots) - first[of_piece]) * piece
    ends = torch.full((nonzeros,), -1)
    ends[crow[1:][whole].long() - 1] = names[whole].long()
    ends[torch.minimum(starts + piece, crow[1:][long][of_piece]) - 1] = rows + torch.arange(slots)
    every = torch.cat([starts, crow[:-1][whole], torch.tensor([nonzeros])]).sort().values
    begins = every[torch.searchsorted(every, torch.arange(-(-nonzeros // size) + 1).mul(size).clamp(max=nonzeros))]
    cut, empty = torch.zeros(nonzeros // (piece + 1), 3), torch.zeros(rows)
    cut[: len(many)] = torch.stack([names[long], first, many], 1)
    empty[: int((lengths == 0).sum())] = names[lengths == 0]
    counts = torch.tensor([int((lengths == 0).sum()), len(many), slots])
    return tuple(t.int() for t in (begins, ends, cut, empty, counts))


def regions(crow, col, columns, size, rounds):
    """csr_regions, as src/sparse/spmm/reordered/layout.h describes it."""
    row, number = rows_of(crow), torch.arange(columns)
    found = torch.where(number % size == 0, number // size, -1)
    for _ in range(rounds):
        best = torch.full_like(found, -1).scatter_reduce(0, row, found[col.long()], "amax")
        found = torch.where(found < 0, best, found)
    return torch.where(found < 0, number // size, found).int()


def reads(crow, col, columns, at_once, every, order=None):
    """csr_reads: the pairs of a counted window and a column that it reads."""
    place = torch.arange(columns)
    if order is not None:
        place = torch.empty_like(place).scatter_(0, order.long(), place)
    window = place[rows_of(crow)] // at_once
    kept = window % every == 0
    return (window[kept] * columns + col[kept]).unique().numel() * torch.ones(1, dtype=torch.int64)


def reorder(crow, col, order):
    """csr_reorder: new offsets and columns, and the old index of each nonzero."""
    ends = crow.diff()[order.long()].cumsum(0)
    new_crow = torch.cat([crow[:1], ends]).int()
    row = rows_of(new_crow)
    place = crow[order.long()[row]] + torch.arange(len(col)) - new_crow[row]
    return new_crow, col[place.long()], place.int()


def packed_units(crow, col, columns, in_order=False):
    """csr_packed_units: 512 bytes of heads and 4 for each pair with a nonzero, of the largest tile, in 16 bytes."""
    row, place = rows_of(crow) % 64, col.long() % 64
    if not in_order:  # see src/sparse/spmm/packed_mma/layout.h
        place = place % 4 * 16 + place % 8 // 4 * 8 + place // 8
    tile = rows_of(crow) // 64 * columns + col // 64
    pairs = (tile * 64 + row) * 32 + place // 2
    counts = (pairs.unique() // (64 * 32)).unique(return_counts=True)[1]
    most = int(counts.max()) if len(counts) else 0
    return torch.tensor([-(-(512 + 4 * most) // 16)], dtype=torch.int32)


def pack_padded(ids, mask, types, padding, packed, positions, packed_types, place, starts):
    """_C.pack_padded, as src/texts/pack.h describes it."""
    (batch, length), shown = ids.shape, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    computed, numbered = shown.clone(), ids != padding
    computed[:, 0] = True
    numbers = torch.arange(length).expand(batch, -1) if padding < 0 else padding + numbered.cumsum(1) * numbered
    for out, x in ((packed, ids), (positions, numbers), (packed_types, types)):
        if out is not None:
            out.zero_()[0, : computed.sum()] = 0 if x is None else x[computed]
    place[: batch * length] = torch.where(computed.flatten(), computed.flatten().cumsum(0) - 1, -1)
    extra = (starts.shape[1] - 1) // (1 if mask is None else 2) - batch  # texts without tokens
    ends = computed.sum(1).cumsum(0)
    ends = torch.cat([ends, ends[-1:].expand(extra)])
    begins, hidden = torch.cat([ends.new_zeros(1), ends[:-1]]), torch.cat([~shown[:, 0], torch.zeros(extra).bool()])
    segments = torch.stack([ends, ends])
    if mask is not None:
        segments = torch.stack([torch.stack([begins, begins + hidden]), segments], -1).flatten(1)
    starts.copy_(torch.cat([segments.new_zeros(2, 1), segments], 1))


def unpack_padded(states, place, batch, length):
    """_C.unpack_padded."""
    place = place[: batch * length].long()
    return torch.where(place[:, None] < 0, 0, states[place.clamp(min=0)]).view(batch, length, -1)


def _zeros_like(name):
    """Zeros of the shapes of an operator's results."""

    def kernel(*args):
        made = getattr(_ops, name)(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in args))
        zeros = [torch.zeros(t.shape, dtype=t.dtype) for t in ([made] if isinstance(made, torch.Tensor) else made)]
        return zeros[0] if isinstance(made, torch.Tensor) else tuple(zeros)

    return kernel


def _by_rows(crow, order):
    """A product that csr_spmm computes. crow, order: the places of these arguments."""
    return lambda *args: _ops.csr_spmm(*args[crow : crow + 5], order=args[order] if len(args) > order else None)


# Products go by rows; what they would read of a layout is zeros.
ON_CPU = {
    "csr_chunks": chunks,
    "csr_regions": regions,
    "csr_reads": reads,
    "csr_reorder": reorder,
    "csr_packed_units": packed_units,
    **{name: _zeros_like(name) for name in ("csr_packed", "csr_halves", "csr_tiles", "csr_tile_entries")},
    "csr_spmm_chunks": _by_rows(4, 10),
    "csr_spmm_tiles": _by_rows(4, 10),
    "csr_spmm_halves": _by_rows(4, 9),
    "csr_spmm_packed": _by_rows(1, 6),
    "csr_linear_packed": lambda packed, crow, col, values, x, columns, order=None, longest=-1, bias=None: (
        _ops.csr_spmm(crow, col, values, x.T, columns, order=order).T + (0 if bias is None else bias)
    ).contiguous(),
}


@contextmanager
def on_cpu():
    """Makes them the operators' CPU kernels, which refuse tensors otherwise."""
    library = torch.library.Library("custom_mm", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernels that they replace
        for name, kernel in ON_CPU.items():
            library.impl(name, kernel)
    try:
        yield
    finally:
        library._destroy()
