"""Which product a plan takes: ours by rows, tiles or blocks, one of cuSPARSE's or the dense one, measured for dtype and
width.

Only products that give the same bits every time are candidates: of cuSPARSE's algorithms csr_alg3 and coo_alg2, as its
documentation has it, and of these csr_alg3 alone: coo_alg2 was never the fastest, and measuring it took three quarters
of the time. Large products of which cuSPARSE's was never the fastest are measured without it. A measurement takes 1 to
5 ms, to choose by size 0.1: where sizes tell, what 50 products, or those announced, could not pay back is not measured.
Which candidate is fastest is a matter of time, though: with torch.use_deterministic_algorithms a plan takes our own,
whatever is faster.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .calls import Call
from .device import has_hopper_kernels, memory, takes_tf32
from .estimates import (
    CUT,
    FEWEST_ROWS,
    is_even,
    us_by_reads,
    us_by_rows,
    us_in_halves,
    us_narrow,
    us_saved_by_reordering,
    us_to_reorder,
)
from .forms import (
    BLOCKS,
    CUSPARSE,
    DENSE,
    HALVES,
    OURS,
    PACKED,
    PACKED_LINEAR,
    REORDERED,
    TILES,
    TWO_OF_FOUR,
    Cusparse,
    Full,
    Product,
    form_of,
    reordered_of,
    takes_blocks,
)
from .measure import time_warm
from .ours import COUNTED, is_skewed, our_call
from .registration import has_tangent
from .structure import Structure, is_capturing, is_transformed, relaxed_capture
from .tiles import MOST_COLUMNS, us_by_tiles

_aten_linear = torch.ops.aten.linear.default

SMALLEST = 2**18  # products of a nonzero and a column; below, a call is all launch and Python
# How many elements of the dense matrix there may be for each nonzero: on tensor cores and elsewhere. And bytes in all:
# of a CPU's, and on a GPU without asking it for room.
FILL_TENSOR_CORES, FILL = 256, 16
SMALL_BYTES = 2**28
CLOSE = 1.5  # times the fastest in a first round: those are timed again
FAR = 1.4  # times the dense product: where ours takes longer, no algorithm of cuSPARSE's is faster; so too for blocks
FILL_HALVES = 32  # elements of the dense matrix for each nonzero, as above
FEWEST_IN_HALVES = 16  # nonzeros of a row on average: sums of fewer round by less than halves leave out
LARGE = 2**22  # products of a nonzero and a column; from there on no algorithm of cuSPARSE's was faster than ours
CLEAR = 1.22  # times that one way is estimated to take of another: it is not measured then
RACE, PRODUCTS = 2e-3, 50  # seconds of a measurement, and products that must pay it back unless more are announced
LINEAR_US, TURNED_US = 0.7, 5  # microseconds more of a bias and rows as they lie, and where both sides are turned over
# Of matrices whose rows are reordered: rows for each that begins far from the diagonal, and nonzeros of the longest.
FEW_FAR, LONGEST_REORDERED = 4, 64
DIFFERENTIABLE = (OURS, BLOCKS, DENSE, REORDERED)  # candidates with a gradient to the dense side
SOONER = 1.06  # times that another way is estimated to be faster than ours: it is considered then


def _agree(x: torch.Tensor, y: torch.Tensor) -> bool:
    """But for rounding; TF32 keeps 11 bits of a number."""
    eps = torch.finfo(torch.float16 if x.dtype == torch.float32 else x.dtype).eps
    return bool((x - y).float().norm() <= 16 * eps * y.float().norm())


@dataclass(frozen=True)
class Measurement:
    """Seconds of each candidate for a number of columns; None: it was refused, or ours was the only one.

    estimated: seconds by the size of the product alone, where they left nothing to measure.
    """

    columns: int
    seconds: dict[str, float | None]
    estimated: bool = False
    _fastest: dict[bool, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def fastest(self, without_gradient: bool) -> str:
        """The name of the fastest candidate; with a gradient to the dense side, of those that have one."""
        if len(self.seconds) == 1 and OURS in self.seconds:
            return OURS
        known = self._fastest.get(without_gradient)
        if known is None:
            times = {name: t for name, t in self.seconds.items() if t is not None}
            found = {name: t for name, t in times.items() if without_gradient or name in DIFFERENTIABLE}
            known = self._fastest[without_gradient] = min(found, key=lambda name: found[name], default=OURS)
        return known


def _near(seconds: dict[str, float], products: int) -> list[str]:
    """Those of estimates among which to measure."""
    if not seconds:
        return []
    best = min(seconds, key=lambda name: seconds[name])
    if (CLEAR - 1) * seconds[best] * products < RACE:
        return [OURS] if seconds[OURS] <= SOONER * seconds[best] else [best]
    return [name for name in seconds if seconds[name] <= CLEAR * seconds[best]]


class Choice:
    """The products that a plan may take, and which one is the fastest. Ours is the one that needs no choice.

    products: how many must pay for choosing. constant: the user said that the values stay as they are, so that a copy
    of the matrix in another layout may serve; without it every candidate reads the values that it is given.
    """

    def __init__(
        self, structure: Structure, *older: object, products: int = PRODUCTS, constant: bool = False
    ) -> None:  # older: arguments in pickles of earlier versions
        self._structure, self.products, self.constant = structure, products, constant
        self.measured: dict[tuple[torch.dtype, int], Measurement] = {}
        self._products: dict[str, Product] = {}
        self._taken: set[str] = set()  # graphs may have captured what these keep
        self._linear: dict[tuple[torch.dtype, int], str] = {}  # for a linear layer's rows
        self._varying: Choice | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Choice":
        # What cuSPARSE prepared cannot be copied; the rest is soon measured.
        return Choice(self._structure, products=self.products, constant=self.constant)

    def __reduce__(self) -> Any:
        return partial(Choice, products=self.products, constant=self.constant), (self._structure,)

    def of_other_values(self) -> "Choice":
        """The choice for values that are not those of a constant plan; made once."""
        if not self.constant:
            return self
        if self._varying is None:
            self._varying = Choice(self._structure, products=self.products)
        return self._varying

    def call(self, values: torch.Tensor, b: torch.Tensor) -> Call | None:
        """values times b by the fastest candidate; None where that is ours."""
        device = b.device
        if b.dim() != 2 or device != values.device:
            return None
        inner, n = b.shape
        if values.shape[0] * n < SMALLEST or self._has_no_rival(b.dtype, n, device):
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
        if is_transformed() or has_tangent(values):
            return None  # what would be kept is none, or has none
        measurement = self.measured.get((dtype, n.bit_length()))
        if measurement is None:
            if is_capturing(device):
                return None
            measurement = self.measure(values, b, dtype)
        while (name := measurement.fastest(not (recording and b.requires_grad))) != OURS:
            try:
                call = self._made(name).call(values, b, dtype)
            except RuntimeError:  # there is no memory, or nonzeros lie too unevenly
                refused = replace(measurement, seconds={**measurement.seconds, name: None})
                measurement = self._known(dtype, refused)
                continue
            self._taken.add(name)
            return call
        return None

    def linear(self, values: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> Call | None:
        """x W^T + bias by the packed matrix or by the one with its zeros, whichever is faster by size; None where
        another product is, and for values that may change. x: [n, columns]."""
        given = (values, x) if bias is None else (values, x, bias)
        recording = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        if not self.constant or recording or torch.are_deterministic_algorithms_enabled():
            return None
        dtype, device, eights = x.dtype, x.device, -(-x.shape[0] // 8)
        if dtype.itemsize != 2 or any(t.dtype != dtype or t.device != device for t in given):
            return None
        if torch.is_autocast_enabled(device.type) or eights == 0 or is_transformed() or has_tangent(values):
            return None
        key = dtype, 8 * eights
        name = self._linear.get(key) or self._linear.setdefault(key, self._linear_of(8 * eights, device))
        made = self._made(name) if name in (PACKED_LINEAR, DENSE) else None
        if not isinstance(made, Full) or (is_capturing(device) and not made.is_laid_out(x.mT, dtype)):
            return None
        self._taken.add(name)
        try:
            call = made.call(values, x.mT, dtype)
        except RuntimeError:  # there is no memory, or nonzeros lie too unevenly
            self._linear[key] = OURS
            return None
        if name == DENSE:
            return call._replace(operator=_aten_linear, arguments=(x, call.arguments[0], bias), dense=0)
        return call._replace(arguments=(*call.arguments, bias))

    def _linear_of(self, n: int, device: torch.device) -> str:
        """The fastest for n rows, in eights, in 16 bits: of a packed matrix, of eights too, or another."""
        s = self._structure
        if not has_hopper_kernels(device) or not s.distinct or not is_even(s, FEWEST_ROWS):
            return OURS
        us = us_narrow(s, n, memory(device))
        packed = us.pop(PACKED) + LINEAR_US if s.rows % 8 == 0 else math.inf
        others = {name: t if name == DENSE else t + TURNED_US for name, t in us.items()}
        if not self._fits(2 * s.rows * s.columns, device):
            del others[DENSE]
        best = min(others, key=lambda name: others[name])
        return PACKED_LINEAR if packed < others[best] else best

    def measure(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Measurement:
        """Waits for the GPU unless ours is taken without being measured."""
        scattered = self.constant and self._is_scattered(dtype, b.shape[1], b.device)
        if scattered and (found := self._reordered(values, b, dtype)):
            return self._known(dtype, found)
        candidates = self._candidates(dtype, b) if b.shape[1] and self._structure.nonzeros else []
        if not candidates:
            return self._known(dtype, Measurement(b.shape[1], {OURS: None}))
        large = [name for name in candidates if name in (TILES, DENSE, HALVES, TWO_OF_FOUR, PACKED, BLOCKS)]
        estimates = self._estimates(large, dtype, b)
        while len(near := _near(estimates, self.products)) == 1:
            if near == [OURS] or self._prepare(near[0], values, b, dtype):
                known: dict[str, float | None] = {OURS: estimates[OURS]} if near == [OURS] else {**estimates}
                return self._known(dtype, Measurement(b.shape[1], known, estimated=True))
            del estimates[near[0]]
        large = [name for name in large if not estimates or name in near]
        with torch.no_grad(), relaxed_capture():
            seconds = self._race(candidates, large, values.detach(), b.detach(), dtype)
        return self._known(dtype, Measurement(b.shape[1], seconds))

    def _prepare(self, name: str, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
        made = self._made(name)
        try:
            if isinstance(made, Full):
                made.prepare(values.detach(), b, dtype)
        except RuntimeError:  # there is no memory, or nonzeros lie too unevenly
            return False
        return True

    def _race(
        self,
        candidates: list[str],
        large: list[str],
        values: torch.Tensor,
        b: torch.Tensor,
        dtype: torch.dtype,
    ) -> dict[str, float | None]:
        """Seconds of ours, of those in `large` and, unless these are far ahead, of the other candidates."""

        def ours() -> torch.Tensor:
            return our_call(self._structure, values, b).run()

        runs: dict[str, Callable[[], object]] = {OURS: ours}
        refused: dict[str, float | None] = {}
        best: dict[str, float] = {}

        def ready(name: str) -> bool:
            try:
                made = self._made(name)
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
            kept = {m.fastest(True) for m in list(self.measured.values())} | self._taken
            self._products = {name: made for name, made in list(self._products.items()) if name in kept}
        return measurement

    def _estimates(self, large: list[str], dtype: torch.dtype, b: torch.Tensor) -> dict[str, float]:
        """Seconds, about, of ours by rows and of those in `large`, as measured on an H200; {} where they are not
        known."""
        s, n = self._structure, b.shape[1]
        fewest = FEWEST_ROWS if dtype.itemsize == 2 else CUT
        if BLOCKS in large or not b.is_cuda or dtype == torch.float64 or n % 8 or not is_even(s, fewest):
            return {}
        if (dtype == torch.float32 and DENSE in large) or not has_hopper_kernels(b.device):
            return {}
        if dtype == torch.float32:
            us = {OURS: us_by_rows(s, n), TILES: us_by_tiles(s, n), **us_in_halves(s, n)}
        else:
            us = us_narrow(s, n, memory(b.device))
        return {name: us[name] * 1e-6 for name in (OURS, *large)}

    def _candidates(self, dtype: torch.dtype, b: torch.Tensor) -> list[str]:
        """Names of what may be faster than ours: copies of a constant matrix first, its blocks last."""
        s, device = self._structure, b.device
        found = self._copies(dtype, b) if self.constant else []
        if device.type == "cuda" and s.nonzeros * b.shape[1] < LARGE:
            found.append(CUSPARSE)
        if takes_blocks(s, dtype, device):
            found.append(BLOCKS)
        return found

    def _copies(self, dtype: torch.dtype, b: torch.Tensor) -> list[str]:
        """Layouts that are worth a try and keep a copy of the values."""
        s, device, found = self._structure, b.device, []
        on_gpu = device.type == "cuda"
        elements = s.rows * s.columns
        wide = dtype == torch.float32 and not takes_tf32()
        eights = b.shape[1] % 8 == 0 and has_hopper_kernels(device)
        hopper = wide and eights
        halves = hopper and s.nonzeros >= FEWEST_IN_HALVES * s.rows
        tensor_cores = on_gpu and not wide and dtype != torch.float64
        fill = FILL_HALVES if halves else FILL_TENSOR_CORES if tensor_cores else FILL
        if hopper and s.distinct and is_even(s) and s.crow.dtype == torch.int32:
            n = b.shape[1]
            if SOONER * us_by_tiles(s, n) < us_by_rows(s, n):
                found.append(TILES)
        if (
            device.type in ("cpu", "cuda")
            and (s.distinct or dtype.itemsize > 2)  # duplicates are not added up in 16 bits
            and s.nonzeros <= elements <= fill * s.nonzeros  # more are mostly duplicates
            and self._fits(elements * dtype.itemsize, device)
        ):
            if eights and dtype.itemsize == 2:
                narrow = us_narrow(s, b.shape[1], memory(device))
                found += [k for k in (TWO_OF_FOUR, PACKED) if narrow.get(k, math.inf) < CLEAR * narrow[DENSE]]
            us = us_in_halves(s, b.shape[1]) if halves else {}
            found.append(min(us, key=lambda name: us[name], default=DENSE))
        return found

    def _is_scattered(self, dtype: torch.dtype, n: int, device: torch.device) -> bool:
        """Whether rows one after the other read here and there of a dense side that the cache does not hold, so that
        another order of them may pay back."""
        s = self._structure
        return (
            FEW_FAR * s.far >= s.rows == s.columns
            and device.type == "cuda"
            and dtype.itemsize <= 4
            and s.crow.dtype == torch.int32
            and s.longest <= LONGEST_REORDERED
            and s.nonzeros + s.rows < COUNTED
            and not is_skewed(s)
            and self.products * us_saved_by_reordering(s, n * dtype.itemsize, memory(device)) > us_to_reorder(s)
        )

    def _reordered(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Measurement | None:
        """By the size of rows in their order and in another, or None where there is none in which they read less.
        Waits for the GPU."""
        s, (_, n) = self._structure, b.shape
        made = reordered_of(s)
        if made is None or not self._prepare(REORDERED, values, b, dtype):
            return None
        us = (us_by_reads(s, n * dtype.itemsize, dtype.itemsize, reads, memory(b.device)) for reads in made.reads)
        return Measurement(n, {name: t * 1e-6 for name, t in zip((OURS, REORDERED), us, strict=True)}, estimated=True)

    def _has_no_rival(self, dtype: torch.dtype, n: int, device: torch.device) -> bool:
        """Sizes alone say so, and nothing else is asked: the GPU waits for a plan's first product."""
        s = self._structure
        if s.nonzeros * n < LARGE or s.blocks is not None:
            return False
        if not self.constant:
            return True
        empty = s.rows * s.columns > FILL_TENSOR_CORES * s.nonzeros
        tiles = dtype == torch.float32 and s.columns <= MOST_COLUMNS
        return empty and not tiles and not self._is_scattered(dtype, n, device)

    @staticmethod
    def _fits(nbytes: int, device: torch.device) -> bool:
        if nbytes <= SMALL_BYTES:  # to ask the GPU takes longer than a product
            return True
        return device.type == "cuda" and bool(nbytes <= torch.cuda.mem_get_info(device)[0] // 4)

    def _made(self, name: str) -> Product:
        if name not in self._products:
            self._products[name] = form_of(name, self._structure)
        return self._products[name]

    def refresh(self, values: torch.Tensor) -> None:
        """Other values, from now on."""
        for made in list(self._products.values()):
            if isinstance(made, Full) and not is_capturing(values.device):
                made.refresh(values.detach())

    @property
    def is_captured(self) -> bool:
        """True where a captured graph reads a copy that is kept here."""
        return any(isinstance(made, Full) and made.is_captured for made in list(self._products.values()))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for made in list(self._products.values()) for t in made.tensors]

    def explain(self, dtype: torch.dtype) -> list[str]:
        """A line for each measurement: microseconds of every candidate, an asterisk at the chosen one. dtype: of
        products that need none."""
        lines = []
        if self._structure.nonzeros and self._has_no_rival(dtype, LARGE, self._structure.crow.device):
            lines.append(f"from {-(-LARGE // self._structure.nonzeros)} columns on: ours, without another candidate")
        for (dtype, _), m in list(self.measured.items()):
            chosen = m.fastest(True)
            times = ", ".join(
                f"{name} {'refused' if t is None else f'{t * 1e6:.1f} us'}{'*' if name == chosen else ''}"
                for name, t in m.seconds.items()
            )
            if m.estimated:
                times = f"{chosen}, by its size alone"
            elif len(m.seconds) == 1:
                times = "ours, without another candidate"
            lines.append(f"{str(dtype).removeprefix('torch.')}, {m.columns} columns: {times}")
        for (dtype, n), name in list(self._linear.items()):
            if name in (PACKED_LINEAR, DENSE):
                lines.append(f"{str(dtype).removeprefix('torch.')}, {n - 7} to {n} rows of a linear layer: {name}")
        return lines
