"""Indices under torch.func: those of several layers stacked by `torch.func.stack_module_state`, which must be equal."""

from typing import NamedTuple

import torch
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor, maybe_get_bdim


class Stacked(NamedTuple):
    """A tensor without the wrappers of torch.func.

    base: the tensor itself.
    dims: the batch dimensions of base, the outermost first; each counts the dimensions that remain without those
        before it.
    """

    base: torch.Tensor
    dims: tuple[int, ...]

    def one(self, name: str) -> torch.Tensor:
        """The tensor that all elements of the batch have; ValueError if they differ. Waits for the GPU."""
        t = self.base
        for dim in self.dims:
            if t.shape[dim] == 0:
                raise ValueError(f"{name}: expected at least one layer, got a batch of none")
            first = t.select(dim, 0)
            if not torch.equal(t, first.unsqueeze(dim).expand_as(t)):
                expected = "stacked layers of one pattern, with equal offsets and columns"
                raise ValueError(f"{name}: expected {expected}, got different ones")
            t = first
        return t


def unwrapped(t: torch.Tensor) -> Stacked:
    """t without the wrappers of torch.func."""
    if not is_functorch_wrapped_tensor(t):
        return Stacked(t, ())
    below = unwrapped(get_unwrapped(t))
    return Stacked(below.base, (*below.dims, maybe_get_bdim(t)) if is_batchedtensor(t) else below.dims)
