"""Attention for Hugging Face models on our products. Importing this imports transformers (5.17 or later)."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from matmuls.dense import cublasMM, cublasTransbMM
from matmuls.fused_softmax import scaled_masked_softmax


def register(name: str = "custom_mm") -> None:
    """Register `attention` and its mask function under one name: `model.set_attn_implementation(name)` then uses both.

    Without its mask function transformers would drop the padding mask without a word.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = bidirectional_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """True where a key may be attended to: [B, 1, 1, K] for padding alone, [B, 1, Q, K] for any other pattern.

    None where every query sees every key. The arguments are those that transformers.masking_utils passes.
    """
    padding_alone = mask_function is bidirectional_mask_function and not use_vmap
    if padding_alone and attention_mask is None:
        return None
    if padding_alone and attention_mask.shape == (batch_size, kv_length) and kv_offset == 0:
        return attention_mask.bool()[:, None, None, :]
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        **kwargs,
    )


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores by cublasTransbMM, scaled_masked_softmax over them, context by cublasMM.

    Returns the context [B, Q, H, D] and the probabilities [B, H, Q, K].

    query: [B, H, Q, D]; key, value: [B, H, K, D], or with fewer heads that H is a multiple of. attention_mask: bool,
    True where a key may be attended to, or float, added to the scores; any shape that broadcasts to [B, H, Q, K].
    position_bias, where a model has one, is added to the scaled scores.

    Raises NotImplementedError for a model with attention sinks or capped scores.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attention: expected a model without {name}, got {type(module).__name__} with it"
            )
    if scaling is None:
        scaling = query.size(-1) ** -0.5
    heads, key_heads = query.size(1), key.size(1)
    if heads != key_heads:  # grouped queries: the batch broadcasts, keys and values are not repeated
        query = query.unflatten(1, (key_heads, heads // key_heads))
        key, value = key.unsqueeze(2), value.unsqueeze(2)
    scores = cublasTransbMM.apply(query, key)
    if heads != key_heads:
        scores = scores.flatten(1, 2)
    probabilities = _softmax(scores, attention_mask, scaling, kwargs.get("position_bias"))
    dropped = torch.nn.functional.dropout(probabilities, p=dropout, training=module.training)
    if heads != key_heads:
        context = cublasMM.apply(dropped.unflatten(1, (key_heads, heads // key_heads)), value).flatten(1, 2)
    else:
        context = cublasMM.apply(dropped, value)
    return context.transpose(1, 2).contiguous(), probabilities


def _softmax(
    scores: torch.Tensor, mask: torch.Tensor | None, scaling: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax of the scaled and masked scores, written over them; a row with nothing to attend to is 0."""
    if bias is not None:
        scores, scaling = scores * scaling + bias, 1.0
    if mask is not None and mask.dtype == torch.bool:
        mask = ~mask
    elif mask is not None:
        mask = mask.to(scores.dtype)
    return scaled_masked_softmax(scores, mask, scaling, inplace=True)
