"""The pattern of a sparse tensor, cached for as long as the tensor lives, and its values."""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.weak import WeakIdKeyDictionary

from custom_mm import _C
from custom_mm.indices import check_entries, expect_justified, place_of, version_of

from ..blocks import KERNEL_SIZES
from .csr_pattern import INT32_MAX, Blocks, CsrPattern, _csr_transpose, _unsafe_view, indices_of, is_transformed
from .entries import added_up, coalesced
from .entries import by_rows as entries_by_rows


def from_entries(
    name: str, row: torch.Tensor, col: torch.Tensor, shape: tuple[int, int], batch: int | None = None
) -> CsrPattern:
    """The pattern from the row and column of each value, in any order. The rows must be in range."""
    order = None
    expect_justified(name, shape[0], row.shape[0])
    if not bool((row[1:] >= row[:-1]).all()):
        row, order = torch.sort(row, stable=True)
        col, order = col[order], order.to(col.dtype)
    crow = torch.searchsorted(row.contiguous(), torch.arange(shape[0] + 1, device=row.device, dtype=row.dtype))
    return CsrPattern(name, crow.to(row.dtype), col.contiguous(), shape, order=order, batch=batch)


def _expect_plain(name: str, a: torch.Tensor) -> None:
    dense = a.dense_dim()
    if dense or (a.layout == torch.sparse_coo and a.dim() != 2):
        raise ValueError(f"{name}: expected a sparse matrix, got shape {list(a.shape)} with {dense} dense dimensions")


def _from_compressed(
    name: str, a: torch.Tensor, offsets: torch.Tensor, inner: torch.Tensor, *, wait: bool, copied: bool
) -> CsrPattern:
    values = a.detach().values()
    rows, columns = a.shape[-2], a.shape[-1]
    if inner.shape != values.shape[: inner.dim()]:
        raise ValueError(
            f"{name}: expected as many indices as values, got {list(inner.shape)} and {list(values.shape)}"
        )
    by_rows = a.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer_size, inner_size = (rows, columns) if by_rows else (columns, rows)
    if a.layout in (torch.sparse_bsr, torch.sparse_bsc):
        if a.dim() != 2:
            raise ValueError(f"{name}: expected one matrix in blocks, got a batch of shape {list(a.shape)}")
        height, width = values.shape[1:]
        if min(height, width) < 1 or rows % height or columns % width:
            raise ValueError(f"{name}: expected blocks that {rows} x {columns} can be cut into, got {height} x {width}")
        outer_block, inner_block = (height, width) if by_rows else (width, height)
        sizes = outer_size // outer_block, inner_size // inner_block
        blocks = CsrPattern(name, offsets.contiguous(), inner.contiguous(), sizes)
        outer = torch.repeat_interleave(torch.arange(blocks.rows, device=inner.device), blocks.crow.diff().long())
        block_row, block_col = (outer, inner.long()) if by_rows else (inner.long(), outer)
        down, across = (torch.arange(n, device=inner.device) for n in (height, width))
        index = inner.dtype if max(values.numel(), rows, columns) < INT32_MAX else torch.int64
        row = (block_row[:, None, None] * height + down[None, :, None]).expand(-1, -1, width)
        col = (block_col[:, None, None] * width + across[None, None, :]).expand(-1, height, -1)
        made = from_entries(name, row.reshape(-1).to(index), col.reshape(-1).to(index), (rows, columns))
        if height in KERNEL_SIZES and width in KERNEL_SIZES:
            made.blocks = Blocks(blocks if by_rows else _by_rows(name, blocks), height, width)
        return made
    if a.dim() == 2:
        sizes = outer_size, inner_size
        wait, copied = wait or not by_rows, copied and by_rows
        pattern = CsrPattern(name, offsets.contiguous(), inner.contiguous(), sizes, wait=wait, copied=copied)
    else:
        # Matrices on a diagonal: offsets and columns continue where the matrix before ended.
        offsets, inner = offsets.flatten(0, -2), inner.flatten(0, -2)
        count, nonzeros = inner.shape
        each = torch.arange(count, device=inner.device, dtype=inner.dtype)[:, None]
        for one_offsets, one_inner in zip(offsets, inner, strict=True):
            CsrPattern(name, one_offsets.contiguous(), one_inner.contiguous(), (outer_size, inner_size))
        if max(count * nonzeros, count * max(rows, columns)) >= INT32_MAX:
            offsets, inner, each = offsets.long(), inner.long(), each.long()
        joined = (offsets[:, :-1] + each * nonzeros).reshape(-1)
        joined = torch.cat([joined, joined.new_full((1,), count * nonzeros)])
        pattern = CsrPattern(
            name, joined, (inner + each * inner_size).reshape(-1), (count * outer_size, count * inner_size), batch=count
        )
    return pattern if by_rows else _by_rows(name, pattern)


def _by_rows(name: str, by_columns: CsrPattern) -> CsrPattern:
    """The pattern by rows of one by columns, which it keeps as its transposed one."""
    crow, col, order = _csr_transpose(by_columns.crow, by_columns.col, by_columns.columns)
    made = CsrPattern(
        name,
        crow,
        col,
        (by_columns.columns, by_columns.rows),
        order=order,
        transposed=(by_columns.crow, by_columns.col, None),
        batch=by_columns.batch,
    )
    made.longest_column = by_columns.longest
    return made


# Sparse tensor -> (key, pattern, its indices): valid while the tensor lives and the key is unchanged.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()
_known_entries: WeakIdKeyDictionary = WeakIdKeyDictionary()  # as _known, by `entries_of`


def _check_again(name: str, a: torch.Tensor, offsets: torch.Tensor, inner: torch.Tensor) -> None:
    """ValueError on a CPU if an index no longer fits though no version moved: after a write to the tensor that the
    sparse tensor was made of. Operators check only what they read, which for most layouts are copies."""
    if a.layout == torch.sparse_coo:
        for what, index, size in zip(("rows", "columns"), offsets, a.shape, strict=True):
            _C.validate_indices(name, what, index, size)
        return
    by_rows = a.layout in (torch.sparse_csr, torch.sparse_bsr)
    what, size = ("columns", a.shape[-1]) if by_rows else ("rows", a.shape[-2])
    if a.layout in (torch.sparse_bsr, torch.sparse_bsc):
        size //= a.detach().values().shape[2 if by_rows else 1]
    offsets, inner = (t.flatten(0, -2) if t.dim() > 1 else t[None] for t in (offsets, inner))
    for one_offsets, one in zip(offsets, inner, strict=True):
        _C.validate_offsets(name, one_offsets, one.shape[0], what)
        _C.validate_indices(name, what, one, size)


def pattern_of(name: str, a: torch.Tensor, wait: bool = True, copied: bool = False) -> tuple[CsrPattern, torch.Tensor]:
    """A sparse tensor's pattern and its values [nonzeros], differentiable.

    wait: False if the caller calls the pattern's `checked` before any product, so that the host continues while the GPU
    checks. copied: as CsrPattern takes it.
    """
    return pattern_alone(name, a, wait, copied), values_of(a)


def pattern_alone(name: str, a: torch.Tensor, wait: bool = True, copied: bool = False) -> CsrPattern:
    """The pattern of `pattern_of`."""
    if not isinstance(a, torch.Tensor):
        raise TypeError(f"{name}: expected a sparse tensor or a plan, got {type(a).__name__}")
    offsets, inner = indices_of(name, a)
    make = _from_coo if a.layout == torch.sparse_coo else partial(_from_compressed, wait=wait, copied=copied)
    return _known_or_made(_known, name, a, offsets, inner, make, wait)


def entries_of(name: str, a: object) -> tuple[CsrPattern, torch.Tensor] | None:
    """For a sum over the nonzeros: the pattern of an uncoalesced COO matrix whose nonzeros are its entries, and their
    values as they are; None if the entries must be added up first: on a GPU, and for their gradient."""
    if not isinstance(a, torch.Tensor) or a.layout != torch.sparse_coo or a.is_coalesced() or not a.is_cpu:
        return None
    if (a.requires_grad and torch.is_grad_enabled()) or is_transformed() or torch.compiler.is_compiling():
        return None
    indices, values = indices_of(name, a)[0], a._values().detach()
    return _known_or_made(_known_entries, name, a, indices, indices, _from_entries, True), values


def _known_or_made(
    known: WeakIdKeyDictionary,
    name: str,
    a: torch.Tensor,
    offsets: torch.Tensor,
    inner: torch.Tensor,
    make: Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], CsrPattern],
    wait: bool,
) -> CsrPattern:
    key = _key_of(offsets, inner)
    entry = known.get(a)  # it keeps the indices alive, so no others have their address
    if entry is not None and entry[0] == key and entry[1].is_checked:  # else another thread's check runs on its stream
        pattern: CsrPattern = entry[1]
        if offsets.device.type == "cpu" and (not wait or a.layout != torch.sparse_csr):
            _check_again(name, a, offsets, inner)
    else:
        _expect_plain(name, a)
        with torch.inference_mode(False):  # a gradient may be recorded later
            pattern = make(name, a, offsets, inner)
        if -1 not in key[:2]:  # writes to inference tensors cannot be detected
            known[a] = key, pattern, offsets, inner
    return pattern


def _key_of(offsets: torch.Tensor, inner: torch.Tensor) -> tuple[object, ...]:
    return version_of(offsets), version_of(inner), place_of(offsets), place_of(inner)


def values_of(a: torch.Tensor) -> torch.Tensor:
    recording = torch.is_grad_enabled()
    if a.layout == torch.sparse_coo and not a.is_coalesced():
        if not (recording and a.requires_grad) and (made := _added_up(a)) is not None:
            return made
        with torch.inference_mode(False), torch.set_grad_enabled(recording):  # a plan may be trained later
            narrow = a.dtype.itemsize == 2  # duplicates are added up in float32
            a = a.float().coalesce().to(a.dtype) if narrow else a.coalesce()
    if recording and a.layout != torch.sparse_coo and not torch.compiler.is_compiling() and a.grad_fn is not None:
        values = _C.values_of_sparse(a)  # a second derivative passes through it
        return values if values.dim() == 1 else values.reshape(-1)
    values = a.values()
    # Not a view of a, which torch.compile does not recognize as its own. Detached values share a's version counter,
    # which need not be watched where a gradient is recorded.
    values = _unsafe_view(values, values.shape) if recording and values.requires_grad else values.detach()
    return values if values.dim() == 1 else values.reshape(-1)


def _added_up(a: torch.Tensor) -> torch.Tensor | None:
    """The values of an uncoalesced COO matrix whose pattern is known; None if it is not."""
    entry = _known.get(a)
    if entry is None or entry[1].nonzero_of_entries is None or entry[0] != _key_of(a._indices(), a._indices()):
        return None
    with torch.inference_mode(False), torch.no_grad():
        return added_up(a._values().detach(), entry[1].nonzero_of_entries, entry[1].nonzeros)


def _entries_in_range(name: str, a: torch.Tensor) -> torch.Tensor:
    """The indices [2, entries] of a COO matrix; ValueError unless they fit."""
    indices, nonzeros = a._indices(), a._values().shape[0]
    if list(indices.shape) != [2, nonzeros]:
        raise ValueError(f"{name}: expected indices of shape [2, {nonzeros}], got {list(indices.shape)}")
    check_entries(name, indices[0], indices[1], (a.shape[0], a.shape[1]))
    return indices


def _from_coo(name: str, a: torch.Tensor, *_: torch.Tensor) -> CsrPattern:
    indices, shape = _entries_in_range(name, a), (a.shape[0], a.shape[1])
    if a.is_coalesced():
        return from_entries(name, indices[0].contiguous(), indices[1].contiguous(), shape)
    if not a.is_cpu or is_transformed():
        row, col = a.detach().coalesce().indices()
        return from_entries(name, row.contiguous(), col.contiguous(), shape)
    rows, columns = indices.detach().contiguous()
    row, col, nonzero = coalesced(rows, columns, shape)
    made = from_entries(name, row, col, shape)
    made.nonzero_of_entries = nonzero
    return made


def _from_entries(name: str, a: torch.Tensor, *_: torch.Tensor) -> CsrPattern:
    expect_justified(name, a.shape[0], a._nnz())
    row, col = _entries_in_range(name, a).detach().contiguous()
    crow, order = entries_by_rows(row, a.shape[0])
    pattern = CsrPattern(name, crow, col.index_select(0, order), (a.shape[0], a.shape[1]), order=order)
    _C.trust_indices(pattern.crow, pattern.col, pattern.order, pattern.columns)
    return pattern
