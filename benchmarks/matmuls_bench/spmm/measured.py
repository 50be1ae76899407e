"""Times every candidate of `matmuls spmm` on one matrix, and checks its result against float64."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from matmuls import sparse
from matmuls.sparse.select import PRODUCTS, Facts, default_kernel

from .. import matrices, timing
from ..machine import copy_rate
from .candidates import CUSPARSE, RIVALS, Operands, Product, _candidates, _cusparse
from .cases import NOT_INSTALLED, PLAN, PLANLESS, TORCH, Case, Result

ROUNDS, CALLS_US = 7, 2e5  # first products: rounds, and microseconds per round (but at least 5 products)
ROUND_US = 5e5  # microseconds for all rounds of a case (but at least 7 rounds)
NEAR = 1.05  # candidates within this factor of the fastest are timed again among themselves
Made = TypeVar("Made")


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


def _checked(prepare: Callable[[], Product], truth: Tensor) -> tuple[Product | None, Result]:
    """A candidate's product and its error, or None and the reason why it was refused."""
    try:
        run = prepare()
        result = run()
        return run, Result(error=_error(result, truth))
    except ModuleNotFoundError:
        return None, Result(refused=NOT_INSTALLED)
    except (RuntimeError, MemoryError) as error:
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

    def race(names: list[str], budget_us: float, most: int) -> dict[str, timing.Timing]:
        if device == "cpu":
            timings = timing.time_on_cpu([[runs[name]] for name in names], budget=0.5)
        else:
            rounds = int(min(most, max(7, budget_us / sum((2 + timing.OWN_BEFORE) * once[name] for name in names))))
            timings = timing.time_warm([runs[name] for name in names], device, rounds, own_before=timing.OWN_BEFORE)
        return dict(zip(names, timings, strict=True))

    timed = race(rest, ROUND_US, 60)
    first = min(timing.seconds for timing in timed.values())
    near = [name for name in rest if timed[name].seconds <= NEAR * first]
    if len(near) > 1:
        timed |= race(near, ROUND_US / 4, 200)
    timed |= dict(zip(slow, timing.time_warm([runs[name] for name in slow], device), strict=True))
    return {
        name: Result(timed[name].seconds * 1e6, r.error, timed[name].spread) if name in timed else r
        for name, r in checked.items()
    }


def _no_news(fraction: float) -> None:
    """Hears how much of a case is done, and does nothing."""


# Shares of the time of a case that lie behind when its results are checked, when they are timed, and when the first
# products are. A case without backward ends there.
CHECKED, TIMED, FIRST = 0.2, 0.5, 0.8


@torch.no_grad()
def measure_case(
    m: Operands,
    n: int,
    copy: float,
    backward: bool,
    against: tuple[str, ...] = RIVALS,
    part: Callable[[float], object] = _no_news,
) -> Case:
    """part: called with the share of the case, from 0 to 1, that is done."""
    b = m.dense_side(n)
    truth = torch.sparse_csr_tensor(m.crow, m.col, m.values.double(), m.matrix.shape) @ b.double()
    made = sparse.plan(m.csr, constant=True)
    # One-time costs of the process, such as loading cuBLAS kernels for a shape, belong to neither time.
    made @ b, sparse.spmm(m.csr, b)
    once, _ = _microseconds(lambda: sparse.spmm(m.csr, b), m.device)
    part(CHECKED / 2)
    runs, checked = _all_checked(m, b, made, truth, against)
    part(CHECKED)
    del truth
    results = _time(runs, checked, m.device)
    part(TIMED)
    first = _first_products(m, b, once)
    part(FIRST)
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
        results=results,
        chosen=default_kernel(Facts(made._pattern, n, m.dtype, made.device)) if chosen is None else chosen.chosen,
        plan_bytes=made.nbytes,
        **first,
    )
    return _with_backward(case, m, b, made) if backward else case


def _all_checked(
    m: Operands, b: Tensor, made: sparse.SparsePlan, truth: Tensor, against: tuple[str, ...]
) -> tuple[dict[str, Product], dict[str, Result]]:
    """The products of the candidates that run, and every candidate's error."""
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
    return runs, checked


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
    mib = {name: timing.peak_memory(run, m.device) / 2**20 for name, run in runs.items()}
    return replace(case, backward=_time(runs, checked, m.device), backward_mib=mib)


def measure_all(
    sources: list[str],
    dtypes: list[torch.dtype],
    widths: list[int],
    device: str,
    refused: list[str],
    backward: bool = False,
    against: tuple[str, ...] = RIVALS,
    part: Callable[[str, float], object] = lambda name, done: None,
) -> Iterator[Case]:
    """Measure every case that can be read and fits in memory; for the others append the reason to `refused`.

    against: the rivals to time, from RIVALS. part: called with what runs and how many cases are done, in fractions too.
    """
    copy = copy_rate(2**29 if device == "cuda" else 2**25, device)

    def attempt(what: str, make: Callable[[], Made]) -> Made | None:
        try:
            return make()
        except (ValueError, OSError, MemoryError, RuntimeError, OverflowError) as error:
            refused.append(what + _first_line(error))
            return None

    each = len(dtypes) * len(widths)
    for i, source in enumerate(sources):
        part(f"reading {source}", i * each)
        matrix = attempt("", partial(matrices.load, source))  # its errors name the source
        if matrix is None:
            continue
        for j, dtype in enumerate(dtypes):
            name = f"{source}, {str(dtype).removeprefix('torch.')}"
            operands = attempt(f"{name}: ", partial(Operands, matrix, dtype, device))
            if operands is None:
                continue
            for k, n in enumerate(widths):
                what, done = f"{name}, {n} columns", i * each + j * len(widths) + k

                def news(share: float, what: str = what, done: int = done) -> None:
                    part(what, done + share)

                news(0.0)
                case = attempt(f"{what}: ", partial(measure_case, operands, n, copy, backward, against, news))
                if case is not None:
                    yield case
