"""Facts about the GPU and torch's switches that decide which kernels run."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import custom_mm

is_batch_invariant: Callable[[], bool] = custom_mm._C.is_batch_invariant  # handles(batch_invariant=True)
HOPPER_KERNELS: bool = custom_mm.build_info().get("hopper_kernels", False)  # the build contains Hopper kernels
_simulated: dict[str, Any] = {}


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, cached: torch asks the driver each time, 3 to 20 us on the host."""
    simulated: tuple[int, int] | None = _simulated.get("capability")
    return simulated or torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    simulated: int | None = _simulated.get("multiprocessors")
    return simulated or torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_hopper_kernels(device: torch.device) -> bool:
    """True if the Hopper kernels run: the GPU has capability 9.0 and this build has code for 9.0a."""
    code = _simulated.get("hopper_code", HOPPER_KERNELS)
    return bool(code and device.type == "cuda" and capability(device) == (9, 0))


@contextmanager
def simulate(**limits: Any) -> Iterator[None]:
    """For tests: choose kernels for these limits (see `_C.simulate_device`); launches that exceed them fail."""
    _set(limits)
    try:
        yield
    finally:
        _set({})


def _set(limits: dict[str, Any]) -> None:
    custom_mm._C.simulate_device(**limits)
    _simulated.clear()
    _simulated.update(limits)
    for asked in (capability, multiprocessors, has_hopper_kernels):
        asked.cache_clear()
    forget_recordings()


def forget_recordings() -> None:
    """Drop the recorded calls of operators with Triton kernels, which run with the tiles of their first call."""
    if hasattr(custom_mm._C, "forget_recordings"):  # a build with CUDA
        custom_mm._C.forget_recordings()


class Memory(NamedTuple):
    rate: float  # bytes per microsecond
    l2: float  # bytes


H200 = Memory(4.9e6, 60 * 2**20)


@functools.cache
def memory(device: torch.device) -> Memory:
    """Memory bandwidth, computed from the bus width and clock, and L2 size of the GPU."""
    of = torch.cuda.get_device_properties(device)
    rate = 2 * of.memory_clock_rate * 1e-3 * of.memory_bus_width / 8
    return Memory(rate, of.L2_cache_size) if rate > 0 else H200  # the driver may not report the clock


def takes_tf32() -> bool:
    """True if float32 products may round their operands to TF32, whichever of torch's switches allows it."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15)  # of 1 to 8 blocks that run at once on an H200
SHARED_BYTES: int = custom_mm._C.kernel_limits["hopper_block_bytes"]  # shared memory of a block on Hopper
