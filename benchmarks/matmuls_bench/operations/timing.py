"""Measures one job: errors against float64, time as called and on the GPU alone, host time, memory."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import timing
from ..machine import Roofs, name_of
from ..table import Call
from .jobs import CALLED_ONLY, DENSE, OPTIONAL, Job, flops_of, results_of
from .rows import Row

Rivals = dict[str, Callable[..., Any]]


def _wide(t: Tensor) -> Tensor:
    """Floating-point tensors as float64, complex ones as complex128; masks and indices unchanged."""
    return t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t


def _error(x: Tensor, truth: Tensor) -> float:
    return (torch.linalg.vector_norm(x.to(truth.dtype) - truth) / torch.linalg.vector_norm(truth)).item()


def errors_of(job: Job, call: Call, rivals: Rivals) -> tuple[float, dict[str, float | None]]:
    """Relative errors of ours and each rival against the float64 reference; the largest over several results.

    None for DENSE, which computes something else. An OPTIONAL rival that fails is left out.
    """
    truths = results_of(job.reference, call.map(_wide))

    def worst(function: Callable[..., Any], c: Call) -> float:
        errors = [_error(x, truth) for x, truth in zip(results_of(function, c), truths, strict=True)]
        return torch.tensor(errors).max().item()  # NaN if any is

    ours = worst(job.call, job.own(call))
    found: dict[str, float | None] = {}
    for name, rival in rivals.items():
        if name not in OPTIONAL:
            found[name] = None if name == DENSE else worst(rival, call)
            continue
        try:
            for _ in range(3):  # compiled, recorded as a CUDA graph, replayed
                found[name] = worst(rival, call)
        except Exception as error:
            found.pop(name, None)
            print(f"{job.label}: without {name}: {error}", file=sys.stderr)
    return ours, found


def _bytes(job: Job, call: Call) -> tuple[int, int]:
    """Bytes that must be read or written, and bytes that ours allocates at its peak, results excluded."""
    own = job.own(call)
    results = results_of(job.call, own)
    moved = job.case.moved(call) if job.case.moved else sum(t.nbytes for t in (*call.tensors, *results))
    given = {t.untyped_storage().data_ptr() for t in own.tensors}
    new = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in results) if s.data_ptr() not in given}
    return moved, timing.peak_memory(lambda: results_of(job.call, own), job.device) - sum(new.values())


def _sets(job: Job, call: Call) -> list[Call]:
    """The call on enough sets of inputs to exceed the L2 cache twice, at most 128; on a CPU on one set."""
    if job.device == "cpu":
        return [call]
    inputs = sum(t.nbytes for t in call.tensors)
    sets = max(1, min(128, -(-2 * timing.l2_bytes(torch.device("cuda")) // inputs)))
    return [call, *(job.draw(seed) for seed in range(1, sets))]


@dataclass(frozen=True)
class Times:
    """Times of ours and of each rival by its name, and the fastest rival."""

    ours: timing.Timing
    rivals: dict[str, timing.Timing]

    @property
    def fastest(self) -> str:
        return min(self.rivals, key=lambda name: self.rivals[name].seconds)

    @property
    def ratio(self) -> float:
        return self.rivals[self.fastest].seconds / self.ours.seconds

    @property
    def rivals_us(self) -> dict[str, float]:
        return {name: timing.seconds * 1e6 for name, timing in self.rivals.items()}


def times_of(job: Job, call: Call, rivals: Rivals, budget: float) -> tuple[Times, Times | None]:
    """Times on the device alone, and on a GPU the times as called too."""
    calls = _sets(job, call)
    own = [job.own(c) for c in calls]

    def restore() -> None:
        for mine, pristine in zip(own, calls, strict=True):
            mine.args[0].copy_(pristine.args[0])

    def bind(function: Callable[..., Any], each: list[Call]) -> list[timing.Run]:
        return [partial(function, *c.args, **c.kwargs) for c in each]

    runs = {name: bind(rival, calls) for name, rival in rivals.items()}
    before = restore if job.in_place else None
    alone = {name: each for name, each in runs.items() if name not in CALLED_ONLY}
    ours, *others = timing.time_on(job.device, [bind(job.call, own), *alone.values()], budget, before)
    device = Times(ours, dict(zip(alone, others, strict=True)))
    if job.kind != "gpu":
        return device, None
    torch.cuda.empty_cache()  # of the recorded graphs
    ours, *others = timing.time_as_called(job.device, [bind(job.call, own), *runs.values()], before)
    return device, Times(ours, dict(zip(runs, others, strict=True)))


@torch.no_grad()
def measure_case(job: Job, roofs: Roofs, budget: float) -> Row:
    """Compute the errors of one case against float64, then time it."""
    call, rivals = job.draw(), job.rivals()
    error, rival_errors = errors_of(job, call, rivals)
    rivals = {name: rivals[name] for name in rival_errors}
    nbytes, extra = _bytes(job, call)
    flops = flops_of(job, call)
    if job.device == "cuda":
        torch.cuda.empty_cache()  # of the float64 reference: during graph capture the allocator cannot free it
    times, called = times_of(job, call, rivals, budget)
    ours = times.ours.seconds
    row = job.row(
        ours_us=ours * 1e6,
        rival=times.fastest,
        rival_us=times.rivals_us[times.fastest],
        rivals_us=times.rivals_us,
        ratio=times.ratio,
        tflops=flops / ours / 1e12 if flops else None,
        tbps=nbytes / ours / 1e12,
        roof=roofs.seconds(flops, nbytes, name_of(job.dtype)) / ours,
        error=error,
        rival_error=rival_errors[times.fastest],
        spread=times.ours.spread,
        extra_bytes=extra,
    )
    if called is None:
        return row
    return replace(
        row,
        called_us=called.ours.seconds * 1e6,
        called_rival=called.fastest,
        called_rivals_us=called.rivals_us,
        called_ratio=called.ratio,
        called_spread=called.ours.spread,
    )


def measure_memory(job: Job) -> Row:
    """Peak memory of a call; a first call has already allocated workspaces."""
    call = job.draw()

    def peak(function: Callable[..., Any], c: Call) -> float:
        results_of(function, c)
        return timing.peak_memory(lambda: results_of(function, c), job.device) / 2**20

    ours, rival = peak(job.call, job.own(call)), peak(job.reference, call)
    return job.row(rival=job.rival, ratio=rival / ours if ours else None, ours_mib=ours, rival_mib=rival)


def measure_host(job: Job) -> Iterator[Row]:
    """Host time of one small call, without and with autograd."""
    for gradient in (False, True) if job.spec.gradient and not job.in_place else (False,):
        call = job.draw()
        if gradient:
            call = call.map(lambda t: t.requires_grad_(t.is_floating_point() or t.is_complex()))
        functions = (job.call, job.spec.host_reference or job.reference)
        mine, rival = timing.time_of_host([partial(f, *call.args, **call.kwargs) for f in functions], job.device)
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
        if job.replayed:
            torch.compiler.reset()  # frees the memory of its CUDA graphs
