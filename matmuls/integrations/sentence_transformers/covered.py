"""Which models and calls of sentence-transformers are computed without padding, and why others are not."""

from collections import OrderedDict
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

AFTER = (Pooling, Normalize, Dense)  # modules that may follow the Transformer
METHODS = ("forward", "preprocess", "tokenize", "_inference")


def why_not(st: SentenceTransformer) -> str | None:
    """Why this model is run by sentence-transformers as it is, or None."""
    for name in METHODS:
        changed = name in st.__dict__ and name != "_inference"
        if changed or getattr(type(st), name) is not getattr(SentenceTransformer, name):
            return f"{type(st).__name__}.{name} is not of SentenceTransformer"
    modules = list(st.children())
    if not modules or type(modules[0]) is not Transformer:
        return f"the first module is {type(modules[0]).__name__ if modules else 'missing'}, not Transformer"
    if not any(type(m) is Pooling for m in modules[1:]):
        return "no Pooling follows the Transformer"
    for module in modules[1:]:
        if type(module) not in AFTER:
            return f"{type(module).__name__} is not one of {', '.join(kind.__name__ for kind in AFTER)}"
    if any(_is_changed(m) for m in (st, *modules)):
        return "a module has hooks, or is compiled"
    if st._placement_is_delegated or any((st.module_kwargs or {}).values()):
        return "the model has a device map, hooks of accelerate or arguments for its modules"
    return _why_not_transformer(modules[0])


def _why_not_transformer(first: Any) -> str | None:
    model, tokenizer = first.model, first.processor
    if first.backend != "torch" or not isinstance(model, PreTrainedModel) or _is_changed(model):
        return "the Transformer holds no model of transformers, or one with hooks or compiled"
    if first.transformer_task != "feature-extraction" or first.module_output_name != "token_embeddings":
        return "the Transformer computes no token embeddings"
    text = first.modality_config.get("text")
    if text is None or "message" in first.modality_config or text["method"] != "forward":
        return "texts do not go through the model's forward"
    if text["method_output_name"] not in ("last_hidden_state", ("last_hidden_state",), ["last_hidden_state"]):
        return "the model's last hidden states are not what it embeds with"
    if first.can_flatten_inputs or first.query_expansion is not None or model.config.output_hidden_states:
        return "the Transformer removes padding itself, expands queries, or returns all hidden states"
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        return "the tokenizer is not a fast one"
    return None


def _is_changed(module: nn.Module) -> bool:
    hooks: tuple[OrderedDict[int, Any], ...] = (module._forward_hooks, module._forward_pre_hooks)
    return any(hooks) or module._compiled_call_impl is not None


def why_not_call(
    inputs: list[Any], output_value: str | None, options: dict[str, Any], device: torch.device
) -> str | None:
    """Why this call is run by sentence-transformers as it is, or None."""
    if not inputs or not all(type(x) is str for x in inputs):
        return "not all inputs are texts"
    if output_value not in ("sentence_embedding", "token_embeddings"):
        return f"output_value={output_value!r}"
    if not options.keys() <= {"task", "processing_kwargs"}:
        return "the model takes other arguments"
    if device.type not in ("cpu", "cuda") or torch.is_autocast_enabled(device.type) or torch.compiler.is_compiling():
        return "autocast, torch.compile or another device"
    return None
