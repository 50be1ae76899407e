"""The layouts of A that a plan may keep for products A @ B: one class for each kernel but the default ones."""

import os
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol
from weakref import WeakSet

import torch

from custom_mm.indices import place_of, version_of

from ..device import capability, takes_tf32
from .csr_pattern import Blocks, CsrPattern, for_every_stream, is_capturing, synchronize
from .default_spmm import Recorded, chunk_sizes, chunks_op, default_op, default_product
from .packed_mma import MAX_UNITS_RATIO, expected_units
from .prepared import PreparedOp
from .reordered import Reordered
from .smem_tiles import TileLayout, layout_of

_ops = torch.ops.custom_mm
_matmul = _ops.matmul.default
_spmm_halves, _spmm_tiles, _bsr_spmm = _ops.csr_spmm_halves.default, _ops.csr_spmm_tiles.default, _ops.bsr_spmm.default
_spmm_packed, _linear_packed = _ops.csr_spmm_packed.default, _ops.csr_linear_packed.default


class Product(Protocol):
    """A way to multiply: values [nonzeros] and b [K, N] in one dtype, or under autocast in any."""

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> PreparedOp: ...

    @property
    def tensors(self) -> list[torch.Tensor]: ...


@dataclass(frozen=True)
class CacheEntry:
    """A re-encoded matrix and the values it was made of. These are detached and own their memory, whatever .data of a
    parameter becomes, so that no other values can have their address."""

    values: torch.Tensor
    state: Any
    made: tuple[torch.Tensor, ...]


class CachedLayout:
    """A re-encoding of a constant matrix, values included.

    After `update`, or a write that torch counts, it is made again: in place if a CUDA graph reads it, else in new
    memory, as other threads, streams and autograd may still read the old one. Making it waits for the GPU, so that
    every stream may read it from then on.
    """

    def __init__(self, pattern: CsrPattern) -> None:
        self._pattern = pattern
        self._kept: dict[Any, CacheEntry] = {}  # by dtype, or by whatever else the layout depends on
        self._retired: dict[Any, CacheEntry] = {}  # may be read by products in other threads; until the next one
        self._captured: set[Any] = set()  # keys that CUDA graphs read
        self._making = RLock()  # held while a layout is made from values
        _every.add(self)

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> PreparedOp:
        if not self.is_laid_out(b, dtype) and is_capturing(b.device):
            return default_op(self._pattern, values.to(dtype), b.to(dtype))._replace(reusable=False)
        values, key = values.detach() if values.requires_grad else values, self._key(b, dtype)
        kept, capturing = self._kept_of(values, key), is_capturing(values.device)
        if kept is None:
            if capturing:  # made again at every replay, in the graph's memory, so not cached
                return self._call(self._made(values, key, ()), values, b, dtype)._replace(reusable=False)
            with self._making:
                kept = self._kept_of(values, key) or self._keep(values, key)
        if capturing:
            self._captured.add(key)
        return self._call(kept.made, values, b, dtype)

    def prepare(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
        """Make the layout for these values, so that graphs may read it too. Waits for the GPU."""
        self._keep(values, self._key(b, dtype))

    def _key(self, b: torch.Tensor, dtype: torch.dtype) -> Any:
        return dtype

    def is_laid_out(self, b: torch.Tensor, dtype: torch.dtype) -> bool:
        """True if making it does not wait for the GPU."""
        return True

    def _kept_of(self, values: torch.Tensor, key: Any) -> CacheEntry | None:
        """The entry for these values in their present state, or None."""
        kept = self._kept.get(key)
        return kept if kept is not None and kept.state == _state(values) else None

    def _keep(self, values: torch.Tensor, key: Any) -> CacheEntry:
        with self._making:
            old, in_place = self._kept.get(key), key in self._captured
            if in_place or key in self._retired:  # a replay or a product on any stream may read them
                synchronize(values.device)
            made = self._made(values, key, old.made if old is not None and in_place else ())
            for_every_stream(values)
            if old is not None and not in_place:
                self._retired[key] = old
            kept = self._kept[key] = CacheEntry(values.detach(), _state(values), made)
        return kept

    def _made(self, values: torch.Tensor, key: Any, old: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The layout's tensors; written into `old` if it has any."""
        raise NotImplementedError

    def _call(
        self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
    ) -> PreparedOp:
        raise NotImplementedError

    def refresh(self, values: torch.Tensor) -> None:
        """Make every entry again from other values, in place if a graph reads it."""
        for key in list(self._kept):  # a copy: other threads may add to it
            self._keep(values, key)

    @property
    def is_captured(self) -> bool:
        return bool(self._captured)

    @property
    def tensors(self) -> list[torch.Tensor]:
        kept = *list(self._kept.values()), *list(self._retired.values())
        return [t for one in kept for t in one.made]


_every: WeakSet[CachedLayout] = WeakSet()


def _renew_locks() -> None:
    """In a child of fork(), where a thread that held a lock does not exist."""
    for layout in list(_every):
        layout._making = RLock()


os.register_at_fork(after_in_child=_renew_locks)


class Dense(CachedLayout):
    """A with its zeros, for cuBLAS or, on a CPU, torch's BLAS."""

    def _made(
        self, values: torch.Tensor, dtype: torch.dtype, old: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        s = self._pattern
        with torch.inference_mode(False), torch.no_grad():  # may be saved for a gradient later
            if values.is_cuda and dtype.itemsize == 2 and s.distinct:
                padded = _ops.csr_filled(s.crow, s.col, values.to(dtype), s.columns, s.order)
                filled = padded[:, : s.columns]
                return (old[0].copy_(filled) if old else filled,)
            full = old[0].zero_() if old else values.new_zeros(s.rows, s.columns, dtype=dtype)
            place, flat = s.row.long() * s.columns + s.col, full.view(-1)
            if s.distinct:
                flat.scatter_(0, place, s.by_rows(values).to(dtype))
            else:  # adds duplicates up in a fixed order
                parts = s.by_rows(values).to(dtype)
                if flat.is_cuda:  # index_put_ sorts them
                    flat.index_put_((place,), parts, accumulate=True)
                else:  # index_put_ would add in the order of threads
                    flat.index_add_(0, place, parts)
        return (full,)

    def _call(
        self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
    ) -> PreparedOp:
        return PreparedOp(_matmul, (kept[0], b, False, False), 1)


class Fp16x2(CachedLayout):
    """float32 A with its zeros, each number as two float16: as exact, on tensor cores
    (src/sparse/spmm/densified/densified.h)."""

    sparse24 = False

    def _made(
        self, values: torch.Tensor, dtype: torch.dtype, old: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        s = self._pattern
        with torch.inference_mode(False), torch.no_grad():
            new: tuple[torch.Tensor, ...] = _ops.csr_halves(
                s.crow, s.col, values.to(dtype), s.columns, s.order, self.sparse24, s.beyond_two
            )
            for x, y in zip(old, new, strict=False):
                x.copy_(y)
        return old or new

    def _call(
        self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
    ) -> PreparedOp:
        s = self._pattern
        parts = s.crow, s.col, values.to(dtype), b.to(dtype), s.columns, s.order, s.longest
        return PreparedOp(_spmm_halves, (*kept, *parts), len(kept) + 3)


class Sparse24(Fp16x2):
    """2:4 sparsity: two nonzeros of every four columns, half the bytes and multiplications; the row kernel adds the
    rest. float32 as two float16, and 16 bits."""

    sparse24 = True


class SmemTiles(CachedLayout):
    """float32 nonzeros in tiles, for products that keep part of B in shared memory (smem_tiles.py)."""

    def __init__(self, pattern: CsrPattern) -> None:
        super().__init__(pattern)
        self._layouts: dict[int, TileLayout | None] = {}  # by columns of b
        self._laid_out: dict[TileLayout, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> PreparedOp:
        if self._key(b, dtype) is None:  # the layout takes the measured width of b but not this one
            return default_op(self._pattern, values.to(dtype), b.to(dtype))._replace(reusable=False)
        return super().call(values, b, dtype)

    def is_laid_out(self, b: torch.Tensor, dtype: torch.dtype) -> bool:
        return self._key(b, dtype) in self._laid_out

    def _key(self, b: torch.Tensor, dtype: torch.dtype) -> Any:
        n = b.shape[1]
        if n not in self._layouts:
            self._layouts[n] = layout_of(self._pattern, n)
        return self._layouts[n]

    def _made(self, values: torch.Tensor, key: Any, old: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        s = self._pattern
        with torch.inference_mode(False), torch.no_grad():
            if key not in self._laid_out:
                heads, slots = _ops.csr_tiles(s.crow, s.col, s.columns, *key)
                first, _, until, _ = heads.view(-1, 4)[-1].tolist()
                self._laid_out[key] = heads, slots, first + (until >> 16)
            heads, slots, steps = self._laid_out[key]
            entries = _ops.csr_tile_entries(
                heads, slots, s.crow, s.col, values.float(), s.columns, key.lanes, steps, s.order
            )
            new: tuple[torch.Tensor, ...] = (heads, slots, *entries)
            if old:
                old[-1].copy_(new[-1])
        return old or new

    def _call(
        self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
    ) -> PreparedOp:
        s, layout = self._pattern, self._key(b, dtype)
        parts = s.crow, s.col, values.to(dtype), b.to(dtype), s.columns, layout.lanes, s.order, s.longest
        return PreparedOp(_spmm_tiles, (*kept, *parts), len(kept) + 3)


class PackedMma(CachedLayout):
    """16 bits, pairs with a nonzero, packed as mma reads them (src/sparse/spmm/packed_mma/layout.h)."""

    in_order, operator = False, _spmm_packed

    def __init__(self, pattern: CsrPattern) -> None:
        super().__init__(pattern)
        self._units: int | None = None

    def is_laid_out(self, b: torch.Tensor, dtype: torch.dtype) -> bool:
        return self._units is not None

    def _made(
        self, values: torch.Tensor, dtype: torch.dtype, old: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        s = self._pattern
        with torch.inference_mode(False), torch.no_grad():
            if self._units is None:
                units = int(_ops.csr_packed_units(s.crow, s.col, s.columns, self.in_order).item())
                if units > MAX_UNITS_RATIO * expected_units(s):
                    raise RuntimeError(f"expected nonzeros that lie anywhere, got a tile of {units} units")
                self._units = units
            parts = s.crow, s.col, values.to(dtype), s.columns, self._units, s.order, self.in_order
            packed = _ops.csr_packed(*parts)
            return (old[0].copy_(packed) if old else packed,)

    def _call(
        self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
    ) -> PreparedOp:
        s = self._pattern
        side = b.mT if self.in_order else b
        parts = s.crow, s.col, values.to(dtype), side.to(dtype), s.columns, s.order, s.longest
        return PreparedOp(self.operator, (*kept, *parts), len(kept) + 3)


class PackedMmaLinear(PackedMma):
    """The same for a linear layer: b = x^T with x [n, K] contiguous; the call gives x W^T, [n, rows]. Its arguments may
    be followed by a bias."""

    in_order, operator = True, _linear_packed


class ReorderedRows(CachedLayout):
    """The rows in an order that reads less of B (reordered.py); with a gradient to B the transposed matrix's too."""

    def __init__(self, pattern: CsrPattern) -> None:
        super().__init__(pattern)
        self._transposed: ReorderedRows | None = None

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> PreparedOp:
        if not (torch.is_grad_enabled() and b.requires_grad):
            return super().call(values, b, dtype)
        if not self._pattern.has_t or values.dtype != b.dtype or torch.is_autocast_enabled(b.device.type):
            return default_op(self._pattern, values, b)._replace(reusable=False)
        return PreparedOp(Recorded.apply, (values, b, self._pattern, self._product), 1, reusable=False)

    def _product(self, pattern: CsrPattern, values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """A product by the matrix or the transposed one."""
        if not is_capturing(b.device) and reordered_of(pattern) is None:
            return default_product(pattern, values, b)
        return self._layout_of(pattern).call(values, b, b.dtype).run()

    def _layout_of(self, pattern: CsrPattern) -> "ReorderedRows":
        if pattern is self._pattern:
            return self
        if self._transposed is None or self._transposed._pattern is not pattern:
            self._transposed = ReorderedRows(pattern)
        return self._transposed

    def refresh(self, values: torch.Tensor) -> None:
        super().refresh(values)
        if self._transposed is not None:
            self._transposed.refresh(values)

    @property
    def is_captured(self) -> bool:
        return super().is_captured or (self._transposed is not None and self._transposed.is_captured)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return super().tensors + ([] if self._transposed is None else self._transposed.tensors)

    def is_laid_out(self, b: torch.Tensor, dtype: torch.dtype) -> bool:
        return reordered_of(self._pattern) is not None

    def _made(
        self, values: torch.Tensor, dtype: torch.dtype, old: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(False), torch.no_grad():
            moved = self._pattern.by_rows(values).to(dtype).index_select(0, self._reordered.place)
            return (old[0].copy_(moved) if old else moved,)

    def _call(
        self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
    ) -> PreparedOp:
        made = self._reordered
        return chunks_op(self._pattern, made.chunks, values.to(dtype), b.to(dtype), made.col, *kept)

    @property
    def _reordered(self) -> Reordered:
        made = reordered_of(self._pattern)
        assert made is not None  # else another product is selected
        return made


def reordered_of(s: CsrPattern) -> Reordered | None:
    return s.reordered(*chunk_sizes(s, 0))


class BlockLayout:
    """The blocks of BSR and BSC, read as they are stored: values may change, and b may have a gradient."""

    def __init__(self, pattern: CsrPattern) -> None:
        assert pattern.blocks is not None
        self._blocks: Blocks = pattern.blocks

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> PreparedOp:
        s, height, width = self._blocks.pattern, self._blocks.height, self._blocks.width
        order, *reverse = s.arguments(b.requires_grad and torch.is_grad_enabled())
        values = values.detach().to(dtype).reshape(-1, height, width)
        parts = s.crow, s.col, values, b.to(dtype), s.columns * width, order, False, *reverse
        return PreparedOp(_bsr_spmm, parts, 3)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return []  # all are the pattern's


def takes_blocks(pattern: CsrPattern, dtype: torch.dtype, device: torch.device) -> bool:
    """True if tensor cores can multiply the blocks: in 16 bits, or in float32 where TF32 is allowed."""
    if pattern.blocks is None or device.type != "cuda" or dtype.itemsize > 4:
        return False
    narrow = dtype.itemsize == 2 or takes_tf32()
    return narrow and capability(device) >= (8, 0)


def _state(values: torch.Tensor) -> Any:
    return place_of(values), version_of(values)
