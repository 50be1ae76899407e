"""The table of kernels that a plan may select for A @ B: what each needs, and what it costs by size.

Every candidate gives the same bits every time. `Selector` (selector.py) compares the candidates. cuSPARSE is none: its
algorithms were slower than the plan in all 162 products on an H200 and all 162 on an H100
(benchmarks/results/spmm-cuda.json and spmm-h100.json), and csr_alg3 does not give the same bits every time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from custom_mm import _C
from custom_mm.kernel_switch import FAMILIES, Family, is_any_off, is_off

from ..device import has_hopper_kernels, memory, takes_tf32
from .costs import (
    MIN_MEAN_FP16X2,
    MIN_ROWS,
    MIN_ROWS_16BIT,
    MOST_SPARSE24_COLUMNS,
    PACKED_COLUMNS,
    is_even,
    is_skewed,
    us_by_reads,
    us_by_rows,
    us_default_16bit,
    us_dense_16bit,
    us_fp16x2,
    us_packed_mma,
    us_saved_by_reordering,
    us_smem_tiles,
    us_sparse24_16bit,
    us_to_reorder,
)
from .csr_pattern import CsrPattern
from .default_spmm import COUNTED, kernel_of
from .layouts import (
    BlockLayout,
    CachedLayout,
    Dense,
    Fp16x2,
    PackedMma,
    PackedMmaLinear,
    Product,
    ReorderedRows,
    SmemTiles,
    Sparse24,
    reordered_of,
    takes_blocks,
)
from .names import (
    BLOCKS,
    BY_ROWS,
    CHUNKS,
    DEFAULT,
    DENSE,
    FP16X2,
    PACKED_MMA,
    PACKED_MMA_LINEAR,
    REORDERED,
    SHARES,
    SMEM_TILES,
    SPARSE24,
    SPLIT_ROWS,
)
from .smem_tiles import layout_of

_ops = torch.ops.custom_mm

# Elements of A for each nonzero, at most, to densify it: on tensor cores, elsewhere, and as fp16x2.
FILL_TENSOR_CORES, FILL, FILL_FP16X2 = 256, 16, 32
SMALL_BYTES = 2**28  # of a densified A: the most on a CPU, and on a GPU without asking for free memory
CLEAR = 1.22  # ratio of two cost estimates from which the slower one is not measured
SOONER = 1.06  # ratio by which a candidate must be estimated faster than the default to be considered
PRODUCTS = 50  # that must pay for a selection, unless more are announced
# Microseconds of a linear layer beyond the product: packed_mma_linear for its bias and rows of x; transposing x and the
# result for a product A @ x^T.
LINEAR_US, TRANSPOSED_US = 0.7, 5
# To reorder rows: rows of A for each that begins far from the diagonal, and nonzeros of the longest row, at most.
ROWS_PER_FAR, LONGEST_REORDERED = 4, 64


@dataclass(frozen=True)
class Facts:
    """What the selection depends on: the pattern of A, B [columns, n] dtype on device, and how many products come."""

    pattern: CsrPattern
    n: int
    dtype: torch.dtype
    device: torch.device
    products: int = PRODUCTS

    @cached_property
    def on_hopper(self) -> bool:
        """True if Hopper's kernels take B."""
        return self.n % 8 == 0 and has_hopper_kernels(self.device)

    @cached_property
    def full_float32(self) -> bool:
        """True for float32 that may not be rounded to TF32."""
        return self.dtype == torch.float32 and not takes_tf32()

    @cached_property
    def has_fp16x2(self) -> bool:
        """True if the GPU has fp16x2 and it is as exact as float32."""
        s = self.pattern
        return self.full_float32 and self.on_hopper and s.nonzeros >= MIN_MEAN_FP16X2 * s.rows

    @cached_property
    def can_densify(self) -> bool:
        """True if A with its zeros fits in memory and has no duplicates that 16 bits cannot add up."""
        s = self.pattern
        return (
            self.device.type in ("cpu", "cuda")
            and (s.distinct or self.dtype.itemsize > 2)
            and _fits(s.rows * s.columns * self.dtype.itemsize, self.device)
        )

    @cached_property
    def may_densify(self) -> bool:
        """True if A can be densified and is not so empty that no densified product is worth it."""
        s, elements = self.pattern, self.pattern.rows * self.pattern.columns
        tensor_cores = self.device.type == "cuda" and not self.full_float32 and self.dtype.itemsize <= 4
        fill = FILL_FP16X2 if self.has_fp16x2 else FILL_TENSOR_CORES if tensor_cores else FILL
        # Fewer elements than nonzeros: mostly duplicates.
        return s.nonzeros <= elements <= fill * s.nonzeros and self.can_densify

    @cached_property
    def fp16x2_kernel(self) -> str:
        """The faster of fp16x2 and sparse24 in float32, of those that are on."""
        us = us_fp16x2(self.pattern, self.n)
        return min((name for name in us if not is_off(name)), key=lambda name: us[name], default=FP16X2)


def _fits(nbytes: int, device: torch.device) -> bool:
    if nbytes <= SMALL_BYTES:  # asking the GPU takes longer than a product
        return True
    return device.type == "cuda" and bool(nbytes <= torch.cuda.mem_get_info(device)[0] // 4)


def _is_default(name: str) -> Callable[[Facts], bool]:
    return lambda f: kernel_of(f.pattern, f.n, f.dtype, f.device) == name


# What a kernel takes at all.


def _takes_reordered(f: Facts) -> bool:
    s = f.pattern
    square = s.rows == s.columns and s.crow.dtype == torch.int32 and s.nonzeros + s.rows < COUNTED
    return square and f.device.type == "cuda" and f.dtype.itemsize <= 4 and reordered_of(s) is not None


def _takes_smem_tiles(f: Facts) -> bool:
    s = f.pattern
    sizes = f.full_float32 and f.on_hopper and s.distinct and s.crow.dtype == torch.int32
    return sizes and layout_of(s, f.n) is not None


def _takes_sparse24(f: Facts) -> bool:
    sizes = f.pattern.distinct and f.pattern.columns <= MOST_SPARSE24_COLUMNS
    return sizes and (f.has_fp16x2 or (f.on_hopper and f.dtype.itemsize == 2)) and f.can_densify


def _takes_packed_mma(f: Facts) -> bool:
    s = f.pattern
    sizes = 0 < s.columns <= PACKED_COLUMNS and s.columns % 8 == 0 and s.rows > 0 and s.distinct
    return sizes and f.on_hopper and f.dtype.itemsize == 2 and f.can_densify


def _takes_fp16x2(f: Facts) -> bool:
    return f.has_fp16x2 and f.can_densify


def _takes_dense(f: Facts) -> bool:
    return f.can_densify


def _takes_blocks(f: Facts) -> bool:
    return takes_blocks(f.pattern, f.dtype, f.device)


def _for_linear_alone(f: Facts) -> bool:
    return False  # see `linear_kernel`


# When it may be faster than the default.


def is_scattered(f: Facts) -> bool:
    """True if neighbouring rows read distant rows of a B that the cache does not hold, so that another order of the
    rows may pay back."""
    s = f.pattern
    return (
        ROWS_PER_FAR * s.far >= s.rows == s.columns
        and f.device.type == "cuda"
        and f.dtype.itemsize <= 4
        and s.crow.dtype == torch.int32
        and s.longest <= LONGEST_REORDERED
        and s.nonzeros + s.rows < COUNTED
        and not is_skewed(s)
        and f.products * us_saved_by_reordering(s, f.n * f.dtype.itemsize, memory(f.device)) > us_to_reorder(s)
        and not is_off(REORDERED)
    )


def _is_worth_smem_tiles(f: Facts) -> bool:
    s = f.pattern
    return f.full_float32 and f.on_hopper and is_even(s) and SOONER * us_smem_tiles(s, f.n) < us_by_rows(s, f.n)


def _nears_dense(us: Callable[[Facts], float], f: Facts) -> bool:
    """True in 16 bits if the cost `us` is not far above the dense product's."""
    return f.on_hopper and f.dtype.itemsize == 2 and us(f) < CLEAR * _us_dense(f)


def _is_worth_sparse24(f: Facts) -> bool:
    if not f.may_densify:
        return False
    return f.fp16x2_kernel == SPARSE24 if f.has_fp16x2 else _nears_dense(_us_sparse24, f)


def _is_worth_packed_mma(f: Facts) -> bool:
    return f.may_densify and _nears_dense(_us_packed_mma, f)


def _is_worth_fp16x2(f: Facts) -> bool:
    return f.may_densify and f.has_fp16x2 and f.fp16x2_kernel == FP16X2


def _is_worth_dense(f: Facts) -> bool:
    return f.may_densify and not f.has_fp16x2


def _always(f: Facts) -> bool:
    return True


def _us_default(f: Facts) -> float:
    return us_by_rows(f.pattern, f.n) if f.dtype == torch.float32 else us_default_16bit(f.pattern, f.n)


def _us_reordered(f: Facts) -> float:
    made = reordered_of(f.pattern)
    return math.inf if made is None else us_of_reads(f, made.reads[1])


def us_of_reads(f: Facts, reads: int) -> float:
    return us_by_reads(f.pattern, f.n * f.dtype.itemsize, f.dtype.itemsize, reads, memory(f.device))


def _us_smem_tiles(f: Facts) -> float:
    return us_smem_tiles(f.pattern, f.n)


def _us_sparse24(f: Facts) -> float:
    if f.dtype == torch.float32:
        return us_fp16x2(f.pattern, f.n).get(SPARSE24, math.inf)
    return us_sparse24_16bit(f.pattern, f.n, memory(f.device))


def _us_packed_mma(f: Facts) -> float:
    return us_packed_mma(f.pattern, f.n, memory(f.device)) if f.pattern.distinct else math.inf


def _us_packed_mma_linear(f: Facts) -> float:
    return _us_packed_mma(f) + LINEAR_US if f.pattern.rows % 8 == 0 else math.inf


def _us_fp16x2(f: Facts) -> float:
    return us_fp16x2(f.pattern, f.n)[FP16X2]


def _us_dense(f: Facts) -> float:
    return us_dense_16bit(f.pattern, f.n, memory(f.device)) if f.dtype.itemsize == 2 else math.inf


def _not_modelled(f: Facts) -> float:
    return math.inf


@dataclass(frozen=True)
class Candidate:
    """A kernel that a plan may take."""

    name: str
    layout: Callable[[CsrPattern], Product] | None  # what the plan keeps for it; None for the default product
    operator: Any
    takes: Callable[[Facts], bool]  # it can multiply these operands, at whatever speed
    is_worth: Callable[[Facts], bool]  # it may be faster than the default
    microseconds: Callable[[Facts], float]  # by its cost model; inf if it has none
    differentiable: bool = False  # in B

    def may_run(self, f: Facts) -> bool:
        return not is_off(self.name) and self.is_worth(f) and self.takes(f)

    @property
    def is_copy(self) -> bool:
        """It keeps a copy of the values: for constant ones."""
        return isinstance(self.layout, type) and issubclass(self.layout, CachedLayout)


# In the order in which they are measured. A name is the folder or file of its kernel below src/sparse/spmm: by_rows/,
# chunks/, packed_mma/, densified/fp16x2_sm90.cu. Of by_rows, split_rows, shares and chunks exactly one may run: the
# default product.
CANDIDATES = (
    *(
        Candidate(name, None, operator, _is_default(name), _always, _us_default, differentiable=True)
        for name, operator in (
            (BY_ROWS, _ops.csr_spmm),
            (SPLIT_ROWS, _ops.csr_spmm),
            (SHARES, _ops.csr_spmm),
            (CHUNKS, _ops.csr_spmm_chunks),
        )
    ),
    Candidate(
        REORDERED,
        ReorderedRows,
        _ops.csr_spmm_chunks,
        _takes_reordered,
        is_scattered,
        _us_reordered,
        differentiable=True,
    ),
    Candidate(SMEM_TILES, SmemTiles, _ops.csr_spmm_tiles, _takes_smem_tiles, _is_worth_smem_tiles, _us_smem_tiles),
    Candidate(SPARSE24, Sparse24, _ops.csr_spmm_halves, _takes_sparse24, _is_worth_sparse24, _us_sparse24),
    Candidate(PACKED_MMA, PackedMma, _ops.csr_spmm_packed, _takes_packed_mma, _is_worth_packed_mma, _us_packed_mma),
    Candidate(FP16X2, Fp16x2, _ops.csr_spmm_halves, _takes_fp16x2, _is_worth_fp16x2, _us_fp16x2),
    Candidate(DENSE, Dense, _ops.matmul, _takes_dense, _is_worth_dense, _us_dense, differentiable=True),
    Candidate(BLOCKS, BlockLayout, _ops.bsr_spmm, _takes_blocks, _always, _not_modelled, differentiable=True),
    Candidate(
        PACKED_MMA_LINEAR,
        PackedMmaLinear,
        _ops.csr_linear_packed,
        _for_linear_alone,
        _always,
        _us_packed_mma_linear,
    ),
)
BY_NAME = {c.name: c for c in CANDIDATES}
FAMILIES["sparse products"] = Family(tuple(BY_NAME), _C.switch_off_spmm_kernels)
DIFFERENTIABLE = {DEFAULT, *(c.name for c in CANDIDATES if c.differentiable)}


def default_kernel(f: Facts) -> str:
    """The name of the kernel that the default product runs; DEFAULT if all that could are switched off."""
    return kernel_of(f.pattern, f.n, f.dtype, f.device)


def rivals(f: Facts, constant: bool) -> list[str]:
    """The kernels that take the product where all of the default's are switched off: those that may be fast, or else
    any; the fastest by the cost models first."""
    on = [c for c in CANDIDATES if c.layout is not None and (constant or not c.is_copy) and not is_off(c.name)]
    taking = [c for c in on if c.takes(f)]
    worth = [c for c in taking if c.is_worth(f)] or taking
    return [c.name for c in sorted(worth, key=lambda c: c.microseconds(f))]


def estimates(f: Facts, names: list[str]) -> dict[str, float]:
    """Seconds of the default product and of those named, by the cost models; {} if these do not hold."""
    min_rows = MIN_ROWS_16BIT if f.dtype.itemsize == 2 else MIN_ROWS
    if BLOCKS in names or f.device.type != "cuda" or f.dtype.itemsize > 4 or not is_even(f.pattern, min_rows):
        return {}
    if (f.dtype == torch.float32 and DENSE in names) or not f.on_hopper:
        return {}
    return {DEFAULT: _us_default(f) * 1e-6, **{name: BY_NAME[name].microseconds(f) * 1e-6 for name in names}}


def linear_kernel(f: Facts) -> str:
    """The fastest of PACKED_MMA_LINEAR, DENSE and others for x @ A^T + bias with x [n, columns], in 16 bits and by size
    alone. The others transpose x and the result."""
    s = f.pattern
    if not has_hopper_kernels(f.device) or not s.distinct:
        return DEFAULT
    is_default_off = is_any_off() and default_kernel(f) == DEFAULT
    if not is_even(s, MIN_ROWS_16BIT) and not is_default_off:
        return DEFAULT
    us = {name: BY_NAME[name].microseconds(f) for name in (DENSE, PACKED_MMA_LINEAR)}
    us |= {name: BY_NAME[name].microseconds(f) + TRANSPOSED_US for name in (BY_ROWS, SPARSE24, PACKED_MMA)}
    if not _fits(2 * s.rows * s.columns, f.device):
        del us[DENSE]
    if is_any_off():  # by_rows stands for the default product
        off = {name for name in us if (is_default_off if name == BY_ROWS else is_off(name))}
        us = {name: t for name, t in us.items() if name not in off and t < math.inf}
    return min(us, key=lambda name: us[name], default=DEFAULT)
