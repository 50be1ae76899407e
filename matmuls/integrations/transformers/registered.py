"""The attention function and the mask function that transformers calls by name."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, eager_mask, sdpa_mask
from transformers.utils import output_capturing
from transformers.utils.import_utils import is_tracing

from matmuls.attention import attend

from .sdpa import attend_by_torch

# Arguments of attention functions that this one does not support: capped scores, sinks, a paged cache, keys selected
# per query.
REFUSED = "softcap", "s_aux", "sinks", "cache", "indices", "block_indices"
NEEDED = {  # attributes of modules that pass such an argument, where they are not None
    "attn_logit_softcapping": "capped scores (softcap)",
    "sinks": "attention sinks (s_aux)",
}


@dataclass(frozen=True)
class Registered:
    """An attention function that `register` has registered under a name.

    Attributes:
        name: the name.

    Examples:
        >>> from matmuls.integrations.transformers import register
        >>> register("with_probabilities", sdpa=False)
        Registered(name='with_probabilities')
    """

    name: str

    def in_use(self, model: torch.nn.Module) -> dict[str, str]:
        """Lists the attention modules of a model that call this function as the model is set now.

        Args:
            model: a model of transformers.

        Returns:
            A dictionary from the name of each such module to its class; empty if no module calls the function.
        """
        from .attention_in_use import in_use

        return in_use(model, self.name)


def register(name: str = "custom_mm", *, sdpa: bool = True, recompute: bool = False) -> Registered:
    """Registers `attention` and its mask function under one name: `model.set_attn_implementation(name)` then uses both.

    `SentenceTransformer(folder, model_kwargs={"attn_implementation": name})` uses both too. (If only the attention
    function were registered, transformers would silently drop the padding mask.)

    Args:
        name: the name for set_attn_implementation. You can register several names.
        sdpa: True calls torch's scaled_dot_product_attention whenever probabilities are not requested. False always
            computes probabilities and returns them to every attention module, as "eager" does.
        recompute: compute the scores again in backward, instead of saving them.

    Returns:
        A `Registered`. Its `in_use(model)` lists the modules that call the function; some classes compute attention
        themselves and ignore the setting.

    Examples:
        >>> from matmuls.integrations.transformers import register
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> registered = register()
        >>> model.set_attn_implementation("custom_mm")
        >>> list(registered.in_use(model))
        ['encoder.layer.0.attention.self', 'encoder.layer.1.attention.self']
    """
    AttentionInterface.register(name, partial(attention, sdpa=sdpa, recompute=recompute))
    AttentionMaskInterface.register(name, attention_mask)
    return Registered(name)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = bidirectional_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Makes the bool mask of `attention`, True where a key may be attended to.

    transformers calls it. For a model that transformers does not mark as supporting scaled_dot_product_attention, it
    returns the additive mask of "eager" instead, because such a model may build masks itself or not declare that it is
    causal.

    Args:
        batch_size: B.
        q_length: Q.
        kv_length: K.
        q_offset: the position of the first query.
        kv_offset: the position of the first key.
        mask_function: a mask function of transformers.masking_utils, which says what keys a query sees.
        attention_mask: [B, K], nonzero for a token that is kept, or None.
        use_vmap: as in transformers.masking_utils.
        allow_is_bidirectional_skip: return None if every query sees every key.
        **kwargs: further arguments of the mask functions in transformers.masking_utils.

    Returns:
        [B, 1, 1, K] if the mask is only for padding, [B, 1, Q, K] for any other pattern. None if no mask is needed:
        every query sees every key, or the module is causal, with as many queries as keys, and nothing else is masked.

    Examples:
        >>> import torch
        >>> from matmuls.integrations.transformers import attention_mask
        >>> attention_mask(1, 3, 3, attention_mask=torch.tensor([[1, 1, 0]]))
        tensor([[[[ True,  True, False]]]])
    """
    all_of_it: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
        **kwargs,
    }
    config = kwargs.get("config")
    if config is not None and not _takes_sdpa_masks(type(config)):
        return eager_mask(**all_of_it)
    if mask_function is bidirectional_mask_function and not use_vmap and kv_offset == 0:
        if attention_mask is None and allow_is_bidirectional_skip:
            return None
        if attention_mask is not None and attention_mask.shape == (batch_size, kv_length):
            # reading the mask synchronizes with the GPU once per forward pass, as in stock: without a mask sdpa is
            # twice as fast
            if allow_is_bidirectional_skip and not is_tracing(attention_mask) and attention_mask.all():
                return None
            return attention_mask.bool()[:, None, None, :]
    # With more keys than queries (static cache) the queries are not always the last ones: a mask tells which they are.
    last = q_length == kv_length or (isinstance(q_offset, int) and q_length == 1 == kv_length + kv_offset - q_offset)
    return sdpa_mask(**all_of_it | ({} if last else {"allow_is_causal_skip": False}))


# The first call imports a module, which torch.compile does not trace.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's has no annotations
def _takes_sdpa_masks(config: type) -> bool:
    return _all_take_sdpa_masks(config)


@lru_cache
def _all_take_sdpa_masks(config: type) -> bool:
    models: Any = MODEL_MAPPING.get(config, ())
    models = models if isinstance(models, tuple) else (models,)
    return bool(models) and all(model._supports_sdpa for model in models)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    sdpa: bool = True,
    recompute: bool = False,
    into: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention for a module of transformers, by `attend` or by torch's scaled_dot_product_attention.

    torch's function is called if `sdpa` is True and no probabilities are requested.

    Args:
        module: the attention module.
        query: [B, H, Q, D] float64, float32, float16 or bfloat16.
        key: [B, h, K, D], H a multiple of h.
        value: [B, h, K, D].
        attention_mask: a tensor whose shape broadcasts to [B, H, Q, K], or None. A bool mask is True where a key may be
            attended to; this is the opposite of `attend`. A float mask is added to the scaled scores. If it is None and
            the module is causal, a query sees no key after its own position; if there are fewer queries than keys,
            they are the last positions.
        scaling: multiplies the scores; 1 / sqrt(D) if None.
        dropout: the probability with which an attention probability is set to 0, in training.
        sdpa: return probabilities only if the call or the model's configuration requests them.
        recompute, into: as in `matmuls.attention.attend`.
        **kwargs: further arguments of transformers' attention functions; position_bias is added to the scaled scores.

    Returns:
        The context [B, Q, H, D], and the probabilities [B, H, Q, K] before dropout or None.

    Raises:
        NotImplementedError: for a model with attention sinks, capped scores, a paged cache or keys selected per query.
        TypeError: if the mask is neither bool nor floating-point.
        RuntimeError: if shapes, dtypes or devices do not match.

    Examples:
        >>> import torch
        >>> from matmuls.integrations.transformers import attention
        >>> q, kept = torch.zeros(1, 1, 1, 4), torch.tensor([True, False])
        >>> attention(torch.nn.Module(), q, q.expand(1, 1, 2, 4), q.expand(1, 1, 2, 4), kept, sdpa=False)[1]
        tensor([[[[1., 0.]]]])
    """
    if kwargs:
        _expect_supported(module, kwargs)
    _check_mask(attention_mask, query, key)
    scaling = query.size(-1) ** -0.5 if scaling is None else scaling
    is_causal = kwargs.pop("is_causal", None)
    # modules without is_causal are related to BERT (LayoutLM, Splinter); transformers' sdpa would treat them as causal
    is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    queries, keys = query.size(2), key.size(2)
    causal = bool(is_causal) and attention_mask is None and queries > 1
    if causal and queries < keys:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        causal, attention_mask = False, seen.tril(keys - queries)[None, None]
    wanted = into is not None or not sdpa or wants_probabilities(module, kwargs)
    if not wanted:
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.to(query.dtype)
        traced = torch.compiler.is_compiling() or torch._C._is_tracing()
        if not traced and kwargs.get("position_bias") is None and query.size(1) == key.size(1):
            # without the views of sdpa_attention_forward
            return attend_by_torch(query, key, value, attention_mask, dropout, causal, scaling), None
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal, **kwargs
        )
        return result

    mask, bias = _masking(attention_mask), kwargs.get("position_bias")
    if bias is not None:
        mask = bias if mask is None else bias + mask if mask.is_floating_point() else bias.masked_fill(mask, -math.inf)
    if mask is not None and mask.is_floating_point() and (query.dtype == torch.float64 or mask.dtype != torch.float32):
        mask = mask.to(query.dtype)
    dropped = dropout if module.training else 0.0
    return attend(query, key, value, mask, scaling, causal=causal, dropout=dropped, recompute=recompute, into=into)


def wants_probabilities(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """True if this forward pass returns attentions: by its argument, what is being captured, or the configuration."""
    if kwargs.get("output_attentions"):
        return True
    captured = _captured()
    if captured is None:
        return bool(getattr(getattr(module, "config", None), "output_attentions", False))
    # for models that do not pass the argument down; transformers' capturing has read the configuration
    return any("attentions" in key for key in captured)


def captures_hidden_states() -> bool:
    """True if this forward pass returns hidden states of layers."""
    return any("hidden_states" in key for key in _captured() or ())


def _captured() -> Collection[str] | None:
    """Returns the names of the outputs that transformers' hooks capture now; None if no model captures any."""
    collector = output_capturing._active_collector
    captured: Collection[str] | None = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return captured


def gives_probabilities(function: Any, module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """True if an attention function is ours and will return probabilities."""
    return is_ours(function) and (not function.keywords["sdpa"] or wants_probabilities(module, kwargs))


def is_ours(function: Any) -> bool:
    """True if `register` made it."""
    return isinstance(function, partial) and function.func is attention


def _expect_supported(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attention: expected a model without {name}, got {type(module).__name__} with it"
            )


def _check_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attention: expected attention_mask in bool or a floating-point dtype, got {mask.dtype}")
    scores = (*query.shape[:3], key.size(2))
    if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(mask.shape[::-1], scores[::-1], strict=False)):
        raise RuntimeError(
            f"attention: expected attention_mask of a shape that broadcasts to the scores' {list(scores)}, "
            f"got {list(mask.shape)}"
        )


def _masking(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Inverts a mask: from True = may be attended to, to True = masked."""
    return ~mask if mask is not None and mask.dtype == torch.bool else mask
