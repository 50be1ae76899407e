"""Which models and calls of sentence-transformers are computed without padding, and why others are not."""

from typing import Any

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

AFTER = (Pooling, Normalize, Dense)  # modules that may follow the Transformer
METHODS = ("forward", "preprocess", "tokenize", "_inference")
EMBEDS = "feature-extraction", "token_embeddings", "last_hidden_state"  # task, what it computes, of which output
SCORES = "sequence-classification", "scores", "logits"
Model = SentenceTransformer | CrossEncoder


def why_not(model: Model) -> str | None:
    """Why this model is run by sentence-transformers as it is, or None."""
    stock = CrossEncoder if isinstance(model, CrossEncoder) else SentenceTransformer
    for name in METHODS:
        changed = name in model.__dict__ and name != "_inference"
        if changed or getattr(type(model), name) is not getattr(stock, name):
            return f"{type(model).__name__}.{name} is not of {stock.__name__}"
    modules = list(model.children())
    if not modules or type(modules[0]) is not Transformer:
        return f"the first module is {type(modules[0]).__name__ if modules else 'missing'}, not Transformer"
    scores = stock is CrossEncoder and modules[0].transformer_task == SCORES[0]
    if not scores and not any(type(m) is Pooling for m in modules[1:]):
        return "no Pooling follows the Transformer"
    for module in modules[1:]:
        if type(module) not in AFTER:
            return f"{type(module).__name__} is not one of {', '.join(kind.__name__ for kind in AFTER)}"
    if any(_is_changed(m) for m in (model, *modules)):
        return "a module has hooks, or is compiled"
    if model._placement_is_delegated or any((model.module_kwargs or {}).values()):
        return "the model has a device map, hooks of accelerate or arguments for its modules"
    return _why_not_transformer(modules[0], SCORES if scores else EMBEDS)


def _why_not_transformer(first: Any, wanted: tuple[str, str, str]) -> str | None:
    (task, output, of), model, tokenizer = wanted, first.model, first.processor
    if first.backend != "torch" or not isinstance(model, PreTrainedModel) or _is_changed(model):
        return "the Transformer holds no model of transformers, or one with hooks or compiled"
    if (first.transformer_task, first.module_output_name) != (task, output):
        return f"the Transformer computes no {output.replace('_', ' ')}"
    text = first.modality_config.get("text")
    if text is None or "message" in first.modality_config or text["method"] != "forward":
        return "texts do not go through the model's forward"
    if text["method_output_name"] not in (of, (of,), [of]):
        return f"the model's {of.replace('_', ' ')} are not what the Transformer returns"
    if first.can_flatten_inputs or first.query_expansion is not None or model.config.output_hidden_states:
        return "the Transformer removes padding itself, expands queries, or returns all hidden states"
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        return "the tokenizer is not a fast one"
    if "attention_mask" not in tokenizer.model_input_names:
        return "the tokenizer makes no attention mask"
    if tokenizer.padding_side == "left" and any(hasattr(m, "position_embeddings") for m in model.modules()):
        return "the positions of its texts depend on padding on their left"
    return None


def _is_changed(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks) or module._compiled_call_impl is not None


def why_not_call(inputs: list[Any], pairs: bool, options: dict[str, Any], device: torch.device) -> str | None:
    """Why this call is run by sentence-transformers as it is, or None. pairs: all inputs may be pairs of texts."""
    texts = all(type(x) is str for x in inputs) or (pairs and all(map(_is_pair, inputs)))
    if not inputs or not texts:
        return "not all inputs are texts"
    if not options.keys() <= {"task", "processing_kwargs"}:
        return "the model takes other arguments"
    if device.type not in ("cpu", "cuda") or torch.is_autocast_enabled(device.type) or torch.compiler.is_compiling():
        return "autocast, torch.compile or another device"
    return None


def _is_pair(x: Any) -> bool:
    return type(x) in (list, tuple) and len(x) == 2 and all(type(text) is str for text in x)
