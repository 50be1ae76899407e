"""Times softmax, softmax_ and softmax_backward along any dimension against torch's on a CPU, for 20 random shapes.

Usage: python benchmarks/scripts/softmax_dims_cpu.py OUT. Writes OUT/softmax-dims-cpu.json. Shapes and dimensions come
from one seed; the kernels' constants were tuned on others. Both sides alternate (A B A B) with 2 threads; the fastest
round of each counts, since other work on the machine only adds time.
"""

import random
from typing import Any

import torch
from out_folder import out_folder

import matmuls
from matmuls_bench import machine
from matmuls_bench.timing import time_on_cpu

SEED = 20261126
RIVALS = {"softmax": "torch", "softmax_": "torch out", "softmax_backward": "torch backward"}


def drawn(count: int) -> list[tuple[list[int], int]]:
    """`count` pairs of a shape (2 to 4 dimensions, 1e4 to 1e7 elements) and a dimension, in two thirds not the last."""
    rng = random.Random(SEED)
    cases: list[tuple[list[int], int]] = []
    while len(cases) < count:
        shape = [int(2 ** rng.uniform(1, 13)) for _ in range(rng.randint(2, 4))]
        dim = len(shape) - 1 if rng.random() < 1 / 3 else rng.randrange(len(shape) - 1)
        if 1e4 <= torch.Size(shape).numel() <= 1e7 and shape[dim] > 1:
            cases.append((shape, dim))
    return cases


def measured(shape: list[int], dim: int, dtype: torch.dtype) -> dict[str, Any]:
    x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    y, out, z = torch.softmax(x, dim), torch.empty_like(x), x.clone()
    sides = {
        "torch": lambda: torch.softmax(x, dim),
        "softmax": lambda: matmuls.softmax(x, dim),
        "torch out": lambda: torch.softmax(x, dim, out=out),
        "softmax_": lambda: matmuls.softmax_(z, dim),
        "torch backward": lambda: torch._softmax_backward_data(grad, y, dim, dtype),
        "softmax_backward": lambda: matmuls.softmax_backward(y, grad, dim),
    }
    timings = time_on_cpu([[call] for call in sides.values()])
    us = {name: timing.fastest * 1e6 for name, timing in zip(sides, timings, strict=True)}
    return {
        "shape": shape,
        "dim": dim,
        "dtype": str(dtype).removeprefix("torch."),
        "us": {name: round(value, 1) for name, value in us.items()},
        "ratio": {ours: round(us[rival] / us[ours], 2) for ours, rival in RIVALS.items()},
    }


def main() -> None:
    out = out_folder(__doc__ or "", needs_gpu=False)
    torch.set_num_threads(2)
    rows = []
    for shape, dim in [([16384, 4096], 0), *drawn(20)]:
        for dtype in (torch.float32, torch.bfloat16):
            rows.append(row := measured(shape, dim, dtype))
            print(f"{shape!s:24} dim {dim} {row['dtype']:9}", *(f"{k} {v:5.2f}" for k, v in row["ratio"].items()))
    lowest = {operation: min(row["ratio"][operation] for row in rows) for operation in RIVALS}
    print("lowest", lowest)
    machine.save(out / "softmax-dims-cpu.json", "cpu", seed=SEED, lowest=lowest, rows=rows)


if __name__ == "__main__":
    main()
