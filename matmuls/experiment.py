"""`matmuls spmm`: times every way to compute A @ B for the sparse matrices that the user names, in one run.

Candidates: matmuls with and without a plan, each cuSPARSE algorithm (with preprocessing where it exists), torch.sparse,
scipy (CPU), the dense product if A fits in memory, and torch's semi-structured product if A has 2:4 sparsity. All get
the same int32 indices, values and B, and run with warm caches, as in repeated products of one matrix. Each result is
compared with torch.sparse in float64.

Floor: the time of a copy of the bytes that must move: indices, values, the rows of B that meet a nonzero, and the
result, each once.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

import custom_mm

from . import files, matrices, measure, sparse
from .bench import copy_rate, environment, geometric_mean
from .matrices import Matrix
from .sparse.select import OLD_NAMES, PRODUCTS, Facts, default_kernel

PLAN, PLANLESS, TORCH, SCIPY, DENSE = "plan", "without a plan", "torch.sparse", "scipy", "dense"
SEMI = "torch 2:4"
CUSPARSE = ("csr_alg1", "csr_alg2", "csr_alg3", "coo_alg1", "coo_alg2", "coo_alg3", "coo_alg4")
RIVALS = (*(f"cusparse {algorithm}" for algorithm in CUSPARSE), TORCH, SCIPY, DENSE, SEMI)
PREPARED = ("csr_alg1", "csr_alg3")  # algorithms that cusparseSpMM_preprocess speeds up
DENSE_ELEMENTS = 2**26  # largest rows * columns of A for which the dense product is timed
ROUNDS, CALLS_US = 7, 2e5  # first products: rounds, and microseconds per round (but at least 5 products)
ROUND_US = 5e5  # microseconds for all rounds of a case (but at least 7 rounds)
NEAR = 1.05  # candidates within this factor of the fastest are timed again among themselves
Product = Callable[[], Any]
Made = TypeVar("Made")


def rivals_named(names: Sequence[str]) -> tuple[str, ...]:
    """The entries of RIVALS with these names; a first word such as cusparse selects all of a library's. ValueError on
    others."""
    for name in names:
        if not any(name in (rival, rival.split()[0]) for rival in RIVALS):
            raise ValueError(f"one of cusparse, {', '.join(RIVALS)}, got {name}")
    return tuple(rival for rival in RIVALS if rival in names or rival.split()[0] in names)


@dataclass(frozen=True)
class Result:
    """One candidate's time in microseconds and its error relative to the norm of the float64 result, or the reason
    (refused) why there is none."""

    us: float | None = None
    error: float | None = None
    spread: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Case:
    """The results for one matrix, dtype and number n of columns of B."""

    matrix: str
    rows: int
    columns: int
    nnz: int
    longest: int
    dtype: str
    n: int
    floor_us: float
    results: dict[str, Result]
    chosen: str  # the name of the kernel that the plan took, of matmuls/sparse/names.py
    plan_us: float  # building it
    plan_bytes: int
    # First products of a new matrix in a process that has already run this shape: their number, and wall time in total
    # with a plan (its construction and choice included) and without; back to back, and (GPU) synchronized after each.
    calls: int = 0
    calls_us: float = 0
    calls_planless_us: float = 0
    waited_us: float = 0
    waited_planless_us: float = 0
    backward: dict[str, Result] = field(default_factory=dict)
    backward_mib: dict[str, float] = field(default_factory=dict)  # peak above the operands

    @property
    def gflops(self) -> float:
        return 2 * self.nnz * self.n / 1e9

    @property
    def rivals(self) -> dict[str, float]:
        """Microseconds of all sparse candidates other than ours."""
        mine = (PLAN, PLANLESS, DENSE)
        return {name: r.us for name, r in self.results.items() if r.us is not None and name not in mine}

    def speed(self, name: str = PLAN) -> float | None:
        """The fastest sparse rival's time over that of the candidate `name`."""
        own = self.results[name].us
        return min(self.rivals.values()) / own if own and self.rivals else None

    @property
    def speed_over_any(self) -> float | None:
        """`speed` of the plan with the dense product among the rivals."""
        own, dense = self.results[PLAN].us, self.results[DENSE].us if DENSE in self.results else None
        found = [*self.rivals.values(), *([dense] if dense else [])]
        return min(found) / own if own and found else None

    def speed_over(self, rival: str, name: str = PLAN) -> float | None:
        own, other = self.results[name].us, self.results[rival].us if rival in self.results else None
        return other / own if own and other else None

    @property
    def floor_share(self) -> float | None:
        own = self.results[PLAN].us
        return self.floor_us / own if own else None

    @property
    def backward_speed(self) -> float | None:
        own, other = (self.backward.get(name, Result()).us for name in (PLAN, TORCH))
        return other / own if own and other else None

    @property
    def pays_back(self) -> float | None:
        """Time of the first products without a plan over that with one; above 1 the plan has paid for itself."""
        return self.calls_planless_us / self.calls_us if self.calls_us else None

    @property
    def pays_back_waited(self) -> float | None:
        """`pays_back` with a synchronization after each product."""
        return self.waited_planless_us / self.waited_us if self.waited_us else None


class Operands:
    """A matrix on a device in a dtype, as CSR, as COO rows and (`full`) dense."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype, device: str) -> None:
        self.matrix, self.dtype, self.device = matrix, dtype, device
        self.crow, self.col = matrix.crow.to(device), matrix.col.to(device)
        generator = torch.Generator().manual_seed(0)
        values = matrix.values
        if values is None:
            values = torch.randn(matrix.nnz, generator=generator)
        self.values = values.to(dtype).to(device)
        self.csr = self.as_csr(self.values)
        self.row = torch.repeat_interleave(
            torch.arange(matrix.shape[0], dtype=self.col.dtype, device=device), self.crow.diff().long()
        )

    def as_csr(self, values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(self.crow, self.col, values, self.matrix.shape, check_invariants=False)

    def dense_side(self, n: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1)
        return torch.randn(self.matrix.shape[1], n, generator=generator, device=self.device).to(self.dtype)

    def floor_bytes(self, n: int) -> int:
        rows, touched = self.matrix.shape[0], int(torch.bincount(self.col).count_nonzero())
        indices = self.crow.nbytes + self.col.nbytes
        return indices + self.values.nbytes + (touched + rows) * n * self.dtype.itemsize

    @property
    def fits_dense(self) -> bool:
        return self.matrix.shape[0] * self.matrix.shape[1] <= DENSE_ELEMENTS

    def full(self) -> Tensor:
        """The dense matrix; duplicates are summed."""
        full = torch.zeros(self.matrix.shape, dtype=self.dtype, device=self.device)
        return full.index_put_((self.row.long(), self.col.long()), self.values, accumulate=True)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _microseconds(run: Product, device: str) -> tuple[float, Any]:
    _wait(device)
    begin = time.perf_counter()
    result = run()
    _wait(device)
    return (time.perf_counter() - begin) * 1e6, result


def _first_products(m: Operands, b: Tensor, about: float) -> dict[str, float]:
    """The fields calls, *calls_us, *waited_us and plan_us of a Case: medians over rounds, each with a new copy of the
    matrix. about: microseconds of one product."""
    calls = int(min(PRODUCTS, max(5, CALLS_US / about)))

    def planned(done: Callable[[], None], a: Tensor) -> None:
        made = sparse.plan(a, constant=True)
        for _ in range(calls):
            made @ b
            done()

    def planless(done: Callable[[], None], a: Tensor) -> None:
        for _ in range(calls):
            sparse.spmm(a, b)
            done()

    ways: dict[str, Callable[[], None]] = {"calls": lambda: None}
    if m.device == "cuda":
        ways["waited"] = torch.cuda.synchronize
    runs: dict[str, Callable[[Tensor], Any]] = {"plan_us": sparse.plan}
    for name, done in ways.items():
        runs |= {f"{name}_us": partial(planned, done), f"{name}_planless_us": partial(planless, done)}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    pairs = list(zip(taken.values(), runs.values(), strict=True))
    for n in range(ROUNDS):
        for times, run in pairs if n % 2 == 0 else reversed(pairs):
            fresh = torch.sparse_csr_tensor(m.crow.clone(), m.col.clone(), m.values, m.matrix.shape)
            times.append(_microseconds(partial(run, fresh), m.device)[0])
    return {"calls": calls} | {name: median(times) for name, times in taken.items()}


def _cusparse(m: Operands, b: Tensor, algorithm: str) -> Product:
    layout = algorithm[:3]
    arguments = m.crow if layout == "csr" else m.row, m.col, m.values, b, *m.matrix.shape
    options: dict[str, Any] = {"layout": layout, "algorithm": algorithm}
    if algorithm in PREPARED:
        options["prepared"] = custom_mm.cusparse_prepare(*arguments, **options)
    return partial(custom_mm.cusparse_spmm, *arguments, **options)


def _scipy(m: Operands, b: Tensor) -> Product:
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

    a = csr_array((m.values.numpy(), m.col.numpy(), m.crow.numpy()), shape=m.matrix.shape)
    other = b.numpy()
    return lambda: torch.from_numpy(a @ other)


def _full(m: Operands, made: sparse.SparsePlan) -> Tensor:
    """The dense matrix: the plan's copy of it, if it has one, lest places in memory be compared. One kernel took .95 to
    1.05 of its time by another copy of 4096 x 4096 numbers, and by each the same again within half a percent (H100)."""
    kept = made._selector.tensors if made._selector else []
    own = (t for t in kept if (t.shape, t.dtype) == (m.matrix.shape, m.dtype) and t.is_contiguous())
    found = next(own, None)
    return m.full() if found is None else found


def _candidates(m: Operands, b: Tensor, made: sparse.SparsePlan) -> Iterator[tuple[str, Callable[[], Product]]]:
    """Pairs of a candidate's name and a function that prepares its product; that one may raise."""
    yield PLAN, lambda: partial(made.__matmul__, b)
    yield PLANLESS, lambda: partial(sparse.spmm, m.csr, b)
    if m.device == "cuda":
        for algorithm in CUSPARSE:
            yield f"cusparse {algorithm}", partial(_cusparse, m, b, algorithm)
    elif m.dtype in (torch.float32, torch.float64):
        yield SCIPY, partial(_scipy, m, b)
    yield TORCH, lambda: partial(torch.matmul, m.csr, b)
    if m.fits_dense:
        yield DENSE, lambda: partial(torch.matmul, _full(m, made), b)
        if m.device == "cuda" and m.dtype.itemsize == 2 and made._pattern.beyond_two == 0:
            yield SEMI, lambda: partial(torch.matmul, torch.sparse.to_sparse_semi_structured(m.full()), b)


def _checked(prepare: Callable[[], Product], truth: Tensor) -> tuple[Product | None, Result]:
    """A candidate's product and its error, or None and the reason why it was refused."""
    try:
        run = prepare()
        result = run()
        return run, Result(error=_error(result, truth))
    except (RuntimeError, MemoryError, ImportError) as error:
        return None, Result(refused=_first_line(error)[:200])


def _error(result: Tensor, truth: Tensor) -> float:
    """Error relative to the norm of the truth. Infinite if NaN or values beyond the dtype's range differ."""
    info = torch.finfo(result.dtype)
    result, slack = result.double(), 32 * info.eps
    held = truth.abs() < info.max * (1 - slack)  # False for NaN and near the overflow threshold
    if not held.all():
        ours, theirs = (x[~held].clamp(-info.max, info.max) for x in (result, truth))
        if not torch.allclose(ours, theirs, rtol=2 * slack, atol=0, equal_nan=True):
            return float("inf")
        result, truth = (x.masked_fill(~held, 0) for x in (result, truth))
    return float(torch.linalg.vector_norm(result - truth) / torch.linalg.vector_norm(truth).clamp_min(1e-300))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _time(runs: dict[str, Product], checked: dict[str, Result], device: str) -> dict[str, Result]:
    """Every candidate's result with its time.

    Candidates 100 times slower than the fastest run only 3 times; those within NEAR of the fastest are timed again.
    """
    once = {name: _microseconds(run, device)[0] for name, run in runs.items()}
    slow = [name for name in runs if once[name] > max(100 * min(once.values()), 1e5)]
    rest = [name for name in runs if name not in slow]

    def race(names: list[str], budget_us: float, most: int) -> dict[str, measure.Timing]:
        if device == "cpu":
            timings = measure.time_on_cpu([[runs[name]] for name in names], budget=0.5)
        else:
            rounds = int(min(most, max(7, budget_us / sum((2 + measure.OWN_BEFORE) * once[name] for name in names))))
            timings = measure.time_warm([runs[name] for name in names], device, rounds, own_before=measure.OWN_BEFORE)
        return dict(zip(names, timings, strict=True))

    timed = race(rest, ROUND_US, 60)
    first = min(timing.seconds for timing in timed.values())
    near = [name for name in rest if timed[name].seconds <= NEAR * first]
    if len(near) > 1:
        timed |= race(near, ROUND_US / 4, 200)
    timed |= dict(zip(slow, measure.time_warm([runs[name] for name in slow], device), strict=True))
    return {
        name: Result(timed[name].seconds * 1e6, r.error, timed[name].spread) if name in timed else r
        for name, r in checked.items()
    }


@torch.no_grad()
def measure_case(m: Operands, n: int, copy: float, backward: bool, against: tuple[str, ...] = RIVALS) -> Case:
    b = m.dense_side(n)
    truth = torch.sparse_csr_tensor(m.crow, m.col, m.values.double(), m.matrix.shape) @ b.double()
    made = sparse.plan(m.csr, constant=True)
    # One-time costs of the process, such as loading cuBLAS kernels for a shape, belong to neither time.
    made @ b, sparse.spmm(m.csr, b)
    once, _ = _microseconds(lambda: sparse.spmm(m.csr, b), m.device)
    runs: dict[str, Product] = {}
    checked: dict[str, Result] = {}
    for name, prepare in _candidates(m, b, made):
        if name not in (PLAN, PLANLESS, *against):
            continue
        run, checked[name] = _checked(prepare, truth)
        if run is not None:
            runs[name] = run
    if m.dtype == torch.bfloat16 and not any(name.startswith("cusparse") for name in runs):
        half = Operands(m.matrix, torch.float16, m.device)
        for algorithm in CUSPARSE if m.device == "cuda" else ():
            if f"cusparse {algorithm}" not in against:
                continue
            name = f"cusparse {algorithm} (float16)"
            run, checked[name] = _checked(partial(_cusparse, half, b.half(), algorithm), truth)
            if run is not None:
                runs[name] = run
    del truth
    lengths = m.crow.diff()
    chosen = next(iter(made._selector.measured.values()), None) if made._selector else None
    case = Case(
        matrix=m.matrix.name,
        rows=m.matrix.shape[0],
        columns=m.matrix.shape[1],
        nnz=m.matrix.nnz,
        longest=int(lengths.max()) if lengths.numel() else 0,
        dtype=str(m.dtype).removeprefix("torch."),
        n=n,
        floor_us=m.floor_bytes(n) / copy * 1e6,
        results=_time(runs, checked, m.device),
        chosen=default_kernel(Facts(made._pattern, n, m.dtype, made.device)) if chosen is None else chosen.chosen,
        plan_bytes=made.nbytes,
        **_first_products(m, b, once),
    )
    return _with_backward(case, m, b, made) if backward else case


@torch.enable_grad()
def _with_backward(case: Case, m: Operands, b: Tensor, made: sparse.SparsePlan) -> Case:
    """Add forward + backward times, with gradients of A's values and of B.

    torch.sparse densifies the gradient of A; it is refused if that does not fit in memory.
    """
    grad = torch.randn(m.matrix.shape[0], b.shape[1], device=m.device).to(m.dtype)

    def ours() -> None:
        values, right = m.values.detach().requires_grad_(), b.detach().requires_grad_()
        torch.autograd.backward(made.with_values(values) @ right, grad)

    def theirs() -> None:
        left, right = m.csr.detach().requires_grad_(), b.detach().requires_grad_()
        torch.autograd.backward(left @ right, grad)

    runs: dict[str, Product] = {PLAN: ours}
    nbytes = m.matrix.shape[0] * m.matrix.shape[1] * m.dtype.itemsize
    room = torch.cuda.mem_get_info()[0] // 4 if m.device == "cuda" else 2**30
    checked = {PLAN: Result(), TORCH: Result(refused=f"the gradient of the values would take {nbytes} bytes")}
    ours()
    if nbytes <= room:
        try:
            theirs()
            runs[TORCH], checked[TORCH] = theirs, Result()
        except RuntimeError as error:
            checked[TORCH] = Result(refused=_first_line(error)[:200])
    mib = {name: measure.peak_memory(run, m.device) / 2**20 for name, run in runs.items()}
    return replace(case, backward=_time(runs, checked, m.device), backward_mib=mib)


def measure_all(
    sources: list[str],
    dtypes: list[torch.dtype],
    widths: list[int],
    device: str,
    refused: list[str],
    backward: bool = False,
    against: tuple[str, ...] = RIVALS,
) -> Iterator[Case]:
    """Measure every case that can be read and fits in memory; for the others append the reason to `refused`.

    against: the rivals to time, from RIVALS.
    """
    copy = copy_rate(2**29 if device == "cuda" else 2**25, device)

    def attempt(what: str, make: Callable[[], Made]) -> Made | None:
        try:
            return make()
        except (ValueError, OSError, MemoryError, RuntimeError, OverflowError) as error:
            refused.append(what + _first_line(error))
            return None

    for source in sources:
        matrix = attempt("", partial(matrices.load, source))  # its errors name the source
        if matrix is None:
            continue
        for dtype in dtypes:
            name = f"{source}, {str(dtype).removeprefix('torch.')}"
            operands = attempt(f"{name}: ", partial(Operands, matrix, dtype, device))
            if operands is None:
                continue
            for n in widths:
                case = attempt(f"{name}, {n} columns: ", partial(measure_case, operands, n, copy, backward, against))
                if case is not None:
                    yield case


def summary(cases: list[Case]) -> list[str]:
    """Lines with the geometric mean and the lowest of each ratio over the cases, by dtype."""
    lines = []
    for dtype in dict.fromkeys(c.dtype for c in cases):
        own = [c for c in cases if c.dtype == dtype]
        for words, ratios in (
            ("plan over the fastest rival", [c.speed() for c in own]),
            ("without a plan over the fastest rival", [c.speed(PLANLESS) for c in own]),
            ("plan over the dense product", [c.speed_over(DENSE) for c in own]),
            (f"the first {PRODUCTS} calls without a plan over those with one", [c.pays_back for c in own]),
            ("the same, synchronized after each call", [c.pays_back_waited for c in own]),
            ("forward and backward over torch.sparse", [c.backward_speed for c in own]),
        ):
            known = [r for r in ratios if r is not None]
            if known:
                mean, low = geometric_mean(known), min(known)
                lines.append(f"{dtype}, {words}: geometric mean {mean:.2f}, lowest {low:.2f}, {len(known)} cases")
    return lines


def wrong(cases: list[Case]) -> list[str]:
    """Lines for the results of ours whose error is larger than rounding explains."""
    return [
        f"{c.matrix}, {c.dtype}, {c.n} columns: {name} is off by {r.error} {r.refused or ''}"
        for c in cases
        for name, r in c.results.items()
        if name in (PLAN, PLANLESS)
        and (r.error is None or not r.error <= (16 + c.longest**0.5) * torch.finfo(getattr(torch, c.dtype)).eps)
    ]


def crossovers(cases: list[Case]) -> list[str]:
    """Lines for a sweep: by dtype and n, the lowest sparsity from which on ours is faster than the dense product."""
    lines = []
    for dtype, n in dict.fromkeys((c.dtype, c.n) for c in cases):
        own = [c for c in cases if (c.dtype, c.n) == (dtype, n)]
        pays = None
        for c in sorted(own, key=_sparsity, reverse=True):
            ratio = c.speed_over(DENSE, PLANLESS)
            if ratio is None or ratio < 1:
                break
            pays = _sparsity(c)
        words = "never" if pays is None else f"from {pays:.1%} zeros on"
        lines.append(f"{dtype}, {n} columns: sparse beats dense: {words}")
    return lines


def _sparsity(c: Case) -> float:
    return 1 - c.nnz / max(c.rows * c.columns, 1)


def save(path: Path, cases: list[Case], device: str, *, complete: bool = True) -> None:
    result = {"environment": environment(device) | {"complete": complete}, "cases": [asdict(c) for c in cases]}
    files.write(path, json.dumps(result, indent=1, default=float) + "\n")


def load(path: Path) -> list[Case]:
    """Read what `save` wrote; fields that an older version lacks get defaults, unknown ones are dropped."""
    known = {f.name for f in fields(Case)}
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    for c in cases:
        c["results"], c["backward"] = ({n: Result(**r) for n, r in c[k].items()} for k in ("results", "backward"))
        c["chosen"] = OLD_NAMES.get(c["chosen"], c["chosen"])
    return [Case(**{name: c[name] for name in known & c.keys()}) for c in cases]


def plot(path: Path, cases: list[Case], sweep: bool) -> None:
    """Plot the microseconds of every candidate, over the sparsity (sweep) or by matrix. Needs matplotlib."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys((c.dtype, c.n) for c in cases))
    figure = Figure(figsize=(6 * min(len(kinds), 3), 4.5 * -(-len(kinds) // 3)), layout="constrained")
    for i, (dtype, n) in enumerate(kinds):
        own = [c for c in cases if (c.dtype, c.n) == (dtype, n)]
        axes = figure.add_subplot(-(-len(kinds) // 3), min(len(kinds), 3), i + 1)
        where = [_sparsity(c) for c in own] if sweep else list(range(len(own)))
        for name in dict.fromkeys(name for c in own for name in c.results):
            points = [(x, c.results[name].us) for x, c in zip(where, own, strict=True) if name in c.results]
            known = [(x, us) for x, us in points if us is not None]
            style: dict[str, Any] = {"linewidth": 2.5} if name in (PLAN, PLANLESS) else {"linewidth": 1, "alpha": 0.7}
            axes.plot(*zip(*known, strict=True), "o-" if sweep else "o", label=name, **style) if known else None
        axes.plot(where, [c.floor_us for c in own], "k--" if sweep else "k_", label="floor")
        axes.set(yscale="log", title=f"{dtype}, {n} columns", ylabel="us", xlabel="share of zeros" if sweep else "")
        if not sweep:
            axes.set_xticks(where, [c.matrix for c in own], rotation=60, ha="right", fontsize=7)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
