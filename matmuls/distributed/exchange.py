"""How the rows of x that other ranks own are received, and how their gradients are sent back and added up."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from . import peers
from .group import Group
from .part import Part, RowCopies


class Awaited(Protocol):
    """Rows on their way."""

    def wait(self) -> torch.Tensor:
        """The rows received, for what the current stream runs next."""


class Exchange(Protocol):
    """Rows of x from other ranks: columns of the halo's matrix, in the order in which they are received."""

    columns: int

    def prepare(self, n: int, dtype: torch.dtype, backward: bool) -> None:
        """Make ready for x of n columns of this dtype, with its gradient or without. All ranks call it."""

    def way(self, n: int, dtype: torch.dtype) -> str:
        """How x of n columns is sent, in words."""

    def keeps(self, received: torch.Tensor) -> torch.Tensor:
        """The received rows, or a copy if a later `start` overwrites them."""

    @property
    def is_lost(self) -> bool:
        """True if the failure of a product was that of a rank which did not answer."""

    def start(self, x: torch.Tensor) -> Awaited:
        """Begin to receive the rows [columns, n] of the other ranks and to send theirs of x, the own rows."""

    def start_back(self, grad: torch.Tensor) -> Awaited:
        """Begin to send gradients [columns, n] of the received rows to their owners, and to receive those of x."""

    def add_back(self, grad: torch.Tensor, received: torch.Tensor) -> None:
        """Add the received gradients to that of x; the same bits every time."""

    def sender(self, n: int, dtype: torch.dtype, back: bool) -> tuple[Any, torch.Tensor | None]:
        """The stage of a `_C.Step` that sends x (back: gradients), and what PeerRows receive into, or None."""

    def adder(self, n: int, dtype: torch.dtype) -> Any:
        """The stage of a `_C.Step` that adds received gradients of n columns."""

    @property
    def nbytes(self) -> int:
        """Bytes that are kept alive."""


def _callable(start: Callable[[torch.Tensor], Awaited]) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
    """start, with what waits for its rows as the result."""
    return lambda rows: start(rows).wait


class NeededRows:
    """Every rank sends each other one the rows that it needs, and no more: by NCCL or gloo, or on one host, if there
    are few, by writing them into the memory of the other GPUs.

    sent [rows]: which of the own rows go to rank 0, then to rank 1, and so on. counts[r][o]: how many rows rank r
    receives from rank o.
    """

    def __init__(self, group: Group, own: int, sent: torch.Tensor, counts: list[list[int]]) -> None:
        self._group, self._own, self._sent, self._counts = group, own, RowCopies(sent, own), counts
        self._counts_back = [list(column) for column in zip(*counts, strict=True)]
        self._sent_counts, self._received_counts = self._counts_back[group.rank], counts[group.rank]
        self.columns = sum(self._received_counts)
        self._sums: dict[torch.dtype, Part] = {}
        self._busiest = max(map(sum, (*counts, *self._counts_back)))
        self._are_reachable = peers.are_reachable(group)
        self._channels: dict[tuple[int, torch.dtype, bool], peers.Channel] = {}

    def is_direct(self, n: int, dtype: torch.dtype) -> bool:
        """True if rows of n columns are written into the memory of the other GPUs."""
        is_small = self._busiest * n * dtype.itemsize <= peers.MOST_BYTES
        return (n, dtype, False) in self._channels or (self._are_reachable and n > 0 and is_small)

    def way(self, n: int, dtype: torch.dtype) -> str:
        if self.is_direct(n, dtype):
            return "by writing the needed rows into the memory of the other GPUs"
        return "by an all-to-all of the needed rows"

    def prepare(self, n: int, dtype: torch.dtype, backward: bool) -> None:
        for back, index, counts in ((False, self._sent.index, self._counts), (True, None, self._counts_back)):
            if back <= backward and (n, dtype, back) not in self._channels and self.is_direct(n, dtype):
                made = peers.make(self._group, index, counts, n, dtype)
                if made is None:  # on every rank alike
                    self._are_reachable = False
                    return
                self._channels[n, dtype, back] = made

    def keeps(self, received: torch.Tensor) -> torch.Tensor:
        channel = self._channels.get((received.shape[1], received.dtype, False))
        return received if channel is None else received.clone()

    @property
    def is_lost(self) -> bool:
        return any(channel.is_lost for channel in self._channels.values())

    def start(self, x: torch.Tensor) -> Awaited:
        if (channel := self._channels.get((x.shape[1], x.dtype, False))) is not None:
            return channel.send(x)
        return self._group.start_all_to_all(self._sent.of(x), self._sent_counts, self._received_counts)

    def start_back(self, grad: torch.Tensor) -> Awaited:
        if (channel := self._channels.get((grad.shape[1], grad.dtype, True))) is not None:
            return channel.send(grad)
        return self._group.start_all_to_all(grad, self._received_counts, self._sent_counts, sends=2)

    def add_back(self, grad: torch.Tensor, received: torch.Tensor) -> None:
        self._part_of(grad.dtype).add_to(grad, received)

    def _part_of(self, dtype: torch.dtype) -> Part:
        """A matrix of ones with a row for each own row: scattered atomics would add in any order."""
        made = self._sums.get(dtype)
        if made is None:
            row, order = torch.sort(self._sent.index, stable=True)
            ones = torch.ones(1, dtype=dtype, device=row.device).expand(order.shape[0])
            shape = self._own, order.shape[0]
            ids = torch.zeros_like(order, dtype=torch.int32)
            made = Part(row, order, shape, ids, ones, constant=False, products=50, added=True)
            self._sums[dtype] = made
        return made

    def sender(self, n: int, dtype: torch.dtype, back: bool) -> tuple[Any, torch.Tensor | None]:
        if (channel := self._channels.get((n, dtype, back))) is not None:
            return channel.rows, channel.received
        return _callable(self.start_back if back else self.start), None

    def adder(self, n: int, dtype: torch.dtype) -> Any:
        return self._part_of(dtype).adder(n, dtype)

    @property
    def nbytes(self) -> int:
        channels = sum(channel.nbytes for channel in self._channels.values())
        return self._sent.nbytes + channels + sum(made.nbytes for made in self._sums.values())


class AllRows:
    """Every rank receives all rows of x by an all-gather: where nearly all are needed, nothing has to be packed.

    sizes: rows of each rank. The halo's columns count `most` for each rank, this one included.
    """

    def __init__(self, group: Group, sizes: list[int]) -> None:
        self._group, self._own, self.most = group, sizes[group.rank], max(sizes)
        self.columns = group.size * self.most
        self.is_lost = False

    def prepare(self, n: int, dtype: torch.dtype, backward: bool) -> None:
        pass

    def way(self, n: int, dtype: torch.dtype) -> str:
        return "by an all-gather of all rows"

    def keeps(self, received: torch.Tensor) -> torch.Tensor:
        return received

    def start(self, x: torch.Tensor) -> Awaited:
        if self._own < self.most:
            padded = x.new_zeros(self.most, x.shape[1])  # a dense kernel would multiply NaN
            padded[: self._own].copy_(x)
            x = padded
        return self._group.start_all_gather(x.contiguous())

    def start_back(self, grad: torch.Tensor) -> Awaited:
        counts = [self.most] * self._group.size
        return self._group.start_all_to_all(grad, counts, counts, sends=2)

    def add_back(self, grad: torch.Tensor, received: torch.Tensor) -> None:
        grad.add_(received.view(self._group.size, self.most, -1).sum(0)[: self._own])

    def sender(self, n: int, dtype: torch.dtype, back: bool) -> tuple[Any, torch.Tensor | None]:
        return _callable(self.start_back if back else self.start), None

    def adder(self, n: int, dtype: torch.dtype) -> Any:
        return self.add_back

    @property
    def nbytes(self) -> int:
        return 0
