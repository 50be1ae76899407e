"""`matmuls bench`: times every operation of the table against the alternatives a user would pick, in one run.

- Inputs are random. All rivals get the same inputs, layouts and precision; their rounds alternate.
- GPU: a CUDA graph of the same call over several sets of inputs, enough to exceed the L2 cache but at most 128
  (the inputs of the smallest cases stay in L2, for all rivals).
- In place: the overwritten tensor is restored before every round, untimed.
- Errors: each result is compared with the float64 reference in the same run.
- Roof: the measured copy bandwidth and the fastest measured matrix product in the case's dtype.
"""

import json
import multiprocessing
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import custom_mm

from . import files, measure
from .specs import TABLE, Call, Case, Draw, Spec

GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CPU_DTYPES = (torch.float32,)
CPU_FLOPS = 5e9  # operations (see `_cost`) of the largest case that is run on a CPU
QUICK_FLOPS = 3e8  # the same with --quick
PRECOMPILE_SECONDS = 300  # limit of `precompile`; the rest is compiled when it is measured
COMPILED = "torch.compile"
DENSE = "one dense product"


@dataclass(frozen=True)
class Row:
    """One measured case.

    ratio: the rival's time or memory over ours (higher is better). roof: the least possible time over ours.
    """

    operation: str
    case: str
    dtype: str
    kind: str  # "gpu", "cpu", "host" or "memory"
    rival: str  # the fastest rival
    ratio: float | None  # None: ours allocates no memory
    ours_us: float | None = None
    rival_us: float | None = None
    rivals_us: dict[str, float] = field(default_factory=dict)  # every rival's time
    tflops: float | None = None
    tbps: float | None = None
    roof: float | None = None
    error: float | None = None
    rival_error: float | None = None
    spread: float | None = None
    extra_bytes: int | None = None  # allocated by ours at its peak, results excluded
    ours_mib: float | None = None  # peak of a call, results included
    rival_mib: float | None = None


@dataclass(frozen=True)
class Roofs:
    """Bytes (copy) and floating-point operations (product, by dtype) per second that the device reached in this run."""

    copy: float
    product: dict[str, float]

    def seconds(self, flops: int, nbytes: int, dtype: str) -> float:
        return max(flops / self.product[dtype] if flops else 0.0, nbytes / self.copy)


@dataclass(frozen=True)
class Job:
    """One case to measure; functions that the case leaves out are its row's."""

    spec: Spec
    case: Case
    dtype: torch.dtype
    device: str
    kind: str  # as in Row

    @property
    def label(self) -> str:
        kind = {"host": " host time", "memory": " memory"}.get(self.kind, "")
        return f"{self.spec.name} {self.case.label}{kind} {self.precision}"

    @property
    def precision(self) -> str:
        return "TF32" if self.case.tf32 else _name(self.dtype)

    @property
    def call(self) -> Callable[..., Any]:
        return self.case.call or self.spec.call

    @property
    def reference(self) -> Callable[..., Any]:
        return self.case.reference or self.spec.reference

    @property
    def rival(self) -> str:
        return self.case.rival or self.spec.rival

    @property
    def in_place(self) -> bool:
        return self.spec.in_place if self.case.in_place is None else self.case.in_place

    @property
    def compiled(self) -> bool:
        """True if torch.compile is a rival. It never is on a CPU, where compiling takes longer than everything else."""
        return self.spec.compiled and self.kind == "gpu"

    def rivals(self) -> dict[str, Callable[..., Any]]:
        """The alternatives by name, among them DENSE, a dense product of the same size with a different result."""
        rivals = {self.rival: self.reference, **self.case.others}
        if self.case.dense is not None:
            rivals[DENSE] = self.case.dense
        if self.compiled:
            torch.compiler.reset()  # above the recompilation limit a function runs eagerly
            rivals[COMPILED] = torch.compile(self.reference, dynamic=False, fullgraph=True)  # no graph breaks
        return rivals

    def draw(self, seed: int = 0) -> Call:
        return self.case.draw(Draw(self.dtype, self.device, seed))

    def own(self, call: Call) -> Call:
        """The call for ours; an in-place operation gets a copy of its first argument."""
        if not self.in_place:
            return call
        return Call((call.args[0].clone(memory_format=torch.preserve_format), *call.args[1:]), call.kwargs)

    def row(self, **measured: Any) -> Row:
        return Row(self.spec.name, self.case.label, self.precision, self.kind, **measured)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def copy_rate(count: int, device: str) -> float:
    """Bytes read + written per second, by torch's copy or an elementwise kernel, the faster of both."""
    source, target = (torch.randn(count, device=device) for _ in range(2))
    timings = measure.time_on(device, [[lambda: target.copy_(source)], [lambda: torch.neg(source, out=target)]])
    return 2 * source.nbytes / min(timing.seconds for timing in timings)


def measure_roofs(device: str, dtypes: list[torch.dtype], quick: bool) -> Roofs:
    """Rate of a copy of 2 GB (GPU) or 128 MB (CPU, quick), and of square products, the best over the sizes."""
    copy = copy_rate(2**25 if device == "cpu" or quick else 2**29, device)
    sizes = (512, 1024) if device == "cpu" or quick else (2048, 4096, 8192)
    product = {}
    for dtype in dtypes:
        draw = Draw(dtype, device)
        best = 0.0
        for n in sizes:
            a, b = draw(n, n), draw(n, n)
            seconds = measure.time_on(device, [[partial(torch.mm, a, b, out=torch.empty_like(a))]])[0].seconds
            best = max(best, 2 * n**3 / seconds)
        product[_name(dtype)] = best
    return Roofs(copy, product)


def _run(function: Callable[..., Any], call: Call) -> list[Tensor]:
    """The tensors of the result: one tensor, or a tuple of tensors and None."""
    result = function(*call.args, **call.kwargs)
    return [result] if isinstance(result, Tensor) else [x for x in result if x is not None]


def _flops(job: Job, call: Call) -> int:
    if not job.spec.flops:
        return 0
    with FlopCounterMode(display=False) as counter:
        _run(job.case.dense or job.reference, call)
    return counter.get_total_flops()


def _wide(t: Tensor) -> Tensor:
    """Floating-point tensors as float64, complex ones as complex128; masks and indices unchanged."""
    return t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t


def _error(x: Tensor, truth: Tensor) -> float:
    return (torch.linalg.vector_norm(x.to(truth.dtype) - truth) / torch.linalg.vector_norm(truth)).item()


def _errors(job: Job, call: Call, rivals: dict[str, Callable[..., Any]]) -> list[float | None]:
    """Relative errors of ours and each rival against the float64 reference; the largest over several results.

    None for DENSE, which computes something else.
    """
    truths = _run(job.reference, call.map(_wide))

    def worst(function: Callable[..., Any], c: Call) -> float:
        errors = [_error(x, truth) for x, truth in zip(_run(function, c), truths, strict=True)]
        return torch.tensor(errors).max().item()  # NaN if any is

    return [worst(job.call, job.own(call)), *(None if n == DENSE else worst(f, call) for n, f in rivals.items())]


def _bytes(job: Job, call: Call) -> tuple[int, int]:
    """Bytes that must be read or written, and bytes that ours allocates at its peak, results excluded."""
    own = job.own(call)
    results = _run(job.call, own)
    moved = job.case.moved(call) if job.case.moved else sum(t.nbytes for t in (*call.tensors, *results))
    given = {t.untyped_storage().data_ptr() for t in own.tensors}
    new = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in results) if s.data_ptr() not in given}
    return moved, measure.peak_memory(lambda: _run(job.call, own), job.device) - sum(new.values())


def _sets(job: Job, call: Call) -> list[Call]:
    """The call on enough sets of inputs to exceed the L2 cache twice, at most 128; on a CPU on one set."""
    if job.device == "cpu":
        return [call]
    inputs = sum(t.nbytes for t in call.tensors)
    sets = max(1, min(128, -(-2 * measure.l2_bytes(torch.device("cuda")) // inputs)))
    return [call, *(job.draw(seed) for seed in range(1, sets))]


def _time(job: Job, call: Call, rivals: dict[str, Callable[..., Any]], budget: float) -> list[measure.Timing]:
    """Times of ours and each rival."""
    calls = _sets(job, call)
    own = [job.own(c) for c in calls]

    def restore() -> None:
        for mine, pristine in zip(own, calls, strict=True):
            mine.args[0].copy_(pristine.args[0])

    def bind(function: Callable[..., Any], each: list[Call]) -> list[measure.Run]:
        return [partial(function, *c.args, **c.kwargs) for c in each]

    runs = [bind(job.call, own), *(bind(rival, calls) for rival in rivals.values())]
    return measure.time_on(job.device, runs, budget, restore if job.in_place else None)


@torch.no_grad()
def measure_case(job: Job, roofs: Roofs, budget: float) -> Row:
    """Compute the errors of one case against float64, then time it."""
    call, rivals = job.draw(), job.rivals()
    error, *rival_errors = _errors(job, call, rivals)
    nbytes, extra = _bytes(job, call)
    flops = _flops(job, call)
    if job.device == "cuda":
        torch.cuda.empty_cache()  # of the float64 reference: during graph capture the allocator cannot free it
    ours, *others = _time(job, call, rivals, budget)
    fastest = min(range(len(others)), key=lambda i: others[i].seconds)
    names = list(rivals)
    return job.row(
        ours_us=ours.seconds * 1e6,
        rival=names[fastest],
        rival_us=others[fastest].seconds * 1e6,
        rivals_us={name: timing.seconds * 1e6 for name, timing in zip(names, others, strict=True)},
        ratio=others[fastest].seconds / ours.seconds,
        tflops=flops / ours.seconds / 1e12 if flops else None,
        tbps=nbytes / ours.seconds / 1e12,
        roof=roofs.seconds(flops, nbytes, _name(job.dtype)) / ours.seconds,
        error=error,
        rival_error=rival_errors[fastest],
        spread=ours.spread,
        extra_bytes=extra,
    )


def measure_memory(job: Job) -> Row:
    """Peak memory of a call; a first call has already allocated workspaces."""
    call = job.draw()

    def peak(function: Callable[..., Any], c: Call) -> float:
        _run(function, c)
        return measure.peak_memory(lambda: _run(function, c), job.device) / 2**20

    ours, rival = peak(job.call, job.own(call)), peak(job.reference, call)
    return job.row(rival=job.rival, ratio=rival / ours if ours else None, ours_mib=ours, rival_mib=rival)


def measure_host(job: Job) -> Iterator[Row]:
    """Host time of one small call, without and with autograd."""
    for gradient in (False, True) if job.spec.gradient and not job.in_place else (False,):
        call = job.draw()
        if gradient:
            call = call.map(lambda t: t.requires_grad_(t.is_floating_point() or t.is_complex()))
        functions = (job.call, job.spec.host_reference or job.reference)
        mine, rival = measure.time_of_host([partial(f, *call.args, **call.kwargs) for f in functions], job.device)
        row = job.row(
            ours_us=mine.seconds * 1e6,
            rival=job.rival,
            rival_us=rival.seconds * 1e6,
            rivals_us={job.rival: rival.seconds * 1e6},
            ratio=rival.seconds / mine.seconds,
            spread=mine.spread,
        )
        yield replace(row, case=f"{row.case}, with a gradient") if gradient else row


def measure_job(job: Job, roofs: Roofs, budget: float = 0.1) -> list[Row]:
    before = torch.get_float32_matmul_precision()
    if job.case.tf32:
        torch.set_float32_matmul_precision("high")
    try:
        if job.kind == "host":
            return list(measure_host(job))
        return [measure_memory(job) if job.kind == "memory" else measure_case(job, roofs, budget)]
    finally:
        torch.set_float32_matmul_precision(before)


def plan(names: list[str], device: str, dtypes: list[torch.dtype], quick: bool) -> list[Job]:
    """The cases to run on `device`: of the operations `names` (empty: all) in `dtypes` (empty: the operation's own)."""
    known = {spec.name: spec for spec in TABLE if spec.cases or spec.memory_cases}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no benchmark named {', '.join(unknown)}; there are {', '.join(known)}")
    limit = QUICK_FLOPS if quick else CPU_FLOPS if device == "cpu" else float("inf")
    jobs = [job for name, spec in known.items() if not names or name in names for job in _jobs(spec, device, dtypes)]
    return [job for job in jobs if job.kind == "host" or _cost(job) <= limit]


def _jobs(spec: Spec, device: str, dtypes: list[torch.dtype]) -> Iterator[Job]:
    default = (spec.bench_dtypes or GPU_DTYPES) if device == "cuda" else (spec.cpu_bench_dtypes or CPU_DTYPES)
    wanted = [dtype for dtype in dtypes or default if dtype in spec.dtypes]
    for dtype in wanted:
        for kind, cases in (("gpu" if device == "cuda" else "cpu", spec.cases), ("memory", spec.memory_cases)):
            yield from (
                Job(spec, case, dtype, device, kind)
                for case in cases
                if case.device in (None, device) and (dtype == torch.float32 or not case.tf32)
            )
    if spec.host_case is not None and wanted:
        yield Job(spec, spec.host_case, wanted[0], device, "host")


class _MetaDraw(Draw):
    """Draws meta tensors: shapes without values."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, "meta"

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")


def _cost(job: Job) -> float:
    """Floating-point operations of a case, or ten for each element of its inputs where that is more."""
    with torch.device("meta"):
        call = job.case.draw(_MetaDraw(job.dtype))
        return max(_flops(job, call), 10 * sum(t.numel() for t in call.tensors))


def precompile(workers: int, names: list[str], device: str, dtypes: list[torch.dtype], quick: bool) -> int:
    """Compile the rivals' torch.compile kernels into inductor's disk cache, split over `workers` processes.

    Returns how many processes failed or timed out; what they did not compile is compiled when it is measured.
    """
    compiled = [job for job in plan(names, device, dtypes, quick) if job.compiled]
    workers = min(workers, len(compiled))
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    processes = [
        context.Process(target=_compile_share, args=(k, workers, names, device, dtypes, quick), daemon=True)
        for k in range(workers)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + PRECOMPILE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    return sum(process.exitcode != 0 for process in processes)


@torch.no_grad()
def _compile_share(
    share: int, shares: int, names: list[str], device: str, dtypes: list[torch.dtype], quick: bool
) -> None:
    """Body of one process: compile every `shares`-th case from `share` on; report failures on stderr, exit status 1."""
    from torch._inductor import config

    config.compile_threads = 1  # the processes are parallel already
    failed = False
    for job in [job for job in plan(names, device, dtypes, quick) if job.compiled][share::shares]:
        try:
            _run(job.rivals()[COMPILED], job.draw())
            torch.cuda.empty_cache()  # other processes share the GPU
        except Exception as error:
            print(f"{job.label}: {error}", file=sys.stderr)
            failed = True
    sys.exit(int(failed))


def environment(device: str) -> dict[str, Any]:
    """The machine, versions, command and commit of a measurement."""
    # an installed copy may lie in another repository
    ours = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    changes = _git("status", "--porcelain", "--", ":/src", ":/custom_mm", ":/matmuls") if ours else None
    processes = os.environ.get("LOCAL_WORLD_SIZE")  # set by torchrun
    launcher = ["torchrun", f"--nproc-per-node={processes}", "-m"] if processes else []
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*launcher, "matmuls", *sys.argv[1:]]),
        "commit": os.environ.get("MATMULS_COMMIT") or (_git("rev-parse", "HEAD") if ours else None),
        "modified": None if changes is None else bool(changes),
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "build": custom_mm.build_info(),
        "driver": _driver() if device == "cuda" else None,
    }


def _cpu() -> str:
    """The CPU's name where Linux knows it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, named), platform.processor() or platform.machine())


def _git(*args: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *args], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return None


def save(path: Path, rows: list[Row], roofs: Roofs, device: str, *, complete: bool = True) -> None:
    facts = environment(device) | {"complete": complete}
    result = {"environment": facts, "roofs": asdict(roofs), "rows": [asdict(row) for row in rows]}
    files.write(path, json.dumps(result, indent=1, default=float) + "\n")


def geometric_mean(values: list[float]) -> float:
    product = torch.tensor(values, dtype=torch.float64).log().mean().exp()
    return product.item()
