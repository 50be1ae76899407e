"""Times pruned layers of language models on a GPU: matmuls.nn.SparseLinear against nn.Linear with the same weights.

Usage: python benchmarks/scripts/sparse_linear.py OUT. Writes OUT/sparse-linear-cuda.json; `matmuls report` shows it in
docs/performance/sparse.md.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from out_folder import out_folder

from matmuls.nn import SparseLinear
from matmuls_bench import machine, timing

LAYERS = (4096, 4096), (4096, 14336), (14336, 4096), (768, 3072), (3072, 768)  # inputs, outputs
TOKENS = 1, 8, 32, 64, 128


@torch.no_grad()
def measured(inputs: int, outputs: int, zeros: float, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Microseconds of one call (warm caches, no autograd) and relative errors against float64, by method."""
    torch.manual_seed(0)
    sparse = SparseLinear.from_linear(torch.nn.Linear(inputs, outputs, device="cuda", dtype=dtype), sparsity=zeros)
    dense = torch.nn.Linear(inputs, outputs, device="cuda", dtype=dtype)
    dense.weight.copy_(sparse.weight.to_dense())
    dense.bias.copy_(sparse.bias)
    sparse.freeze()
    for n in TOKENS:
        x = torch.randn(n, inputs, device="cuda", dtype=dtype)
        truth = torch.nn.functional.linear(x.double(), dense.weight.double(), dense.bias.double())
        ways = {"SparseLinear": lambda x=x: sparse(x), "nn.Linear": lambda x=x: dense(x)}
        errors = {name: ((run().double() - truth).norm() / truth.norm()).item() for name, run in ways.items()}
        times = timing.time_warm(list(ways.values()), "cuda", 7, own_before=timing.OWN_BEFORE)
        yield {
            "inputs": inputs,
            "outputs": outputs,
            "zeros": zeros,
            "tokens": n,
            "dtype": str(dtype).removeprefix("torch."),
            "us": {name: time.seconds * 1e6 for name, time in zip(ways, times, strict=True)},
            "errors": errors,
        }


def main(out: Path) -> None:
    warnings.filterwarnings("ignore", "Sparse (CSR|invariant)")
    rows = [
        row
        for dtype in (torch.float16, torch.bfloat16)
        for layer in LAYERS
        for zeros in (0.5, 0.8, 0.9, 0.95)
        for row in measured(*layer, zeros, dtype)
    ]
    machine.save(out / "sparse-linear-cuda.json", "cuda", rows=rows)


if __name__ == "__main__":
    main(out_folder(__doc__))
