"""What a GPU and torch's switches allow."""

import functools
from typing import NamedTuple

import torch


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """torch asks the driver each time: 3 to 20 us of the host."""
    return torch.cuda.get_device_capability(device)


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
