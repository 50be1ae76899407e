"""Times training steps of PyTorch Geometric's GCN, GraphSAGE (mean) and GIN, as called: PyG's own sums against plans.

Usage: MATRICES=FOLDER python benchmarks/scripts/pyg_steps.py OUT. Writes OUT/pyg-steps-DEVICE.json. A step is forward,
loss, backward and fused Adam of two layers on the whole graph: those in the .npz files of FOLDER, smallest first, and
two drawn ones, until 240 s have passed. Ways alternate: PyG and plans, each with a tensor of edges and with a
torch.sparse adjacency, and the same network written by hand, with torch.sparse, `spmm` and a plan. On a GPU each way is
also timed with the whole step captured in a CUDA graph, after steps that warm it up. A way that cannot run, or cannot
be captured, has its error instead of a time.
"""

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from out_folder import out_folder
from torch.nn import Linear, Module, ModuleList, ReLU
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GCN, GIN, GraphSAGE

import matmuls
from matmuls.integrations import pyg
from matmuls_bench import machine, matrices, timing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAWN = "rmat:16:16", "uniform:50000:1000000"
WIDTHS, CLASSES = (64, 256), 16
WARM, ROUNDS, BLOCK = 12, 5, 0.03  # steps before the first round; rounds; seconds of a round of one way
BUDGET, MOST_EDGES = 240, 40_000_000
CAPTURED = ", captured"
Run = Callable[[], torch.Tensor]


def graph_of(source: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Targets' offsets, sources and the number of nodes of a matrix's graph."""
    if source.startswith("uniform:"):
        nodes, edges = map(int, source.split(":")[1:])
        target, col = torch.randint(nodes, (2, edges))
        order = target.argsort(stable=True)
        crow = torch.cat([torch.zeros(1, dtype=torch.int64), target.bincount(minlength=nodes).cumsum(0)])
        return crow, col[order], nodes
    a = matrices.load(source)
    if a.nnz > MOST_EDGES:
        raise ValueError(f"{source}: expected at most {MOST_EDGES} nonzeros")
    crow, col, (rows, columns) = a.crow.long(), a.col.long(), a.shape
    if rows == columns:
        return crow, col, rows
    order = col.argsort(stable=True)  # the bipartite graph of rows and columns, with both directions
    down, up = torch.repeat_interleave(torch.arange(rows), crow.diff())[order], col.bincount(minlength=columns)
    return torch.cat([crow, a.nnz + up.cumsum(0)]), torch.cat([col + rows, down]), rows + columns


class Written(Module):
    """The network by hand: two layers of a product by a sparse matrix, as PyG's of this kind has them."""

    def __init__(self, kind: str, product: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
        super().__init__()
        self.kind, self.product = kind, product
        outs = width, CLASSES
        self.first = ModuleList(Linear(width, width if kind == "GIN" else n) for n in outs)
        self.second = ModuleList(Linear(width, n) for n in outs)

    def forward(self, x: torch.Tensor, graph: object) -> torch.Tensor:
        for i, (first, second) in enumerate(zip(self.first, self.second, strict=True)):
            if self.kind == "GCN":
                x = self.product(first(x))
            elif self.kind == "GraphSAGE":
                x = first(self.product(x)) + second(x)
            else:
                x = second(first(x + self.product(x)).relu())
            x = x if i else x.relu()
        return x


def by_hand(kind: str, crow: torch.Tensor, col: torch.Tensor, nodes: int) -> torch.Tensor:
    """The matrix of `Written`: ones, 1 / degree, or with self-loops 1 / sqrt(degree * degree)."""
    row = torch.repeat_interleave(torch.arange(nodes, device=crow.device), crow.diff())
    if kind == "GCN":
        own = torch.arange(nodes, device=row.device)
        row, col = torch.cat([row, own]), torch.cat([col, own])
    degree = row.bincount(minlength=nodes).float()
    values = {"GCN": (degree[row] * degree[col].clamp(1)).rsqrt(), "GraphSAGE": 1 / degree[row]}.get(kind)
    values = torch.ones_like(row, dtype=torch.float32) if values is None else values
    return torch.sparse_coo_tensor(torch.stack([row, col]), values, (nodes, nodes)).coalesce().to_sparse_csr()


def step_of(model: Module, x: torch.Tensor, graph: torch.Tensor, labels: torch.Tensor) -> Run:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=DEVICE == "cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x, graph), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def captured(step: Run) -> Run:
    """The step as one CUDA graph, captured after steps in which plans choose their kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def context_of(way: str) -> AbstractContextManager[None]:
    return pyg.enabled(patience=0) if way.startswith("plans") else nullcontext()


def timed(steps: dict[str, Run]) -> dict[str, Any]:
    """Milliseconds of a step of each way, the median of alternating rounds; its first loss; or its error."""
    found: dict[str, Any] = {}
    calls, times = {}, {}
    for way, step in steps.items():
        try:
            with context_of(way):
                begin = time.perf_counter()
                loss = step().item()
                first = time.perf_counter() - begin
                if way.endswith(CAPTURED):
                    step = steps[way] = captured(step)
                timing.seconds_of(step, WARM, DEVICE)
                calls[way] = max(1, round(BLOCK / timing.seconds_of(step, 2, DEVICE)))
        except (RuntimeError, NotImplementedError) as error:  # memory is out, or PyG cannot
            found[way] = {"error": str(error).splitlines()[0]}
            continue
        times[way], found[way] = [], {"loss": loss, "ms_first": first * 1e3}
    for turn in range(ROUNDS):
        for way in calls if turn % 2 == 0 else reversed(calls):
            with context_of(way):
                times[way].append(timing.seconds_of(steps[way], calls[way], DEVICE))
    for way, all_of_them in times.items():
        found[way]["ms"] = sorted(all_of_them)[ROUNDS // 2] * 1e3
    return found


def measured(source: str) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    crow, col, nodes = graph_of(source)
    crow, col = crow.to(DEVICE), col.to(DEVICE)
    row = torch.repeat_interleave(torch.arange(nodes, device=DEVICE), crow.diff())
    edges = torch.stack([col, row])
    adjacency = torch.sparse_csr_tensor(crow, col, torch.ones(col.numel(), device=DEVICE), (nodes, nodes))
    labels = torch.randint(CLASSES, (nodes,), device=DEVICE)
    for kind in (GCN, GraphSAGE, GIN):
        name = kind.__name__
        hand = by_hand(name, crow, col, nodes)
        for width in WIDTHS:
            x = torch.randn(nodes, width, device=DEVICE)
            # GIN's norm and GraphSAGE's normalization are left out, so that all ways compute the same sums
            options = {"norm": None, "act": ReLU()} if kind is GIN else {}
            model = kind(width, width, num_layers=2, out_channels=CLASSES, **options).to(DEVICE)
            graphs = {"edges": edges, "adjacency": adjacency}
            plan = matmuls.plan(hand)
            products = {"torch.sparse": hand.matmul, "spmm": partial(matmuls.spmm, hand), "plan": plan.__matmul__}
            steps = {}
            for end in ("", CAPTURED) if DEVICE == "cuda" else ("",):
                for what, graph in graphs.items():
                    for way in ("PyG", "plans"):
                        steps[f"{way} {what}{end}"] = step_of(copy.deepcopy(model), x, graph, labels)
                for way, product in products.items():
                    torch.manual_seed(1)
                    steps[way + end] = step_of(Written(name, product, width).to(DEVICE), x, edges, labels)
            pyg.stats(reset=True)
            ways = timed(steps)
            left = {" ".join(key): n for key, n in pyg.stats().left.items()}
            size = {"graph": source, "nodes": nodes, "edges": col.numel(), "width": width}
            yield {"model": name, **size, "ways": ways, "left_to_pyg": left}
            told = ", ".join(f"{way} {w['ms']:.2f}" if "ms" in w else f"{way}: error" for way, w in ways.items())
            print(f"{name} {source} {width}: {told} ms", flush=True)


def main(out: Path) -> None:
    warnings.filterwarnings("ignore")  # torch's sparse tensors are in beta
    torch.sparse.check_sparse_tensor_invariants.disable()
    folder = os.environ.get("MATRICES")
    found = sorted(Path(folder).glob("*.npz"), key=lambda p: p.stat().st_size) if folder else []
    begin, rows, skipped = time.perf_counter(), [], {}
    for source in (*map(str, found), *DRAWN):
        try:
            for row in measured(source):
                rows.append(row)
                if time.perf_counter() - begin > BUDGET:
                    break
        except (ValueError, RuntimeError) as error:  # too large, or memory is out
            skipped[source] = str(error).splitlines()[0]
        if time.perf_counter() - begin > BUDGET:
            break
    machine.save(out / f"pyg-steps-{DEVICE}.json", DEVICE, rows=rows, skipped=skipped)


if __name__ == "__main__":
    main(out_folder(__doc__, needs_gpu=False))
