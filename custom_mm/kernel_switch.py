"""Switches kernels off, for tests and measurements: which kernel takes a call otherwise, and what a kernel gains."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from . import _C


@dataclass
class Family:
    """Kernels of which each call of a group of operations takes one. set_off(names): tells the C++ that chooses."""

    kernels: tuple[str, ...]
    set_off: Callable[[list[str]], None] | None = None


FAMILIES: dict[str, Family] = {
    "rows": Family(tuple(_C.row_kernels()), _C.switch_off_row_kernels),
    "dense products": Family(tuple(_C.product_kernels()), _C.switch_off_product_kernels),
    "products in place": Family(tuple(_C.inplace_kernels()), _C.switch_off_inplace_kernels),
}
_off: frozenset[str] = frozenset()
_numbers = {_off: 0}  # of each set that has been off, by which C++ compares them


def is_off(name: str) -> bool:
    return name in _off


def is_any_off() -> bool:
    return bool(_off)


def _set(names: frozenset[str]) -> None:
    global _off
    _off = names
    _C.note_kernels_off(_numbers.setdefault(names, len(_numbers)))
    for family in FAMILIES.values():
        if family.set_off is not None:
            family.set_off([name for name in family.kernels if name in names])


def _known(names: Sequence[str]) -> None:
    known = [name for family in FAMILIES.values() for name in family.kernels]
    for name in names:
        if name not in known:
            raise ValueError(f"custom_mm: expected a kernel, one of {', '.join(known)}, got {name!r}")


@contextmanager
def without_kernels(*names: str) -> Iterator[None]:
    """Switches kernels off in the whole process, for tests and measurements.

    A call then runs the next kernel that can compute it, or raises ValueError if there is none. A plan keeps the kernel
    that it selected before, so make plans inside of the context.

    Args:
        *names: names of kernels, as `explain` and a plan's `explain()` print them.

    Returns:
        A context manager; the kernels are on again after it.

    Raises:
        ValueError: if a name is unknown.

    Examples:
        >>> import torch, custom_mm
        >>> x = torch.zeros(64, 8192, dtype=torch.bfloat16)
        >>> with custom_mm.without_kernels("nearly_even"):
        ...     print(custom_mm.explain("softmax_", x, gpu="H100").kernel)
        one_pass
    """
    _known(names)
    before = _off
    _set(before | frozenset(names))
    try:
        yield
    finally:
        _set(before)


@contextmanager
def only_kernel(name: str) -> Iterator[None]:
    """Switches all other kernels of the same family off, for tests and measurements.

    A call then runs this kernel, or raises ValueError if it cannot. See `without_kernels`.

    Args:
        name: a kernel's name, as `explain` prints it.

    Returns:
        A context manager; the other kernels are on again after it.

    Raises:
        ValueError: if the name is unknown.

    Examples:
        >>> import torch, custom_mm
        >>> x = torch.zeros(64, 8192, dtype=torch.bfloat16)
        >>> with custom_mm.only_kernel("reread"):
        ...     print(custom_mm.explain("softmax_", x, gpu="H100").kernel)
        reread
    """
    _known([name])
    family = next(f for f in FAMILIES.values() if name in f.kernels)
    with without_kernels(*(other for other in family.kernels if other != name)):
        yield
