"""Time and memory of a call, for plans that choose a kernel by timing and for the commands `tune` and `bert`."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Run = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Time of one call over several rounds.

    seconds: the median. spread: interquartile range over the median. fastest: seconds of the fastest round, the one
    least disturbed by other processes.
    """

    seconds: float
    spread: float
    fastest: float


def timing_of(seconds: list[float]) -> Timing:
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median, median, median)
    return Timing(median, (high - low) / median, min(seconds))


def in_turns(count: int, rounds: int) -> Iterator[int]:
    """Which rival is next, in rounds that alternate: 0 1, 1 0, 0 1 and so on."""
    for n in range(rounds):
        yield from range(count) if n % 2 == 0 else reversed(range(count))


def l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


def graph_of(calls: Sequence[Run]) -> torch.cuda.CUDAGraph:
    """The calls in sequence as a CUDA graph, warmed up first. Replaying it has no launch gaps and no host time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in (*calls[:2], *calls[:1]):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _l2_filler() -> Run:
    """A kernel that reads twice the L2's size and writes as much, which leaves half of the L2 dirty.

    The kernel timed next pays for that write-back and leaves as many dirty lines, as the roof's back-to-back copies do.
    """
    source, target = torch.zeros(2, 2 * l2_bytes(torch.device("cuda")) // 4, device="cuda")
    return lambda: torch.neg(source, out=target)


def time_on_gpu(rivals: Sequence[Sequence[Run]], budget: float = 0.4, restore: Run | None = None) -> list[Timing]:
    """GPU time per call of each rival. A rival is the same call on several sets of inputs, run in sequence.

    Rounds alternate between the rivals, so that clock drift affects all equally. `restore` resets what a rival
    overwrites: it runs untimed before every round of every rival, followed by a kernel that fills the L2.
    budget: seconds per rival; 20 to 200 rounds.
    """
    graphs = [graph_of(calls) for calls in rivals]
    filler = _l2_filler()  # in a variable: it owns the memory that the graph uses
    before = graph_of([restore, filler]) if restore else None  # one launch: the GPU never waits for the host
    for graph in graphs:
        graph.replay()

    def replay(i: int, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        if before:
            before.replay()
        start.record()
        graphs[i].replay()
        end.record()

    def event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    start, end = event(), event()
    start.record()
    for i in range(len(graphs)):
        replay(i, event(), event())
    end.record()
    torch.cuda.synchronize()
    one_round = max(start.elapsed_time(end) / 1e3, 1e-5)
    rounds = int(min(200, max(20, budget * len(rivals) / one_round)))
    events = [[(event(), event()) for _ in range(rounds)] for _ in graphs]
    unused = [iter(pairs) for pairs in events]
    for i in in_turns(len(graphs), rounds):
        replay(i, *next(unused[i]))
    torch.cuda.synchronize()
    return [
        timing_of([start.elapsed_time(end) / 1e3 / len(calls) for start, end in pairs])
        for pairs, calls in zip(events, rivals, strict=True)
    ]


def time_warm(rivals: Sequence[Run], device: str, rounds: int = 3, *, own_before: int = 0) -> list[Timing]:
    """Time of one call of each rival with warm caches: few rounds, no CUDA graph. Rounds alternate.

    own_before: untimed calls of the same rival before each measurement. On a GPU the time is half of two calls.
    """
    seconds: list[list[float]] = [[] for _ in rivals]
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in rivals]
    for i in in_turns(len(rivals), rounds):
        for _ in range(own_before):
            rivals[i]()
        if device == "cuda":
            events[i].append(_around_two(rivals[i]))
        else:
            begin = time.perf_counter()
            rivals[i]()
            seconds[i].append(time.perf_counter() - begin)
    if device == "cuda":
        torch.cuda.current_stream().synchronize()
        seconds = [[start.elapsed_time(end) / 2e3 for start, end in pairs] for pairs in events]
    return [timing_of(s) for s in seconds]


def _around_two(run: Run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events around two calls, launched while the GPU sleeps, so that no launch gap is timed.

    The GPU sleeps for 160 us. If it wakes before the host has launched both calls, the measurement is repeated with a
    longer sleep, up to twice. A call that synchronizes with the GPU exhausts these attempts.
    """
    for cycles in (300_000, 1_200_000, 4_800_000):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        run(), run()
        end.record()
        if not start.query():
            break
    return start, end


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection, as timeit does: it would slow down an arbitrary rival."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def peak_memory(run: Run, device: str) -> int:
    """Bytes of tensors alive at the peak of a call, above those alive before it."""
    # A garbage collection during the call would free older tensors and hide allocations. A full collection before it
    # takes 0.3 s in a process that has used torch.compile, a tenth of a long bench.
    with uncollected():
        return _peak_on_gpu(run) if device == "cuda" else _peak_on_cpu(run)


def _requested() -> int:
    # requested, not allocated: the allocator's block is up to 1 MB larger than its tensor
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def _peak_on_gpu(run: Run) -> int:
    torch.cuda.synchronize()
    before, seen = _requested(), -1
    while before != seen:  # autograd's thread may free the last call's tensors late
        time.sleep(1e-3)
        before, seen = _requested(), before
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)


def _peak_on_cpu(run: Run) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        run()
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak
