"""`matmuls tune`: searches the fastest tile sizes of the masked kernels for a shape on this GPU.

- Each trial is checked against torch and timed as a CUDA graph over several sets of inputs, which exceed the L2 cache
  unless the shape is small (see `sets_of_inputs`).
- Trials run in a child process; one that crashes or hangs loses only its own result.
- Every result is appended to a journal at once, so that a stopped search continues where it ended.
- At the end the best trials, the default and the tiles in use are timed together; those in use stay unless others are
  faster. If none of them has a time, nothing is written.
"""

import fcntl
import json
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import product
from operator import attrgetter, ne
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import timing
from .masked import plain
from .triton import configs
from .triton.configs import Entry, Gpu, Tiles

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FINALISTS = 3  # best trials that are timed together with the default and the tiles in use at the end
SETS = 16  # most sets of inputs of a trial: 4 MB each, of 1,024 features in bfloat16, exceed the 50 MB L2 of an H200
PART = 1 << 24  # elements of a result that are compared at once: 64 MiB in float32
Measure = Callable[["Problem", list[Tiles]], list[float]]  # seconds of each of the tiles
Results = tuple[Tensor, ...]


class Problem(NamedTuple):
    """One kernel on one shape."""

    operator: str
    m: int
    n: int
    k: int
    dtype: str


class Found(NamedTuple):
    """The result of a search. Both times are from one measurement; if that failed, each of the tiles was measured
    alone."""

    before: Tiles
    before_us: float  # 0: they failed
    entry: Entry | None  # None: nothing has a time


class Failed(Exception):
    """A trial without a time: it was refused, gave a wrong result, crashed or hung."""


def problems(group: str, k: int, n: int, ms: Sequence[int], dtype: str) -> list[Problem]:
    """The kernels of masked_linear (K to N features) or masked_ffn (hidden size K, intermediate size N), forward and
    backward, for each number of rows. ValueError on an unknown group or dtype, or sizes below 1."""
    shapes = {
        "masked_linear": [("masked_linear", n, k), ("masked_linear_t", k, n), ("masked_weights", n, k)],
        "masked_ffn": [
            ("masked_ffn_gate_up", n, k),
            ("masked_ffn_down", k, n),
            ("masked_ffn_gradient", n, k),
            ("masked_ffn_input", k, n),
            ("masked_ffn_weights", n, k),
        ],
    }
    if group not in shapes:
        raise ValueError(f"there is nothing to tune named {group}; there are {', '.join(shapes)}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype is {', '.join(DTYPES)}, got {dtype}")
    if min((k, n, *ms)) < 1:
        raise ValueError(f"--k, --n and --m are at least 1, got {min((k, n, *ms))}")
    found = [Problem(op, m, n_, k_, dtype) for m in ms for op, n_, k_ in shapes[group]]
    if group == "masked_linear":
        from .triton.masked_gradients import from_copies

        for m in ms:
            op = from_copies(m, n, k, DTYPES[dtype].itemsize)
            found += [Problem(op, m, *((n, k) if op == "masked_few_weights" else (k, n)), dtype)] if op else []
    return list(dict.fromkeys(found))


# -------------------------------------------------------------------------------------------------------------- space


def _fits(t: Tiles, p: Problem, gpu: Gpu) -> bool:
    size, sums = DTYPES[p.dtype].itemsize, 2 if p.operator == "masked_ffn_gate_up" else 1
    sizes: tuple[tuple[int, int], ...]
    if p.operator in configs.WEIGHTS:
        stage = t.depth * (t.rows + t.columns)
        sizes = ((t.rows, p.n), (t.columns, p.k))
    else:
        stage = t.depth * (t.rows + sums * t.columns)
        sizes = ((t.rows, p.m), (t.columns, p.n), (t.depth, p.k))
    numbers = sums * t.rows * t.columns // (32 * t.warps)  # float32 accumulators per thread
    return (
        t.stages * stage * size <= gpu.kilobytes * 1024
        and 8 <= numbers <= (160 if sums == 1 and t.pieces > 1 else 128)
        and all(tile <= max(16, 2 * have) for tile, have in sizes)
    )


def candidates(p: Problem, gpu: Gpu) -> list[Tiles]:
    """The tiles to try: the default first, then by the number of fields that differ from it."""
    default = configs.default(p.operator, configs.bucket(p.m), p.n, p.k, DTYPES[p.dtype].itemsize, gpu)
    small = (16, 32) if p.m <= 64 and p.operator not in configs.WEIGHTS else ()
    sides, depths = (*small, 64, 128, 256), (32, 64, 128)
    found = set()
    if p.operator == "masked_few_weights":
        for rows, columns, depth, warps, stages, group, pieces in product(
            sides, sides, (32, 64), (4, 8), (2, 3, 4), (2, 4, 8), (1, 2, 4)
        ):
            if gpu.capability >= (9, 0):
                found.add(Tiles(rows, columns, depth, warps, stages, group, tma=True, pieces=pieces))
    elif p.operator in configs.WEIGHTS:
        splits = sorted({1, 2, 3, 4, 6, 8, 12, 16, default.split})
        wide, narrow = (p.n, p.k) if p.operator == "masked_ffn_weights" or p.n < p.k else (p.k, p.n)
        for rows, columns, depth, warps, stages, group, split, tma in product(
            sides, sides, depths, (4, 8), (3, 4, 5), (4, 8), splits, (False, True)
        ):
            if tma and (gpu.capability < (9, 0) or narrow % rows or wide % columns):
                continue
            if split <= max(1, p.m // 512):
                found.add(
                    Tiles(rows, columns, depth, warps, stages, group, tma=tma, pieces=4 if tma else 1, split=split)
                )
    else:
        loops = ((False, False), (True, False), (True, True))
        for rows, columns, depth, warps, stages, group, (persistent, flatten), tma, pieces in product(
            sides, sides, depths, (4, 8), (3, 4, 5), (4, 8, 16), loops, (False, True), (1, 2, 4, 8)
        ):
            if tma and gpu.capability < (9, 0):
                continue
            if pieces > 1 and not flatten and p.operator not in ("masked_ffn_gate_up", "masked_ffn_gradient"):
                continue  # it only saves shared memory, which the next tile's loads use
            found.add(Tiles(rows, columns, depth, warps, stages, group, persistent, flatten, tma, pieces))
            few = -(-p.m // rows) * -(-p.n // columns) < 2 * gpu.multiprocessors
            if few and tma and not persistent and p.operator in ("masked_linear", "masked_linear_t"):
                found.add(Tiles(rows, columns, depth, warps, stages, group, tma=tma, pieces=pieces, split=2))
    fit = [t for t in found - {default} if _fits(t, p, gpu)]
    return [default, *sorted(fit, key=lambda t: (differences(t, default), values_of(t)))]


# -------------------------------------------------------------------------------------------------------------- search


@dataclass
class Journal:
    """All trials so far, in a file with one JSON line each, from which a stopped search continues."""

    path: Path
    version: str = triton.__version__
    seconds: dict[tuple[Problem, Tiles], float | None] = field(default_factory=dict)  # None: it failed

    def __post_init__(self) -> None:
        if not self.path.is_file():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                e = json.loads(line)
                if e["triton"] == self.version:
                    seconds = None if e["seconds"] is None else float(e["seconds"])
                    self.seconds[Problem(**e["problem"]), Tiles(**e["tiles"])] = seconds
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue  # a truncated line, from a stopped search

    def note(self, problem: Problem, tiles: Tiles, seconds: float | None, why: str = "") -> None:
        self.seconds[problem, tiles] = seconds
        line = {"problem": problem._asdict(), "tiles": asdict(tiles), "seconds": seconds, "triton": self.version}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "why": why[:200]} if why else line) + "\n")


values_of = attrgetter(*(f.name for f in fields(Tiles)))


def differences(a: Tiles, b: Tiles) -> int:
    """The number of fields in which a and b differ."""
    return sum(map(ne, values_of(a), values_of(b)))


def search(
    problem: Problem,
    tried: Sequence[Tiles],
    measure_: Measure,
    journal: Journal,
    budget: float,
    clock: Callable[[], float] = time.monotonic,
    ahead: "Compilers | None" = None,
) -> Iterator[tuple[Tiles, float | None]]:
    """Run trials until `budget` seconds are spent; yield each with its time, or None if it failed.

    Order: tried[0] and tried[1], then always the tiles that differ in the fewest fields from the best so far. Trials in
    the journal are not repeated. `ahead` compiles the next few before they are timed.
    """
    begin = clock()
    known = {t: journal.seconds[problem, t] for t in tried if (problem, t) in journal.seconds}
    rest = [t for t in tried if t not in known]
    leader = min((tried[0], *known), key=lambda t: known.get(t) or math.inf)
    lead, width = known.get(leader) or math.inf, ahead.width if ahead else 1
    compiled: list[Tiles] = []
    while rest and clock() - begin <= budget:
        if not compiled:
            # stable: ties keep the order of `tried`
            compiled = sorted(rest, key=lambda t: (t not in tried[:2], differences(t, leader)))[:width]
            if ahead:
                ahead(problem, compiled)
        tiles = compiled.pop(0)
        rest.remove(tiles)
        try:
            (seconds,) = measure_(problem, [tiles])
            journal.note(problem, tiles, seconds)
            if seconds < lead:
                leader, lead = tiles, seconds
        except Failed as error:
            seconds = None
            journal.note(problem, tiles, None, str(error))
        yield tiles, seconds


def together(problem: Problem, tiles: list[Tiles], measure_: Measure) -> list[float]:
    """Seconds of each of the tiles, infinite if it fails. If a measurement of all fails, each is measured alone."""
    try:
        return measure_(problem, tiles)
    except Failed:
        return [s for t in tiles for s in together(problem, [t], measure_)] if tiles[1:] else [math.inf]


def best(problem: Problem, before: Tiles, default: Tiles, measure_: Measure, journal: Journal) -> Found:
    """Time the best trials, the default and the tiles in use together; `before` stays unless others are faster."""
    known = {t: s for (p, t), s in journal.seconds.items() if p == problem and s is not None}
    trials = sorted(known.keys() - {before, default}, key=lambda t: known[t])[:FINALISTS]
    finalists = list(dict.fromkeys((before, default, *trials)))
    seconds = dict(zip(finalists, together(problem, finalists, measure_), strict=True))
    fastest = min(finalists, key=lambda t: seconds[t])  # the first of equals
    us = {t: round(s * 1e6, 3) if s < math.inf else 0.0 for t, s in seconds.items()}
    op, m, n, k, dtype = problem
    entry = Entry(op, k, n, configs.bucket(m), dtype, journal.version, fastest, us[fastest], us[default])
    return Found(before, us[before], entry if seconds[fastest] < math.inf else None)


def merge(path: Path, name: str, new: Sequence[Entry]) -> None:
    """Write the new entries to the user's file; they replace older ones of the same shape.

    Entries that this version does not know are kept. An unreadable file is renamed to *.bad, with a warning.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # against concurrent searches; released on close
        try:
            old, unknown = configs.load(path, name)
        except configs.UNREADABLE as error:
            bad = path.replace(path.with_suffix(".bad"))
            warnings.warn(f"matmuls: {path} is ignored, and is now {bad}: {error}", stacklevel=2)
            old, unknown = [], []
        entries = {e[:6]: e for e in (*old, *new)}
        configs.write(path, name, sorted(entries.values(), key=lambda e: e[:6]), (e for e, _ in unknown))


# ----------------------------------------------------------------------------------------------------------- a process


def _serve(connection: Any, measure_: Measure) -> None:
    while (job := connection.recv()) is not None:
        try:
            connection.send(("seconds", measure_(*job)))
        except Failed as error:
            connection.send(("failed", str(error)))
        except Exception as error:  # the CUDA context may be broken: the next trial gets a new process
            connection.send(("crashed", f"{type(error).__name__}: {error}"))
            return


class Process:
    """Runs `measure_` in a child process, which is replaced after a crash or a trial longer than `limit` seconds."""

    def __init__(self, measure_: Measure, limit: float = 120.0) -> None:
        self._measure, self._limit = measure_, limit
        self._process: Any = None
        self._connection: Any = None

    def __call__(self, problem: Problem, tiles: list[Tiles]) -> list[float]:
        if self._process is None:
            context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._measure), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._connection.send((problem, tiles))
            if not self._connection.poll(self._limit):
                raise Failed(f"no result in {self._limit:.0f} s")
            kind, answer = self._connection.recv()
        except (EOFError, OSError, Failed) as error:
            code = self._process.exitcode
            self.close()
            raise Failed(str(error) or f"the process died, exit code {code}") from None
        if kind == "crashed":
            self.close()
        if kind != "seconds":
            raise Failed(answer)
        return list(answer)

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._process = None


class Compilers:
    """`width` processes that run each of the tiles once, to fill Triton's disk cache.

    Nothing is timed meanwhile. A failure is ignored here: the trial fails again and reports it.
    """

    def __init__(self, compile_: Measure, width: int) -> None:
        self.width = width
        self._processes = [Process(compile_) for _ in range(width)]
        self._threads = ThreadPoolExecutor(width)

    def __call__(self, problem: Problem, tiles: list[Tiles]) -> None:
        waiting = [self._threads.submit(p, problem, [t]) for p, t in zip(self._processes, tiles, strict=False)]
        for each in waiting:
            each.exception()

    def close(self) -> None:
        self._threads.shutdown()
        for process in self._processes:
            process.close()


# ------------------------------------------------------------------------------------------------------------ on a GPU


def _call(p: Problem, seed: int, device: str = "cuda") -> tuple[Callable[[], Results], Callable[[], Results]]:
    """A kernel on random inputs and its torch reference. Each row belongs to the first expert with probability 1/2, or
    1/20 if the seed is odd."""
    from .triton import masked_ffn, masked_gradients, masked_linear, masked_weights
    from .triton.mask_plan import plan

    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).div_(shape[-1] ** 0.25).to(DTYPES[p.dtype])

    rows, counts = plan(torch.rand(p.m, generator=generator, device=device) < (0.5, 0.05)[seed % 2])
    order = rows.long()
    first = torch.zeros(p.m, 1, dtype=torch.bool, device=device)
    first[order] = (torch.arange(p.m, device=device) < counts[0])[:, None]
    by = plain.Blend(first)

    def unsorted(x: Tensor) -> Tensor:
        return torch.empty_like(x).index_copy_(0, order, x)

    name, m, n, k, _ = p
    if name in ("masked_weights", "masked_ffn_weights"):
        g, x, gather = draw(m, n), draw(m, k), name == "masked_weights"
        both = partial(masked_weights.weight_gradients, g, x, rows, counts, gather_g=gather)
        return both, lambda: by.weights(g if gather else unsorted(g), x, True, True)
    if name == "masked_few_weights":
        g, x, w, u = draw(m, n), draw(m, k), draw(n, k), draw(n, k)
        every = partial(masked_gradients.gradients, g, x, w, u, rows, counts)
        return every, lambda: (by.linear(g, w.T, u.T), *by.weights(g, x, True, True))
    if name in ("masked_linear", "masked_linear_t", "masked_ffn_down"):
        x, (w, u) = draw(m, k), [draw(k, n).T if name == "masked_linear_t" else draw(n, k) for _ in range(2)]
        return (
            lambda: (masked_linear.product(x, w, u, rows, counts, operator=name),),
            lambda: (by.linear(unsorted(x) if name == "masked_ffn_down" else x, w, u),),
        )
    if name == "masked_ffn_input":
        x, w, u, v, z = draw(m, 2 * k), draw(k, n).T, draw(k, n).T, draw(k, n).T, draw(k, n).T
        return (
            lambda: (masked_linear.product(x, w, u, rows, counts, pair=(v, z), operator=name),),
            lambda: (by.linear(unsorted(x), torch.cat([w, v], 1), torch.cat([u, z], 1)),),
        )
    if name == "masked_ffn_gate_up":
        x, w1, w3, u1, u3 = draw(m, k), draw(n, k), draw(n, k), draw(n, k), draw(n, k)

        def expected() -> Results:
            gate, up = by.linear(x, w1, u1)[order], by.linear(x, w3, u3)[order]
            return torch.nn.functional.silu(gate) * up, torch.cat([gate, up], 1)

        return lambda: masked_ffn.gate_up(x, w1, w3, u1, u3, rows, counts, True), expected
    dy, w2, u2, t = draw(m, k), draw(k, n), draw(k, n), draw(m, 2 * n)

    def gradients() -> Results:
        g = by.linear(dy, w2.T, u2.T)[order]
        gate, up = t.chunk(2, 1)
        s = gate.sigmoid()
        silu = gate * s
        return torch.cat([g * up * (s + silu * (1 - s)), g * silu], 1), silu * up

    return lambda: masked_ffn.hidden_gradients(dy, w2, u2, t, rows, counts), gradients


def check(p: Problem, tiles: Tiles, ours: Results, truth: Results) -> None:
    """Raise Failed if a result differs from torch's by more than the rounding of the dtype; one that torch finds to be
    zero, as the gradient of the weights of an expert without rows, must be exactly zero."""
    allowed = max(4 * torch.finfo(DTYPES[p.dtype]).eps, 1e-5)
    norm = torch.linalg.vector_norm
    for mine, other in zip(ours, truth, strict=True):
        parts = zip(*(t.chunk(-(-t.numel() // PART)) for t in (mine, other)), strict=True)
        norms = [torch.stack([norm(b.float()), norm(a - b.float())]) for a, b in parts]
        scale, off = norm(torch.stack(norms), dim=0).tolist()
        off = off / scale if scale else math.inf if off else 0.0  # NaN counts as true
        if not off <= allowed:
            raise Failed(f"{p.operator} with {tiles} is off by {off:.2e}, {allowed:.2e} allowed")


@torch.no_grad()
def compile_on_gpu(p: Problem, tiles: list[Tiles]) -> list[float]:
    """Run each of the tiles once, which compiles them; the returned times are 0."""
    ours, _ = _call(p, 0)
    for t in tiles:
        configs.forced[p.operator] = t
        ours()
    torch.cuda.synchronize()
    return [0.0] * len(tiles)


def sets_of_inputs(p: Problem, l2: int) -> int:
    """The number of sets of inputs that a trial is timed on, half of them for each share of rows: calls on all of them
    read and write at least twice the bytes of the L2, or there are SETS. Sets below l2 / SETS bytes stay in the L2."""
    size = DTYPES[p.dtype].itemsize * (p.m * (p.n + p.k) + 2 * p.n * p.k)
    return max(2, min(SETS, 2 * -(-l2 // size)))


@torch.no_grad()
def measure_on_gpu(p: Problem, tiles: list[Tiles]) -> list[float]:
    """Seconds of each of the tiles, after their results were checked, one call after the other."""
    calls = [_call(p, seed) for seed in range(sets_of_inputs(p, timing.l2_bytes(torch.device("cuda"))))]

    def run(t: Tiles, ours: Callable[[], Results]) -> Results:
        configs.forced[p.operator] = t
        return ours()

    try:
        for ours, expected in calls[:2]:
            truth = expected()
            for t in tiles:
                torch.use_deterministic_algorithms(True)  # fills new results with NaN: unwritten elements are found
                result = run(t, ours)
                torch.use_deterministic_algorithms(False)
                check(p, t, result, truth)
                del result
            del truth
        rivals = [[lambda t=t, ours=ours: run(t, ours) for ours, _ in calls] for t in tiles]
        return [one.seconds for one in timing.time_on_gpu(rivals, 0.05)]
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as error:
        raise Failed(str(error)) from None
    finally:
        configs.forced.pop(p.operator, None)
        torch.use_deterministic_algorithms(False)


def tune(
    todo: Sequence[Problem],
    gpu: Gpu,
    folder: Path,
    measure_: Measure,
    budget: float,
    report: Callable[[Problem, Tiles, float | None], None] = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
    ahead: Compilers | None = None,
) -> list[Found]:
    """Search every problem within its share of the budget (seconds), from the tiles in use; save each winner at once to
    the user's file."""
    path = configs.file_of(folder, gpu.name)
    journal = Journal(path.with_suffix(".trials.jsonl"))
    found = []
    end = clock() + budget
    for at, problem in enumerate(todo):
        default, *others = candidates(problem, gpu)
        (op, m, *_), known, here = problem, configs.entries(gpu, folder), (journal.version, gpu.multiprocessors)
        before = configs.choose(*known, op, configs.bucket(m), problem.n, problem.k, problem.dtype, *here) or default
        tried = list(dict.fromkeys((before, default, *others)))
        share = (end - clock()) / (len(todo) - at)
        for tiles, seconds in search(problem, tried, measure_, journal, share, clock, ahead):
            report(problem, tiles, seconds)
        found.append(best(problem, before, default, measure_, journal))
        if entry := found[-1].entry:
            merge(path, gpu.name, [entry])
    configs.reload()
    return found
