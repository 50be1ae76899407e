"""Computes the hidden states of packed texts in one pass of a model's own forward."""

from typing import Any

import torch
from torch import Tensor, nn

from .plan import _Chain, _running
from .segments import Segments, packed

RECORDED = "output_attentions", "output_hidden_states"


def run(model: Any, chain: _Chain, given: dict[str, Tensor], segments: Segments) -> Any:
    """The model's output for packed tokens. given: arguments of its forward [1, T]."""
    before = packed.set(segments), _running.set(chain)
    try:
        return type(model).forward(model, **given, **dict.fromkeys(RECORDED, False), return_dict=True)
    finally:
        packed.reset(before[0])
        _running.reset(before[1])


def pool_again(model: Any, output: Any) -> None:
    """Replaces the pooler's result in an output by that of the padded states in it."""
    pooler = getattr(model, "pooler", None)
    if pooler is not None:
        states = output.last_hidden_state
        output.pooler_output = (
            model.pooler_activation(pooler(states[:, 0])) if isinstance(pooler, nn.Linear) else pooler(states)
        )


def positions(embeddings: Any, tokens: dict[str, Tensor], kept: Tensor) -> Tensor:
    """The positions [texts, longest] that the stock model gives to tokens."""
    if hasattr(embeddings, "create_position_ids_from_input_ids"):  # of the family of RoBERTa: padding has none
        if "input_ids" in tokens:
            return embeddings.create_position_ids_from_input_ids(tokens["input_ids"], embeddings.padding_idx)
        return embeddings.create_position_ids_from_inputs_embeds(tokens["inputs_embeds"], embeddings.padding_idx)
    return torch.arange(kept.size(1), device=kept.device).expand(kept.shape)


def longest(embeddings: Any) -> int:
    """How many tokens of a text have a position."""
    first = embeddings.padding_idx + 1 if hasattr(embeddings, "create_position_ids_from_input_ids") else 0
    return int(embeddings.position_embeddings.num_embeddings) - first
