"""What the masked products check about x, a plan and weights, and when Triton's kernels run."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..registration import fail

REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def rows_of(x: Tensor) -> int:
    """The number of rows, symbolic if a size is: Size.numel() would make it concrete and recompile for each number."""
    return math.prod(x.shape[:-1])


def check_x(name: str, x: Tensor, rows: Tensor, counts: Tensor) -> None:
    if x.layout != torch.strided or x.dtype not in REAL or x.dim() == 0:
        kind = f"{x.dtype} of shape {list(x.shape)}, {x.layout}"
        fail(name, "x to be strided, of float64, float32, float16 or bfloat16 and of at least one dimension", kind)
    m = rows_of(x)
    if rows.dim() != 1 or rows.shape[0] != m:
        fail(name, f"a mask or plan of {m} rows, as x of shape {list(x.shape)} has", rows.numel())
    if rows.dtype != torch.int32 or counts.dtype != torch.int32 or counts.dim() != 1 or counts.shape[0] != 2:
        fail(name, "a plan made by mask_plan", f"{rows.dtype} and {counts.dtype} of shape {list(counts.shape)}")
    if not rows.is_contiguous() or not counts.is_contiguous():
        fail(name, "a contiguous plan, as mask_plan makes it", f"strides {rows.stride()} and {counts.stride()}")
    if rows.device != x.device or counts.device != x.device:
        fail(name, f"the mask on {x.device} as x is", f"{rows.device} and {counts.device}")


def check_known(name: str, rows: Tensor, known: int) -> None:
    if known != -1 and not 0 <= known <= rows.shape[0]:
        fail(name, f"known from 0 to the mask's {rows.shape[0]} elements, or -1", known)


def one_expert(name: str, rows: Tensor, counts: Tensor, known: int) -> bool:
    """True if all rows belong to one expert and the host knows it. On a CPU `known` is compared with the plan."""
    if known not in (0, rows.shape[0]):
        return False
    if counts.device.type == "cpu" and (n1 := int(counts[0])) != known:
        fail(name, f"known to be the plan's count, {n1}", known)
    return True


def check_like(name: str, which: str, t: Tensor, x: Tensor, shape: Sequence[int | torch.SymInt]) -> None:
    if list(t.shape) != list(shape):
        fail(name, f"{which} of shape {list(shape)}", list(t.shape))
    if t.dtype != x.dtype:
        fail(name, f"{which} of dtype {x.dtype} as x is", t.dtype)
    if t.device != x.device:
        fail(name, f"{which} on {x.device} as x is", t.device)


def flat(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(rows_of(x), x.shape[-1])


def by_triton(x: Tensor, *sizes: int) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and all(sizes) and x.numel() > 0
