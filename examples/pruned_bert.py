"""Prunes BERT's feed-forward layers by magnitude, without retraining, and runs them as sparse layers.

    python examples/pruned_bert.py --sparsity 0.5 0.9

Prints for each sparsity: time of a forward pass, bytes of the weights, and the cosine between the sentence embeddings
of the pruned and the dense model. With other times on each machine:

    dense          ... ms    27.0 MiB
     50%           ... ms    27.1 MiB  cosine 0.800, least 0.708
     90%           ... ms     5.5 MiB  cosine 0.331, least 0.214
"""

import argparse
import copy

import torch
from torch.utils.benchmark import Timer

from matmuls import nn
from matmuls.bert import Encoder, model_folder

TEXTS = [
    "How old are you?",
    "What is your age?",
    "A cat sat on the mat.",
    "Interest rates rose again in spring, and nobody was surprised.",
] * 4


def prune(model: torch.nn.Module, sparsity: float) -> int:
    """Replace the two linear layers of each feed-forward network; return the bytes of all their weights."""
    nbytes = 0
    for layer in model.encoder.layer:
        for part in (layer.intermediate, layer.output):
            part.dense = nn.SparseLinear.from_linear(part.dense, sparsity=sparsity).freeze()
            nbytes += sum(t.nbytes for t in (*part.dense.parameters(), *part.dense.buffers()))
    return nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.5, 0.8, 0.9, 0.95])
    sparsities = parser.parse_args().sparsity
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = Encoder.load(model_folder(), device, torch.float32)
    batch = encoder.batch(TEXTS)
    whole = encoder.embed(batch, "custom_mm")

    def ms(one: Encoder) -> float:
        timer = Timer(
            "one.embed(batch, 'custom_mm')", globals={"one": one, "batch": batch}, num_threads=torch.get_num_threads()
        )
        return timer.blocked_autorange().median * 1e3

    layers = [m for layer in encoder.model.encoder.layer for m in (layer.intermediate.dense, layer.output.dense)]
    mib = sum(p.nbytes for m in layers for p in m.parameters()) / 2**20
    print(f"dense     {ms(encoder):8.2f} ms  {mib:6.1f} MiB")
    for sparsity in sparsities:
        pruned = Encoder(copy.deepcopy(encoder.model), encoder.tokenizer)
        mib = prune(pruned.model, sparsity) / 2**20
        cosine = (pruned.embed(batch, "custom_mm") * whole).sum(-1)
        drift = f"cosine {cosine.mean():.3f}, least {cosine.min():.3f}"
        print(f"{sparsity:4.0%}      {ms(pruned):8.2f} ms  {mib:6.1f} MiB  {drift}")


if __name__ == "__main__":
    main()
