"""Times plans and SparseLinear with constant=True and with values that may change, which every call must re-read.

Usage: python benchmarks/scripts/constant.py OUT. Writes OUT/sparse-constant-cuda.json: microseconds of one call by wall
clock (us_as_called: host included, many calls, alternating) and of the GPU alone (us_gpu), with the dense product's.
"""

import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from out_folder import out_folder

import matmuls
from matmuls.nn import SparseLinear
from matmuls_bench import machine, timing

MATRICES = (4096, 4096, 0.5), (4096, 4096, 0.9), (3072, 768, 0.8), (5000, 3000, 0.95)  # rows, columns, share of zeros
WIDTHS = 32, 128, 500
LAYERS = (4096, 4096, 0.9), (3000, 5000, 0.8)  # inputs, outputs, share of zeros
TOKENS = 1, 32, 128


def measured(ways: dict[str, Callable[[], object]]) -> dict[str, Any]:
    timings = timing.time_warm(list(ways.values()), "cuda", 7, own_before=timing.OWN_BEFORE)
    gpu = {name: t.seconds * 1e6 for name, t in zip(ways, timings, strict=True)}
    called = timing.rounds_of(ways, rounds=9, calls=200)
    return {"us_as_called": {name: statistics.median(s) * 1e6 for name, s in called.items()}, "us_gpu": gpu}


@torch.no_grad()
def main(out: Path) -> None:
    warnings.filterwarnings("ignore", "Sparse (CSR|invariant)")
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for m, k, zeros in MATRICES:
            torch.manual_seed(0)
            dense = (torch.randn(m, k, device="cuda") * (torch.rand(m, k, device="cuda") >= zeros)).to(dtype)
            a = dense.to_sparse_csr()
            stays, varies = matmuls.plan(a, constant=True), matmuls.plan(a)
            for n in WIDTHS:
                b = torch.randn(k, n, device="cuda").to(dtype)
                ways = {
                    "plan, constant": lambda b=b, made=stays: made @ b,
                    "plan": lambda b=b, made=varies: made @ b,
                    "spmm": lambda b=b, a=a: matmuls.spmm(a, b),
                    "torch.sparse": lambda b=b, a=a: a @ b,
                    "dense": lambda b=b, dense=dense: dense @ b,
                }
                rows.append({"matrix": [m, k, zeros], "n": n, "dtype": name, **measured(ways)})
    for inputs, outputs, zeros in LAYERS:
        torch.manual_seed(0)
        linear = torch.nn.Linear(inputs, outputs, device="cuda", dtype=torch.float16)
        frozen, varying = (SparseLinear.from_linear(linear, sparsity=zeros) for _ in range(2))
        frozen.freeze()
        for n in TOKENS:
            x = torch.randn(n, inputs, device="cuda").half()
            ways = {
                "SparseLinear, frozen": lambda x=x, layer=frozen: layer(x),
                "SparseLinear": lambda x=x, layer=varying: layer(x),
                "nn.Linear": lambda x=x, layer=linear: layer(x),
            }
            rows.append({"layer": [inputs, outputs, zeros], "tokens": n, "dtype": "float16", **measured(ways)})
    machine.save(out / "sparse-constant-cuda.json", "cuda", rows=rows)
    for row in rows:
        times = ", ".join(f"{name} {us:.1f}" for name, us in row["us_as_called"].items())
        print(row.get("matrix") or row.get("layer"), row.get("n") or row.get("tokens"), row["dtype"], times)


if __name__ == "__main__":
    main(out_folder(__doc__))
