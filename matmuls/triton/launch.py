"""Launching a Triton kernel for less: the compiled kernel is found by what it was compiled for.

Triton's own `kernel[grid](...)` binds, specializes and looks up in Python at each call.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import capability

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
_compiled: dict[tuple[Any, ...], Any] = {}


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr):
    """Every kernel's first statement, before it reads or writes anything: it may have begun while others end. But for
    `fetch_ahead`, to the L2, where all that others write is seen."""
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The next kernel's programs take their places beside these, which must leave them room; they wait there."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(places, EARLY: tl.constexpr):
    """The lines at these addresses, to the L2."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
        )


def _signature(arg: Any) -> Any:
    """What Triton compiles a kernel for: a pointer's type and alignment, an integer's value (1, a multiple of 16)."""
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
) -> None:
    """Run `kernel` on the current stream of the first argument's device.

    The kernel takes args (tensors, TMA descriptors, integers that it is compiled for, None), then free (integers that
    it is not compiled for: do_not_specialize), then constants, and last whether it begins early: on sm_90 and later by
    programmatic dependent launch: 1.0 to 2.4 us less for four kernels in a graph. shares: the next one's programs are
    to begin beside its own, and take most of a multiprocessor's shared memory.
    """
    grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
    if INTERPRETED:
        kernel[grid](*args, *free, *constants, False)
        return
    device = args[0].device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, args, free, constants, warps, stages, shares=shares)
        return
    # Its number rather than the kernel: Triton hashes its source's.
    key = (id(kernel), device.index, warps, stages, constants, *map(_signature, args))
    found = _compiled.get(key)
    if found is not None:
        compiled, early, _ = found
        compiled[grid](*args, *free, *constants, early)
        return
    early = capability(device) >= (9, 0)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": early}
    compiled = kernel[grid](*args, *free, *constants, early, **options)
    if shares and early:
        _prefer_shared_memory(compiled)
    _compiled[key] = compiled, early, kernel  # whose number stays its own


def _prefer_shared_memory(compiled: Any) -> None:
    """A multiprocessor divides its cache anew only when it is idle: kernels that are to meet there want the same."""
    preferred_carveout, percent = 9, 100  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(compiled.function), preferred_carveout, percent
    )
    if status != 0:
        raise RuntimeError(f"launch: expected cuFuncSetAttribute to take a preferred carveout, got CUresult {status}")
