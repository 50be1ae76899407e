"""A part of a block of rows of A, with products that are added to a result, and the transposed ones."""

from collections.abc import Callable
from typing import Any

import torch

from custom_mm import _C

from ..sparse.csr_pattern import INT32_MAX, CsrPattern, for_every_stream, is_capturing
from ..sparse.default_spmm import default_product_into, kernel_of
from ..sparse.names import CHUNKS, DEFAULT
from ..sparse.plan import REAL, SparsePlan
from ..sparse.selector import Selector

_sddmm: Callable[..., torch.Tensor] = torch.ops.custom_mm.csr_sddmm.default

FEW = 0.5  # of the rows: with fewer that have nonzeros, the part is kept without the others
# Products of a nonzero and a column up to which one launch for all (src/distributed/row_sums.h) is faster than a plan's
# product and its addition. On a GPU: 10 us at the row kernel's 3.5e6 products a us; the launches take as long.
MOST_SUMMED = {"cuda": 2**25, "cpu": 2**18}
LONG_ROW = 64  # nonzeros; a whole block sums a longer row
# Nonzeros; if no row has more, any kernel of a GPU is bound by memory, and one launch is best for any number.
SHORT_ROW = 8
MOST_COLUMNS = 65535 * 32  # of a launch, where rows are not aligned


def takes_sums(dtype: torch.dtype, n: int, *sizes: int) -> bool:
    """True if `row_sums` take n columns of this dtype and matrices of these sizes."""
    return dtype in REAL and n <= MOST_COLUMNS and max(sizes) < INT32_MAX


def row_sums(
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    targets: torch.Tensor | None,
    values: torch.Tensor | None,
    shape: tuple[int, int],
    every_row: bool,
) -> _C.RowSums:
    """Sums of the rows of a matrix. indices: crow, col, order. targets: the result's row of each; None: the same ones.
    values: None for ones. shape: of the result's rows, and of the dense operand's. every_row: empty ones too, which are
    written as zeros."""
    crow, col, order = indices
    counts = crow.diff()
    rows = torch.arange(counts.shape[0], device=crow.device) if every_row else counts.nonzero().view(-1)
    is_short = counts[rows] <= LONG_ROW
    rows = torch.cat([rows[~is_short], rows[is_short]])
    to = rows if targets is None else targets[rows]
    items = torch.stack([crow[rows], crow[rows + 1], to, torch.zeros_like(to)], 1).to(torch.int32).contiguous()
    long_rows = int((~is_short).sum())
    made = _C.RowSums(
        items=items, long_rows=long_rows, col=col, order=order, values=values, rows=shape[0], columns=shape[1]
    )
    for_every_stream(items)
    return made


class RowCopies:
    """Some rows of a matrix [rows, n], copied from it or added to it by one kernel. torch's index_select and index_add_
    take 0.8 ms for 1.3 million rows of 64 bytes on an H200.

    index [count]: which rows, each one once if they are added to.
    """

    def __init__(self, index: torch.Tensor, rows: int) -> None:
        self.index, self._rows = index, rows
        self._made: dict[bool, _C.RowSums] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_made": {}}  # a copied or unpickled one makes its own

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """x[index], [count, n]."""
        made = self._sums(x, False)
        return x.index_select(0, self.index) if made is None else made.product(x)

    def add_to(self, y: torch.Tensor, rows: torch.Tensor) -> None:
        """y[index] += rows."""
        made = self._sums(rows, True) if y.is_contiguous() else None
        if made is None:
            y.index_add_(0, self.index, rows)
        else:
            made.add(y, rows.contiguous())

    def _sums(self, x: torch.Tensor, added: bool) -> _C.RowSums | None:
        count = self.index.shape[0]
        if x.device.type != "cuda" or not takes_sums(x.dtype, x.shape[1], count, self._rows):
            return None
        if added not in self._made:
            if is_capturing(x.device):
                return None
            with torch.inference_mode(False), torch.no_grad():
                each = torch.arange(count + 1, device=x.device, dtype=torch.int32)
                col = each[:-1] if added else self.index.to(torch.int32)
                shape = (self._rows, count) if added else (count, self._rows)
                made = row_sums((each, col, None), self.index if added else None, None, shape, not added)
                for_every_stream(col)
                self._made[added] = made
        return self._made[added]

    @property
    def nbytes(self) -> int:
        """Bytes that are kept alive."""
        return self.index.nbytes + sum(made.items.nbytes + made.col.nbytes for made in self._made.values())


class Part:
    """A matrix of some of the nonzeros of a block of rows.

    plan: the matrix, without its empty rows if there are many. rows: those rows of the block's; None: all.
    ids [nonzeros]: the part's values are values[ids].
    """

    def __init__(
        self,
        row: torch.Tensor,
        col: torch.Tensor,
        shape: tuple[int, int],
        ids: torch.Tensor,
        values: torch.Tensor,
        *,
        constant: bool,
        products: int,
        added: bool,
    ) -> None:
        """row, col: of each nonzero, by rows. values: all of the block's. added: its products are added to others, so
        that empty rows may be left out."""
        self.ids, self._added, self._height = ids, added, shape[0]
        self.rows: RowCopies | None = None
        counts = torch.bincount(row.long(), minlength=shape[0])
        if added:
            taken = counts.nonzero().view(-1)
            if taken.shape[0] < FEW * shape[0]:
                self.rows, counts = RowCopies(taken, shape[0]), counts[taken]
        crow = torch.zeros(counts.shape[0] + 1, dtype=torch.int64, device=col.device)
        torch.cumsum(counts, 0, out=crow[1:])
        sizes = counts.shape[0], shape[1]
        pattern = CsrPattern("distributed.plan", crow, col.to(torch.int64), sizes).in_int32()
        selector = Selector(pattern, products=products, constant=constant)
        self._values = values.detach().index_select(0, ids)
        self._made(SparsePlan(pattern, self._values, sizes, selector))

    def _made(self, plan: SparsePlan) -> None:
        self.plan, self.transposed, self.nnz = plan, plan.mT, plan.nnz
        self._in_place: dict[tuple[torch.dtype, int], bool] = {}
        self._sums: dict[bool, _C.RowSums] = {}  # of the matrix, and of the transposed one

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_sums": {}}  # a copied or unpickled part makes its own

    def load(self, values: torch.Tensor) -> None:
        """Take the part's values from the block's, in the memory of the last ones, which captured graphs read. Without
        a gradient being recorded."""
        if values.dtype != self._values.dtype:
            self._values = values.detach().index_select(0, self.ids)
            self._in_place.clear()
            self._sums.clear()
        else:
            # By way of data the version stays, and with it the calls that the plan prepared.
            torch.index_select(values, 0, self.ids, out=self._values.data)
            if not self.plan._selector or not self.plan._selector.constant:
                return  # they are read in place
        self.plan.update(self._values)

    def of_other_values(self, values: torch.Tensor) -> "Part":
        """The same part of a block with other values, not constant."""
        made = object.__new__(Part)
        made.ids, made.rows, made._added, made._height = self.ids, self.rows, self._added, self._height
        made._values = values.detach().index_select(0, self.ids)
        made._made(self.plan.with_values(made._values))
        return made

    def sums(self, n: int, dtype: torch.dtype, transposed: bool = False) -> _C.RowSums | None:
        """The sums that add A @ b to rows of a result, or compute A^T @ grad, in one launch. None if the plan's product
        is faster. n: columns of b or grad."""
        s, device = self.plan._pattern, self._values.device
        if not self._added or self.nnz == 0 or dtype != self._values.dtype:
            return None
        if not takes_sums(dtype, n, s.rows, s.columns, self._height, s.nonzeros):
            return None
        are_short = device.type == "cuda" and not transposed and s.longest <= SHORT_ROW
        if self.nnz * n > MOST_SUMMED.get(device.type, 0) and not are_short:
            return None
        if transposed not in self._sums:
            if is_capturing(device):
                return None
            with torch.inference_mode(False), torch.no_grad():
                self._sums[transposed] = self._transposed_sums() if transposed else self._own_sums()
        return self._sums[transposed]

    def _own_sums(self) -> _C.RowSums:
        s = self.plan._pattern
        targets = None if self.rows is None else self.rows.index
        return row_sums((s.crow, s.col, s.order), targets, self._values, (self._height, s.columns), False)

    def _transposed_sums(self) -> _C.RowSums:
        s = self.plan._pattern
        crow, col, order = s.transposed()
        if self.rows is not None:
            col = self.rows.index.to(torch.int32)[col.long()]
        return row_sums((crow, col, order), None, self._values, (s.columns, self._height), True)

    def adder(self, n: int, dtype: torch.dtype) -> Any:
        """The stage of a `_C.Step` that adds A @ b, for b of n columns; None if A has no nonzeros."""
        return None if self.nnz == 0 else self.sums(n, dtype) or self.add_to

    def add_to(self, y: torch.Tensor, b: torch.Tensor) -> None:
        """y <- y + A @ b."""
        if self.nnz == 0:
            return
        if y.is_contiguous() and (sums := self.sums(b.shape[1], b.dtype)) is not None:
            sums.add(y, b.contiguous())
        elif self.rows is not None:
            self.rows.add_to(y, self.plan @ b)
        elif self._adds_in_place(b):
            default_product_into(y, self.plan._pattern, self._values, b, "sum", 1.0, 1.0)
        else:
            y.add_(self.plan @ b)

    def _adds_in_place(self, b: torch.Tensor) -> bool:
        """True if the fastest kernel is one that adds to its result. The first answer selects the kernel."""
        n = b.shape[1]
        known = self._in_place.get((b.dtype, n))
        if known is None:
            if is_capturing(b.device):
                return True
            _ = self.plan @ b
            selector = self.plan._selector
            measured = None if selector is None else selector.measured.get((b.dtype, n.bit_length()))
            default = measured is None or measured.fastest(True) == DEFAULT
            known = default and kernel_of(self.plan._pattern, n, b.dtype, b.device) != CHUNKS
            self._in_place[b.dtype, n] = known
        return known

    def transposed_product(self, grad: torch.Tensor) -> torch.Tensor:
        """A^H @ grad, which is A^T @ grad if A is real."""
        if grad.is_complex():
            return (self.transposed @ self._own_rows(grad).conj().resolve_conj()).conj().resolve_conj()
        if (sums := self.sums(grad.shape[1], grad.dtype, transposed=True)) is not None:
            return sums.product(grad)
        return self.transposed @ self._own_rows(grad)

    def gradient_of_values(self, grad: torch.Tensor, b: torch.Tensor, to: torch.Tensor) -> None:
        """Write the gradient of the part's values, for the product with b, to its places in that of the block's."""
        s = self.plan._pattern
        found = _sddmm(s.crow, s.col, self._own_rows(grad), b.conj(), s.columns, 1, *s.arguments(False))
        to.index_copy_(0, self.ids.long(), found)

    def _own_rows(self, grad: torch.Tensor) -> torch.Tensor:
        return grad if self.rows is None else self.rows.of(grad)

    @property
    def nbytes(self) -> int:
        """Bytes that the part keeps alive."""
        own = self.plan.nbytes + self.ids.nbytes + (0 if self.rows is None else self.rows.nbytes)
        copied = self.rows is not None
        return own + sum(s.items.nbytes + copied * back * s.col.nbytes for back, s in self._sums.items())
