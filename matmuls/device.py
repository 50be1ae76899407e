"""What a GPU and torch's switches allow."""

import functools

import torch


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """torch asks the driver each time: 3 to 20 us of the host."""
    return torch.cuda.get_device_capability(device)


def takes_tf32() -> bool:
    """Whether float32 products may round their operands to TF32, whichever of torch's switches said so."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15)  # of 1 to 8 blocks that run at once on an H200
