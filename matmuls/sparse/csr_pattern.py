"""The pattern of a sparse matrix in CSR, without values, checked once."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch._C import _DisableFuncTorch
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import unset_fake_temporarily

from custom_mm import _C
from custom_mm.indices import Check

from .chunks import Chunks, chunks_of
from .reordered import Reordered, reorder

_csr_transpose: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = (
    torch.ops.custom_mm.csr_transpose.default
)

_unsafe_view: Callable[..., torch.Tensor] = torch.ops.aten._unsafe_view.default

INT32_MAX = 2**31 - 1


def indices_of(name: str, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and inner indices of a sparse tensor, as stored; of COO twice its [2, nonzeros]."""
    if a.layout == torch.sparse_coo:
        return a._indices(), a._indices()
    if a.layout in (torch.sparse_csr, torch.sparse_bsr):
        return a.crow_indices(), a.col_indices()
    if a.layout in (torch.sparse_csc, torch.sparse_bsc):
        return a.ccol_indices(), a.row_indices()
    raise ValueError(f"{name}: expected a sparse tensor or a plan, got a tensor of layout {a.layout}")


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


class CsrPattern:
    """The checked indices of a matrix [rows, columns].

    crow [rows + 1], col [nonzeros] int32 or int64: CSR offsets and columns.
    order [nonzeros]: the value of nonzero p is values[order[p]]; None: values[p].
    batch: the number of matrices, one pattern each, that lie on the diagonal of this one; None for a single matrix.
    longest: nonzeros of the longest row. longest_column: of the longest column, -1 until `transposed` has run.
    distinct, beyond_two, far: see custom_mm.indices.Facts.
    nonzero_of_entries: of an uncoalesced COO matrix on a CPU, the nonzero that each entry is added to.
    """

    nonzero_of_entries: torch.Tensor | None = None

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
        parts = () if owner is None else indices_of("plan", owner)
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
