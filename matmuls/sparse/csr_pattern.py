"""The pattern of a sparse matrix in CSR, without values: checked once and cached for as long as its tensor lives."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch._C import _DisableFuncTorch
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.weak import WeakIdKeyDictionary

from custom_mm import _C
from custom_mm.indices import Check, check_entries, expect_justified, place_of, version_of

from ..blocks import KERNEL_SIZES
from .chunks import Chunks, chunks_of
from .loaded import load_pattern
from .reordered import Reordered, reorder

_csr_transpose: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = (
    torch.ops.custom_mm.csr_transpose.default
)

_unsafe_view: Callable[..., torch.Tensor] = torch.ops.aten._unsafe_view.default

INT32_MAX = 2**31 - 1


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and _C.is_capturing(device.index)


def is_transformed() -> bool:
    """True under fake-tensor mode or a functorch transform: results of operators must not be cached."""
    fake: object = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake is not None or peek_interpreter_stack() is not None


@contextmanager
def untransformed() -> Iterator[None]:
    """Disable fake-tensor and functorch modes: tensors created inside are real and may be cached."""
    with unset_fake_temporarily(), _DisableFuncTorch():
        yield


def for_every_stream(t: torch.Tensor) -> None:
    """Wait for the current stream of t's device, so that every stream may read its results."""
    if t.is_cuda:
        _C.synchronize_stream(t.device.index)


def relaxed_capture(t: object) -> AbstractContextManager[object]:
    """A context in which this thread may query events and allocate while another thread captures a graph, for the
    tensor t.

    It calls CUDA for tensors of a GPU only: a CUDA build must work without a driver, and in a forked child."""
    return _C.RelaxedCapture() if isinstance(t, torch.Tensor) and t.is_cuda else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait for all streams of a GPU."""
    if device.type == "cuda":
        _C.synchronize_device(device.index)


Indices: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # crow, col, order


def _trust(made: Indices, of: Indices, columns: int) -> None:
    """Spare CPU operators the check of copied indices, which no one else writes to."""
    if all(a is not b for a, b in zip(made, of, strict=True) if a is not None):
        _C.trust_indices(*made, columns)


@dataclass(frozen=True)
class Blocks:
    """The pattern of a matrix of blocks, checked too. Its values are [blocks, height, width]."""

    pattern: "CsrPattern"
    height: int
    width: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        older = {"pattern": state["structure"]} if "structure" in state else {}
        self.__dict__.update({name: x for name, x in state.items() if name != "structure"} | older)


class CsrPattern:
    """The checked indices of a matrix [rows, columns].

    crow [rows + 1], col [nonzeros] int32 or int64: CSR offsets and columns.
    order [nonzeros]: the value of nonzero p is values[order[p]]; None: values[p].
    batch: the number of matrices, one pattern each, that lie on the diagonal of this one; None for a single matrix.
    longest: nonzeros of the longest row. longest_column: of the longest column, -1 until `transposed` has run.
    distinct, beyond_two, far: see custom_mm.indices.Facts.
    """

    def __init__(
        self,
        name: str,
        crow: torch.Tensor,
        col: torch.Tensor,
        shape: tuple[int, int],
        *,
        order: torch.Tensor | None = None,
        transposed: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None,
        batch: int | None = None,
        wait: bool = True,
        copied: bool = False,
    ) -> None:
        """wait: False if the caller calls `checked` before anything else. copied: let the check copy the indices to
        int32 too, if that suffices, for `in_int32`."""
        self.crow, self.col, self.order, self.batch = crow, col, order, batch
        self.rows, self.columns = shape
        self._transposed = transposed
        self._chunks: dict[tuple[int, int], Chunks] = {}
        self._reordered: dict[tuple[int, int], Reordered | None] = {}
        self._narrow: CsrPattern | None = None
        self._t: CsrPattern | None = None
        self._reverse: CsrPattern | None = None
        self.blocks: Blocks | None = None  # of a matrix stored in blocks that a kernel takes
        self.longest_column = -1
        if crow.dim() != 1 or crow.shape[0] != self.rows + 1:
            raise ValueError(
                f"{name}: expected {self.rows + 1} offsets of rows, got offsets of shape {list(crow.shape)}"
            )
        copied = copied and max(self.rows, self.columns, self.nonzeros) < INT32_MAX
        self._check: Check | None = Check(name, crow, col, self.columns, copied=copied)
        if wait:
            self.checked()

    def checked(self) -> None:
        """ValueError unless the indices fit. Waits for the GPU, once."""
        if self._check is not None:
            self.longest, self.distinct, self.beyond_two, self.far = self._check.facts()
            self._check = None

    @property
    def is_checked(self) -> bool:
        return self._check is None

    def __deepcopy__(self, memo: dict[int, object]) -> "CsrPattern":
        return self  # never written to

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("crow", "col", "order", "rows", "columns", "batch", "blocks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        load_pattern(self, state)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.crow, self.col, self.order, *(self._transposed or ())) if t is not None]

    @property
    def block_tensors(self) -> list[torch.Tensor]:
        return [] if self.blocks is None else self.blocks.pattern.tensors

    @property
    def nonzeros(self) -> int:
        return self.col.shape[0]

    @property
    def row(self) -> torch.Tensor:
        """[nonzeros]: the row of each nonzero, in the order of `col`."""
        rows = torch.arange(self.rows, device=self.col.device, dtype=self.col.dtype)
        return torch.repeat_interleave(rows, self.crow.diff(), output_size=self.nonzeros)

    def chunks(self, size: int, piece: int) -> Chunks | None:
        """Chunks of about `size` nonzeros with rows of more than `piece` cut. Made once, which waits for the GPU; None
        under CUDA-graph capture if they were not made before."""
        made = self._chunks.get((size, piece))
        if made is None and not is_capturing(self.crow.device):
            with untransformed():
                made = self._chunks[size, piece] = chunks_of(self.crow, self.col, size, piece)
        return made

    def reordered(self, size: int, piece: int) -> Reordered | None:
        """The rows in an order that reads less of B; None if no order does or memory is out."""
        key = size, piece
        if key not in self._reordered and not is_capturing(self.crow.device):
            try:
                with untransformed():
                    self._reordered[key] = reorder(self.crow, self.col, *key)
            except torch.OutOfMemoryError:
                self._reordered[key] = None
        return self._reordered.get(key)

    @property
    def chunk_tensors(self) -> list[torch.Tensor]:
        made = *self._chunks.values(), *self._reordered.values()
        others = [t for one in (self._t, self._reverse) if one is not None for t in one.chunk_tensors]
        return [t for one in made if one is not None for t in one.tensors] + others

    def by_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Values in the order of `col`."""
        return values if self.order is None else values[self.order]

    def transposed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Offsets, rows and order of the transposed matrix, made once."""
        if self._transposed is None:
            with torch.inference_mode(False), untransformed():
                t_crow, t_col, t_order = _csr_transpose(self.crow, self.col, self.columns)
                made = t_crow, t_col, t_order if self.order is None else self.order[t_order.long()]
                self.longest_column = int(t_crow.diff().max()) if self.columns else 0
                _C.trust_indices(*made, self.rows)
            self._transposed = made  # only if all of it was made
        return self._transposed

    @property
    def has_t(self) -> bool:
        """True if the transposed matrix is there or can be made now."""
        return self._transposed is not None or not is_capturing(self.crow.device)

    @property
    def t(self) -> "CsrPattern":
        """The pattern of the transposed matrix, made once."""
        if self._t is None:
            crow, col, order = self.transposed()
            t = self._copy(_narrow=None, blocks=None, far=0, batch=None)
            t.crow, t.col, t.order, t._transposed = crow, col, order, (self.crow, self.col, self.order)
            t.rows, t.columns = self.columns, self.rows
            t.longest, t.longest_column = self.longest_column, self.longest
            self._t = t
        return self._t

    def reversed(self) -> "CsrPattern":
        """The pattern of the transposed matrix with all the facts about it, made once, which waits for the GPU. `t`
        serves gradients and has but those that they need."""
        if self._reverse is None:
            if is_capturing(self.crow.device):
                raise RuntimeError("plan: expected plan.T or x @ plan to be used once before a CUDA graph capture")
            crow, col, order = self.transposed()
            own, shape = (self.crow, self.col, self.order), (self.columns, self.rows)
            with torch.inference_mode(False), untransformed(), relaxed_capture(self.crow):
                made = CsrPattern("plan", crow, col, shape, order=order, transposed=own, batch=self.batch)
            made.longest_column = self.longest
            self._reverse = made
        return self._reverse

    def to(self, device: torch.device) -> "CsrPattern":
        """The pattern on another device. Waits for the GPU."""
        if device == self.crow.device:
            return self

        def moved(parts: Indices, columns: int) -> Indices:
            crow, col, order = (None if t is None else t.to(device) for t in parts)
            assert crow is not None
            assert col is not None
            _trust((crow, col, order), parts, columns)
            return crow, col, order

        with torch.inference_mode(False), untransformed():
            crow, col, order = moved((self.crow, self.col, self.order), self.columns)
            t = None if self._transposed is None else moved(self._transposed, self.rows)
            blocks = self.blocks and replace(self.blocks, pattern=self.blocks.pattern.to(device))
        for_every_stream(crow)
        for_every_stream(self.crow)
        return self._copy(crow=crow, col=col, order=order, _transposed=t, blocks=blocks, _narrow=None)

    def _copy(self, **changed: object) -> "CsrPattern":
        """A copy without what was made of its indices and cached."""
        copy = object.__new__(CsrPattern)
        copy.__dict__.update(
            {**self.__dict__, "_chunks": {}, "_reordered": {}, "_t": None, "_reverse": None, **changed}
        )
        return copy

    def arguments(self, dense_gradient: bool) -> tuple[torch.Tensor | None, ...]:
        """order, t_crow, t_col, t_order: with the transposed matrix if a gradient to B will need it."""
        if self._transposed is None and (
            not dense_gradient or torch.compiler.is_compiling() or is_capturing(self.crow.device)
        ):
            return self.order, None, None, None
        return self.order, *(self.transposed() if dense_gradient else (None, None, None))

    def in_int32(self, owner: torch.Tensor | None = None) -> "CsrPattern":
        """The pattern with int32 indices, where they suffice: half the bytes to read.

        They never alias int32 indices of the sparse tensor `owner`, whose writes cannot be detected. Its int64 indices
        may be shared, as their version counter is checked.
        """
        if self._narrow is None and self._check is not None and self._check.copies is not None:
            copies = self._check.copies
            self.checked()
            _C.trust_indices(*copies, None, self.columns)
            self._narrow = self._copy(crow=copies[0], col=copies[1])
            return self._narrow
        dtype = torch.int32 if max(self.rows, self.columns, self.nonzeros) < INT32_MAX else self.crow.dtype
        parts = () if owner is None else _indices_of("plan", owner)
        unwanted = [t for t in parts if dtype == torch.int32 or t.is_inference()]
        taken = {t.untyped_storage().data_ptr() for t in unwanted}

        def is_own(t: torch.Tensor) -> bool:
            return t.untyped_storage().data_ptr() not in taken

        if self.crow.dtype == dtype and all(map(is_own, (*self.tensors, *self.block_tensors))):
            return self

        def own(t: torch.Tensor) -> torch.Tensor:
            return t.to(dtype, copy=not is_own(t))

        def all_own(parts: Indices) -> Indices:
            crow, col, order = parts
            return own(crow), own(col), None if order is None else own(order)

        if self._narrow is None:
            was_checked = self.is_checked
            before, t_before = (self.crow, self.col, self.order), self._transposed
            with torch.inference_mode(False):
                made, transposed = all_own(before), None if t_before is None else all_own(t_before)
            blocks = self.blocks and replace(self.blocks, pattern=self.blocks.pattern.in_int32(owner))
            self.checked()  # which waits
            if was_checked:
                for_every_stream(self.crow)
            _trust(made, before, self.columns)
            if transposed is not None and t_before is not None:
                _trust(transposed, t_before, self.rows)
            crow, col, order = made
            self._narrow = self._copy(crow=crow, col=col, order=order, _transposed=transposed, blocks=blocks)
        return self._narrow

    def is_like(self, other: "CsrPattern") -> bool:
        """True if the indices are equal and lie in other memory. Waits for the GPU."""
        mine, theirs = ([t for t in (s.crow, s.col, s.order) if t is not None] for s in (self, other))
        own = self.nonzeros == 0 or self.col.data_ptr() != other.col.data_ptr()
        return own and len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


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
    name: str, a: torch.Tensor, offsets: torch.Tensor, inner: torch.Tensor, wait: bool, copied: bool
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


def _indices_of(name: str, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and inner indices of a sparse tensor, as stored; of COO twice its [2, nonzeros]."""
    if a.layout == torch.sparse_coo:
        return a._indices(), a._indices()
    if a.layout in (torch.sparse_csr, torch.sparse_bsr):
        return a.crow_indices(), a.col_indices()
    if a.layout in (torch.sparse_csc, torch.sparse_bsc):
        return a.ccol_indices(), a.row_indices()
    raise ValueError(f"{name}: expected a sparse tensor or a plan, got a tensor of layout {a.layout}")


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
    if not isinstance(a, torch.Tensor):
        raise TypeError(f"{name}: expected a sparse tensor or a plan, got {type(a).__name__}")
    offsets, inner = _indices_of(name, a)
    key = version_of(offsets), version_of(inner), place_of(offsets), place_of(inner)
    entry = _known.get(a)  # type: ignore[no-untyped-call]  # it keeps the indices alive, so no others have their address
    if entry is not None and entry[0] == key and entry[1].is_checked:  # else another thread's check runs on its stream
        pattern = entry[1]
        if offsets.device.type == "cpu" and (not wait or a.layout != torch.sparse_csr):
            _check_again(name, a, offsets, inner)
    else:
        _expect_plain(name, a)
        coo = a.layout == torch.sparse_coo
        with torch.inference_mode(False):  # a gradient may be recorded later
            pattern = _from_coo(name, a) if coo else _from_compressed(name, a, offsets, inner, wait, copied)
        if -1 not in key[:2]:  # writes to inference tensors cannot be detected
            _known[a] = key, pattern, offsets, inner
    return pattern, values_of(a)


def values_of(a: torch.Tensor) -> torch.Tensor:
    recording = torch.is_grad_enabled()
    if a.layout == torch.sparse_coo and not a.is_coalesced():
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


def _from_coo(name: str, a: torch.Tensor) -> CsrPattern:
    indices, nonzeros = a._indices(), a._values().shape[0]
    if list(indices.shape) != [2, nonzeros]:
        raise ValueError(f"{name}: expected indices of shape [2, {nonzeros}], got {list(indices.shape)}")
    shape = a.shape[0], a.shape[1]
    check_entries(name, indices[0], indices[1], shape)
    if not a.is_coalesced():
        indices = a.detach().coalesce().indices()
    return from_entries(name, indices[0].contiguous(), indices[1].contiguous(), shape)
