"""Names an argument that is no tensor, once an operator has refused it: calls that succeed check nothing."""

from collections.abc import Collection

import torch


def clearer(error: Exception, name: str, optional: Collection[str] = (), **given: object) -> Exception:
    """A TypeError about the first of `given` that is no tensor; `error` itself if there is none. optional: names of
    those that may be None.

    torch's own message for such a call has several lines and contains the argument's elements.
    """
    for what, x in given.items():
        if not isinstance(x, torch.Tensor) and not (x is None and what in optional):
            return TypeError(f"{name}: expected a torch.Tensor for {what}, got {type_name(x)}")
    return error


def type_name(x: object) -> str:
    """`numpy.ndarray` for an array, `list` for a list."""
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
