"""`matmuls bench`: every row of the table timed beside what a user would pick instead, in one run.

Inputs are random; on a GPU the same call runs over as many sets of inputs as it takes to leave the L2 (128 at most: the
smallest cases stay in it, for both rivals), captured as a CUDA graph; both rivals get the same sets, layouts and
precision, and their rounds alternate. Each result is held against float64 in the same run. The roof is measured in the
same run too: the rate of a copy, and of the largest product in that dtype.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import custom_mm

from . import measure
from .specs import TABLE, Call, Case, Draw, Spec

GPU_DTYPES = ("bfloat16", "float16", "float32", "float64")
CPU_DTYPES = ("float32",)
CPU_FLOPS = 5e9  # the largest case worth its time on a CPU
QUICK_FLOPS = 3e8


@dataclass(frozen=True)
class Row:
    """One measured case. ratio: the rival's time over ours, higher is better; roof: the least time over ours."""

    operation: str
    case: str
    dtype: str
    kind: str  # "gpu", "cpu" or "host"
    ours_us: float
    rival: str
    rival_us: float
    ratio: float
    tflops: float | None = None
    tbps: float | None = None
    roof: float | None = None
    error: float | None = None
    rival_error: float | None = None
    spread: float | None = None


Timer = Callable[..., list[measure.Timing]]


@dataclass(frozen=True)
class Roofs:
    """Bytes and floating-point operations a second that this device reached in this run."""

    copy: float
    product: dict[str, float]

    def seconds(self, flops: int, nbytes: int, dtype: str) -> float:
        return max(flops / self.product[dtype] if flops else 0.0, nbytes / self.copy)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy_rate(time: Timer, count: int, device: str) -> float:
    """Bytes read and written a second, by torch's copy or an elementwise kernel, whichever is faster."""
    source, target = (torch.randn(count, device=device) for _ in range(2))
    timings = time([[lambda: target.copy_(source)], [lambda: torch.neg(source, out=target)]])
    return 2 * source.nbytes / min(timing.seconds for timing in timings)


def measure_roofs(device: str, dtypes: list[torch.dtype], quick: bool) -> Roofs:
    """A copy of 2 GB (GPU) or 128 MB, and square products, the best of the sizes."""
    time = measure.time_on_gpu if device == "cuda" else measure.time_on_cpu
    copy = _copy_rate(time, 2**25 if device == "cpu" or quick else 2**29, device)
    sizes = (512, 1024) if device == "cpu" or quick else (2048, 4096, 8192)
    product = {}
    for dtype in dtypes:
        draw = Draw(dtype, device)
        best = 0.0
        for n in sizes:
            a, b = draw(n, n), draw(n, n)
            out = torch.empty_like(a)
            seconds = time([[lambda a=a, b=b, out=out: torch.mm(a, b, out=out)]])[0].seconds
            best = max(best, 2 * n**3 / seconds)
        product[_name(dtype)] = best
    return Roofs(copy, product)


def _flops(spec: Spec, call: Call) -> int:
    if not spec.flops:
        return 0
    with FlopCounterMode(display=False) as counter:
        spec.reference(*call.args, **call.kwargs)
    return counter.get_total_flops()


def _error(x: torch.Tensor, truth: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(x.to(truth.dtype) - truth) / torch.linalg.vector_norm(truth)).item()


def _copy(call: Call) -> Call:
    return call.map(lambda t: t.clone(memory_format=torch.preserve_format))


def measure_case(spec: Spec, case: Case, dtype: torch.dtype, device: str, roofs: Roofs, budget: float) -> Row:
    """Check one case against float64, then time it."""
    call = case.draw(Draw(dtype, device))
    wide = call.map(lambda t: t.to(torch.complex128 if t.is_complex() else torch.float64))
    truth = spec.reference(*wide.args, **wide.kwargs)
    del wide
    once = _copy(call)
    result, theirs = spec.call(*once.args, **once.kwargs), spec.reference(*call.args, **call.kwargs)
    errors = _error(result, truth), _error(theirs, truth)
    nbytes = sum(t.nbytes for t in call.tensors) + result.nbytes
    inputs = sum(t.nbytes for t in call.tensors)
    flops = _flops(spec, call)
    del truth, result, theirs, once

    if device == "cuda":
        sets = max(1, min(128, -(-2 * measure.l2_bytes(torch.device("cuda")) // inputs)))
        calls = [call, *(case.draw(Draw(dtype, device, seed)) for seed in range(1, sets))]
    else:
        calls = [call]

    def bind(function: Callable[..., Any], c: Call) -> Callable[[], Any]:
        return lambda: function(*c.args, **c.kwargs)

    time = measure.time_on_gpu if device == "cuda" else measure.time_on_cpu
    own = [_copy(c) for c in calls] if spec.in_place else calls  # what we write over is not the rival's input
    with torch.no_grad():
        ours, rival = time([[bind(spec.call, c) for c in own], [bind(spec.reference, c) for c in calls]], budget)
    return Row(
        operation=spec.name,
        case=case.label,
        dtype=_name(dtype),
        kind="gpu" if device == "cuda" else "cpu",
        ours_us=ours.seconds * 1e6,
        rival=spec.rival,
        rival_us=rival.seconds * 1e6,
        ratio=rival.seconds / ours.seconds,
        tflops=flops / ours.seconds / 1e12 if flops else None,
        tbps=nbytes / ours.seconds / 1e12,
        roof=roofs.seconds(flops, nbytes, _name(dtype)) / ours.seconds,
        error=errors[0],
        rival_error=errors[1],
        spread=ours.spread,
    )


def measure_host(spec: Spec, dtype: torch.dtype, device: str) -> Iterator[Row]:
    """Host time of one small call, without and with a gradient to record."""
    assert spec.host_case is not None
    for gradient in (False, True) if spec.gradient else (False,):
        call = spec.host_case.draw(Draw(dtype, device))
        if gradient:
            call = call.map(lambda t: t.requires_grad_())

        rivals = (spec.call, spec.host_reference or spec.reference)
        mine, rival = measure.time_of_host([lambda f=f, c=call: f(*c.args, **c.kwargs) for f in rivals], device)
        yield Row(
            operation=spec.name,
            case=spec.host_case.label + (", with a gradient" if gradient else ""),
            dtype=_name(dtype),
            kind="host",
            ours_us=mine.seconds * 1e6,
            rival=spec.rival,
            rival_us=rival.seconds * 1e6,
            ratio=rival.seconds / mine.seconds,
            spread=mine.spread,
        )


@dataclass(frozen=True)
class Job:
    """One thing to measure."""

    spec: Spec
    case: Case | None  # None: the host's time
    dtype: torch.dtype

    @property
    def label(self) -> str:
        return f"{self.spec.name} {self.case.label if self.case else 'host time'} {_name(self.dtype)}"


def plan(names: list[str], device: str, dtypes: list[str], quick: bool) -> list[Job]:
    """The table's cases that suit the device, for the rows named (all of them when none is)."""
    known = {spec.name: spec for spec in TABLE if spec.cases}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no benchmark named {', '.join(unknown)}; there are {', '.join(known)}")
    limit = QUICK_FLOPS if quick else CPU_FLOPS if device == "cpu" else float("inf")
    jobs = []
    for spec in known.values():
        if names and spec.name not in names:
            continue
        for dtype in (getattr(torch, d) for d in dtypes):
            if dtype not in spec.dtypes:
                continue
            for case in spec.cases:
                with torch.device("meta"):
                    cost = _cost(spec, case, dtype)
                if cost <= limit:
                    jobs.append(Job(spec, case, dtype))
        if spec.host_case is not None:
            jobs.append(Job(spec, None, getattr(torch, dtypes[0])))
    return jobs


class _MetaDraw(Draw):
    """Shapes without values."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, "meta"

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")


def _cost(spec: Spec, case: Case, dtype: torch.dtype) -> float:
    """Operations of a case; what only moves memory counts ten for an element."""
    call = case.draw(_MetaDraw(dtype))
    return max(_flops(spec, call), 10 * sum(t.numel() for t in call.tensors))


def measure_jobs(jobs: list[Job], device: str, roofs: Roofs, budget: float = 0.4) -> Iterator[tuple[Job, list[Row]]]:
    for job in jobs:
        if job.case is None:
            yield job, list(measure_host(job.spec, job.dtype, device))
        else:
            yield job, [measure_case(job.spec, job.case, job.dtype, device, roofs, budget)]


def environment(device: str) -> dict[str, Any]:
    """Where and with what a result was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["matmuls", *sys.argv[1:]]),
        "commit": os.environ.get("MATMULS_COMMIT") or _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--", "src", "custom_mm", "matmuls")),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "build": custom_mm.build_info(),
        "driver": _driver() if device == "cuda" else None,
    }


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


def save(path: Path, rows: list[Row], roofs: Roofs, device: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": environment(device), "roofs": asdict(roofs), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(result, indent=1, default=float) + "\n")


def geometric_mean(values: list[float]) -> float:
    product = torch.tensor(values, dtype=torch.float64).log().mean().exp()
    return product.item()
