"""Time the candidates for a product against each other: one round of all, two more of those that are close."""

from collections.abc import Callable

import torch

from ..timing import time_warm
from .names import DEFAULT

CLOSE = 1.5  # times the fastest of the first round: those race again

Run = Callable[[], object]


def race(
    default: Run, ready: Callable[[str], Run | None], candidates: list[str], b: torch.Tensor
) -> dict[str, float | None]:
    """Seconds of the default product and of the candidates.

    ready(name): a way to multiply, run once; None if it was refused, which stays in the result as None.
    """
    default()  # its first call is not timed
    found = {name: ready(name) for name in candidates}
    runs = {DEFAULT: default, **{name: run for name, run in found.items() if run is not None}}

    def time(names: list[str], rounds: int) -> dict[str, float]:
        with torch.cuda.device_of(b):
            timings = time_warm([runs[name] for name in names], b.device.type, rounds)
        return {name: timing.seconds for name, timing in zip(names, timings, strict=True)}

    seconds: dict[str, float | None] = {DEFAULT: None, **dict.fromkeys(found)}
    if len(runs) == 1:
        return seconds
    best = time(list(runs), 1)
    close = [name for name in best if best[name] <= CLOSE * min(best.values())]
    if len(close) > 1:
        best |= {name: min(best[name], again) for name, again in time(close, 2).items()}
    return seconds | best
