"""mask_plan: the rows of a mask grouped by expert."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from custom_mm.arguments import clearer

from ..registration import fail, library, register
from . import checks, plain


class MaskPlan(NamedTuple):
    """A mask plan: the rows of a mask grouped by expert, for any number of calls, layers and backward passes.

    It is made by `mask_plan`. It has nothing to do with the plan of a sparse matrix, `SparsePlan`.

    Attributes:
        rows: int32 [M]: rows with mask True in ascending order, then the others in ascending order.
        counts: int32 [2]: the number of rows of each expert.
        known: counts[0] if the host knows it, else -1.

    Examples:
        >>> import torch, matmuls
        >>> plan = matmuls.mask_plan(torch.tensor([False, True, False]))
        >>> plan.rows.tolist(), plan.counts.tolist()
        ([1, 0, 2], [1, 2])
    """

    rows: Tensor  # int32 [M]: rows with mask True in ascending order, then the others in ascending order
    counts: Tensor  # int32 [2]: number of rows of each expert
    known: int = -1  # counts[0] if known on the host, else -1


def _check_mask(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool or mask.layout != torch.strided:
        fail(name, "a strided mask of torch.bool", f"{mask.dtype}, {mask.layout}")


def _plan_kernel(mask: Tensor) -> tuple[Tensor, Tensor]:
    _check_mask("mask_plan", mask)
    if mask.numel() >= 2**31:  # under tracing this is a guard on every size
        fail("mask_plan", "a mask of fewer than 2^31 rows", mask.numel())
    mask = mask.reshape(-1)
    if checks.by_triton(mask):
        from ..triton import mask_plan

        if mask.shape[0] <= mask_plan.LARGEST:
            return mask_plan.plan(mask.contiguous())
    return plain.plan(mask)


def _plan_meta(mask: Tensor) -> tuple[Tensor, Tensor]:
    _check_mask("mask_plan", mask)
    return mask.new_empty(mask.numel(), dtype=torch.int32), mask.new_empty(2, dtype=torch.int32)


register("mask_plan(Tensor mask) -> (Tensor, Tensor)", _plan_kernel, _plan_meta)
_plan: Callable[..., tuple[Tensor, Tensor]] = torch.ops.custom_mm.mask_plan.default
library.impl("mask_plan", torch.library.fallthrough_kernel, "Autograd")


def mask_plan(mask: Tensor, known: int | None = None) -> MaskPlan:
    """Makes a mask plan, which groups the rows of a mask by expert. `masked_linear` and `masked_ffn` accept it as mask.

    It is made on the mask's device in one launch, without synchronization, so that a CUDA graph can be replayed with
    another mask. A plan made under torch.inference_mode can be used for inference only, because autograd cannot save
    it.

    Args:
        mask: bool, any shape; True selects the first expert.
        known: the number of True elements, if the host knows it; it must be right. If all rows then belong to one
            expert, a GPU runs a single product of torch.

    Returns:
        A `MaskPlan`.

    Raises:
        RuntimeError: if mask is not bool, or `known` is negative or more than its elements.
        TypeError: if mask is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> mask, x, w = torch.tensor([True, False]), torch.ones(2, 1), torch.ones(1, 1)
        >>> matmuls.masked_linear(x, w, -w, matmuls.mask_plan(mask))
        tensor([[ 1.],
                [-1.]])
    """
    try:
        rows, counts = _plan(mask)
    except RuntimeError as error:
        raise clearer(error, "mask_plan", mask=mask) from None
    if known is not None and not 0 <= known <= rows.shape[0]:
        fail("mask_plan", f"known from 0 to the mask's {rows.shape[0]} elements", known)
    return MaskPlan(rows, counts, -1 if known is None else known)


def planned(name: str, mask: Tensor | MaskPlan, x: Tensor) -> tuple[Tensor, Tensor, int]:
    if isinstance(mask, MaskPlan):
        return mask
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        fail(name, "a mask of torch.bool, or a plan made by mask_plan", found)
    leading = x.shape[:-1]
    if mask.dim() > 1 and len(leading) > 1 and mask.shape not in (leading, (*leading, 1)):
        fail(name, f"a mask of shape {list(leading)} as the rows of x, or of one dimension", list(mask.shape))
    return (*_plan(mask), -1)
