"""Validates the indices of sparse matrices once: the kernels trust indices that were checked here."""

import weakref
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

_csr_check = torch.ops.custom_mm.csr_check.default
_csr_check_copied = torch.ops.custom_mm.csr_check_copied.default


def version_of(t: torch.Tensor) -> int:
    """t's version counter, which every write to t increments; -1 for an inference tensor, which has none."""
    return -1 if t.is_inference() else t._version


def place_of(t: torch.Tensor) -> tuple[Any, ...]:
    """The address, dtype, shape and strides of t. They change if `.data` is assigned."""
    return t.data_ptr(), t.dtype, t.shape, t.stride()


class Facts(NamedTuple):
    """Facts about the indices of a CSR matrix (or CSC, with rows and columns exchanged)."""

    longest: int  # nonzeros of the longest row
    distinct: bool  # columns strictly increase within each row: no duplicates
    beyond_two: int  # nonzeros after the second in an aligned group of 4 columns; approximate unless columns increase
    far: int  # number of rows that begin 2^14 columns or more from the diagonal


class Check:
    """A validation of indices on the GPU, started at once; `facts` reads the result. name: the calling operation.

    offsets: [rows + 1], inner: [nonzeros] from 0 to size - 1, both int32 or both int64. copied: also makes int32
    `copies` of both, whose values must fit.
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
        """The facts; raises ValueError on an invalid index. Waits for the GPU, on the stream that started the check."""
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
    """Validates the indices and returns their facts at once."""
    return Check(name, offsets, inner, size, what).facts()


def check_entries(name: str, row: torch.Tensor, column: torch.Tensor, shape: tuple[int, int]) -> None:
    """Raises ValueError unless every row and column lies in the shape. Waits for the GPU."""
    if not row.numel() or not column.numel():
        return
    found = torch.stack([t.long() for pair in (row.aminmax(), column.aminmax()) for t in pair]).tolist()
    for what, low, high, size in (("rows", *found[:2], shape[0]), ("columns", *found[2:], shape[1])):
        if low < 0 or high >= size:
            raise ValueError(f"{name}: expected {what} from 0 to {size - 1}, got {low if low < 0 else high}")


def expect_justified(name: str, rows: int, nonzeros: int) -> None:
    """Raises ValueError for so many rows that their offsets take memory which the nonzeros do not account for, as
    csr_transpose does."""
    if rows > 2**28 and rows // 64 > nonzeros:
        most = max(2**28, 64 * nonzeros)
        raise ValueError(f"{name}: expected at most {most} rows with {nonzeros} nonzeros, got {rows}")


# Results of validation per tensor of indices and layout, valid while the tensor lives and is not written to. CSR and
# COO forms of one matrix share their columns tensor.
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
    """Validates the indices of a matrix in one of cuSPARSE's layouts; height and width are a block's, 1 for other
    layouts.

    Indices are validated again only after a write: a call with known ones does not wait for the GPU.
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
    places = place_of(offsets), place_of(indices)
    asked: tuple[Any, ...] = (layout, rows, columns, height, width, versions, places)
    seen = _known.get(indices, {})
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
