"""Times spgemm on the CPU against scipy: C = A @ A^T with values drawn for the patterns of files, in float32.

Usage: python benchmarks/spgemm.py THREADS FILE.npz... Each file has `crow`, `col` and `shape`, as `matmuls spmm` reads
it. Prints the least time of each in milliseconds, measured in turns; scipy's columns are not sorted unless asked.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy.sparse
import torch

import matmuls

ROUNDS = 7


def milliseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: min(of) for name, of in times.items()}


def measured(path: Path) -> str:
    file = np.load(path)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(len(file["col"])).astype(np.float32)
    a = scipy.sparse.csr_matrix((values, file["col"], file["crow"]), shape=tuple(file["shape"]))
    b = a.T.tocsr()
    left, right = (
        torch.sparse_csr_tensor(*(torch.from_numpy(x) for x in (m.indptr, m.indices, m.data)), m.shape) for m in (a, b)
    )
    plan = matmuls.plan_spgemm(left, right)
    theirs, ours = (a @ b).sorted_indices(), plan()
    assert np.array_equal(theirs.indices, ours.col_indices())
    assert np.allclose(theirs.data, ours.values(), rtol=1e-3, atol=1e-3)
    calls = {
        "scipy": lambda: a @ b,
        "scipy sorted": lambda: (a @ b).sort_indices(),
        "spgemm": lambda: matmuls.spgemm(left, right),
        "prepared": lambda: plan.values(),
    }
    times = milliseconds(calls)
    words = ", ".join(f"{name} {t:.1f}" for name, t in times.items())
    return f"{path.stem}: {plan.nnz} nonzeros; {words}; scipy / spgemm {times['scipy'] / times['spgemm']:.2f}"


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    for name in sys.argv[2:]:
        print(measured(Path(name)), flush=True)
