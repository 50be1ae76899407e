"""Times spgemm and solve_triangular on the CPU against scipy, with values drawn for the patterns of files.

Usage: python benchmarks/spgemm.py THREADS FILE.npz... Each file has `crow`, `col` and `shape`, as `matmuls spmm` reads
it. The product is A @ A^T in float32; the systems, of square matrices, have the lower triangle of A with a diagonal
that dominates it, in float64. Prints the least time of each in milliseconds, measured in turns; scipy's columns are not
sorted unless asked.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
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


def in_torch(m: scipy.sparse.csr_matrix) -> torch.Tensor:
    parts = (torch.from_numpy(x) for x in (m.indptr, m.indices, m.data))
    return torch.sparse_csr_tensor(*parts, m.shape, check_invariants=True)


def words(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {t:.1f}" for name, t in times.items())


def product(name: str, a: scipy.sparse.csr_matrix) -> str:
    a = a.astype(np.float32)
    b = a.T.tocsr()
    left, right = in_torch(a), in_torch(b)
    plan = matmuls.plan_spgemm(left, right)
    theirs, ours = (a @ b).sorted_indices(), plan()
    assert np.array_equal(theirs.indices, ours.col_indices())
    assert np.allclose(theirs.data, ours.values(), rtol=1e-3, atol=1e-3)
    times = milliseconds(
        {
            "scipy": lambda: a @ b,
            "scipy sorted": lambda: (a @ b).sort_indices(),
            "spgemm": lambda: matmuls.spgemm(left, right),
            "prepared": lambda: plan.values(),
        }
    )
    return f"{name} A @ A^T, {plan.nnz} nonzeros: {words(times)}"


def systems(name: str, a: scipy.sparse.csr_matrix) -> str:
    lower = scipy.sparse.tril(a, -1).tocsr()
    diagonal = 1 + abs(lower).sum(0).A1 + abs(lower).sum(1).A1
    lower = (lower + scipy.sparse.diags(diagonal)).tocsr()
    plan, lines = matmuls.plan(in_torch(lower)), []
    for k in (1, 16, 64):
        b = np.random.default_rng(k).standard_normal((a.shape[0], k))
        right = torch.from_numpy(b)
        theirs = scipy.sparse.linalg.spsolve_triangular(lower, b)
        assert np.allclose(theirs, matmuls.solve_triangular(plan, right, upper=False))
        times = milliseconds(
            {
                "scipy": lambda b=b: scipy.sparse.linalg.spsolve_triangular(lower, b),
                "solve_triangular": lambda b=right: matmuls.solve_triangular(plan, b, upper=False),
            }
        )
        lines.append(f"{name} triangle, {lower.nnz} nonzeros, k = {k}: {words(times)}")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    for path in map(Path, sys.argv[2:]):
        file = np.load(path)
        values = np.random.default_rng(0).standard_normal(len(file["col"]))
        a = scipy.sparse.csr_matrix((values, file["col"], file["crow"]), shape=tuple(file["shape"]))
        print(product(path.stem, a), flush=True)
        if a.shape[0] == a.shape[1]:
            print(systems(path.stem, a), flush=True)


if __name__ == "__main__":
    main()
