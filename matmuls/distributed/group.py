"""A process group as plans use it: collectives on lists of numbers and on tensors, with errors that name ranks."""

import datetime
import itertools
import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .agreement import LOOK_SECONDS, Agreement, Told

T = TypeVar("T")
Mesh = DeviceMesh | dist.ProcessGroup | None

ANSWER_SECONDS = 5.0  # after a failure, for the other ranks to say that they are alive

_gathering, _exchanging = AllgatherOptions(), AllToAllOptions()
_RENAMED = hasattr(dist.ProcessGroup, "all_to_all_single")
_gathering.asyncOp = _exchanging.asyncOp = True


# The methods that functions of torch.distributed call after checks that a product need not repeat. torch 2.13 renamed
# them.


def _all_gather(group: Any, received: torch.Tensor, sent: torch.Tensor) -> Any:
    return (group.all_gather_single if _RENAMED else group._allgather_base)(received, sent, _gathering)


def _all_to_all(group: Any, received: torch.Tensor, sent: torch.Tensor, *counts: list[int]) -> Any:
    """counts: of the rows received from each rank, and of those sent."""
    call = group.all_to_all_single if _RENAMED else group.alltoall_base
    return call(received, sent, *counts, _exchanging)


def as_real(t: torch.Tensor) -> torch.Tensor:
    """t as it is sent, in its own memory: gloo and NCCL have no complex numbers."""
    return torch.view_as_real(t) if t.is_complex() else t


class Pending:
    """A tensor that is being received, and what is being sent, which lives until then. sends: 1 for rows of x, 2 for
    gradients."""

    __slots__ = ("_exchange", "_group", "_received", "_sends", "_sent", "_work")

    def __init__(self, group: "Group", received: torch.Tensor, sent: torch.Tensor, work: Any, sends: int = 1) -> None:
        self._group, self._received, self._sent, self._work, self._sends = group, received, sent, work, sends
        self._exchange = 0
        if group.agreement is not None and work is not None:
            group.agreement.exchanges += 1
            self._exchange = group.agreement.exchanges

    def wait(self) -> torch.Tensor:
        """The tensor received. NCCL: the current stream waits, the host does not."""
        if self._work is not None:
            if self._exchange:
                self._look_around()
            else:
                self._wait()
        return self._received

    def _wait(self, *seconds: datetime.timedelta) -> bool:
        """False if it takes longer."""
        try:
            self._work.wait(*seconds)
        except RuntimeError as error:
            if not seconds or self._work.is_completed():
                self._group.name_the_dead(error)
            return False
        return True

    def _look_around(self) -> None:
        """Wait for the rows; RuntimeError if a rank that sends some asks for an agreement instead."""
        agreement, end = self._group.agreement, time.monotonic() + self._group.seconds
        assert agreement is not None
        for seconds in itertools.chain((LOOK_SECONDS,), itertools.repeat(4 * LOOK_SECONDS)):
            if self._wait(datetime.timedelta(seconds=seconds)):
                return
            if agreement.is_asked(self._exchange):
                break
            if time.monotonic() > end:
                self._wait()
                return
        rows, n = self._sent.shape[:2]
        every = agreement.ask(Told(self._sends, 1, rows, n, -1, -1, self._exchange - 1))
        self._wait(datetime.timedelta(seconds=ANSWER_SECONDS))  # the other ranks send rows that no one reads
        rank, other = next((rank, told) for rank, told in enumerate(every) if not told.waits_for)
        raise RuntimeError(
            f"{self._group}: expected the same call on every rank, got {every[self._group.rank]} here and {other} on "
            f"rank {rank}"
        )


class Group:
    """A process group: of a DeviceMesh of one dimension, or given, or the default one. Without torch.distributed, or
    in a group of one, nothing is ever sent.

    rank, size: of this process in the group. name: of the operator, for errors. agreement: how its ranks agree on a
    product; None: by all_gather.

    A plan may outlive its process group. It refers to the group weakly: destroy_process_group then joins gloo's
    threads. A thread that outlives the interpreter aborts the process when it releases a tensor.
    """

    agreement: Agreement | None = None
    _group: Callable[[], dist.ProcessGroup | None] = staticmethod(lambda: None)

    def __init__(self, name: str, mesh: Mesh, device: torch.device) -> None:
        self.name, self.device = name, device
        self.mesh = mesh if isinstance(mesh, DeviceMesh) else None
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                raise ValueError(f"{name}: expected a mesh of one dimension, got {mesh.ndim}; take one of it by name")
            group: dist.ProcessGroup | None = mesh.get_group()
        elif mesh is None:
            ready = dist.is_available() and dist.is_initialized()
            group = dist.group.WORLD if ready else None
        elif isinstance(mesh, dist.ProcessGroup):
            group = mesh
        else:
            raise TypeError(f"{name}: expected mesh to be a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}")
        self.rank, self.size = 0, 1
        if group is not None:
            self._group = weakref.ref(group)
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            kinds = {d.type for d in group._device_types}
            if self.size > 1 and device.type not in kinds:
                raise ValueError(f"{name}: expected A on {' or '.join(sorted(kinds))} as the group sends, got {device}")

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank} of {self.size}"

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, of more than this process alone. RuntimeError if it is destroyed."""
        if (group := self._group()) is None:
            raise RuntimeError(f"{self}: expected the process group of the plan, which destroy_process_group has ended")
        return group

    @property
    def seconds(self) -> float:
        """The group's timeout: how long a rank may take to answer."""
        try:
            backend: Any = self.group._get_backend(self.device)
            return float(backend.options._timeout.total_seconds())
        except (AttributeError, RuntimeError):  # it is not public
            return 600.0

    def expect_rows(self, x: DTensor, *sizes: Sequence[int]) -> None:
        """ValueError unless x is on the ranks of this group by rows, and has them as a plan of these sizes does."""
        if tuple(x.placements) != (Shard(0),):
            raise ValueError(f"{self}: expected x with one placement, Shard(0), got {x.placements}")
        mesh = x.device_mesh
        if mesh.size() != self.size or mesh.get_local_rank() != self.rank:
            raise ValueError(f"{self}: expected x on the ranks of the plan, got a mesh of {mesh.size()}")
        uneven = [what for what in sizes if list(what) != even(sum(what), len(what))]
        if uneven:
            raise ValueError(
                f"{self}: expected rows as Shard(0) has them for a DTensor, got {list(uneven[0])}; "
                "take x.to_local(), or split by rows"
            )

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, as many on each. Waits for all of them."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        if self.size == 1:
            return [list(numbers)]
        rows: list[list[int]] = self.start_all_gather(mine).wait().view(self.size, -1).tolist()
        return rows

    def together(self, make: Callable[[], T]) -> T:
        """Return the result of `make()` on this rank. If `make` raises on one rank, all ranks raise an error."""
        error = None
        try:
            made = make()
        except Exception as raised:
            error = raised
        failed = [rank for rank, (is_failed,) in enumerate(self.all_gather([error is not None])) if is_failed]
        if error is not None:
            raise error
        if failed:
            raise RuntimeError(f"{self}: expected rows of A that fit on every rank, got an error on rank {failed[0]}")
        return made

    def start_all_gather(self, sent: torch.Tensor) -> Pending:
        """The tensors of all ranks, of one shape, one after another."""
        sent = sent.resolve_conj()
        received = sent.new_empty(self.size * sent.shape[0], *sent.shape[1:])
        group = self.group
        try:
            work = _all_gather(group, *map(as_real, (received, sent)))
        except RuntimeError as error:
            self.name_the_dead(error)
        return Pending(self, received, sent, work)

    def start_all_to_all(self, sent: torch.Tensor, counts: list[int], received: list[int], sends: int = 1) -> Pending:
        """Send the first counts[0] rows to rank 0 and so on; receive received[0] rows of rank 0 and so on. sends: as
        Pending takes it."""
        sent = sent.resolve_conj()
        target = sent.new_empty(sum(received), *sent.shape[1:])
        if self.size == 1:
            return Pending(self, target.copy_(sent), sent, None)
        group = self.group
        try:
            work = _all_to_all(group, as_real(target), as_real(sent), received, counts)
        except RuntimeError as error:
            self.name_the_dead(error)
        return Pending(self, target, sent, work, sends)

    def name_the_dead(self, error: RuntimeError) -> NoReturn:
        """Raise an error of the group with the ranks that do not answer any more."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        raise RuntimeError(f"{self}: {self._silent()}: {error}") from error

    def _silent(self) -> str:
        """Which ranks do not answer. Every rank that sees the failure leaves a mark in the group's store."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            store = dist.distributed_c10d._get_process_group_store(self.group)
            store.set(f"matmuls failed {self.rank}", "")
        except (AttributeError, RuntimeError):  # it is not public
            return "expected an answer of the group's store, which rank 0 keeps unless torchrun does, got none"
        deadline = time.monotonic() + ANSWER_SECONDS
        while others and time.monotonic() < deadline:
            others = [rank for rank in others if not store.check([f"matmuls failed {rank}"])]
            time.sleep(0.05)
        if not others:
            return "expected a collective of all ranks, got an error on each"
        return f"expected all ranks, got no answer of rank {', '.join(map(str, others))} (ended, or waiting elsewhere)"


def digest(numbers: Sequence[int]) -> int:
    """A number that differs where the numbers do, but for chance: to compare long lists across ranks."""
    found = len(numbers)
    for number in numbers:
        found = (found * 1_000_003 + number) % (2**61 - 1)
    return found


def starts_of(sizes: Sequence[int]) -> list[int]:
    """The start of each range of these sizes, and the end of the last one."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def even(total: int, parts: int) -> list[int]:
    """The sizes that torch.chunk and Shard(0) of DTensor give to each part."""
    each = math.ceil(total / parts) if total else 0
    return [max(0, min(each, total - each * part)) for part in range(parts)]
