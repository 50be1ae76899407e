"""Times products under handles(batch_invariant=True) against the same without, on a GPU, or on a CPU without one.

Usage: python benchmarks/scripts/batch_invariance.py OUT. Writes OUT/cuda/batch-invariance.json, or the same under
OUT/cpu. Both sides alternate (A B A B): on a GPU the median of the rounds counts, on a CPU the fastest round, since
other work on the machine only adds time. `ratio` is the time under batch invariance over that without.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from out_folder import out_folder

import matmuls
from custom_mm import _C
from matmuls_bench import machine
from matmuls_bench.timing import geometric_mean, time_on

GPU, CPU = "cuda", "cpu"
WIDTHS = {GPU: [(1024, 1024), (4096, 4096), (4096, 1024), (1024, 4096), (8192, 8192)], CPU: [(768, 768), (3072, 768)]}
ROWS = {GPU: [1, 16, 64, 256, 1024, 8192], CPU: [1, 16, 256, 1024]}
Call = Callable[[], Any]


@contextmanager
def batch_invariance() -> Iterator[None]:
    """The switch alone: the handles of handles() would be destroyed at each call."""
    _C.open_batch_invariant_scope()
    try:
        yield
    finally:
        _C.close_batch_invariant_scope()


def under_it(call: Call) -> Call:
    def invariant() -> None:
        with batch_invariance():
            call()

    return invariant


def calls_of(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> dict[str, Call]:
    x, w = (torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
    w, bias = w / math.sqrt(k), torch.randn(n, device=device).to(dtype)
    calls: dict[str, Call] = {
        "matmul": lambda: matmuls.matmul(x, w, transb=True),
        "matmul, bias and relu": lambda: matmuls.matmul(x, w, transb=True, bias=bias, activation="relu"),
    }
    if n == k:
        y = x.clone()
        w = w / 2  # repeated products stay finite
        calls["linear_"] = lambda: matmuls.linear_(y, w, bias)
    return calls


def main() -> None:
    out: Path = out_folder(__doc__ or "", needs_gpu=False)
    device = GPU if torch.cuda.is_available() else CPU
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for n, k in WIDTHS[device]:
            for m in ROWS[device]:
                for name, call in calls_of(m, n, k, dtype, device).items():
                    timings = time_on(device, [[under_it(call)], [call]], budget=0.2)
                    us = [(t.seconds if device == GPU else t.fastest) * 1e6 for t in timings]
                    shape = {"m": m, "n": n, "k": k, "dtype": str(dtype).removeprefix("torch.")}
                    row = {"call": name, **shape, "us": us[0], "default_us": us[1], "ratio": us[0] / us[1]}
                    rows.append(row)
                    print(
                        f"{name:22} {m:5}x{n}x{k} {shape['dtype']:9}",
                        f"{us[0]:9.1f} us {row['ratio']:6.2f}",
                        flush=True,
                    )
    mean = geometric_mean([row["ratio"] for row in rows])
    print(f"geometric mean of {len(rows)} ratios: {mean:.2f}")
    machine.save(out / device / "batch-invariance.json", device, mean=mean, rows=rows)


if __name__ == "__main__":
    main()
