"""Launching a Triton kernel for less: the compiled kernel is found by what it was compiled for.

Triton's own `kernel[grid](...)` binds, specializes and looks up in Python at each call.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
_compiled: dict[tuple[Any, ...], Any] = {}


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
    it is not compiled for: do_not_specialize), then constants.
    """
    grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
    if INTERPRETED:
        kernel[grid](*args, *free, *constants)
        return
    device = args[0].device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, args, free, constants, warps, stages)
        return
    key = (kernel, device, warps, stages, constants, *map(_signature, args))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, *free, *constants, num_warps=warps, num_stages=stages)
    else:
        compiled[grid](*args, *free, *constants)
