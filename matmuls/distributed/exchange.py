"""How the rows of x that other ranks own are received, and how their gradients are sent back and added up."""

from typing import Protocol

import torch

from .group import Group, Pending
from .part import Part


class Exchange(Protocol):
    """Rows of x from other ranks: columns of the halo's matrix, in the order in which they are received."""

    columns: int

    def start(self, x: torch.Tensor) -> Pending:
        """Begin to receive the rows [columns, n] of the other ranks and to send theirs of x, the own rows."""

    def start_back(self, grad: torch.Tensor) -> Pending:
        """Begin to send gradients [columns, n] of the received rows to their owners, and to receive those of x."""

    def add_back(self, grad: torch.Tensor, received: torch.Tensor) -> None:
        """Add the received gradients to that of x; the same bits every time."""

    @property
    def nbytes(self) -> int:
        """Bytes that are kept alive."""


class NeededRows:
    """Every rank sends each other one the rows that it needs, and no more.

    sent [rows]: which of the own rows go to rank 0, then to rank 1, and so on, sent_counts of them;
    received_counts: how many come from each.
    """

    def __init__(
        self, group: Group, own: int, sent: torch.Tensor, sent_counts: list[int], received_counts: list[int]
    ) -> None:
        self._group, self._own, self._sent = group, own, sent
        self._sent_counts, self._received_counts = sent_counts, received_counts
        self.columns = sum(received_counts)
        self._sums: dict[torch.dtype, Part] = {}

    def start(self, x: torch.Tensor) -> Pending:
        return self._group.start_all_to_all(x.index_select(0, self._sent), self._sent_counts, self._received_counts)

    def start_back(self, grad: torch.Tensor) -> Pending:
        return self._group.start_all_to_all(grad, self._received_counts, self._sent_counts)

    def add_back(self, grad: torch.Tensor, received: torch.Tensor) -> None:
        """By a matrix of ones with a row for each own row: scattered atomics would add in any order."""
        made = self._sums.get(grad.dtype)
        if made is None:
            row, order = torch.sort(self._sent, stable=True)
            ones = torch.ones(1, dtype=grad.dtype, device=grad.device).expand(order.shape[0])
            shape = self._own, order.shape[0]
            ids = torch.zeros_like(order, dtype=torch.int32)
            made = Part(row, order, shape, ids, ones, constant=False, products=50, added=True)
            self._sums[grad.dtype] = made
        made.add_to(grad, received)

    @property
    def nbytes(self) -> int:
        return self._sent.nbytes + sum(made.nbytes for made in self._sums.values())


class AllRows:
    """Every rank receives all rows of x by an all-gather: where nearly all are needed, nothing has to be packed.

    sizes: rows of each rank. The halo's columns count `most` for each rank, this one included.
    """

    def __init__(self, group: Group, sizes: list[int]) -> None:
        self._group, self._own, self.most = group, sizes[group.rank], max(sizes)
        self.columns = group.size * self.most

    def start(self, x: torch.Tensor) -> Pending:
        if self._own < self.most:
            padded = x.new_zeros(self.most, x.shape[1])  # a dense kernel would multiply NaN
            padded[: self._own].copy_(x)
            x = padded
        return self._group.start_all_gather(x.contiguous())

    def start_back(self, grad: torch.Tensor) -> Pending:
        counts = [self.most] * self._group.size
        return self._group.start_all_to_all(grad, counts, counts)

    def add_back(self, grad: torch.Tensor, received: torch.Tensor) -> None:
        grad.add_(received.view(self._group.size, self.most, -1).sum(0)[: self._own])

    @property
    def nbytes(self) -> int:
        return 0
