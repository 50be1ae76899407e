"""Which cases a benchmark runs: jobs of the table's rows, and the compilation of their rivals."""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..machine import name_of
from ..table import QUACK, TABLE, Call, Case, Draw, Spec
from .rows import Row

GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CPU_DTYPES = (torch.float32,)
CPU_FLOPS = 5e9  # operations (see `cost_of`) of the largest case that is run on a CPU
QUICK_FLOPS = 3e8  # the same with --quick
PRECOMPILE_SECONDS = 300  # limit of `precompile`; the rest is compiled when it is measured
COMPILED = "torch.compile"
REPLAYED = 'torch.compile(mode="reduce-overhead")'
DENSE = "one dense product"
CALLED_ONLY = (REPLAYED,)  # replays CUDA graphs itself: no other graph can record its calls
OPTIONAL = (REPLAYED, QUACK)  # left out, with a message, where they fail


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
        return "TF32" if self.case.tf32 else name_of(self.dtype)

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
    def replayed(self) -> bool:
        """True if torch.compile with CUDA graphs is a rival."""
        return self.case.parameters is not None and self.kind == "gpu"

    @property
    def compiled(self) -> bool:
        """True if torch.compile is a rival. It never is on a CPU, where compiling takes longer than everything else."""
        return (self.spec.compiled and self.kind == "gpu") or self.replayed

    def rivals(self) -> dict[str, Callable[..., Any]]:
        """The alternatives by name, among them DENSE, a dense product of the same size with a different result."""
        rivals = {self.rival: self.reference, **self.case.others}
        if self.case.dense is not None:
            rivals[DENSE] = self.case.dense
        if self.compiled:
            torch.compiler.reset()  # above the recompilation limit a function runs eagerly; frees CUDA graphs
            rivals[COMPILED] = torch.compile(self.reference, dynamic=False, fullgraph=True)  # no graph breaks
        if self.replayed:
            rivals[REPLAYED] = _replayed(self.reference)
        return rivals

    def draw(self, seed: int = 0) -> Call:
        """The call on random inputs. Its parameters keep their addresses from call to call, as a module's do."""
        call = self.case.draw(Draw(self.dtype, self.device, seed))
        for position in self.case.parameters or () if self.replayed else ():
            torch._dynamo.mark_static_address(call.args[position], guard=False)
        return call

    def own(self, call: Call) -> Call:
        """The call for ours; an in-place operation gets a copy of its first argument."""
        if not self.in_place:
            return call
        return Call((call.args[0].clone(memory_format=torch.preserve_format), *call.args[1:]), call.kwargs)

    def row(self, **measured: Any) -> Row:
        return Row(self.spec.name, self.case.label, self.precision, self.kind, drawn=self.case.drawn, **measured)


def _replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile with CUDA graphs. Each call begins a step: the result of the call before is overwritten.

    Before a replay torch copies every input but the parameters into the graph's memory, as for a user whose inputs are
    new tensors.
    """
    compiled = torch.compile(function, mode="reduce-overhead", dynamic=False, fullgraph=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*args, **kwargs)

    return run


def results_of(function: Callable[..., Any], call: Call) -> list[Tensor]:
    """The tensors of the result: one tensor, or a tuple of tensors and None."""
    result = function(*call.args, **call.kwargs)
    return [result] if isinstance(result, Tensor) else [x for x in result if x is not None]


def flops_of(job: Job, call: Call) -> int:
    if not job.spec.flops:
        return 0
    with FlopCounterMode(display=False) as counter:
        results_of(job.case.dense or job.reference, call)
    return counter.get_total_flops()


def plan(
    names: list[str], device: str, dtypes: list[torch.dtype], quick: bool, labels: Sequence[str] = ()
) -> list[Job]:
    """The cases to run on `device`: of the operations `names` (empty: all) in `dtypes` (empty: the operation's own).

    labels: only cases whose label contains one of these texts.
    """
    known = {spec.name: spec for spec in TABLE if spec.cases or spec.memory_cases}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no benchmark named {', '.join(unknown)}; there are {', '.join(known)}")
    texts = labels or ("",)
    limit = QUICK_FLOPS if quick else CPU_FLOPS if device == "cpu" else float("inf")
    jobs = [job for name, spec in known.items() if not names or name in names for job in cases_of(spec, device, dtypes)]
    jobs = [job for job in jobs if any(text in job.case.label for text in texts)]
    if not jobs and labels:
        raise ValueError(f"no case of these operations has a label with {' or '.join(map(repr, labels))}")
    return [job for job in jobs if job.kind == "host" or cost_of(job) <= limit]


def cases_of(spec: Spec, device: str, dtypes: list[torch.dtype]) -> Iterator[Job]:
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


def cost_of(job: Job) -> float:
    """Floating-point operations of a case, or ten for each element of its inputs where that is more."""
    with torch.device("meta"):
        call = job.case.draw(_MetaDraw(job.dtype))
        return max(flops_of(job, call), 10 * sum(t.numel() for t in call.tensors))


def precompile(workers: int, *chosen: Any) -> int:
    """Compile the rivals' torch.compile kernels into inductor's disk cache, split over `workers` processes.

    chosen: the arguments of `plan`.

    Returns how many processes failed or timed out; what they did not compile is compiled when it is measured.
    """
    compiled = [job for job in plan(*chosen) if job.compiled]
    workers = min(workers, len(compiled))
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    processes = [
        context.Process(target=_compile_share, args=(k, workers, *chosen), daemon=True) for k in range(workers)
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
def _compile_share(share: int, shares: int, *chosen: Any) -> None:
    """Body of one process: compile every `shares`-th case from `share` on; report failures on stderr, exit status 1."""
    from torch._inductor import config

    config.compile_threads = 1  # the processes are parallel already
    failed = False
    for job in [job for job in plan(*chosen) if job.compiled][share::shares]:
        try:
            rivals, call = job.rivals(), job.draw()
            for name in (COMPILED, REPLAYED)[: 1 + job.replayed]:
                results_of(rivals[name], call)
            torch.cuda.empty_cache()  # other processes share the GPU
        except Exception as error:
            print(f"{job.label}: {error}", file=sys.stderr)
            failed = True
    sys.exit(int(failed))
