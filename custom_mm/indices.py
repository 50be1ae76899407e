"""Indices of sparse matrices, looked at once: the kernels trust what was checked here and read it unchecked."""

import weakref
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

_csr_check = torch.ops.custom_mm.csr_check.default
_csr_check_copied = torch.ops.custom_mm.csr_check_copied.default


def version_of(t: torch.Tensor) -> int:
    """Moves with every write to t; an inference tensor has none."""
    return -1 if t.is_inference() else t._version


class Facts(NamedTuple):
    """Of a matrix by rows, or by columns likewise."""

    longest: int  # nonzeros of a row
    distinct: bool  # the columns of every row increase: none is there twice
    beyond_two: int  # nonzeros after the second in their four columns: about, where columns increase
    far: int  # rows that begin 2^14 columns or more from the diagonal


class Check:
    """What the indices say, which the GPU is asked at once. name: of the operation that asks.

    offsets: [rows + 1], inner: [nonzeros] from 0 to size - 1, both int32 or both int64. copied: with `copies` of them
    in int32, which is enough for each of them.
    """

    def __init__(
        self,
        name: str,
        offsets: torch.Tensor,
        inner: torch.Tensor,
        size: int,
        what: str = "columns",
        copied: bool = False,
    ) -> None:
        self.name, self._nonzeros, self._size, self._what = name, inner.shape[0], size, what
        self.copies: tuple[torch.Tensor, torch.Tensor] | None = None
        if copied:
            self._said, *copies = _csr_check_copied(offsets, inner, size)
            self.copies = copies[0], copies[1]
        else:
            self._said = _csr_check(offsets, inner, size)

    def facts(self) -> Facts:
        """ValueError where an index is not what it must be. Waits for the GPU, on the stream of before."""
        problem, where, found, longest, rises, beyond_two, far = self._said.tolist()
        if problem:
            expected = {
                1: "the first offset to be 0",
                2: f"the last offset to be {self._nonzeros}, as many as there are {self._what}",
                3: f"offsets that do not decrease after row {where}",
                4: f"{self._what} from 0 to {self._size - 1} at nonzero {where}",
            }
            raise ValueError(f"{self.name}: expected {expected[problem]}, got {found}")
        return Facts(int(longest), bool(rises), int(beyond_two), int(far))


def check_rows(name: str, offsets: torch.Tensor, inner: torch.Tensor, size: int, what: str = "columns") -> Facts:
    """What the indices say, at once."""
    return Check(name, offsets, inner, size, what).facts()


def check_entries(name: str, row: torch.Tensor, column: torch.Tensor, shape: tuple[int, int]) -> None:
    """ValueError unless every row and column lies in the shape. Waits for the GPU."""
    if not row.numel() or not column.numel():
        return
    found = torch.stack([t.long() for pair in (row.aminmax(), column.aminmax()) for t in pair]).tolist()
    for what, low, high, size in (("rows", *found[:2], shape[0]), ("columns", *found[2:], shape[1])):
        if low < 0 or high >= size:
            raise ValueError(f"{name}: expected {what} from 0 to {size - 1}, got {low if low < 0 else high}")


# What was checked of a tensor of indices in each layout, for as long as it lives and is not written to: one matrix by
# rows and by entries shares its columns.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def check_parts(
    name: str,
    layout: str,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    rows: int,
    columns: int,
    height: int,
    width: int,
) -> None:
    """The indices of a matrix in a layout of cuSPARSE's; height and width are a block's, 1 where there are none.

    Looked at anew only when they were written to: a call with known ones does not wait for the GPU.
    """
    for what, t in (("offsets", offsets), ("indices", indices)):
        if not isinstance(t, torch.Tensor) or t.dim() != 1 or t.dtype not in (torch.int32, torch.int64):
            got = f"{t.dtype} of shape {list(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
            raise ValueError(f"{name}: expected {what} of one dimension in int32 or int64, got {got}")
    if layout != "coo" and not offsets.shape[0]:
        raise ValueError(f"{name}: expected offsets, one more than there are of what they begin, got none")
    if offsets.dtype != indices.dtype:
        raise ValueError(f"{name}: expected offsets in {indices.dtype} as indices are, got {offsets.dtype}")
    versions = version_of(offsets), version_of(indices)
    addresses = offsets.data_ptr(), indices.data_ptr()  # others where somebody sets .data
    asked: tuple[Any, ...] = (layout, rows, columns, height, width, *versions, *addresses)
    seen = _known.get(indices, {})  # type: ignore[no-untyped-call]
    entry = seen.get(layout)
    if entry is not None and entry[0]() is offsets and entry[1] == asked:
        return
    if layout == "coo":
        check_entries(name, offsets, indices, (rows, columns))
        if bool((offsets.diff() < 0).any()):
            raise ValueError(f"{name}: expected rows that do not decrease, got rows in another order")
    elif layout == "csc":
        check_rows(name, offsets, indices, rows, "rows")
    else:
        check_rows(name, offsets, indices, columns // max(width, 1))
    if -1 not in versions:
        _known[indices] = {**seen, layout: (weakref.ref(offsets), asked)}
