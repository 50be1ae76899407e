"""Trains GCN and GraphSAGE of PyTorch Geometric to classify nodes, with its own sums over edges and with plans.

    python examples/pyg_node_classification.py --nodes 20000 --epochs 20

The graph is drawn by a stochastic block model: 8 blocks of nodes, and most edges inside a block. The class of a node is
its block; its features say little about that without those of its neighbours. A tenth of the nodes is for training, the
others for the test. Both runs start from the same weights, so their losses agree.

It prints, with other times on each machine:

    20000 nodes in 8 blocks, 240000 edges, 32 features; 20 epochs
            GCN by PyG: loss 2.0687 to 0.1239, accuracy 98.5%, ... ms an epoch
          GCN by plans: loss 2.0687 to 0.1239, accuracy 98.5%, ... ms an epoch
      GraphSAGE by PyG: loss 2.1047 to 0.0667, accuracy 95.8%, ... ms an epoch
    GraphSAGE by plans: loss 2.1047 to 0.0667, accuracy 95.8%, ... ms an epoch
"""

import argparse
import time
from contextlib import nullcontext

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GCN, GraphSAGE

from matmuls.integrations import pyg

BLOCKS, DEGREE, INSIDE = 8, 12, 0.6  # edges of a node, on average; the part of them inside its block


def block_model(nodes: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Edges [2, E], both ways, of a graph of `nodes`, a multiple of BLOCKS; and the block of each node."""
    size = nodes // BLOCKS
    source = torch.randint(nodes, (nodes * DEGREE // 2,), generator=generator)
    anywhere = torch.randint(nodes, source.shape, generator=generator)
    near = source // size * size + anywhere % size
    target = torch.where(torch.rand(source.shape, generator=generator) < INSIDE, near, anywhere)
    return torch.stack([torch.cat([source, target]), torch.cat([target, source])]), torch.arange(nodes) // size


def train(
    model: torch.nn.Module,
    x: torch.Tensor,
    edges: torch.Tensor,
    block: torch.Tensor,
    training: torch.Tensor,
    epochs: int,
) -> tuple[list[float], float, float]:
    """Trains for some epochs. Returns the loss of each, the accuracy on the other nodes, and seconds of the median
    epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses, seconds = [], []
    for _ in range(epochs):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(x, edges)[training], block[training])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for a GPU
        seconds.append(time.perf_counter() - begin)
    model.eval()
    with torch.no_grad():
        right = model(x, edges).argmax(1) == block
    return losses, right[~training].float().mean().item(), sorted(seconds)[epochs // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=20000)
    parser.add_argument("--width", type=int, default=32, help="features of a node, and of the hidden layer")
    parser.add_argument("--epochs", type=int, default=20)
    a = parser.parse_args()
    if min(a.nodes // 80, a.width, a.epochs) < 1:
        parser.error("--nodes is at least 80, --width and --epochs at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    nodes = a.nodes // BLOCKS * BLOCKS
    edges, block = block_model(nodes, generator)
    centres = torch.randn(BLOCKS, a.width, generator=generator)
    x = 0.3 * centres[block] + torch.randn(nodes, a.width, generator=generator)
    training = torch.rand(nodes, generator=generator) < 0.1
    x, edges, block, training = (t.to(device) for t in (x, edges, block, training))
    print(f"{nodes} nodes in {BLOCKS} blocks, {edges.shape[1]} edges, {a.width} features; {a.epochs} epochs")
    for kind in (GCN, GraphSAGE):
        for way, context in (("PyG", nullcontext()), ("plans", pyg.enabled())):
            torch.manual_seed(0)
            model = kind(a.width, a.width, num_layers=2, out_channels=BLOCKS).to(device)
            with context:
                losses, accuracy, seconds = train(model, x, edges, block, training, a.epochs)
            print(
                f"{kind.__name__ + ' by ' + way:>18}: loss {losses[0]:.4f} to {losses[-1]:.4f}, "
                f"accuracy {accuracy:.1%}, {seconds * 1e3:.2f} ms an epoch"
            )


if __name__ == "__main__":
    main()
