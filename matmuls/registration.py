"""Registers operators whose kernels are launched from Python with the dispatcher.

Uses Library.impl: a call costs 5.4 us, and 11.1 with a gradient; a custom_op costs 7.8 and 18.8. In a build with CUDA
calls that were made before do not come here.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import Function, once_differentiable

from custom_mm import _C
from custom_mm.arguments import type_name

REPLAYS = hasattr(_C, "replay_on_gpu")  # a build with CUDA
library: Any = torch.library.Library("custom_mm", "FRAGMENT")
_ops = torch.ops.custom_mm


def fail(name: str, expected: str, got: object) -> NoReturn:
    raise RuntimeError(f"{name}: expected {expected}, got {got}")


def number(name: str, what: str, x: float | Tensor) -> float:
    """x converted to a number for an operator; raises RuntimeError if it is none, or needs a gradient, which would be
    lost."""
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        fail(name, f"{what} without a gradient", "one that requires grad; multiply by it instead")
    if isinstance(x, Tensor) and (x.numel() != 1 or x.is_complex()):
        fail(name, f"{what} to be a number", f"a tensor of shape {list(x.shape)} in {x.dtype}")
    if not isinstance(x, Tensor | float | int) and not hasattr(x, "__float__"):
        fail(name, f"{what} to be a number", type_name(x))
    return float(x)


def expect_dense(name: str, **given: object) -> None:
    """Raises TypeError if a tensor is not strided: the dispatcher would find no kernel for it."""
    for what, t in given.items():
        if not isinstance(t, Tensor) or t.layout != torch.strided:
            got = f"a tensor of layout {t.layout}" if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"{name}: expected {what} to be a dense tensor, got {got}")


def check_permutation(name: str, what: str, order: Tensor) -> Tensor:
    """Raises RuntimeError unless order, int64 on a CPU, contains each of 0 to len(order) - 1 once. Returns their places
    in it."""
    size = order.shape[0]
    try:
        places = order.new_full((size,), -1).scatter_(0, order, torch.arange(size, device=order.device))
        every = not size or int(places.min()) >= 0
    except RuntimeError:  # an index is out of bounds
        every = False
    if not every:
        fail(name, f"{what} to be 0 to {size - 1} in some order", order.tolist()[:8])
    return places


def _naming_absent_tensors(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps run to name a tensor argument that is None in the error: torch passes None to Python kernels for any
    tensor."""
    expected = [
        (i, a.name) for i, a in enumerate(getattr(_ops, name).default._schema.arguments) if str(a.type) == "Tensor"
    ]

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except (AttributeError, TypeError):
            for i, what in expected:
                if i < len(args) and args[i] is None:
                    raise RuntimeError(f"{name}: expected a tensor for {what}, got None") from None
            raise

    return call


def _record(kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    from .triton.record import record

    return record(kernel, arguments)


def register(schema: str, kernel: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """Registers an operator. kernel: for CPU and CUDA tensors; meta: shapes only, for tracing.

    On a GPU calls that were made before, with the same shapes, are repeated in C++ (src/masked/replay.cpp).
    """
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema[: schema.index("(")]
    kernel, meta = _naming_absent_tensors(name, kernel), _naming_absent_tensors(name, meta)
    library.impl(name, kernel, "CPU")
    if REPLAYS:
        _C.replay_on_gpu(name, kernel, _record)
    else:
        library.impl(name, kernel, "CUDA")
    library.impl(name, meta, "Meta")


def signature_of_apply(*names: str) -> inspect.Signature:
    """The signature of a Function's `apply`, for help(): a Function itself is not called, and torch's `apply` takes
    any arguments."""
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names], return_annotation=Tensor)


class Applied:
    """A class whose `apply` is called; to call the class itself raises TypeError."""

    __signature__: inspect.Signature
    _module: str | None = None  # an nn.Module of the same name

    if not TYPE_CHECKING:  # to type checkers the classes would be functions

        def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
            expected = f"{cls.__name__}.apply({', '.join(cls.__signature__.parameters)})"
            module = "" if cls._module is None else f"; the nn.Module of this name is {cls._module}"
            raise TypeError(f"{cls.__name__}: expected {expected}, got a call of the class{module}")


def has_tangent(t: Tensor) -> bool:
    """True if t has a forward-mode tangent."""
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(t).tangent is not None


def register_gradient(name: str, function: type[Function]) -> None:
    operator = getattr(_ops, name).default
    defaults = [a.default_value for a in operator._schema.arguments]

    def autograd(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0 and any(isinstance(a, Tensor) and has_tangent(a) for a in args):
            fail(name, "inputs without forward-mode tangents (not implemented)", "a dual tensor")
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return function.apply(*args, *defaults[len(args) :])
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    named = _naming_absent_tensors(name, autograd)
    if REPLAYS:
        _C.record_gradient(name, named)
    else:
        library.impl(name, named, "Autograd")


def once(name: str) -> type[Function]:
    """Raises on a second derivative: for operators whose callers use others where one is needed."""

    class Once(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
            with torch._C._AutoDispatchBelowAutograd():
                found: tuple[Tensor, ...] = getattr(_ops, name).default(*args)
            return found

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise RuntimeError(f"{name}: expected to be differentiated once, got a second time")

    return Once


def register_autocast(name: str) -> None:
    """Casts floats of another width to autocast's dtype, as torch's linear does; float64 stays."""
    for device in ("cpu", "cuda"):
        _register_autocast_of(name, device)


def _register_autocast_of(name: str, device: str) -> None:
    operator = getattr(_ops, name).default
    key = f"Autocast{device.upper()}"
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(a: Any, dtype: torch.dtype) -> Any:
        eligible = isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64
        return a.to(dtype) if eligible and a.device.type == device else a

    def autocast(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*(cast(a, dtype) for a in args))

    library.impl(name, autocast, key)
