"""How a plan keeps a matrix to multiply by it: with its zeros, by tiles, packed, in its blocks, or for cuSPARSE."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol
from weakref import WeakSet

import torch

from custom_mm.indices import version_of

from .calls import Call
from .device import capability, takes_tf32
from .ours import Recorded, call_by_chunks, chunk_sizes, our_call, our_product
from .packed import expected_units
from .reorder import Reordered
from .structure import Blocks, Structure, current_stream, for_every_stream, is_capturing, synchronize
from .tiles import TileLayout, layout_of

_ops = torch.ops.custom_mm
_matmul, _cusparse_spmm = _ops.matmul.default, _ops.cusparse_spmm.default
_spmm_halves, _spmm_tiles, _bsr_spmm = _ops.csr_spmm_halves.default, _ops.csr_spmm_tiles.default, _ops.bsr_spmm.default
_spmm_packed = _ops.csr_spmm_packed.default
_linear_packed = _ops.csr_linear_packed.default

OURS = "ours"
DENSE = "dense"
HALVES = "dense in halves"
TWO_OF_FOUR = "two of four"
TILES = "tiles in shared memory"
PACKED = "packed on tensor cores"
PACKED_LINEAR = "packed for a linear layer"
REORDERED = "rows reordered"
BLOCKS = "blocks on tensor cores"
CUSPARSE = "cusparse csr_alg3"
UNEVEN = 1.25  # times the units that a tile is expected to have: others have fewer, and their room is fetched too


class Product(Protocol):
    """values [nonzeros] and b [K, N] in one dtype, or under autocast in any."""

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call: ...

    @property
    def tensors(self) -> list[torch.Tensor]: ...


@dataclass(frozen=True)
class Kept:
    """A copy of the matrix and the values that it was made of. Detached, these hold their memory, whatever .data of a
    parameter becomes, so that no others can lie at their address."""

    values: torch.Tensor
    state: Any
    made: tuple[torch.Tensor, ...]


class Full:
    """A copy of a constant matrix in another layout, values included.

    The user said that the values stay as they are. After `update`, or a write that torch counts, the copy is made anew:
    in its place where a CUDA graph reads it there, elsewhere beside the old one, which other threads, streams and
    autograd may yet read. Making it waits for the GPU, so that any stream may read it from then on.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._kept: dict[Any, Kept] = {}  # by dtype, or whatever else the layout depends on
        self._retired: dict[Any, Kept] = {}  # what products that other threads had begun may read; until the next one
        self._captured: set[Any] = set()
        self._making = RLock()  # one thread makes it, and none while another multiplies by what that one has made
        _every.add(self)

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        if not self.is_laid_out(b, dtype) and is_capturing(b.device):
            return our_call(self._structure, values.to(dtype), b.to(dtype))._replace(lasting=False)
        values, key = values.detach() if values.requires_grad else values, self._key(b, dtype)
        kept, capturing = self._kept_of(values, key), is_capturing(values.device)
        if kept is None:
            if capturing:  # written at every replay; what lies in a graph's memory is not kept
                return self._call(self._made(values, key, ()), values, b, dtype)._replace(lasting=False)
            with self._making:
                kept = self._kept_of(values, key) or self._keep(values, key)
        if capturing:
            self._captured.add(key)
        return self._call(kept.made, values, b, dtype)

    def prepare(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
        """For products by these values, in graphs too from now on. Waits for the GPU."""
        self._keep(values, self._key(b, dtype))

    def _key(self, b: torch.Tensor, dtype: torch.dtype) -> Any:
        return dtype

    def is_laid_out(self, b: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether making it does not wait for the GPU."""
        return True

    def _kept_of(self, values: torch.Tensor, key: Any) -> Kept | None:
        """What was made of these values, as they are."""
        kept = self._kept.get(key)
        return kept if kept is not None and kept.state == _state(values) else None

    def _keep(self, values: torch.Tensor, key: Any) -> Kept:
        with self._making:
            old, in_place = self._kept.get(key), key in self._captured
            if in_place or key in self._retired:  # on any stream a replay may read the one, a product the other
                synchronize(values.device)
            made = self._made(values, key, old.made if old is not None and in_place else ())
            for_every_stream(values)
            if old is not None and not in_place:
                self._retired[key] = old
            kept = self._kept[key] = Kept(values.detach(), _state(values), made)
        return kept

    def _made(self, values: torch.Tensor, key: Any, old: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """In the place of what was made before, if anything was."""
        raise NotImplementedError

    def _call(self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        raise NotImplementedError

    def refresh(self, values: torch.Tensor) -> None:
        """For graphs that read it: what was made of other values is written over."""
        for key in list(self._kept):  # other threads may add to it
            self._keep(values, key)

    @property
    def is_captured(self) -> bool:
        return bool(self._captured)

    @property
    def tensors(self) -> list[torch.Tensor]:
        kept = *list(self._kept.values()), *list(self._retired.values())
        return [t for one in kept for t in one.made]


_every: WeakSet[Full] = WeakSet()


def _renew_locks() -> None:
    """In a child of fork(), where the thread that held one of them does not exist."""
    for form in list(_every):
        form._making = RLock()


os.register_at_fork(after_in_child=_renew_locks)


class Dense(Full):
    """By cuBLAS or, on a CPU, torch's BLAS."""

    def _made(
        self, values: torch.Tensor, dtype: torch.dtype, old: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        s = self._structure
        with torch.inference_mode(False), torch.no_grad():  # it may be saved for a gradient later
            if values.is_cuda and dtype.itemsize == 2 and s.distinct:
                padded = _ops.csr_filled(s.crow, s.col, values.to(dtype), s.columns, s.order)
                filled = padded[:, : s.columns]
                return (old[0].copy_(filled) if old else filled,)
            full = old[0].zero_() if old else values.new_zeros(s.rows, s.columns, dtype=dtype)
            place, flat = s.row.long() * s.columns + s.col, full.view(-1)
            if s.distinct:
                flat.scatter_(0, place, s.by_rows(values).to(dtype))
            else:  # duplicates are added up, in a fixed order: index_put_ sorts them
                parts = s.by_rows(values).to(dtype)
                if flat.is_cuda:
                    flat.index_put_((place,), parts, accumulate=True)
                else:  # there index_put_ adds in the order in which threads come
                    flat.index_add_(0, place, parts)
        return (full,)

    def _call(self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        return Call(_matmul, (kept[0], b, False, False), 1)


class Halves(Full):
    """Of float32, each number as two of float16: as exact, on tensor cores (src/sparse/spmm/densified/densified.h)."""

    two_of_four = False

    def _made(
        self, values: torch.Tensor, dtype: torch.dtype, old: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        s = self._structure
        with torch.inference_mode(False), torch.no_grad():
            new: tuple[torch.Tensor, ...] = _ops.csr_halves(
                s.crow, s.col, values.to(dtype), s.columns, s.order, self.two_of_four, s.beyond_two
            )
            for x, y in zip(old, new, strict=False):
                x.copy_(y)
        return old or new

    def _call(self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        s = self._structure
        parts = s.crow, s.col, values.to(dtype), b.to(dtype), s.columns, s.order, s.longest
        return Call(_spmm_halves, (*kept, *parts), len(kept) + 3)


class TwoOfFour(Halves):
    """Two of every four columns, the rest by rows: half the bytes and half the products. In 16 bits too."""

    two_of_four = True


class Tiled(Full):
    """Of float32, without zeros, laid out for products that keep part of b in shared memory (smem_tiles/)."""

    def __init__(self, structure: Structure) -> None:
        super().__init__(structure)
        self._layouts: dict[int, TileLayout | None] = {}  # for each number of b's columns
        self._laid_out: dict[TileLayout, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        if self._key(b, dtype) is None:  # of a width near the one that was measured, which is not multiplied so
            return our_call(self._structure, values.to(dtype), b.to(dtype))._replace(lasting=False)
        return super().call(values, b, dtype)

    def is_laid_out(self, b: torch.Tensor, dtype: torch.dtype) -> bool:
        return self._key(b, dtype) in self._laid_out

    def _key(self, b: torch.Tensor, dtype: torch.dtype) -> Any:
        n = b.shape[1]
        if n not in self._layouts:
            self._layouts[n] = layout_of(self._structure, n)
        return self._layouts[n]

    def _made(self, values: torch.Tensor, key: Any, old: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        s = self._structure
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

    def _call(self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        s, layout = self._structure, self._key(b, dtype)
        parts = s.crow, s.col, values.to(dtype), b.to(dtype), s.columns, layout.lanes, s.order, s.longest
        return Call(_spmm_tiles, (*kept, *parts), len(kept) + 3)


class Packed(Full):
    """In 16 bits, without most zeros, laid out as tensor cores take it (src/sparse/spmm/packed_mma/layout.h)."""

    in_order, operator = False, _spmm_packed

    def __init__(self, structure: Structure) -> None:
        super().__init__(structure)
        self._units: int | None = None

    def is_laid_out(self, b: torch.Tensor, dtype: torch.dtype) -> bool:
        return self._units is not None

    def _made(
        self, values: torch.Tensor, dtype: torch.dtype, old: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        s = self._structure
        with torch.inference_mode(False), torch.no_grad():
            if self._units is None:
                units = int(_ops.csr_packed_units(s.crow, s.col, s.columns, self.in_order).item())
                if units > UNEVEN * expected_units(s):
                    raise RuntimeError(f"expected nonzeros that lie anywhere, got a tile of {units} units")
                self._units = units
            parts = s.crow, s.col, values.to(dtype), s.columns, self._units, s.order, self.in_order
            packed = _ops.csr_packed(*parts)
            return (old[0].copy_(packed) if old else packed,)

    def _call(self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        s = self._structure
        side = b.mT if self.in_order else b
        parts = s.crow, s.col, values.to(dtype), side.to(dtype), s.columns, s.order, s.longest
        return Call(self.operator, (*kept, *parts), len(kept) + 3)


class PackedLinear(Packed):
    """The same for rows x that are K apart: b = x^T, and the call gives x W^T, [n, rows]. A bias may come after its
    arguments."""

    in_order, operator = True, _linear_packed


class RowsReordered(Full):
    """By rows in an order in which they read less (reorder.py), with a gradient those of the transposed matrix too."""

    def __init__(self, structure: Structure) -> None:
        super().__init__(structure)
        self._transposed: RowsReordered | None = None

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        if not (torch.is_grad_enabled() and b.requires_grad):
            return super().call(values, b, dtype)
        if not self._structure.has_t or values.dtype != b.dtype or torch.is_autocast_enabled(b.device.type):
            return our_call(self._structure, values, b)._replace(lasting=False)
        return Call(Recorded.apply, (values, b, self._structure, self._product), 1, lasting=False)

    def _product(self, structure: Structure, values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """By the matrix or the transposed one."""
        if not is_capturing(b.device) and reordered_of(structure) is None:
            return our_product(structure, values, b)
        return self._form_of(structure).call(values, b, b.dtype).run()

    def _form_of(self, structure: Structure) -> "RowsReordered":
        if structure is self._structure:
            return self
        if self._transposed is None or self._transposed._structure is not structure:
            self._transposed = RowsReordered(structure)
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
        return reordered_of(self._structure) is not None

    def _made(
        self, values: torch.Tensor, dtype: torch.dtype, old: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode(False), torch.no_grad():
            moved = self._structure.by_rows(values).to(dtype).index_select(0, self._reordered.place)
            return (old[0].copy_(moved) if old else moved,)

    def _call(self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        made = self._reordered
        return call_by_chunks(self._structure, made.chunks, values.to(dtype), b.to(dtype), made.col, *kept)

    @property
    def _reordered(self) -> Reordered:
        made = reordered_of(self._structure)
        assert made is not None  # else another product is taken
        return made


def reordered_of(s: Structure) -> Reordered | None:
    return s.reordered(*chunk_sizes(s, 0))


class ByBlocks:
    """A matrix stored in blocks, which a kernel reads as they lie: values may change, and b may have a gradient."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        s, height, width = self._blocks.structure, self._blocks.height, self._blocks.width
        order, *reverse = s.arguments(b.requires_grad and torch.is_grad_enabled())
        values = values.detach().to(dtype).reshape(-1, height, width)
        parts = s.crow, s.col, values, b.to(dtype), s.columns * width, order, False, *reverse
        return Call(_bsr_spmm, parts, 3)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return []  # the structure's


def takes_blocks(structure: Structure, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tensor cores can multiply them: in 16 bits, or in float32 where TF32 is allowed."""
    if structure.blocks is None or device.type != "cuda" or dtype == torch.float64:
        return False
    narrow = dtype.itemsize == 2 or takes_tf32()
    return narrow and capability(device) >= (8, 0)


def _state(values: torch.Tensor) -> Any:
    return values.data_ptr(), values.stride(), version_of(values), values.dtype


class Cusparse:
    """cusparseSpMM by csr_alg3, with what cusparseSpMM_preprocess learned for the width that was measured."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._prepared: dict[Any, torch.Tensor] = {}

    def _arguments(self, values: torch.Tensor, b: torch.Tensor) -> tuple[Any, ...]:
        s = self._structure
        return s.crow, s.col, s.by_rows(values), b, s.rows, s.columns, "csr", "csr_alg3"

    @staticmethod
    def _key(b: torch.Tensor, dtype: torch.dtype) -> Any:
        # cuSPARSE writes into what it prepared: a stream of its own for each.
        return b.shape[1], dtype, current_stream(b.device) if b.is_cuda else 0

    def learn(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
        if b.is_contiguous():
            arguments = self._arguments(values.to(dtype), b.to(dtype))
            self._prepared[self._key(b, dtype)] = _ops.cusparse_prepare(*arguments)

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        # a graph may be replayed beside this stream, and after what was prepared is gone
        keeps = b.is_contiguous() and not is_capturing(b.device)
        prepared = self._prepared.get(self._key(b, dtype)) if keeps else None
        arguments = self._arguments(values.to(dtype), b.to(dtype))
        return Call(_cusparse_spmm, (*arguments, False, False, 1.0, prepared), 3, lasting=False)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self._prepared.values())


def form_of(name: str, structure: Structure) -> Product:
    """Nothing is made before the first product."""
    if name == BLOCKS and structure.blocks is not None:
        return ByBlocks(structure.blocks)
    kinds: dict[str, Callable[[Structure], Product]] = {
        DENSE: Dense,
        TILES: Tiled,
        PACKED: Packed,
        PACKED_LINEAR: PackedLinear,
        HALVES: Halves,
        TWO_OF_FOUR: TwoOfFour,
        REORDERED: RowsReordered,
        CUSPARSE: Cusparse,
    }
    return kinds[name](structure)
