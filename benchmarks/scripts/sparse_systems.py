"""Times spgemm and solve_triangular as called, compared with scipy on a CPU and with CuPy and torch on a GPU.

Usage: python benchmarks/scripts/sparse_systems.py OUT MATRIX... [--device cuda|cpu] [--threads N]. MATRIX: as `matmuls
spmm` takes it; a pattern gets random values. Writes OUT/cuda/sparse-systems.json, or OUT/cpu/sparse-systems-N.json for
N threads. The product is A @ A^T in float32. The systems, of square matrices, have the lower triangle of A with a
diagonal that dominates it, in float64. A prepared system is of plan_solve: with the values of the call before, or with
others, which are checked and copied; torch and CuPy have none, and analyse the triangle at every call. Wall clock of
one call, with the GPU idle before and after it. The ways of a case take turns (A B A B); the least and the median of
the rounds are kept. A way that raises an error is noted with it, and left out. Errors are relative to scipy's result in
float64. scipy and CuPy leave a product's columns unsorted.
"""

import argparse
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch

import matmuls
from matmuls_bench import machine, matrices

ROUNDS = 15
COLUMNS = 1, 16, 64  # right-hand sides of a system
Call = Callable[[], Any]
Ways = dict[str, Call]


def waited(device: str) -> float:
    """The time, once the GPU is idle."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def in_numpy(x: Any) -> Any:
    """A result as an array or a matrix of scipy: of torch (triangular_solve gives a tuple), CuPy or scipy."""
    if isinstance(x, tuple):
        x = x[0]
    if hasattr(x, "get"):
        x = x.get()
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach().cpu()
    if x.layout == torch.strided:
        return x.numpy()
    parts = (t.numpy() for t in (x.values(), x.col_indices(), x.crow_indices()))
    return scipy.sparse.csr_matrix(tuple(parts), shape=tuple(x.shape))


def relative_error(x: Any, truth: Any) -> float:
    norm = scipy.sparse.linalg.norm if scipy.sparse.issparse(truth) else np.linalg.norm
    return float(norm(in_numpy(x).astype(np.float64) - truth) / norm(truth))


def case(ways: Ways, truth: Any, device: str) -> dict[str, Any]:
    """Seconds, errors and failures of the ways to compute `truth`. A way without a result has no error."""
    found: dict[str, Any] = {"first_seconds": {}, "errors": {}, "failed": {}}
    times: dict[str, list[float]] = {name: [] for name in ways}

    def tried(name: str, step: Call) -> None:
        if name in found["failed"]:
            return
        try:
            step()
        except Exception as error:  # a rival's, whatever it is: the others go on
            found["failed"][name] = f"{type(error).__name__}: {error}"[:300]
            if device == "cuda":
                torch.cuda.empty_cache()

    def first(name: str) -> None:
        start = waited(device)
        result = ways[name]()
        found["first_seconds"][name] = waited(device) - start
        if not isinstance(result, matmuls.SpgemmPlan):
            found["errors"][name] = relative_error(result, truth)

    def again(name: str) -> None:
        start = waited(device)
        result = ways[name]()  # kept until the time is taken
        times[name].append(waited(device) - start)
        del result

    for step in (first, *[again] * ROUNDS):
        for name in ways:
            tried(name, lambda step=step, name=name: step(name))
    kept = {name: t for name, t in times.items() if name not in found["failed"]}
    found["least_seconds"] = {name: min(t) for name, t in kept.items()}
    found["median_seconds"] = {name: statistics.median(t) for name, t in kept.items()}
    return found


def in_torch(m: scipy.sparse.csr_matrix, device: str) -> torch.Tensor:
    parts = (torch.from_numpy(x) for x in (m.indptr, m.indices, m.data))
    return torch.sparse_csr_tensor(*parts, m.shape, check_invariants=True).to(device)


def in_cupy(m: scipy.sparse.csr_matrix) -> Any:
    """m for CuPy; raises ImportError where it is not installed."""
    from cupyx.scipy import sparse

    return sparse.csr_matrix(m)


def late(make: Callable[[], Call]) -> Call:
    """A way that is made at its first call, so that an error in it is the way's own."""
    made: list[Call] = []

    def call() -> Any:
        if not made:
            made.append(make())
        return made[0]()

    return call


def product(a: scipy.sparse.csr_matrix, device: str) -> dict[str, Any]:
    """A @ A^T."""
    a = a.astype(np.float32)
    b = a.T.tocsr()
    left, right = in_torch(a, device), in_torch(b, device)

    def of_cupy() -> Call:
        x, y = in_cupy(a), in_cupy(b)
        return lambda: x @ y

    ways: Ways = {
        "spgemm": lambda: matmuls.spgemm(left, right),
        "plan_spgemm": lambda: matmuls.plan_spgemm(left, right),
        "prepared": late(lambda: matmuls.plan_spgemm(left, right)),
        "torch.sparse.mm": lambda: torch.sparse.mm(left, right),
    }
    if device == "cuda":
        ways["cupy"] = late(of_cupy)
    else:
        ways |= {"scipy": lambda: a @ b, "scipy, sorted": lambda: (a @ b).sorted_indices()}
    truth = a.astype(np.float64) @ b.astype(np.float64)
    return {"result_nonzeros": int(truth.nnz), **case(ways, truth, device)}


def triangle(a: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    """The lower triangle of a, with a diagonal that dominates it."""
    lower = scipy.sparse.tril(a, -1).tocsr()
    diagonal = 1 + abs(lower).sum(0).A1 + abs(lower).sum(1).A1
    made = (lower + scipy.sparse.diags(diagonal)).tocsr()
    made.sort_indices()
    return made


def system(lower: scipy.sparse.csr_matrix, columns: int, device: str) -> dict[str, Any]:
    b = np.random.default_rng(columns).standard_normal((lower.shape[0], columns))
    matrix, right = in_torch(lower, device), torch.from_numpy(b).to(device)
    plan = matmuls.plan(matrix)
    solver, changing = (matmuls.plan_solve(plan, upper=False) for _ in range(2))
    values = itertools.cycle([plan.values, plan.values.clone()])

    def of_cupy() -> Call:
        import cupy
        from cupyx.scipy.sparse.linalg import spsolve_triangular

        x, y = in_cupy(lower), cupy.asarray(b)
        return lambda: spsolve_triangular(x, y)

    ways: Ways = {
        "solve_triangular": lambda: matmuls.solve_triangular(plan, right, upper=False),
        "prepared": lambda: solver(right),
        "prepared, other values": lambda: changing(right, next(values)),
        "torch.triangular_solve": lambda: torch.triangular_solve(right, matrix, upper=False),
    }
    if device == "cuda":
        ways["cupy"] = late(of_cupy)
    else:
        ways["scipy"] = lambda: scipy.sparse.linalg.spsolve_triangular(lower, b)
    truth = scipy.sparse.linalg.spsolve_triangular(lower, b)
    return {"right_hand_sides": columns, "triangle_nonzeros": int(lower.nnz), **case(ways, truth, device)}


def in_scipy(matrix: matrices.Matrix) -> scipy.sparse.csr_matrix:
    values = matrix.values
    if values is None:
        values = torch.from_numpy(np.random.default_rng(0).standard_normal(matrix.nnz))
    parts = (t.numpy() for t in (values, matrix.col, matrix.crow))
    return scipy.sparse.csr_matrix(tuple(parts), shape=matrix.shape)


def versions(device: str) -> dict[str, str | None]:
    """Versions of scipy and CuPy, whose ways are timed."""
    found = {"scipy": scipy.__version__, "cupy": None}
    if device == "cuda":
        try:
            import cupy

            found["cupy"] = cupy.__version__
        except ImportError:
            pass
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("matrices", nargs="+", metavar="MATRIX")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device to run on")
    warnings.filterwarnings("ignore", "Sparse (CSR|invariant)|torch.triangular_solve")
    torch.set_num_threads(options.threads)
    name = "cuda/sparse-systems.json" if options.device == "cuda" else f"cpu/sparse-systems-{options.threads}.json"
    target = options.out / name
    rows: list[dict[str, Any]] = []

    def add(matrix: matrices.Matrix, row: dict[str, Any]) -> None:
        rows.append({"matrix": matrix.name, "shape": list(matrix.shape), "nonzeros": matrix.nnz, **row})
        print(json.dumps(rows[-1]), flush=True)
        machine.save(target, options.device, versions(options.device), rows=rows)

    for source in options.matrices:
        matrix = matrices.load(source)
        a = in_scipy(matrix)
        add(matrix, product(a, options.device))
        if a.shape[0] == a.shape[1]:
            lower = triangle(a)
            for columns in COLUMNS:
                add(matrix, system(lower, columns, options.device))


if __name__ == "__main__":
    main()
