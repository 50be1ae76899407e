"""Rows of x that each rank writes into the memory of the other GPUs of one host, by one kernel instead of NCCL."""

import os
import socket
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from custom_mm import _C

from .group import Group, digest, starts_of

T = TypeVar("T")

# Above this size NCCL's launch time is a small part of a product, and the plan would keep much memory.
MOST_BYTES = 64 << 20
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
SHARES = "MATMULS_SHARE_MEMORY"  # "0" keeps plans from writing into each other's memory


class Channel:
    """Sends rows of `n` numbers of one dtype, always to the same ranks. Making one is a collective: all ranks do.

    buffer: as `allocated` returns it.
    index: which rows of x are sent, first those to rank 0; None: all of them. counts[r][o]: how many rows rank r
    receives from rank o.

    received [rows, n]: what the other ranks have written, until the next `send`. sent: how many rows this rank sends.
    nbytes: of this rank's memory.
    """

    def __init__(
        self,
        group: Group,
        buffer: torch.Tensor,
        index: torch.Tensor | None,
        counts: Sequence[Sequence[int]],
        n: int,
        dtype: torch.dtype,
    ) -> None:
        from torch.distributed._symmetric_memory import rendezvous  # it is not public

        own, each = counts[group.rank], n * dtype.itemsize
        header = _C.PeerRows.header
        with _no_multicast():
            shared = rendezvous(buffer, group.group.group_name)
        self.nbytes, self._shared = buffer.nbytes, shared
        self.received = buffer[header : header + sum(own) * each].view(dtype).view(sum(own), n)
        starts, slots = places(counts, group.rank)
        self.sent = starts[-1]
        self._held: torch.Tensor | None = None
        self.rows = _C.PeerRows(
            buffer=buffer,
            addresses=list(shared.buffer_ptrs),
            rank=group.rank,
            index=index,
            starts=starts,
            slots=slots,
            sources=[rank for rank, count in enumerate(own) if count],
            row_bytes=each,
            seconds=group.seconds,
        )

    def send(self, x: torch.Tensor) -> "Channel":
        """Write rows of x [.., n] into the other ranks' memory, while the current stream runs what comes next."""
        self._held = x.contiguous()  # else its memory might be given to what runs next
        self.rows.send(self._held)
        return self

    def wait(self) -> torch.Tensor:
        """The rows received, for what the current stream runs next."""
        self.rows.wait()
        self._held = None
        return self.received

    @property
    def is_lost(self) -> bool:
        """True after a rank has not answered in time: this process can use its GPU no more."""
        return bool(self.rows.lost >= 0)


def places(counts: Sequence[Sequence[int]], rank: int) -> tuple[list[int], list[int]]:
    """Which of the rows that a rank sends go to each rank, as starts of ranges, and where they begin there."""
    return starts_of([row[rank] for row in counts]), [sum(row[:rank]) for row in counts]


def allocated(group: Group, nbytes: int) -> torch.Tensor:
    """Bytes that other ranks can map, with a zeroed header."""
    from torch._C._distributed_c10d import _SymmetricMemory  # it is not public

    buffer: torch.Tensor = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, group.device)
    buffer[: _C.PeerRows.header].zero_()
    torch.cuda.synchronize(group.device)
    return buffer


def make(
    group: Group, index: torch.Tensor | None, counts: Sequence[Sequence[int]], n: int, dtype: torch.dtype
) -> Channel | None:
    """A channel, or None if a rank could not make one, which warns. All ranks have memory before they meet: one that
    has not would let the others wait."""
    # the same on every rank, as torch requires
    nbytes = _C.PeerRows.header + n * dtype.itemsize * max(map(sum, counts))
    with torch.inference_mode(False), torch.no_grad():
        buffer = _on_all(group, lambda: allocated(group, nbytes))
        return buffer if buffer is None else _on_all(group, lambda: Channel(group, buffer, index, counts, n, dtype))


def _on_all(group: Group, make: Callable[[], T]) -> T | None:
    """make(), or None if it failed on a rank, which warns."""
    made = None
    try:
        made = make()
    except Exception as error:  # out of memory; another version of torch. The other ranks wait for the answer.
        warnings.warn(f"{group}: its rows go by NCCL, as the GPUs share no memory: {error}", stacklevel=1)
    return made if all(is_made for (is_made,) in group.all_gather([made is not None])) else None


def are_reachable(group: Group) -> bool:
    """True if the ranks are GPUs of one host that can all access each other's memory, and SHARES forbids it on none.
    The answer is the same on every rank.

    Also False for a part of the processes: torch counts the memory that a process shares with any group, and waits
    forever where the counts of two processes differ (pytorch issue 196082).
    """
    if group.device.type != "cuda" or not hasattr(_C, "PeerRows") or not 1 < group.size <= _C.PeerRows.most:
        return False
    if group.size != dist.get_world_size():
        return False
    own = torch.cuda.current_device() if group.device.index is None else group.device.index
    others = [i for i in range(torch.cuda.device_count()) if i != own]
    shares = os.environ.get(SHARES) != "0"
    reached = sum(1 << i for i in others if shares and torch.cuda.can_device_access_peer(own, i))
    facts = group.all_gather([_host(), own, reached])
    devices = {device for _, device, _ in facts}
    needed = sum(1 << device for device in devices)
    return (
        len({host for host, *_ in facts}) == 1
        and len(devices) == group.size
        and not any(needed & ~(reached | 1 << device) for _, device, reached in facts)
    )


def _host() -> int:
    """A number for this host, or this container of it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text(encoding="utf-8") if boot.exists() else ""
    return digest((socket.gethostname() + started).encode())


@contextmanager
def _no_multicast() -> Any:
    """Nothing here writes to several GPUs at once, which needs a switch that not every host lends."""
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = before
