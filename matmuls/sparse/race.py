"""Time the candidates for a product against each other: a few rounds of all, more of those that are close."""

import math
from collections.abc import Callable

import torch

from ..measure import time_warm
from .names import DEFAULT

CLOSE = 1.5  # times the fastest of the first round: those race again
FAR = 1.4  # times the fastest of `large`: if the default takes longer, so do cuSPARSE's algorithm and other small ones

Run = Callable[[], object]


def race(
    default: Run, ready: Callable[[str], Run | None], candidates: list[str], large: list[str], b: torch.Tensor
) -> dict[str, float | None]:
    """Seconds of the default product, of those in `large` and, unless these are far ahead, of the other candidates.

    ready(name): a way to multiply, run once; None if it was refused, which stays in the result as None.
    """
    runs: dict[str, Run] = {DEFAULT: default}
    refused: dict[str, float | None] = {}
    best: dict[str, float] = {}

    def is_ready(name: str) -> bool:
        run = ready(name)
        if run is None:
            refused[name] = None
            return False
        runs[name] = run
        return True

    def time(names: list[str], rounds: int) -> None:
        with torch.cuda.device_of(b):  # type: ignore[no-untyped-call]
            timings = time_warm([runs[name] for name in names], b.device.type, rounds)
        for name, timing in zip(names, timings, strict=True):
            best[name] = min(best.get(name, math.inf), timing.seconds)

    default()  # its first call is not timed
    found = [name for name in large if is_ready(name)]
    if found:
        time([DEFAULT, *found], 1)
    if best.get(DEFAULT, 0) <= FAR * min((best[name] for name in found), default=math.inf):
        others = [name for name in candidates if name not in large and is_ready(name)]
        if others:
            time(others if best else [DEFAULT, *others], 1)
    close = [name for name in best if best[name] <= CLOSE * min(best.values())]
    if len(close) > 1:
        time(close, 2)
    return {DEFAULT: None, **refused, **best}
