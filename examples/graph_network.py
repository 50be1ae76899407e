"""Trains a two-layer graph network on a whole graph, with a sparse plan and with torch.sparse, and compares the time.

    python examples/graph_network.py --points 65536 --edges 524288 --width 128

The graph is drawn, with a few points that have very many neighbours. Every step multiplies by its matrix twice forward,
and by the transpose twice backward. Both start from the same weights, so their losses agree.

It prints, with other times on each machine:

    65536 points, 1084850 nonzeros, 128 features
            plan: loss 2.7571 to 0.9726 in 20 steps of ... ms
    torch.sparse: loss 2.7571 to 0.9726 in 20 steps of ... ms
"""

import argparse
import warnings
from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer

import matmuls

warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")  # torch says so at the first one
Product = Callable[[torch.Tensor], torch.Tensor]


def neighbours(points: int, edges: int, device: str) -> torch.Tensor:
    """CSR matrix of an undirected graph with self-loops; each nonzero is 1 / sqrt(degree(i) * degree(j))."""
    row, col = (torch.rand(2, edges) ** 3 * points).long()
    itself = torch.arange(points)
    index = torch.unique(torch.cat([row, col, itself]) * points + torch.cat([col, row, itself]))
    row, col = (index // points).to(device), (index % points).to(device)
    degree = torch.bincount(row, minlength=points).float()
    values = (degree[row] * degree[col]).rsqrt()
    where = torch.stack([row, col])
    return torch.sparse_coo_tensor(
        where, values, (points, points), is_coalesced=True, check_invariants=False
    ).to_sparse_csr()


def network(product: Product, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return product(torch.relu(product(x @ first)) @ second)


def step_of(
    product: Product, x: torch.Tensor, labels: torch.Tensor, start: list[torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """A function that runs one training step on copies of these weights and returns the loss before the step."""
    weights = [w.clone().requires_grad_() for w in start]
    optimizer = torch.optim.Adam(weights, lr=0.02)

    def step() -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(network(product, x, *weights), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def main() -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch 2.11 warns where nothing is chosen
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1 << 16)
    parser.add_argument("--edges", type=int, default=1 << 19, help="pairs of points that are drawn")
    parser.add_argument("--width", type=int, default=128, help="features of a point, and of the hidden layer")
    parser.add_argument("--classes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    a = parser.parse_args()
    if min(a.points, a.edges, a.width, a.classes, a.steps) < 1:
        parser.error("every number is at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    graph = neighbours(a.points, a.edges, device)
    plan = matmuls.plan(graph, products=4 * a.steps, constant=True)
    print(f"{graph.shape[0]} points, {plan.nnz} nonzeros, {a.width} features")
    x = torch.randn(graph.shape[0], a.width, device=device)
    shapes = (a.width, a.width), (a.width, a.classes)
    teacher, start = ([torch.randn(*shape, device=device) / a.width**0.5 for shape in shapes] for _ in range(2))
    labels = network(plan.__matmul__, x, *teacher).argmax(1)

    ways: dict[str, Product] = {"plan": plan.__matmul__, "torch.sparse": graph.__matmul__}
    for name, product in ways.items():
        step = step_of(product, x, labels, start)
        losses = [step().item() for _ in range(a.steps)]
        seconds = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads()).timeit(3).mean
        print(f"{name:>12}: loss {losses[0]:.4f} to {losses[-1]:.4f} in {a.steps} steps of {seconds * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
