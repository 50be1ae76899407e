"""Attention rollout over all layers of BERT: how much each token contributes to the sentence embedding.

    python examples/bert_attention.py "A cat sat on the mat."

Attention rollout (Abnar and Zuidema, 2020) traces each token's share of the representation back through the layers: a
layer mixes tokens by the mean of its heads' probabilities and keeps half of each token unchanged. sdpa returns no
probabilities; eager attention does, but is slower. It prints a share and a bar for each token:

                 a  14.7% ###############
               cat  12.9% #############
               sat  12.9% #############
                on  11.7% ############
               the  14.2% ##############
               mat  12.0% ############
                 .  21.7% ######################
"""

import argparse

import torch

from matmuls.bert import Encoder, model_folder
from matmuls.integrations.transformers import optimize


def rollout(attentions: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """[S, S]: share of each input token (column) in each output token (row). attentions: [1, H, S, S] per layer."""
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
    shares = rollout(attentions).mean(0)[1:-1]  # the embedding is the tokens' mean; drops [CLS] and [SEP]
    words = encoder.tokenizer.convert_ids_to_tokens(batch["input_ids"][0])[1:-1]
    for token, share in zip(words, shares / shares.sum(), strict=True):
        print(f"{token:>14} {share:6.1%} {'#' * round(100 * share.item())}")


if __name__ == "__main__":
    main()
