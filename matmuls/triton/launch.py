"""Launches Triton kernels with less overhead, by caching the compiled kernel under its specialization key.

Triton's own `kernel[grid](...)` binds, specializes and looks up in Python at each call.
"""

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import capability

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
_compiled: dict[tuple[Any, ...], Any] = {}


class Launched(NamedTuple):
    """A launch that was made: Triton's compiled kernel, and its arguments in the kernel's order."""

    compiled: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    stream: int


Step = Launched | Literal["fork", "join"]


class _Log(threading.local):
    steps: list[Step] | None = None


_log = _Log()


@contextmanager
def steps_of() -> Iterator[list[Step]]:
    """A list of the launches that this thread makes in the context, and where a second stream begins and ends."""
    before, _log.steps = _log.steps, []
    try:
        yield _log.steps
    finally:
        _log.steps = before


@contextmanager
def concurrently() -> Iterator[None]:
    """A context whose launches may be on a second stream, which waits for earlier ones, and later ones wait for it."""
    if _log.steps is not None:
        _log.steps.append("fork")
    try:
        yield
    finally:
        if _log.steps is not None:
            _log.steps.append("join")


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr):
    """Every kernel's first statement, before it reads or writes anything: with programmatic dependent launch (PDL) it
    may start while earlier kernels end. Only `fetch_ahead` may come before: it prefetches to the L2, which stays
    coherent."""
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """PDL: the next kernel's programs may become resident, if this one leaves them room, and wait there."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(places, EARLY: tl.constexpr):
    """Prefetches the cache lines at these addresses to the L2."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
        )


def _signature(arg: Any) -> Any:
    """What Triton specializes a kernel on: a pointer's type and alignment, an integer's value (1, a multiple of 16)."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    return (arg.base.dtype, *arg.block_shape) if isinstance(arg, TensorDescriptor) else arg


def launch(
    kernel: Any,
    programs: int | tuple[int, int],
    args: Sequence[Any],
    free: tuple[int, ...],
    constants: tuple[Any, ...],
    warps: int,
    stages: int,
    *,
    shares: bool = False,
    registers: int | None = None,
) -> None:
    """Run `kernel` on the current stream of the first argument's device.

    The kernel takes args (tensors, TMA descriptors, integers that it is specialized on), then free (integers that it is
    not specialized on: do_not_specialize), then constants, and last EARLY. On sm_90 and later it launches early by
    programmatic dependent launch: 1.0 to 2.4 us less for four kernels in a graph. shares: the next kernel's programs
    should become resident next to this one's; both then prefer most of a multiprocessor's cache as shared memory.
    registers: at most so many per thread.
    """
    grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
    if INTERPRETED:
        kernel[grid](*args, *free, *constants, False)
        return
    device = args[0].device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, args, free, constants, warps, stages, shares=shares, registers=registers)
        return
    # id(kernel) rather than the kernel: Triton hashes its source.
    key = (id(kernel), device.index, warps, stages, registers, constants, *map(_signature, args))
    found = _compiled.get(key)
    if found is not None:
        compiled, early, _ = found
        compiled[grid](*args, *free, *constants, early)
    else:
        early = capability(device) >= (9, 0)
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": early, "maxnreg": registers}
        compiled = kernel[grid](*args, *free, *constants, early, **options)
        if shares and early:
            _prefer_shared_memory(compiled)
        # Keeps the kernel alive, so that its id stays unique. If another thread compiled it too, the first one stays:
        # recordings hold its function, and Triton unloads a kernel that nobody holds.
        compiled, early, _ = _compiled.setdefault(key, (compiled, early, kernel))
    if _log.steps is not None:
        stream = torch.cuda.current_stream(device).cuda_stream
        _log.steps.append(Launched(compiled, grid, (*args, *free, *constants, early), stream))


def _prefer_shared_memory(compiled: Any) -> None:
    """Sets the preferred shared memory carveout. A multiprocessor repartitions its cache only when idle, so kernels
    that share one must prefer the same."""
    preferred_carveout, percent = 9, 100  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(compiled.function), preferred_carveout, percent
    )
    if status != 0:
        raise RuntimeError(f"launch: expected cuFuncSetAttribute to take a preferred carveout, got CUresult {status}")
