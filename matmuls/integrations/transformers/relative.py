"""Relative position biases of MPNet: made once for all texts of a batch, or by the segments of packed texts."""

from functools import partial
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from .plan import _Plan, _running
from .segments import packed


def _encoder(
    encoder: Any, plan: _Plan, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> Any:
    """The forward of an encoder with one bias for its layers. The stock code runs where it would collect what its
    layers return: they do not write over their input then."""
    chain = _running.get()
    collects = kwargs.get("output_attentions") or kwargs.get("output_hidden_states") or not kwargs.get("return_dict")
    if chain is None or plan not in chain.plans or collects:
        before = _running.set(None)
        try:
            return type(encoder).forward(encoder, hidden_states, attention_mask, **kwargs)
        finally:
            _running.reset(before)
    # stock repeats the bias [1, H, S, S] for every text; packed texts ask for that of their own distances
    bias = encoder.compute_position_bias(hidden_states[:1]) if packed.get() is None else partial(_bias, encoder)
    for layer in encoder.layer:
        (hidden_states,) = layer(hidden_states, attention_mask, bias, **kwargs)
    return BaseModelOutput(last_hidden_state=hidden_states)


def _bias(encoder: Any, distances: Tensor) -> Tensor:
    """The biases [texts, H, Q, K] of the columns [texts, Q, K] from queries to keys."""
    buckets = encoder.relative_position_bucket(distances)
    bias: Tensor = encoder.relative_attention_bias(buckets).movedim(-1, 1).contiguous()
    return bias
