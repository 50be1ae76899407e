"""Second streams for work concurrent with the current one. They are created here and used by nothing else.

torch.cuda.Stream hands out the same 32 streams again and again: one may be in use elsewhere, or capture a graph there.
"""

import ctypes
import functools
import threading
import weakref
from typing import Any

import torch

MOST = 64  # per thread, before they are returned
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_free: dict[int, list[torch.cuda.ExternalStream]] = {}  # by device: streams of threads that have ended
_lock = threading.RLock()  # reentrant: garbage collection under the lock may end another _OfThread


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _ask(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status != 0:
        raise RuntimeError(f"beside: expected {name} to succeed, got CUresult {status}")


def _give_back(streams: dict[torch.cuda.Stream, torch.cuda.ExternalStream]) -> None:
    with _lock:
        for stream in streams.values():
            _free.setdefault(stream.device.index, []).append(stream)
    streams.clear()


class _OfThread:
    """A thread's second streams, one for each current stream: two concurrent captures must not share one."""

    def __init__(self) -> None:
        self.streams: dict[torch.cuda.Stream, torch.cuda.ExternalStream] = {}
        weakref.finalize(self, _give_back, self.streams).atexit = False


class _Local(threading.local):
    def __init__(self) -> None:
        self.own = _OfThread()


_local = _Local()


def beside(main: torch.cuda.Stream) -> torch.cuda.ExternalStream:
    """This thread's second stream for `main`, a current stream."""
    streams = _local.own.streams
    found = streams.get(main)
    if found is None:
        if len(streams) >= MOST:
            _give_back(streams)
        found = streams[main] = _take(main.device)
    return found


def _take(device: torch.device) -> torch.cuda.ExternalStream:
    mode = ctypes.c_int(RELAXED)  # these queries must not invalidate another thread's capture
    with torch.cuda.device(device):
        _ask("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            torch.cuda.cudart().cudaMemGetInfo(device.index)  # makes the device's context current in this thread
            with _lock:
                free = _free.get(device.index, [])
                at = next((i for i, stream in enumerate(free) if not _captures(stream)), None)
                if at is not None:
                    return free.pop(at)
            made = ctypes.c_void_p()
            _ask("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(NON_BLOCKING))
        finally:
            _ask("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    return torch.cuda.ExternalStream(made.value, device)


def _captures(stream: torch.cuda.ExternalStream) -> bool:
    """True if the stream is still part of a capture that its former thread left open."""
    status = ctypes.c_int()
    _ask("cuStreamIsCapturing", ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status))
    return status.value != 0
