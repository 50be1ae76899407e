"""Which words hold a sentence together: attention rollout over all layers, from BERT's probabilities.

    python examples/bert_attention.py "A cat sat on the mat."

A token's share of the sentence's representation is followed back through the layers (Abnar and Zuidema, 2020): each
layer mixes tokens by the mean of its heads' probabilities and keeps half of each token as it is. sdpa returns no
probabilities; eager attention takes longer for them.
"""

import argparse

import torch

from matmuls.bert import Encoder, model_folder
from matmuls.integrations.transformers import optimize


def rollout(attentions: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """How much of each input token is in each output token: [S, S], rows sum to 1. attentions: [1, H, S, S] a layer."""
    mixed = torch.eye(attentions[0].size(-1), device=attentions[0].device)
    for layer in attentions:
        step = (layer[0].float().mean(0) + torch.eye(layer.size(-1), device=layer.device)) / 2
        mixed = step @ mixed
    return mixed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", default="The old cat sat quietly on the mat while it rained in Berlin.")
    text = parser.parse_args().text
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder = Encoder.load(model_folder(), device, torch.float32)
    optimize(encoder.model)
    batch = encoder.batch([text])
    attentions = encoder.run(batch, "custom_mm", probabilities=True).attentions
    shares = rollout(attentions).mean(0)[1:-1]  # the embedding is the mean of the tokens; [CLS] and [SEP] say nothing
    words = encoder.tokenizer.convert_ids_to_tokens(batch["input_ids"][0])[1:-1]
    for token, share in zip(words, shares / shares.sum(), strict=True):
        print(f"{token:>14} {share:6.1%} {'#' * round(100 * share.item())}")


if __name__ == "__main__":
    main()
