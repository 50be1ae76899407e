"""Times block-sparse (BSR) products on a GPU: matmuls.blocks.bsr_spmm, cuSPARSE's bsr_alg1, dense, and a plan.

Usage: python benchmarks/scripts/blocks.py OUT. Writes OUT/blocks-cuda.json; `matmuls report` shows it in
docs/performance/sparse.md.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from out_folder import out_folder

import custom_mm
import matmuls
from matmuls.blocks import bsr_spmm
from matmuls_bench import machine, timing

SIDE = 4096


def measured(block: int, zeros: float, n: int, dtype: torch.dtype) -> dict[str, Any]:
    """Microseconds of one product with warm caches, and relative errors against float64, by method."""
    draw = torch.Generator().manual_seed(0)
    there = torch.rand(SIDE // block, SIDE // block, generator=draw) >= zeros
    crow = torch.cat([torch.zeros(1, dtype=torch.int64), there.sum(1).cumsum(0)]).int().cuda()
    col = there.nonzero()[:, 1].int().cuda()
    values = torch.randn(col.numel(), block, block, generator=draw).to(dtype).cuda()
    b = torch.randn(SIDE, n, generator=draw).to(dtype).cuda()
    a = torch.sparse_bsr_tensor(crow, col, values, (SIDE, SIDE))
    dense, plan = a.to_dense(), matmuls.plan(a)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "bsr_spmm": lambda: bsr_spmm(crow, col, values, b, SIDE),
        "plan": lambda: plan @ b,
        "dense": lambda: dense @ b,
        "cusparse bsr_alg1": lambda: custom_mm.cusparse_spmm(
            crow, col, values, b, SIDE, SIDE, layout="bsr", algorithm="bsr_alg1"
        ),
    }
    truth = dense.double() @ b.double()
    errors = {name: ((run().double() - truth).norm() / truth.norm()).item() for name, run in ways.items()}
    times = timing.time_warm(list(ways.values()), "cuda", 5, own_before=timing.OWN_BEFORE)
    return {
        "block": block,
        "zeros": zeros,
        "n": n,
        "dtype": str(dtype).removeprefix("torch."),
        "blocks": col.numel(),
        "us": {name: time.seconds * 1e6 for name, time in zip(ways, times, strict=True)},
        "errors": errors,
    }


def main(out: Path) -> None:
    warnings.filterwarnings("ignore", "Sparse (BSR|invariant)")
    rows = [
        measured(block, zeros, n, dtype)
        for dtype in (torch.float16, torch.bfloat16)
        for block in (16, 32, 64, 128)
        for zeros in (0.8, 0.95)
        for n in (128, 512)
    ]
    machine.save(out / "blocks-cuda.json", "cuda", rows=rows)


if __name__ == "__main__":
    main(out_folder(__doc__))
