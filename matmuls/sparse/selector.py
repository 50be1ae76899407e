"""Select the kernel of a plan's product among the candidates of select.py, by their cost models or by measuring them.

A measurement takes 1 to 5 ms, a selection by size 0.1 ms at most: a difference in size that PRODUCTS products, or those
announced, could not pay back is not measured. Which candidate is fastest may change from process to process, so with
torch.use_deterministic_algorithms a plan takes the default product.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from custom_mm.kernel_switch import is_any_off, is_off

from ..registration import has_tangent
from .csr_pattern import CsrPattern, is_capturing, is_transformed, relaxed_capture
from .default_spmm import default_op, linear_op
from .layouts import CachedLayout, Product, reordered_of
from .names import BLOCKS, BY_ROWS, DEFAULT, DENSE, PACKED_MMA_LINEAR, REORDERED
from .prepared import PreparedOp
from .race import Run, race
from .select import (
    BY_NAME,
    CANDIDATES,
    CLEAR,
    DIFFERENTIABLE,
    PRODUCTS,
    SOONER,
    Facts,
    default_kernel,
    estimates,
    is_scattered,
    linear_kernel,
    rivals,
    us_of_reads,
)

_aten_linear = torch.ops.aten.linear.default

SMALLEST = 2**18  # products of a nonzero and a column of B; below, a call is all launch and Python: the default
RACE = 2e-3  # seconds of a measurement


def _agree(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if equal up to rounding. float32 uses float16's eps: TF32 has an 11-bit significand."""
    eps = torch.finfo(torch.float16 if x.dtype == torch.float32 else x.dtype).eps
    wide = torch.promote_types(x.dtype, torch.float32)
    return bool((x - y).to(wide).norm() <= 16 * eps * y.to(wide).norm())


@dataclass(frozen=True)
class Measurement:
    """Seconds of each candidate for a number of columns of B; None: it was refused, or the default was the only one.

    estimated: the seconds are those of cost models, which left nothing to measure. kernel: which of its kernels the
    default product, DEFAULT, runs.
    """

    columns: int
    seconds: dict[str, float | None]
    estimated: bool = False
    kernel: str = BY_ROWS
    _fastest: dict[bool, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def fastest(self, without_gradient: bool) -> str:
        """The fastest candidate; with a gradient to B, of those that have one. DEFAULT for any of the default's."""
        if len(self.seconds) == 1 and DEFAULT in self.seconds:
            return DEFAULT
        known = self._fastest.get(without_gradient)
        if known is None:
            times = {name: t for name, t in self.seconds.items() if t is not None}
            found = {name: t for name, t in times.items() if without_gradient or name in DIFFERENTIABLE}
            known = self._fastest[without_gradient] = min(found, key=lambda name: found[name], default=DEFAULT)
        return known

    @property
    def chosen(self) -> str:
        """The kernel of a product without a gradient."""
        return self._kernel(self.fastest(True))

    def _kernel(self, name: str) -> str:
        return self.kernel if name == DEFAULT else name

    def describe(self) -> str:
        """The microseconds of each candidate, an asterisk at the chosen one."""
        chosen = self.fastest(True)
        if self.estimated:
            return f"{self._kernel(chosen)}, by its size alone"
        if len(self.seconds) == 1:
            return f"{self.kernel}, without another candidate"
        times = {name: "refused" if t is None else f"{t * 1e6:.1f} us" for name, t in self.seconds.items()}
        return ", ".join(f"{self._kernel(name)} {t}{'*' if name == chosen else ''}" for name, t in times.items())


def _near(seconds: dict[str, float], products: int) -> list[str]:
    """The candidates to measure, by their estimates; a single one is taken without measuring."""
    if not seconds:
        return []
    best = min(seconds, key=lambda name: seconds[name])
    if (CLEAR - 1) * seconds[best] * products < RACE:
        return [DEFAULT] if seconds[DEFAULT] <= SOONER * seconds[best] else [best]
    return [name for name in seconds if seconds[name] <= CLEAR * seconds[best]]


class Selector:
    """The layouts that a plan keeps, and which candidate is the fastest for each dtype and number of columns of B.

    products: how many must pay for a selection. constant: the user said that the values stay as they are, so that a
    copy of the matrix in another layout may serve; without it every candidate reads the values it is given.
    """

    def __init__(self, pattern: CsrPattern, *, products: int = PRODUCTS, constant: bool = False) -> None:
        self._pattern, self.products, self.constant = pattern, products, constant
        self.measured: dict[tuple[torch.dtype, int], Measurement] = {}  # by dtype and bits of the number of columns
        self._products: dict[str, Product] = {}
        self._taken: set[str] = set()  # CUDA graphs may have captured what these keep
        self._linear: dict[tuple[torch.dtype, int], str] = {}  # by dtype and rows of a linear layer
        self._varying: Selector | None = None
        self.reverse: Selector | None = None  # of the transposed matrix

    def __deepcopy__(self, memo: dict[int, Any]) -> "Selector":
        # Layouts and measurements are soon made again.
        return Selector(self._pattern, products=self.products, constant=self.constant)

    def of_other_values(self) -> "Selector":
        """The selector for values other than a constant plan's; made once."""
        if not self.constant:
            return self
        if self._varying is None:
            self._varying = Selector(self._pattern, products=self.products)
        return self._varying

    def reversed(self) -> "Selector":
        """The selector for the transposed matrix; made once."""
        if self.reverse is None:
            self.reverse = Selector(self._pattern.reversed(), products=self.products, constant=self.constant)
        return self.reverse

    def call(self, values: torch.Tensor, b: torch.Tensor) -> PreparedOp | None:
        """values times b by the fastest candidate; None if that is the default product."""
        device = b.device
        if b.dim() != 2 or device != values.device:
            return None
        inner, n = b.shape
        is_small = values.shape[0] * n < SMALLEST
        if is_small and not (is_any_off() and self._is_default_off(self._facts(b.dtype, n, device))):
            return None
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else b.dtype
        if (values.dtype != dtype and not autocast) or inner != self._pattern.columns:
            return None  # the operator raises the error
        if autocast and max(values.dtype.itemsize, b.dtype.itemsize) > 4:
            return None  # autocast does not touch them
        recording = torch.is_grad_enabled()
        if (recording and values.requires_grad) or torch.are_deterministic_algorithms_enabled():
            return None  # the default's gradients use the transposed matrix
        if is_transformed() or has_tangent(values):
            return None  # what would be kept is no real tensor, or has no tangent
        measurement = self.measured.get((dtype, n.bit_length()))
        if measurement is None:
            if is_capturing(device):
                return None
            measurement = self.measure(values, b, dtype)
        while (name := measurement.fastest(not (recording and b.requires_grad))) != DEFAULT:
            try:
                op = self._made(name).call(values, b, dtype)
            except RuntimeError:  # memory is out, or a tile has too many nonzeros
                refused = replace(measurement, seconds={**measurement.seconds, name: None})
                measurement = self._remember(dtype, refused)
                continue
            self._taken.add(name)
            return op
        return None

    def is_default(self, values: torch.Tensor, n: int) -> bool:
        """True if the default product is taken for n columns in the dtype of values, as far as is known."""
        if torch.are_deterministic_algorithms_enabled():
            return True
        if values.shape[0] * n < SMALLEST:
            return not (is_any_off() and self._is_default_off(self._facts(values.dtype, n, values.device)))
        if not self.constant and self._pattern.blocks is None:
            return True
        known = self.measured.get((values.dtype, n.bit_length()))
        return known is not None and known.fastest(True) == known.fastest(False) == DEFAULT

    def linear(self, values: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> PreparedOp | None:
        """x A^T + bias, x [n, columns], by the packed or the dense matrix, whichever is faster by size. None if another
        product is faster, and for values that may change."""
        given = (values, x) if bias is None else (values, x, bias)
        recording = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        if not self.constant or recording or torch.are_deterministic_algorithms_enabled() or x.dim() != 2:
            return None
        dtype, device, eights = x.dtype, x.device, -(-x.shape[0] // 8)
        if dtype.itemsize != 2 or any(t.dtype != dtype or t.device != device for t in given):
            return None
        if torch.is_autocast_enabled(device.type) or eights == 0 or is_transformed() or has_tangent(values):
            return None
        key = dtype, 8 * eights
        name = self._linear.get(key) or self._linear.setdefault(key, self._linear_of(8 * eights, device))
        made = self._made(name) if name in (PACKED_MMA_LINEAR, DENSE) else None
        if not isinstance(made, CachedLayout) or (is_capturing(device) and not made.is_laid_out(x.mT, dtype)):
            return None
        self._taken.add(name)
        try:
            op = made.call(values, x.mT, dtype)
        except RuntimeError:  # memory is out, or a tile has too many nonzeros
            self._linear[key] = DEFAULT
            return None
        if name == DENSE:
            return op._replace(operator=_aten_linear, arguments=(x, op.arguments[0], bias), b_index=0)
        return op._replace(arguments=(*op.arguments, bias))

    def _linear_of(self, n: int, device: torch.device) -> str:
        """The fastest for n rows of a linear layer, rounded up to a multiple of 8, in 16 bits."""
        return linear_kernel(self._facts(torch.float16, n, device))

    def measure(self, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Measurement:
        """Select the kernel for b's number of columns. Waits for the GPU unless the default has no rival."""
        facts = self._facts(dtype, b.shape[1], b.device)
        if is_any_off() and self._is_default_off(facts):
            return self._without_default(facts, values, b)
        scattered = self.constant and is_scattered(facts)
        if scattered and (reordered := self._reordered(facts, values, b)):
            return self._known(facts, reordered, estimated=True)
        candidates = self._candidates(facts) if facts.n and self._pattern.nonzeros else []
        if not candidates:
            return self._known(facts, {DEFAULT: None})
        estimated = self._estimates(facts, candidates)
        while len(near := _near(estimated, self.products)) == 1:
            if near == [DEFAULT] or self._prepare(near[0], values, b, dtype):
                known: dict[str, float | None] = {DEFAULT: estimated[DEFAULT]} if near == [DEFAULT] else {**estimated}
                return self._known(facts, known, estimated=True)
            del estimated[near[0]]
        candidates = [name for name in candidates if not near or name in near]
        with torch.no_grad(), relaxed_capture(b):
            seconds = self._race(candidates, values.detach(), b.detach(), dtype)
        return self._known(facts, seconds)

    def _is_default_off(self, facts: Facts) -> bool:
        """True if the default product would run a kernel, and all that could are switched off."""
        return facts.n > 0 and self._pattern.nonzeros > 0 and default_kernel(facts) == DEFAULT

    def _without_default(self, facts: Facts, values: torch.Tensor, b: torch.Tensor) -> Measurement:
        """The first of the kernels that are on, by their cost models, that can be made ready."""
        for name in rivals(facts, self.constant):
            if self._prepare(name, values, b, facts.dtype):
                known: dict[str, float | None] = {name: BY_NAME[name].microseconds(facts) * 1e-6}
                return self._known(facts, known, estimated=True)
        s, on = self._pattern, [c.name for c in CANDIDATES if not is_off(c.name)]
        raise ValueError(
            f"spmm: expected a product that {' or '.join(on) or 'a kernel'} takes, as all others are switched off, got "
            f"[{s.rows}, {s.columns}] with {s.nonzeros} nonzeros times {facts.n} columns in {facts.dtype}"
        )

    def _prepare(self, name: str, values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
        """Make the candidate's layout; False if it is refused."""
        made = self._made(name)
        try:
            if isinstance(made, CachedLayout):
                made.prepare(values.detach(), b, dtype)
        except RuntimeError:  # memory is out, or a tile has too many nonzeros
            return False
        return True

    def _race(
        self, candidates: list[str], values: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
    ) -> dict[str, float | None]:
        """Seconds of the default and of the candidates."""

        def default() -> torch.Tensor:
            return default_op(self._pattern, values, b).run()

        def ready(name: str) -> Run | None:
            try:
                made = self._made(name)
                product = made.call(values, b, dtype).run()
                if name == BLOCKS and not _agree(product, default()):
                    raise RuntimeError(f"{name} differs from {DEFAULT}")
            except Exception as error:  # memory is out, or a tile has too many nonzeros
                if name != BLOCKS and not isinstance(error, RuntimeError):  # Triton's compiler raises any type
                    raise
                return None
            return lambda: made.call(values, b, dtype).run()

        return race(default, ready, candidates, b)

    def _known(self, facts: Facts, seconds: dict[str, float | None], estimated: bool = False) -> Measurement:
        return self._remember(facts.dtype, Measurement(facts.n, seconds, estimated, default_kernel(facts)))

    def _remember(self, dtype: torch.dtype, measurement: Measurement) -> Measurement:
        """Keep it, and drop the layouts that no product takes."""
        self.measured[dtype, measurement.columns.bit_length()] = measurement
        if self._products:
            kept = {m.fastest(True) for m in list(self.measured.values())} | self._taken
            self._products = {name: made for name, made in list(self._products.items()) if name in kept}
        return measurement

    def _facts(self, dtype: torch.dtype, n: int, device: torch.device) -> Facts:
        return Facts(self._pattern, n, dtype, device, self.products)

    def _estimates(self, facts: Facts, candidates: list[str]) -> dict[str, float]:
        """Seconds of the default and of the candidates by their cost models; {} if these do not hold."""
        return estimates(facts, candidates)

    def _candidates(self, facts: Facts) -> list[str]:
        """What may be faster than the default: copies of a constant matrix first, its blocks last."""
        others = [c.name for c in CANDIDATES if c.layout is not None and not c.is_copy and c.may_run(facts)]
        return (self._copies(facts) if self.constant else []) + others

    def _copies(self, facts: Facts) -> list[str]:
        """Layouts that are worth measuring and keep a copy of the values. Reordered rows are selected before."""
        return [c.name for c in CANDIDATES if c.is_copy and c.name != REORDERED and c.may_run(facts)]

    def _reordered(self, facts: Facts, values: torch.Tensor, b: torch.Tensor) -> dict[str, float | None] | None:
        """Seconds with the rows in their order and reordered, by size; None if no order saves reads. Waits for the
        GPU."""
        made = reordered_of(self._pattern)
        if made is None or not self._prepare(REORDERED, values, b, facts.dtype):
            return None
        us = {DEFAULT: us_of_reads(facts, made.reads[0]), REORDERED: BY_NAME[REORDERED].microseconds(facts)}
        return {name: t * 1e-6 for name, t in us.items()}

    def _made(self, name: str) -> Product:
        """The layout of a candidate; nothing is encoded before its first product."""
        if name not in self._products:
            layout = BY_NAME[name].layout
            assert layout is not None
            self._products[name] = layout(self._pattern)
        return self._products[name]

    def refresh(self, values: torch.Tensor) -> None:
        """Encode other values, from now on."""
        for made in list(self._products.values()):
            if isinstance(made, CachedLayout) and not is_capturing(values.device):
                made.refresh(values.detach())

    @property
    def is_captured(self) -> bool:
        """True if a captured graph reads a copy that is kept here."""
        return any(isinstance(made, CachedLayout) and made.is_captured for made in list(self._products.values()))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for made in list(self._products.values()) for t in made.tensors]

    def chosen(self) -> list[str]:
        """The kernel selected for each dtype and number of columns so far."""
        return [
            f"{str(dtype).removeprefix('torch.')} x {m.columns}: {m.chosen}"
            for (dtype, _), m in list(self.measured.items())
        ]

    def explain(self) -> list[str]:
        """A line for each number of columns, and each of rows of a linear layer, for which a kernel was selected."""
        lines = [
            f"{str(dtype).removeprefix('torch.')}, {m.columns} columns: {m.describe()}"
            for (dtype, _), m in list(self.measured.items())
        ]
        for (dtype, n), name in list(self._linear.items()):
            if name in (PACKED_MMA_LINEAR, DENSE):
                lines.append(f"{str(dtype).removeprefix('torch.')}, {n - 7} to {n} rows of a linear layer: {name}")
        return lines


def linear_of(
    own: Selector | None,
    pattern: CsrPattern,
    values: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    contiguous: bool = True,
) -> PreparedOp | None:
    """x A^T + bias as one operator; None if a product A @ x^T and a sum after it are the way, as they are faster.
    contiguous: the result must be; they leave out that copy, which takes longer than a launch for many operands."""
    n = x.numel() // max(x.shape[-1], 1)
    op = None if own is None else own.linear(values, x, bias)
    if op is not None or not (contiguous or values.shape[0] * n < SMALLEST):
        return op
    is_like = values.dtype == x.dtype or torch.is_autocast_enabled(x.device.type)  # else spmm raises the error
    is_default = is_like and (own is None or own.is_default(values, n))
    return linear_op(pattern, values, x, bias) if is_default else None


def described(plan: Any) -> list[str]:
    """A SparsePlan in a few lines: the matrix, the selected kernels, the times that were measured."""
    s = plan._pattern
    mean = s.nonzeros / max(s.rows, 1)
    density = s.nonzeros / max(s.rows * s.columns, 1)
    transposed = "kept" if s._transposed is not None else "made when B first requires a gradient"
    batch = f", {s.batch} blocks on the diagonal" if s.batch is not None else ""
    order = "in the order of rows" if s.order is None else "by an order of their own"
    if s.blocks is not None:
        order += f", in {s.blocks.pattern.nonzeros} blocks of {s.blocks.height} x {s.blocks.width}"
    lines = [
        f"{' x '.join(map(str, plan.shape))}: {s.nonzeros} nonzeros ({density:.2%}), {plan.dtype}, {plan.device}",
        f"nonzeros a row: mean {mean:.1f}, most {s.longest}{batch}",
        f"indices: {s.crow.dtype}, values {order}",
        f"transposed matrix: {transposed}",
        f"{plan.nbytes} bytes",
    ]
    return lines + ([] if plan._selector is None else plan._selector.explain())
