"""What a GPU and torch's switches allow."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import custom_mm

HOPPER_KERNELS: bool = custom_mm.build_info().get("hopper_kernels", False)  # are in this build
_simulated: dict[str, Any] = {}


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """torch asks the driver each time: 3 to 20 us of the host."""
    simulated: tuple[int, int] | None = _simulated.get("capability")
    return simulated or torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    simulated: int | None = _simulated.get("multiprocessors")
    return simulated or torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether Hopper's own kernels run: the GPU is of capability 9.0 and this build has code for 9.0a."""
    code = _simulated.get("hopper_code", HOPPER_KERNELS)
    return bool(code and device.type == "cuda" and capability(device) == (9, 0))


@contextmanager
def simulate(**limits: Any) -> Iterator[None]:
    """For tests: choices as on a GPU of these limits, `_C.simulate_device`'s; what that could not launch fails."""
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


class Memory(NamedTuple):
    rate: float  # bytes in a microsecond
    l2: float  # bytes


H200 = Memory(4.9e6, 60 * 2**20)


@functools.cache
def memory(device: torch.device) -> Memory:
    """The GPU's, by its bus and clock."""
    of = torch.cuda.get_device_properties(device)
    rate = 2 * of.memory_clock_rate * 1e-3 * of.memory_bus_width / 8
    return Memory(rate, of.L2_cache_size) if rate > 0 else H200  # a driver may not tell


def takes_tf32() -> bool:
    """Whether float32 products may round their operands to TF32, whichever of torch's switches said so."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15)  # of 1 to 8 blocks that run at once on an H200
SHARED_BYTES = 226 * 1024  # of a block on Hopper: kShared of the smem_tiles and packed_mma kernels
