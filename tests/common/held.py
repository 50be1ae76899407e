"""Multiprocessors held by a kernel that waits, for tests of kernels that must make progress meanwhile."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# A block per multiprocessor, since it takes most of the shared memory. It ends when *flag is set, or after 20 s. One
# thread polls, seldom: the flag is in the host's memory, and reads of all threads would slow every kernel down.
SOURCE = """
extern "C" __global__ void hold(volatile int* flag, int* started) {
  if (threadIdx.x == 0) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    atomicAdd_system(started, 1);
    do {
      __nanosleep(20000);
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (*flag == 0 && now - begin < 20000000000ull);
  }
  __syncthreads();
}
"""
SHARED_BYTES = 200 << 10
_kernels: dict[str, Any] = {}


def _hold() -> Any:
    if not _kernels:
        _kernels["hold"] = torch.cuda._compile_kernel(SOURCE, "hold")
        _kernels["hold"].set_shared_memory_config(SHARED_BYTES)
    return _kernels["hold"]


@contextmanager
def held(multiprocessors: int) -> Iterator[None]:
    """Multiprocessors of the current GPU are held by a kernel on a stream of its own."""
    if multiprocessors == 0:
        yield
        return
    flag, started = (torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(2))
    stream = torch.cuda.Stream()
    hold = _hold()
    hold((multiprocessors, 1, 1), (512, 1, 1), [flag, started], shared_mem=SHARED_BYTES, stream=stream)
    begin = time.perf_counter()
    while started.item() < multiprocessors:
        assert time.perf_counter() - begin < 10, f"{started.item()} of {multiprocessors} blocks have started"
    try:
        yield
        assert not stream.query(), "the multiprocessors were not held until the end"
    finally:
        flag.fill_(1)
        stream.synchronize()


def seconds_beside(run: Callable[[], object], limit: float = 5.0) -> float | None:
    """Seconds until the work that `run` gives to a stream of its own has ended; None: not within the limit. They begin
    when `run` has returned."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        end = torch.cuda.Event()
        end.record()
    begin = time.perf_counter()
    while not end.query():
        if time.perf_counter() - begin > limit:
            return None
    return time.perf_counter() - begin
