"""A part of a block of rows of A, with products that are added to a result, and the transposed ones."""

from collections.abc import Callable

import torch

from ..sparse.csr_pattern import CsrPattern, is_capturing
from ..sparse.default_spmm import default_product_into, kernel_of
from ..sparse.names import CHUNKS, DEFAULT
from ..sparse.plan import SparsePlan
from ..sparse.selector import Selector

_sddmm: Callable[..., torch.Tensor] = torch.ops.custom_mm.csr_sddmm.default

FEW = 0.5  # of the rows: with fewer that have nonzeros, the part is kept without the others


class Part:
    """A matrix of some of the nonzeros of a block of rows.

    plan: the matrix, without its empty rows if there are many. rows: which those rows are of the block's; None: all.
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
        self.ids, self.rows = ids, None
        counts = torch.bincount(row.long(), minlength=shape[0])
        if added:
            taken = counts.nonzero().view(-1)
            if taken.shape[0] < FEW * shape[0]:
                self.rows, counts = taken, counts[taken]
        crow = torch.zeros(counts.shape[0] + 1, dtype=torch.int64, device=col.device)
        torch.cumsum(counts, 0, out=crow[1:])
        sizes = counts.shape[0], shape[1]
        pattern = CsrPattern("distributed.plan", crow, col.to(torch.int64), sizes).in_int32()
        selector = Selector(pattern, products=products, constant=constant)
        self._values = values.detach().index_select(0, ids)
        self._made(SparsePlan(pattern, self._values, sizes, selector))

    def _made(self, plan: SparsePlan) -> None:
        self.plan, self._transposed, self.nnz = plan, plan.mT, plan.nnz
        self._in_place: dict[tuple[torch.dtype, int], bool] = {}

    def load(self, values: torch.Tensor) -> None:
        """Take the part's values from the block's, in the memory of the last ones, which captured graphs read. Without
        a gradient being recorded."""
        if values.dtype != self._values.dtype:
            self._values = values.detach().index_select(0, self.ids)
            self._in_place.clear()
        else:
            # By way of data the version stays, and with it the calls that the plan prepared.
            torch.index_select(values, 0, self.ids, out=self._values.data)
            if not self.plan._selector or not self.plan._selector.constant:
                return  # they are read in place
        self.plan.update(self._values)

    def of_other_values(self, values: torch.Tensor) -> "Part":
        """The same part of a block with other values, not constant."""
        made = object.__new__(Part)
        made.ids, made.rows = self.ids, self.rows
        made._values = values.detach().index_select(0, self.ids)
        made._made(self.plan.with_values(made._values))
        return made

    def add_to(self, y: torch.Tensor, b: torch.Tensor) -> None:
        """y <- y + A @ b."""
        if self.nnz == 0:
            return
        if self.rows is not None:
            y.index_add_(0, self.rows, self.plan @ b)  # each row once, so that the order does not matter
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
        """A^T @ grad."""
        return self._transposed @ self._own_rows(grad)

    def gradient_of_values(self, grad: torch.Tensor, b: torch.Tensor, to: torch.Tensor) -> None:
        """Write the gradient of the part's values, for the product with b, to its places in that of the block's."""
        s = self.plan._pattern
        found = _sddmm(s.crow, s.col, self._own_rows(grad), b, s.columns, 1, *s.arguments(False))
        to.index_copy_(0, self.ids.long(), found)

    def _own_rows(self, grad: torch.Tensor) -> torch.Tensor:
        return grad if self.rows is None else grad.index_select(0, self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes that the part keeps alive."""
        return self.plan.nbytes + self.ids.nbytes + (0 if self.rows is None else self.rows.nbytes)
