"""Which product a plan takes: ours by rows, tiles or blocks, one of cuSPARSE's or the dense one, measured for dtype and
width.

Only products that give the same bits every time are candidates: of cuSPARSE's algorithms csr_alg3 and coo_alg2, as its
documentation has it, and of these csr_alg3 alone: coo_alg2 was never the fastest, and measuring it took three quarters
of the time. Large products of which cuSPARSE's was never the fastest are measured without it. A measurement takes 1 to
5 ms, to choose by size 0.1: where sizes tell, what 50 products could not pay back is not measured.
Which candidate is fastest is a matter of time, though: with torch.use_deterministic_algorithms a plan takes our own,
whatever is faster.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from threading import RLock
from typing import Any, Protocol

import torch

from custom_mm.indices import version_of

from .calls import Call
from .device import CLUSTERS, capability, takes_tf32
from .measure import time_warm
from .ours import our_call
from .packed import expected_units, us_packed
from .structure import Blocks, Given, Structure, current_stream, for_every_stream, is_capturing
from .tiles import TileLayout, layout_of, us_by_tiles

_ops = torch.ops.custom_mm
_matmul, _cusparse_spmm = _ops.matmul.default, _ops.cusparse_spmm.default
_spmm_halves, _spmm_tiles, _bsr_spmm = _ops.csr_spmm_halves.default, _ops.csr_spmm_tiles.default, _ops.bsr_spmm.default
_spmm_packed = _ops.csr_spmm_packed.default

OURS = "ours"
DENSE = "dense"
HALVES = "dense in halves"
TWO_OF_FOUR = "two of four"
TILES = "tiles in shared memory"
PACKED = "packed on tensor cores"
BLOCKS = "blocks on tensor cores"
CUSPARSE = "cusparse csr_alg3"
SMALLEST = 2**18  # products of a nonzero and a column; below, a call is all launch and Python
# How many elements of the dense matrix there may be for each nonzero: on tensor cores and elsewhere. And bytes in all:
# of a CPU's, and on a GPU without asking it for room.
FILL_TENSOR_CORES, FILL = 256, 16
SMALL_BYTES = 2**28
CLOSE = 1.5  # times the fastest in a first round: those are timed again
FAR = 1.4  # times the dense product: where ours takes longer, no algorithm of cuSPARSE's is faster; so too for blocks
FILL_HALVES = 32  # elements of the dense matrix for each nonzero, as above
FEWEST_IN_HALVES = 16  # nonzeros of a row on average: sums of fewer round by less than halves leave out
PAIRED_FILL = 3  # the same, from where two of four are considered in float32; and the most columns of it
PAIRED_COLUMNS = 8192
NARROW_PAIRED_COLUMNS = 32768  # in 16 bits
# Elements from which on a matrix is packed; None: not at all, as its kernel was timed and its results compared on an
# H100, but compute-sanitizer has not seen it. 2^25 are more than the L2 holds in 16 bits.
PACKED_ELEMENTS: int | None = None
UNEVEN = 1.25  # times the units that a tile is expected to have: others have fewer, and their room is fetched too
LARGE = 2**22  # products of a nonzero and a column; from there on no algorithm of cuSPARSE's was faster than ours
CLEAR = 1.22  # times that one way is estimated to take of another: it is not measured then
RACE, PRODUCTS = 2e-3, 50  # seconds of a measurement, and products that must pay it back
SOONER = 1.06  # times that another way is estimated to be faster than ours: it is considered then
CUT = 1024  # rows: of fewer the long ones are cut, and estimated too low
EVEN = 4  # times the average: the longest row of a matrix whose product takes as long as its size says


class Product(Protocol):
    """values [nonzeros] and b [K, N] in one dtype, or under autocast in any."""

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call: ...

    @property
    def tensors(self) -> list[torch.Tensor]: ...


@dataclass(frozen=True)
class Kept:
    """What was made, and of which values: detached they hold their memory, whatever .data of a parameter becomes, so
    that no others can lie at their address. making: what other streams wait for."""

    values: torch.Tensor
    state: Any
    made: tuple[torch.Tensor, ...]
    making: Given | None


class Full:
    """The matrix in another form. Made anew when the values are others than those it was made of: in its place, as CUDA
    graphs read it there, unless autograd may yet read it and no graph does."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._kept: dict[Any, Kept] = {}  # for each dtype, or whatever else tells what is made
        self._captured: set[Any] = set()
        self._saved: set[Any] = set()
        self._readers: dict[int, torch.cuda.Stream] = {}
        self._making = RLock()  # one thread makes it, and none while another multiplies by what that one has made

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        values, key = values.detach() if values.requires_grad else values, self._key(b, dtype)
        kept, capturing = self._kept_of(values, key), is_capturing(values.device)
        if kept is None:
            if capturing:  # written at every replay; what lies in a graph's memory is not kept
                return self._call(self._made(values, key, ()), values, b, dtype)._replace(lasting=False)
            with self._making:
                kept = self._kept_of(values, key) or self._keep(values, key)
        if capturing:
            self._captured.add(key)
        elif kept.making is not None:
            kept.making.wait()
        if b.requires_grad and torch.is_grad_enabled():
            self._saved.add(key)
        call = self._call(kept.made, values, b, dtype)
        return call if capturing or not values.is_cuda else call._replace(stream=self._reader(values.device))

    def _reader(self, device: torch.device) -> int:
        """The current stream, which is known from now on to read what was made."""
        stream = current_stream(device)
        if stream not in self._readers:
            self._readers[stream] = torch.cuda.current_stream(device)
        return stream

    def _after_readers(self, made: tuple[torch.Tensor, ...], device: torch.device) -> None:
        """The current stream may write over it, and free it, when those that read it have."""
        for number, stream in list(self._readers.items()) if device.type == "cuda" else ():
            if number == current_stream(device):
                continue
            with torch.cuda.stream(stream):
                capturing = is_capturing(device)
            if not capturing:
                torch.cuda.current_stream(device).wait_stream(stream)
                for t in made:
                    t.record_stream(stream)

    def prepare(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> None:
        """For products by these values, in graphs too from now on. Waits for the GPU."""
        self._keep(values, self._key(b, dtype), wait=True)

    def _key(self, b: torch.Tensor, dtype: torch.dtype) -> Any:
        return dtype

    def _kept_of(self, values: torch.Tensor, key: Any) -> Kept | None:
        """What was made of these values, as they are."""
        kept = self._kept.get(key)
        return kept if kept is not None and kept.state == _state(values) else None

    def _keep(self, values: torch.Tensor, key: Any, wait: bool = False) -> Kept:
        with self._making:
            old = self._kept.get(key)
            in_place = old is not None and (key in self._captured or key not in self._saved)
            if old is not None:
                self._after_readers(old.made, values.device)
            made = self._made(values, key, old.made if old and in_place else ())
            self._saved.discard(key)
            if wait:
                for_every_stream(values)
            kept = Kept(values.detach(), _state(values), made, None if wait else Given(values))
            self._kept[key] = kept
        return kept

    def _made(self, values: torch.Tensor, key: Any, old: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """In the place of what was made before, if anything was."""
        raise NotImplementedError

    def _call(self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        raise NotImplementedError

    def forget(self) -> None:
        """Of which values it was made: the next product makes it anew."""
        with self._making:
            self._kept = {key: replace(kept, state=None) for key, kept in self._kept.items()}

    def refresh(self, values: torch.Tensor) -> None:
        """For graphs that read it: what was made of other values is written over."""
        for key in list(self._kept):  # other threads may add to it
            self._keep(values, key)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for kept in list(self._kept.values()) for t in kept.made]


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
    """Of float32, each number as two of float16: as exact, on tensor cores (src/filled.h)."""

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
    """Of float32, without zeros, laid out for products that keep part of b in shared memory (src/tiles.h)."""

    def __init__(self, structure: Structure) -> None:
        super().__init__(structure)
        self._layouts: dict[int, TileLayout | None] = {}  # for each number of b's columns
        self._laid_out: dict[TileLayout, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        if self._key(b, dtype) not in self._laid_out and is_capturing(b.device):  # to lay it out waits for the GPU
            return our_call(self._structure, values.to(dtype), b.to(dtype))._replace(lasting=False)
        return super().call(values, b, dtype)

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
    """In 16 bits, without most zeros, laid out as tensor cores take it (src/packed.h)."""

    def __init__(self, structure: Structure) -> None:
        super().__init__(structure)
        self._units: int | None = None

    def call(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        if self._units is None and is_capturing(b.device):  # to measure it waits for the GPU
            return our_call(self._structure, values.to(dtype), b.to(dtype))._replace(lasting=False)
        return super().call(values, b, dtype)

    def _made(
        self, values: torch.Tensor, dtype: torch.dtype, old: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        s = self._structure
        with torch.inference_mode(False), torch.no_grad():
            if self._units is None:
                units = int(_ops.csr_packed_units(s.crow, s.col, s.columns).item())
                if units > UNEVEN * expected_units(s):
                    raise RuntimeError(f"expected nonzeros that lie anywhere, got a tile of {units} units")
                self._units = units
            packed = _ops.csr_packed(s.crow, s.col, values.to(dtype), s.columns, self._units, s.order)
            return (old[0].copy_(packed) if old else packed,)

    def _call(self, kept: tuple[torch.Tensor, ...], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Call:
        s = self._structure
        parts = s.crow, s.col, values.to(dtype), b.to(dtype), s.columns, s.order, s.longest
        return Call(_spmm_packed, (*kept, *parts), len(kept) + 3)


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


def _agree(x: torch.Tensor, y: torch.Tensor) -> bool:
    """But for rounding; TF32 keeps 11 bits of a number."""
    eps = torch.finfo(torch.float16 if x.dtype == torch.float32 else x.dtype).eps
    return bool((x - y).float().norm() <= 16 * eps * y.float().norm())


def _state(values: torch.Tensor) -> Any:
    return values.data_ptr(), version_of(values), values.dtype


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


@dataclass(frozen=True)
class Measurement:
    """Seconds of each candidate for a number of columns; None: it was refused, or ours was the only one.

    estimated: seconds by the size of the product alone, where they left nothing to measure.
    """

    columns: int
    seconds: dict[str, float | None]
    estimated: bool = False
    _fastest: dict[tuple[bool, bool], str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def fastest(self, dense: bool, cusparse: bool) -> str:
        known = self._fastest.get((dense, cusparse))
        if known is None:
            halves = dense and cusparse
            kinds = {OURS: True, BLOCKS: True, DENSE: dense} | dict.fromkeys(
                (HALVES, TWO_OF_FOUR, TILES, PACKED), halves
            )
            found = {k: t for k, t in self.seconds.items() if t is not None and kinds.get(k, cusparse)}
            known = self._fastest[dense, cusparse] = min(found, key=lambda name: found[name], default=OURS)
        return known


def _is_even(s: Structure) -> bool:
    """Whether rows are about as long as each other, and none is cut: products take as long as their size says."""
    return s.rows >= CUT and s.longest * s.rows <= EVEN * s.nonzeros


def _us_by_rows(s: Structure, n: int) -> float:
    """Microseconds, about, of a float32 product by rows of about the same length."""
    return 4.3 + max(s.nonzeros * max(n, 16) / 3.6e6, s.nonzeros / s.rows * 0.022) + s.rows * n * 1e-6


@lru_cache(4096)
def _cost_in_halves(rows: int, columns: int, n: int, width: int) -> tuple[float, float, int, int]:
    """Steps and waves in all, of tiles `width` wide, steps of one, and width."""
    tiles, narrow = -(-rows // 128) * -(-n // width), 1.0 if width == 128 else 0.64
    waves = ((narrow * -(-tiles // at_once), -(-columns // (64 * k))) for k, at_once in enumerate(CLUSTERS, 1))
    return min((w * (4 + steps), w, steps, width) for w, steps in waves)


def _us_in_halves(s: Structure, n: int) -> dict[str, float]:
    """Microseconds, about, of a float32 product on tensor cores, as filled_sm90.cu shares it out: steps of 64 columns,
    and four for a tile's begin and end."""

    widths = (64, 128) if n > 64 else (64,) if n > 32 else (32,)
    steps, waves, each, width = min(_cost_in_halves(s.rows, s.columns, n, width) for width in widths)
    begin = 4.9 + s.columns / 1150 + n / 256
    us = {HALVES: begin + steps * 1.02}
    if s.distinct and s.columns <= PAIRED_COLUMNS and s.rows * s.columns >= PAIRED_FILL * s.nonzeros:
        # Of the rest each nonzero reads a row of the dense side: 6 TB/s, out of the L2.
        of_pairs = 4.4 + 0.76 * each if width == 128 else 6 + 0.55 * each
        us[TWO_OF_FOUR] = begin + waves * of_pairs + s.beyond_two * max(n, 32) / 1.5e6
    return us


@lru_cache(4096)
def _cycles_of_pairs(rows: int, columns: int, n: int) -> int:
    """Cycles, about, of what two of four keep in 16 bits, as filled_pairs_sm90.cu shares it out: tiles of 128 rows and
    64 columns of the result, or of 256 and 128, for `peers` of a cluster and its shares of K."""
    found = []
    for peers, shares in ((p, s) for p in (1, 2, 4) for s in range(1, 8 // p + 1)):
        steps, at_once = -(-columns // (64 * shares)), CLUSTERS[peers * shares - 1]
        waves = -(-(-(-rows // (128 * peers)) * -(-n // 64)) // at_once)
        found.append(waves * (3000 + 1000 * shares + steps * (455 + 20 // peers)))
        if n > 64 and peers <= 2:
            waves = -(-(-(-rows // 256) * -(-n // (128 * peers))) // at_once)
            found.append(waves * (6000 * shares + steps * (940 - 25 * peers)))
    return min(found)


def _us_narrow(s: Structure, n: int) -> dict[str, float]:
    """Microseconds, about, of a 16-bit product."""
    wide, elements = max(n, 32), s.rows * s.columns
    products = s.nonzeros * wide
    us = {
        OURS: 4.9 + max(products / (4.5e6 if n > 32 else 4e6), s.nonzeros / s.rows * 0.02),
        DENSE: max(4 + min(s.columns / 600, 4.3), 5.1 + elements * n / 4.3e8, 2.5 + elements / 1.9e6),
    }
    if s.distinct and s.columns <= NARROW_PAIRED_COLUMNS:
        us[TWO_OF_FOUR] = 1.6 + _cycles_of_pairs(s.rows, s.columns, n) / 1755 + s.beyond_two * wide / 1e6
    if s.distinct and PACKED_ELEMENTS is not None and elements >= PACKED_ELEMENTS:
        us[PACKED] = us_packed(s, n)
    return us


def _near(seconds: dict[str, float]) -> list[str]:
    """Those of estimates among which to measure."""
    if not seconds:
        return []
    best = min(seconds, key=lambda name: seconds[name])
    if (CLEAR - 1) * seconds[best] * PRODUCTS < RACE:
        return [OURS] if seconds[OURS] <= SOONER * seconds[best] else [best]
    return [name for name in seconds if seconds[name] <= CLEAR * seconds[best]]


class Choice:
    """A plan's products. Ours is the one that needs no choice."""

    def __init__(self, structure: Structure, *older: object) -> None:  # older: what pickles of before held
        self._structure = structure
        self.measured: dict[tuple[torch.dtype, int], Measurement] = {}
        self._products: dict[str, Product] = {}
        self._taken: set[str] = set()  # graphs may have captured what these keep
        self.trained = False  # the values may be others since, without a count of it
        self._forgetting = RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Choice":
        return Choice(self._structure)  # what cuSPARSE prepared cannot be copied; the rest is soon measured

    def __reduce__(self) -> Any:
        return Choice, (self._structure,)

    def call(self, values: torch.Tensor, b: torch.Tensor, dense: bool) -> Call | None:
        """values times b by the fastest candidate; None where that is ours. dense: the values will stay."""
        device = b.device
        if b.dim() != 2 or device != values.device:
            return None
        inner, n = b.shape
        if values.shape[0] * n < SMALLEST:
            return None
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else b.dtype
        if (values.dtype != dtype and not autocast) or inner != self._structure.columns:
            return None  # the operator tells of it
        if autocast and torch.float64 in (values.dtype, b.dtype):
            return None  # which autocast leaves alone
        recording = torch.is_grad_enabled()
        if (recording and values.requires_grad) or torch.are_deterministic_algorithms_enabled():
            return None  # our gradients know the transposed matrix
        measurement = self.measured.get((dtype, n.bit_length()))
        if measurement is None:
            if is_capturing(device):
                return None
            measurement = self.measure(values, b, dtype, dense)
        dense = dense and not values.is_inference()  # whether one was written to cannot be seen
        name = measurement.fastest(dense, not (recording and b.requires_grad))
        if name == OURS:
            return None
        self._taken.add(name)
        return self._made(name).call(values, b, dtype)

    def measure(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, stay: bool = True) -> Measurement:
        """Waits for the GPU unless ours is taken without being measured. stay: values that will not are not left in
        what graphs read."""
        candidates = self._candidates(dtype, b)
        if not candidates:
            return self._known(dtype, Measurement(b.shape[1], {OURS: None}))
        large = [name for name in candidates if name in (TILES, DENSE, HALVES, TWO_OF_FOUR, PACKED, BLOCKS)]
        estimates = self._estimates(large, dtype, b)
        near = _near(estimates)
        if len(near) == 1 and (near == [OURS] or self._prepare(near[0], values, b, dtype, stay)):
            known: dict[str, float | None] = {OURS: estimates[OURS]} if near == [OURS] else {**estimates}
            return self._known(dtype, Measurement(b.shape[1], known, estimated=True))
        large = [name for name in large if not estimates or name in near]
        with torch.no_grad():
            seconds = self._race(candidates, large, values.detach(), b.detach(), dtype, stay)
        return self._known(dtype, Measurement(b.shape[1], seconds))

    def _prepare(self, name: str, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, stay: bool) -> bool:
        made = self._made(name)
        try:
            if stay and isinstance(made, Full):
                made.prepare(values.detach(), b, dtype)
        except RuntimeError:  # there is no memory
            return False
        return True

    def _race(
        self,
        candidates: list[str],
        large: list[str],
        values: torch.Tensor,
        b: torch.Tensor,
        dtype: torch.dtype,
        stay: bool,
    ) -> dict[str, float | None]:
        """Seconds of ours, of those in `large` and, unless these are far ahead, of the other candidates."""

        def ours() -> torch.Tensor:
            return our_call(self._structure, values, b).run()

        runs: dict[str, Callable[[], object]] = {OURS: ours}
        refused: dict[str, float | None] = {}
        best: dict[str, float] = {}

        def ready(name: str) -> bool:
            try:
                made = self._made(name) if stay or name == CUSPARSE else self._new(name)
                if isinstance(made, Cusparse):
                    made.learn(values, b, dtype)
                product = made.call(values, b, dtype).run()
                if name == BLOCKS and not _agree(product, ours()):
                    raise RuntimeError(f"{name} differs from {OURS}")
            except Exception as error:  # cuSPARSE does not support it, or there is no memory
                if name != BLOCKS and not isinstance(error, RuntimeError):  # Triton's compiler raises what it likes
                    raise
                refused[name] = None
                return False
            runs[name] = lambda: made.call(values, b, dtype).run()
            return True

        def race(names: list[str], rounds: int) -> None:
            with torch.cuda.device_of(b):  # type: ignore[no-untyped-call]
                timings = time_warm([runs[name] for name in names], b.device.type, rounds)
            for name, timing in zip(names, timings, strict=True):
                best[name] = min(best.get(name, math.inf), timing.seconds)

        ours()  # its first call is not timed
        found = [name for name in large if ready(name)]
        if found:
            race([OURS, *found], 1)
        if best.get(OURS, 0) <= FAR * min((best[name] for name in found), default=math.inf):
            others = [name for name in candidates if name not in large and ready(name)]
            if others:
                race(others if best else [OURS, *others], 1)
        close = [name for name in best if best[name] <= CLOSE * min(best.values())]
        if len(close) > 1:
            race(close, 2)
        return {OURS: None, **refused, **best}

    def _known(self, dtype: torch.dtype, measurement: Measurement) -> Measurement:
        self.measured[dtype, measurement.columns.bit_length()] = measurement
        if self._products:
            kept = {m.fastest(True, True) for m in list(self.measured.values())} | self._taken
            self._products = {name: made for name, made in list(self._products.items()) if name in kept}
        return measurement

    def _estimates(self, large: list[str], dtype: torch.dtype, b: torch.Tensor) -> dict[str, float]:
        """Seconds, about, of ours by rows and of those in `large`, as measured on an H200; {} where they are not
        known."""
        s, n = self._structure, b.shape[1]
        if BLOCKS in large or not b.is_cuda or dtype == torch.float64 or n % 8 or not _is_even(s):
            return {}
        if (dtype == torch.float32 and DENSE in large) or capability(b.device) != (9, 0):
            return {}
        if dtype == torch.float32:
            us = {OURS: _us_by_rows(s, n), TILES: us_by_tiles(s, n), **_us_in_halves(s, n)}
        else:
            us = _us_narrow(s, n)
        return {name: us[name] * 1e-6 for name in (OURS, *large)}

    def _candidates(self, dtype: torch.dtype, b: torch.Tensor) -> list[str]:
        """The matrix with its zeros first, where it is worth a try; its blocks last."""
        s, device = self._structure, b.device
        on_gpu = device.type == "cuda"
        found = [CUSPARSE] if on_gpu and s.nonzeros * b.shape[1] < LARGE else []
        elements = s.rows * s.columns
        wide = dtype == torch.float32 and not takes_tf32()
        eights = on_gpu and b.shape[1] % 8 == 0 and capability(device) == (9, 0)
        hopper = wide and eights
        halves = hopper and s.nonzeros >= FEWEST_IN_HALVES * s.rows
        tensor_cores = on_gpu and not wide and dtype != torch.float64
        fill = FILL_HALVES if halves else FILL_TENSOR_CORES if tensor_cores else FILL
        if (
            device.type in ("cpu", "cuda")
            and (s.distinct or dtype.itemsize > 2)  # duplicates are not added up in 16 bits
            and s.nonzeros <= elements <= fill * s.nonzeros  # more are mostly duplicates
            and self._fits(elements * dtype.itemsize, device)
        ):
            us = _us_in_halves(s, b.shape[1]) if halves else {}
            found.insert(0, min(us, key=lambda name: us[name], default=DENSE))
            if eights and dtype.itemsize == 2:
                narrow = _us_narrow(s, b.shape[1])
                found[:0] = [k for k in (TWO_OF_FOUR, PACKED) if narrow.get(k, math.inf) < CLEAR * narrow[DENSE]]
        if hopper and s.distinct and _is_even(s) and s.crow.dtype == torch.int32:
            n = b.shape[1]
            if SOONER * us_by_tiles(s, n) < _us_by_rows(s, n):
                found.insert(0, TILES)
        if takes_blocks(s, dtype, device):
            found.append(BLOCKS)
        return found

    @staticmethod
    def _fits(nbytes: int, device: torch.device) -> bool:
        if nbytes <= SMALL_BYTES:  # to ask the GPU takes longer than a product
            return True
        return device.type == "cuda" and bool(nbytes <= torch.cuda.mem_get_info(device)[0] // 4)

    def _made(self, name: str) -> Product:
        if self.trained:
            with self._forgetting:  # one thread, and none after others have made it anew
                for made in list(self._products.values()) if self.trained else ():
                    if isinstance(made, Full):
                        made.forget()
                self.trained = False
        if name not in self._products:
            self._products[name] = self._new(name)
        return self._products[name]

    def _new(self, name: str) -> Product:
        s = self._structure
        if name == BLOCKS and s.blocks is not None:
            return ByBlocks(s.blocks)
        kinds: dict[str, Callable[[Structure], Product]] = {
            DENSE: Dense,
            TILES: Tiled,
            PACKED: Packed,
            HALVES: Halves,
            TWO_OF_FOUR: TwoOfFour,
            CUSPARSE: Cusparse,
        }
        return kinds[name](s)

    def refresh(self, values: torch.Tensor) -> None:
        """Other values, from now on."""
        for made in list(self._products.values()):
            if isinstance(made, Full) and not is_capturing(values.device):
                made.refresh(values.detach())

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for made in list(self._products.values()) for t in made.tensors]

    def explain(self) -> str:
        """A line for each measurement: microseconds of every candidate, an asterisk at the chosen one."""
        lines = []
        for (dtype, _), m in list(self.measured.items()):
            chosen = m.fastest(True, True)
            times = ", ".join(
                f"{name} {'refused' if t is None else f'{t * 1e6:.1f} us'}{'*' if name == chosen else ''}"
                for name, t in m.seconds.items()
            )
            if m.estimated:
                times = f"{chosen}, by its size alone"
            elif len(m.seconds) == 1:
                times = "ours, without another candidate"
            lines.append(f"{str(dtype).removeprefix('torch.')}, {m.columns} columns: {times}")
        return "\n".join(lines)
