"""What the ranks of a CPU group agree on before a product that is new to one of them. It takes no collective: another
rank may be in the collective of a product that it knows."""

import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..sparse.plan import DTYPES

if TYPE_CHECKING:
    from .exchange import Exchange
    from .group import Group

LOOK_SECONDS = 0.25  # that a rank waits for rows before it looks whether another one asks for an agreement


class Told(NamedTuple):
    """What a rank says: of the product that it is about to make or, if it waits for rows, of those that it sent.

    waits_for: 0, or 1 for rows of x, 2 for gradients. fits: x does. dtype: its place in DTYPES, or -1. recorded: x
    needs a gradient. exchanges: those that this rank has done.
    """

    waits_for: int
    fits: int
    rows: int
    n: int
    dtype: int
    recorded: int
    exchanges: int

    def __str__(self) -> str:
        if self.waits_for:
            return f"a {('product', 'gradient')[self.waits_for - 1]} of {self.n} columns that it had made before"
        dtype = "another dtype" if self.dtype < 0 else str(DTYPES[self.dtype])
        return f"[{self.rows}, {self.n}] in {dtype} {'with' if self.recorded else 'without'} a gradient"


class Agreement:
    """The agreements of one plan, through the store of its group.

    A rank to which a product is new asks, and waits for what all ranks say. A rank that knows its product does not ask:
    it begins the exchange. If the rows do not come, it looks whether another rank asks, and says that it waits.
    """

    def __init__(self, group: "Group", store: Any, token: int) -> None:
        self._group, self._store, self._token = group, store, token
        self._asked = 0  # the same on every rank
        self.exchanges = 0  # begun by this rank

    def _name(self, asked: int, rank: int) -> str:
        return f"matmuls {self._token} {asked} {rank}"

    def ask(self, own: Told) -> list[Told]:
        """The messages of all ranks. Waits for all of them."""
        group, store = self._group, self._store
        names = [self._name(self._asked, rank) for rank in range(group.size)]
        store.set(names[group.rank], " ".join(str(int(number)) for number in own))
        try:
            store.wait(names, datetime.timedelta(seconds=group.seconds))
        except RuntimeError as error:
            silent = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
            raise RuntimeError(
                f"{group}: expected all ranks, got no answer of rank {', '.join(silent)} (ended, or in another call)"
            ) from error
        told = [self._read(name) for name in names]
        if self._asked:  # all have read it
            store.delete_key(self._name(self._asked - 1, group.rank))
        self._asked += 1
        return told

    def settle(self, own: Told, exchange: "Exchange", rows: int, dtype: torch.dtype) -> list[Told]:
        """`ask`; then sends zeros to the ranks that wait for rows, so that their exchange ends and they raise an error
        too. rows: of x on this rank. dtype: of x."""
        told = self.ask(own)
        waiting = {(other.waits_for, other.n, other.exchanges) for other in told if other.waits_for}
        if len(waiting) == 1:
            waits_for, n, exchanges = waiting.pop()
            if exchanges == own.exchanges:  # else they wait in different calls: no rows of this rank would end both
                start, count = (exchange.start, rows) if waits_for == 1 else (exchange.start_back, exchange.columns)
                start(torch.zeros(count, n, dtype=dtype)).wait()
        return told

    def is_asked(self, exchange: int) -> bool:
        """True if a rank asks that does not take part in this exchange, by its number."""
        names = (self._name(self._asked, rank) for rank in range(self._group.size) if rank != self._group.rank)
        return any(self._store.check([name]) and self._read(name).exchanges < exchange for name in names)

    def _read(self, name: str) -> Told:
        return Told(*map(int, self._store.get(name).decode().split()))


def agreement_of(group: "Group", token: int) -> Agreement | None:
    """None where the group has no store, and on GPUs, where the host does not wait for rows."""
    if group.size == 1 or group.device.type != "cpu":
        return None
    try:
        store = dist.distributed_c10d._get_process_group_store(group.group)
    except (AttributeError, KeyError, RuntimeError):  # it is not public
        return None
    return Agreement(group, store, token)
