"""Gradients of distributed products; products of constant plans that src/distributed/repeated.cpp repeats."""

from collections.abc import Callable
from typing import Any

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
        after = halo.adder(n, dtype)
    return _C.Step(
        own=prepared.products, values=prepared.values, before=None, sender=sender, received=received, after=after
    )


def backward_step(own: Part, halo: Part, exchange: Exchange | None, n: int, dtype: torch.dtype) -> _C.Step | None:
    """A^T @ grad by the kernel of the last such product; None if it cannot be repeated, or A is complex."""
    prepared = own.transposed._prepared
    if prepared.products is None or dtype.is_complex:
        return None
    before, sender, received, after = None, None, None, None
    if exchange is not None:
        before = halo.sums(n, dtype, transposed=True) or halo.transposed_product
        sender, received = exchange.sender(n, dtype, True)
        after = exchange.adder(n, dtype)
    return _C.Step(
        own=prepared.products, values=prepared.values, before=before, sender=sender, received=received, after=after
    )


class Recorded(torch.autograd.Function):
    """A @ x of a plan, with gradients to the values and to x, where C++ does not repeat it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, x: torch.Tensor, plan: Any) -> torch.Tensor:
        to_values, to_x, _ = ctx.needs_input_grad
        y: torch.Tensor
        y, received = plan._forward(values, x)
        ctx.plan, ctx.to_x, ctx.loads = plan, to_x, plan._loads
        if not plan._constant:
            if to_values and received is not None and plan._exchange is not None:
                received = plan._exchange.keeps(received)
            ctx.save_for_backward(values, x if to_values else None, received if to_values else None)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "distributed.plan: expected first derivatives, got create_graph=True: it has no second ones"
            )
        plan = ctx.plan
        if plan._constant:
            if plan._loads != ctx.loads:
                raise RuntimeError(_C.RepeatedProduct.expired)
            return None, plan._gradient_of_x(grad), None
        values, x, received = ctx.saved_tensors
        if plan._loads != ctx.loads:  # a product since then may have read other values
            plan._load(values)
        grad_x = plan._gradient_of_x(grad) if ctx.to_x else None
        return None if x is None else plan._gradient_of_values(values, x, received, grad), grad_x, None


class Repeated:
    """The products of a plan that C++ repeats, by shape, dtype and device of x and whether it needs a gradient."""

    MOST = 16  # kept, the most recent ones

    def __init__(self) -> None:
        self._products: dict[tuple[object, ...], _C.RepeatedProduct] = {}
        self._valid = [True]  # shared by all products since the values changed, also those that are kept no more

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """A @ x; None if no product before it was like it, or if its kernel may not be repeated now."""
        for product in tuple(self._products.values()):
            if (y := product(x)) is not None:
                return y
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return Repeated, ()  # a copied or unpickled plan records its own

    def forget(self) -> None:
        """Begin anew, as the values have changed: products of before refuse a backward pass."""
        self._valid[0] = False
        self._valid = [True]
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
        made = _C.RepeatedProduct(x=x, recorded=recorded, forward=step, slow=slow, lost=lost, valid=self._valid)
        self._products[x.shape, x.dtype, x.device, recorded] = made
