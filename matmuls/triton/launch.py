"""Launching a Triton kernel for less: the compiled kernel is found by what it was compiled for.

Triton's own `kernel[grid](...)` binds, specializes and looks up in Python at each call.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import capability

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
_compiled: dict[tuple[Any, ...], Any] = {}


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr):
    """Every kernel's first statement, before it reads or writes anything: it may have begun while others end."""
    if EARLY:
        gdc_wait()


def _signature(arg: Any) -> Any:
    """What Triton compiles a kernel for: a pointer's type and alignment, an integer's value (1, a multiple of 16)."""
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape
    return (arg.dtype, arg.data_ptr() % 16 == 0) if isinstance(arg, torch.Tensor) else arg


def launch(
    kernel: Any,
    programs: int | tuple[int, int],
    args: Sequence[Any],
    free: tuple[int, ...],
    constants: tuple[Any, ...],
    warps: int,
    stages: int,
) -> None:
    """Run `kernel` on the current stream of the first argument's device.

    The kernel takes args (tensors, TMA descriptors, integers that it is compiled for, None), then free (integers that
    it is not compiled for: do_not_specialize), then constants, and last whether it begins early: on sm_90 and later by
    programmatic dependent launch: 1.0 to 2.4 us less for four kernels in a graph.
    """
    grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
    if INTERPRETED:
        kernel[grid](*args, *free, *constants, False)
        return
    device = args[0].device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, args, free, constants, warps, stages)
        return
    key = (kernel, device.index, warps, stages, constants, *map(_signature, args))
    if key not in _compiled:
        early = capability(device) >= (9, 0)
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": early}
        _compiled[key] = kernel[grid](*args, *free, *constants, early, **options), early
    else:
        compiled, early = _compiled[key]
        compiled[grid](*args, *free, *constants, early)
