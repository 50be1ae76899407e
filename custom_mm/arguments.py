"""Names an argument that is no tensor, once an operator has refused it: calls that succeed check nothing."""

import torch


def clearer(error: Exception, name: str, **given: object) -> Exception:
    """A TypeError about the first of `given` that is neither a tensor nor None; `error` itself if there is none.

    torch's own message for such a call has several lines and contains the argument's elements.
    """
    for what, x in given.items():
        if x is not None and not isinstance(x, torch.Tensor):
            return TypeError(f"{name}: expected a torch.Tensor for {what}, got {type_name(x)}")
    return error


def type_name(x: object) -> str:
    """`numpy.ndarray` for an array, `list` for a list."""
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
