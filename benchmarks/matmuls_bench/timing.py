"""Time of calls in every way that the benchmarks tell: on the device alone, as called, of the host, of whole calls.

`matmuls.timing` has those that the library itself needs; they are here under the same names.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from matmuls.timing import (
    Run,
    Timing,
    graph_of,
    in_turns,
    l2_bytes,
    peak_memory,
    time_on_gpu,
    time_warm,
    timing_of,
    uncollected,
)

__all__ = [
    "Run",
    "Timing",
    "geometric_mean",
    "graph_of",
    "l2_bytes",
    "peak_memory",
    "rounds_of",
    "seconds_of",
    "time_as_called",
    "time_of_host",
    "time_of_whole",
    "time_on",
    "time_on_cpu",
    "time_on_gpu",
    "time_warm",
]

ALIKE = 0.05  # spread (see Timing) below which `time_of_whole` needs no more rounds
# A round of `time_as_called`: least seconds; most calls; how often it overwrites one tensor at most: rows come
# closer to one another with each product with one weight, and equal data lowers the power that the GPU needs.
ROUND, CALLS, OVERWRITES = 5e-3, 4000, 8


# Untimed calls of a rival before its timed ones, so that its operands displace what other rivals left in the L2. On an
# H200 (50 MB L2) a product with 33 MB of operands took 11.7 us after one such call instead of 11.2 us.
OWN_BEFORE = 4


def time_on_cpu(rivals: Sequence[Sequence[Run]], budget: float = 0.4, restore: Run | None = None) -> list[Timing]:
    """Wall time per call of each rival; rounds alternate as on the GPU. `restore` runs untimed before each call.

    budget: seconds per rival; 5 to 100 rounds.
    """
    begin = time.perf_counter()
    for calls in rivals:
        if restore:
            restore()
        calls[0]()
    one_round = time.perf_counter() - begin
    repeats = 1 if restore else max(1, int(2e-3 / max(one_round, 1e-7)))
    rounds = int(min(100, max(5, budget * len(rivals) / (max(one_round, 1e-6) * repeats))))
    seconds: list[list[float]] = [[] for _ in rivals]
    for i in in_turns(len(rivals), rounds):
        calls = rivals[i]
        if restore:
            restore()
        begin = time.perf_counter()
        for k in range(repeats):
            calls[k % len(calls)]()
        seconds[i].append((time.perf_counter() - begin) / repeats)
    return [timing_of(s) for s in seconds]


def time_on(
    device: str, rivals: Sequence[Sequence[Run]], budget: float = 0.4, restore: Run | None = None
) -> list[Timing]:
    """`time_on_gpu` or `time_on_cpu`, by the device."""
    return (time_on_gpu if device == "cuda" else time_on_cpu)(rivals, budget, restore)


def time_as_called(
    device: str, rivals: Sequence[Sequence[Run]], restore: Run | None = None, rounds: int = 7
) -> list[Timing]:
    """Wall time per call of each rival in a plain loop, the host included. A rival is as in `time_on_gpu`.

    A round is a loop over the rival's sets of inputs, repeated for at least ROUND seconds, and one wait for the GPU at
    its end. Rounds alternate between the rivals. `restore` resets what a rival overwrites, untimed before every round.
    """

    wait: Run = (lambda: None) if device == "cpu" else torch.cuda.synchronize

    def seconds(calls: Sequence[Run], repeats: int) -> float:
        if restore:
            restore()
        wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            for call in calls:
                call()
        wait()
        return time.perf_counter() - begin

    def repeats_of(calls: Sequence[Run]) -> int:
        for _ in range(2):  # warm-up; torch.compile records the CUDA graph of every set of parameters
            seconds(calls, 1)
        most = max(1, CALLS // len(calls))
        return min(math.ceil(ROUND / seconds(calls, 1)), min(most, OVERWRITES) if restore else most)

    with uncollected():
        repeats = [repeats_of(calls) for calls in rivals]
        found: list[list[float]] = [[] for _ in rivals]
        for i in in_turns(len(rivals), rounds):
            found[i].append(seconds(rivals[i], repeats[i]) / repeats[i] / len(rivals[i]))
    return [timing_of(s) for s in found]


def seconds_of(run: Run, calls: int = 1, device: str = "cuda", *, alone: bool = False) -> float:
    """Wall time of one call in a loop of `calls`, until the device is idle; with `alone` it is idle after each call."""
    wait: Run = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
        if alone:
            wait()
    wait()
    return (time.perf_counter() - begin) / calls


def rounds_of(
    ways: Mapping[str, Run], rounds: int, calls: int | Mapping[str, int], device: str = "cuda"
) -> dict[str, list[float]]:
    """The `seconds_of` each way in every round, with so many calls a round. Rounds alternate between the ways."""
    names = list(ways)
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in in_turns(len(names), rounds):
        one = names[i]
        found[one].append(seconds_of(ways[one], calls if isinstance(calls, int) else calls[one], device))
    return found


def time_of_host(rivals: Sequence[Run], device: str, rounds: int = 40, calls: int = 250) -> list[Timing]:
    """Host time per call, until the call returns. The GPU is idle at the start of every round of `calls` calls."""
    for run in rivals:
        for _ in range(calls):
            run()
    seconds: list[list[float]] = [[] for _ in rivals]
    with uncollected():
        for i in in_turns(len(rivals), rounds):
            if device == "cuda":
                torch.cuda.synchronize()
            run = rivals[i]
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            seconds[i].append((time.perf_counter() - begin) / calls)
    return [timing_of(s) for s in seconds]


def time_of_whole(
    rivals: Sequence[Run], device: str, rounds: int = 7, news: Callable[[float], object] = lambda share: None
) -> list[Timing]:
    """Time of whole calls, host and GPU: from an idle device until it is idle again. Rounds alternate.

    On a GPU by CUDA events; the first is recorded before the host starts the call. Up to four times as many rounds,
    until the spread of each rival is below ALIKE, because other processes disturb the host. news: called before each
    round with the share of the rounds that is done.
    """

    def seconds(run: Run) -> float:
        if device != "cuda":
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    for run in rivals:
        run()
    found: list[list[float]] = [[] for _ in rivals]
    with uncollected():
        for n in range(4 * rounds):
            if n >= rounds and all(timing_of(s).spread < ALIKE for s in found):
                break
            news(n / (4 * rounds))
            order = range(len(rivals)) if n % 2 == 0 else reversed(range(len(rivals)))
            for i in order:
                gc.collect(1)  # frees the last call's tensors that are in reference cycles
                found[i].append(seconds(rivals[i]))
    return [timing_of(s) for s in found]


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean of the logarithms."""
    return torch.tensor(values, dtype=torch.float64).log().mean().exp().item()
