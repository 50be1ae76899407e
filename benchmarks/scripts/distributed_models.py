"""Times training steps of a GCN that plans divide among GPUs, and modules that parallelize_module divides.

Usage: torchrun --nproc-per-node=N benchmarks/scripts/distributed_models.py OUT [MATRIX...] [--small]. Rank 0 writes
OUT/DEVICE/distributed-models-N.json: on GPUs by NCCL, without one by gloo. MATRIX: files of square matrices, further
graphs for the GCN. --small: small sizes, to try it. All is timed as called (wall clock, warm, of the slowest rank; the
median of rounds that alternate), and so is the same on rank 0 alone. Losses, results and gradients are compared with
those of one process; the exit status is 1 if they differ.
"""

import argparse
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import divided_modules
import numpy as np
import scipy.sparse  # type: ignore[import-untyped]
import scipy.spatial  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import matmuls
from matmuls import distributed
from matmuls.distributed.group import starts_of
from matmuls.distributed.splits import balanced
from matmuls_bench import machine, matrices
from matmuls_bench.spmm.distributed import rounds, scattered

FEATURES, CLASSES, STEPS = 128, 64, 5  # STEPS: of which the losses are compared
BLOCK = 1 << 14  # rows of features that are drawn together
SIZES = (8192, 4096), (16384, 8192)  # rows, input and output features of the modules
GRAPHS = "grid:1024", f"mesh:{2**20}"
SMALL_SIZES, SMALL_GRAPHS = ((96, 48),), ("grid:32", "mesh:1000")


def mesh_of(points: int) -> Any:
    """The edges of a Delaunay triangulation of random points of a square."""
    drawn = np.random.default_rng(0).random((points, 2))
    offsets, neighbours = scipy.spatial.Delaunay(drawn).vertex_neighbor_vertices
    return scipy.sparse.csr_array((np.ones(neighbours.shape), neighbours, offsets), shape=(points, points))


@lru_cache(maxsize=1)
def graph_of(source: str) -> matrices.Matrix:
    """The undirected graph with loops, with values 1 / sqrt(degree * degree); rows in order of rcm but for a grid's."""
    if source.startswith("mesh:"):
        a = mesh_of(int(source.removeprefix("mesh:")))
    else:
        m = matrices.load(source)
        a = scipy.sparse.csr_array((np.ones(m.nnz), m.col.numpy(), m.crow.numpy()), shape=m.shape)
    a = ((a + a.T + scipy.sparse.eye_array(a.shape[0])) > 0).astype(np.float64).tocsr()
    if not source.startswith("grid:"):
        order = scipy.sparse.csgraph.reverse_cuthill_mckee(a, symmetric_mode=True)
        a = a[order][:, order]
    a.sort_indices()
    scale = np.diff(a.indptr) ** -0.5
    values = torch.from_numpy(np.repeat(scale, np.diff(a.indptr)) * scale[a.indices])
    crow, col = (torch.from_numpy(t).int() for t in (a.indptr, a.indices))
    return matrices.Matrix(Path(source).name.removesuffix(".npz"), crow, col, values, a.shape)


def data_of(begin: int, end: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Features and labels of these rows; they do not depend on the division."""
    xs, labels = [torch.empty(0, FEATURES)], [torch.empty(0, dtype=torch.int64)]
    for first in range(begin // BLOCK * BLOCK, end, BLOCK):
        generator = torch.Generator().manual_seed(first)
        taken = slice(max(begin - first, 0), end - first)
        xs.append(torch.randn(BLOCK, FEATURES, generator=generator)[taken])
        labels.append(torch.randint(CLASSES, (BLOCK,), generator=generator)[taken])
    return torch.cat(xs).to(device, dtype), torch.cat(labels).to(device)


class GCN:
    """Two layers, plan @ (x @ weight), and steps of SGD. begin, end: this process's rows of `total`. divided: the ranks
    of the default group share the rows, and sum up their gradients."""

    def __init__(self, plan: Any, begin: int, end: int, total: int, divided: bool) -> None:
        self.plan, self.total, self.divided = plan, total, divided
        self.x, self.labels = data_of(begin, end, plan.dtype, plan.device)
        generator = torch.Generator().manual_seed(0)
        sizes = (FEATURES, FEATURES), (FEATURES, CLASSES)
        drawn = (torch.randn(size, generator=generator) * size[0] ** -0.5 for size in sizes)
        self.weights = [nn.Parameter(weight.to(self.x)) for weight in drawn]
        self.optimizer = torch.optim.SGD(self.weights, lr=0.5)

    def step(self) -> Tensor:
        """Forward, loss, backward, the sum of the gradients over the ranks, SGD. Returns this process's loss."""
        first, second = self.weights
        hidden = torch.relu(self.plan @ (self.x @ first))
        out = self.plan @ (hidden @ second)
        loss = nn.functional.cross_entropy(out.float(), self.labels, reduction="sum") / self.total
        self.optimizer.zero_grad()
        loss.backward()
        if self.divided:
            gradients = [weight.grad for weight in self.weights if weight.grad is not None]
            summed = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(summed)
            for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        self.optimizer.step()
        return loss.detach()

    def losses(self) -> list[float]:
        """The losses of the whole graph in STEPS steps."""
        found = torch.stack([self.step() for _ in range(STEPS)])
        if self.divided:
            dist.all_reduce(found)
        shown: list[float] = found.tolist()
        return shown


def on_first(call: Callable[[], None]) -> None:
    """Call it on rank 0, while the others wait, also if it fails."""
    try:
        if dist.get_rank() == 0:
            call()
    finally:
        dist.broadcast_object_list([None], 0)


def graph_case(source: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """A step of the GCN on this graph, divided and on rank 0 alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    matrix = graph_of(source) if rank == 0 else None
    parts = balanced(matrix.crow, ranks) if matrix is not None else []
    rows, sizes, name, nnz = scattered(matrix, parts, device)
    total, (begin, end) = sum(sizes), starts_of(sizes)[rank : rank + 2]
    plan = distributed.plan(rows.to(dtype), constant=True)
    model = GCN(plan, begin, end, total, True)
    losses, seconds = {"divided": model.losses()}, rounds({"divided": model.step}, device, together=True)[0]
    row: dict[str, Any] = {"case": "GCN", "graph": name, "rows": total, "nonzeros": nnz, "ranks": ranks}
    row |= {"dtype": str(dtype).removeprefix("torch."), "losses": losses, "seconds": seconds}
    row["bytes_sent"] = {n: plan.bytes_sent(n) for n in (FEATURES, CLASSES)}

    def alone() -> None:
        assert matrix is not None
        assert matrix.values is not None
        crow, col, values = (t.to(device) for t in (matrix.crow, matrix.col, matrix.values.to(dtype)))
        a = torch.sparse_csr_tensor(crow, col, values, matrix.shape, check_invariants=False)
        model = GCN(matmuls.plan(a, constant=True), 0, total, total, False)
        losses["alone"] = model.losses()
        seconds.update(rounds({"alone": model.step}, device, together=False)[0])
        row["efficiency"] = seconds["alone"] / ranks / seconds["divided"]
        row["error"] = max(abs(d / a - 1) for d, a in zip(losses["divided"], losses["alone"], strict=True))
        row["right"] = row["error"] < (1e-4 if dtype == torch.float32 else 1e-2)

    on_first(alone)
    return row


def rows_of(options: argparse.Namespace, device: str) -> Iterator[dict[str, Any]]:
    """Every case; with an "error" instead of times if it failed."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    jobs: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = []
    for source in (*(SMALL_GRAPHS if options.small else GRAPHS), *options.matrices):
        for dtype in (torch.float32, torch.bfloat16):
            told = {"case": "GCN", "graph": source, "dtype": str(dtype)}
            jobs.append((told, partial(graph_case, source, dtype, device)))
    for rows, size in SMALL_SIZES if options.small else SIZES:
        for case in divided_modules.cases(size, torch.bfloat16, device):
            told = {"case": case.name, "by": case.by, "rows": rows, "out": size}
            jobs.append((told, partial(divided_modules.measure, case, rows, mesh, device, on_first)))
    for told, job in jobs:
        try:
            yield job()
        except Exception:
            yield told | {"right": False, "failed": traceback.format_exc()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("matrices", nargs="*", metavar="MATRIX")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_intermixed_args()
    warnings.filterwarnings("ignore", "Sparse (CSR|invariant)")  # torch warns at the first sparse CSR tensor
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else None
    if own is not None:
        torch.cuda.set_device(own)
    dist.init_process_group("gloo" if own is None else "nccl", device_id=own, timeout=timedelta(seconds=120))
    ranks, rows = dist.get_world_size(), []
    target = options.out / device / f"distributed-models-{ranks}.json"
    for row in rows_of(options, device):
        rows.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            machine.save(target, device, rows=rows)
    dist.barrier()
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    sys.exit(int(is_first and not all(row["right"] for row in rows)))


if __name__ == "__main__":
    main()
