"""Distributed products with a constant matrix that C++ repeats (src/distributed/repeated.cpp), with their gradients."""

from collections.abc import Callable

import torch

from custom_mm import _C

from .exchange import Exchange
from .part import Part


def forward_step(own: Part, halo: Part, exchange: Exchange | None, n: int, dtype: torch.dtype) -> _C.Step | None:
    """A @ x by the kernel of the last such product; None if it cannot be repeated."""
    prepared = own.plan._prepared
    if prepared.products is None:
        return None
    sender, received, after = None, None, None
    if exchange is not None:
        sender, received = exchange.sender(n, dtype, False)
        after = None if halo.nnz == 0 else halo.sums(n, dtype) or halo.add_to
    return _C.Step(
        own=prepared.products, values=prepared.values, before=None, sender=sender, received=received, after=after
    )


def backward_step(own: Part, halo: Part, exchange: Exchange | None, n: int, dtype: torch.dtype) -> _C.Step | None:
    """A^T @ grad by the kernel of the last such product; None if it cannot be repeated."""
    prepared = own.transposed._prepared
    if prepared.products is None:
        return None
    before, sender, received, after = None, None, None, None
    if exchange is not None:
        before = halo.sums(n, dtype, transposed=True) or halo.transposed_product
        sender, received = exchange.sender(n, dtype, True)
        after = exchange.adder(n, dtype)
    return _C.Step(
        own=prepared.products, values=prepared.values, before=before, sender=sender, received=received, after=after
    )


class Repeated:
    """The products of a plan that C++ repeats, by shape, dtype and device of x and whether it needs a gradient."""

    MOST = 16  # kept, the most recent ones

    def __init__(self) -> None:
        self._products: dict[tuple[object, ...], _C.RepeatedProduct] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """A @ x; None if no product before it was like it, or if its kernel may not be repeated now."""
        for product in tuple(self._products.values()):
            if (y := product(x)) is not None:
                return y
        return None

    def forget(self) -> None:
        """Begin anew, as the values have changed."""
        self._products.clear()

    def knows(self, x: torch.Tensor, recorded: bool) -> bool:
        """True if the product of x is kept."""
        return (x.shape, x.dtype, x.device, recorded) in self._products

    def record(
        self,
        x: torch.Tensor,
        recorded: bool,
        step: _C.Step,
        slow: Callable[[_C.RepeatedProduct, torch.Tensor], torch.Tensor],
        lost: Callable[[str], None],
    ) -> None:
        """Keep the product of x. It keeps what the callables hold, which must not be what holds this."""
        while len(self._products) >= self.MOST:
            self._products.pop(next(iter(self._products)), None)
        made = _C.RepeatedProduct(x=x, recorded=recorded, forward=step, slow=slow, lost=lost)
        self._products[x.shape, x.dtype, x.device, recorded] = made
