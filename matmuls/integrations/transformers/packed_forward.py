"""Computes the hidden states of packed texts in one pass of a model's own forward."""

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from .embedding_kernel import in_one_kernel
from .families import DECODERS, TEXTS, _kind, of_class
from .plan import _Chain, _running
from .segments import Segments, packed

RECORDED = "output_attentions", "output_hidden_states"


def run(model: Any, chain: _Chain, given: dict[str, Tensor], segments: Segments) -> Any:
    """The model's output for packed tokens, without that of its pooler. given: arguments of its forward [1, T]."""
    options: dict[str, Any] = dict.fromkeys((*RECORDED, "use_cache") if _kind(model) in DECODERS else RECORDED, False)
    if getattr(model.config, "layer_types", None):
        options["attention_mask"] = dict.fromkeys(model.config.layer_types)  # no mask of [T, T] for them
    else:  # masks of four dimensions pass as they are, and our layers read none; in a capture None would become [T, T]
        options["attention_mask"] = next(iter(given.values())).new_empty(1, 1, 1, 1)
    before = packed.set(segments), _running.set(chain)
    try:
        return type(model).forward(_packed_form(model, given), **given, **options, return_dict=True)
    finally:
        packed.reset(before[0])
        _running.reset(before[1])


def _packed_form(model: Any, given: dict[str, Tensor]) -> Any:
    """The same modules, but for the pooler, which would read the first packed token only, and embeddings that one
    kernel computes."""
    kernel = in_one_kernel(getattr(model, "embeddings", None)) if "input_ids" in given else None
    others = {"pooler": None} | ({"embeddings": kernel} if kernel else {})
    form = object.__new__(type(model))
    vars(form).update(vars(model), _modules=model._modules | {k: v for k, v in others.items() if k in model._modules})
    return form


def kept(model: Any, seen: Tensor) -> Tensor:
    """The tokens [texts, longest] to compute: those that the mask shows, and each text's first, which heads read,
    though not those of decoders."""
    return seen if _kind(model) in DECODERS else torch.cat([torch.ones_like(seen[:, :1]), seen[:, 1:]], 1)


def pool_again(model: Any, output: Any, firsts: Callable[[Tensor], Tensor] = lambda states: states) -> None:
    """Sets the pooler's result in an output. firsts: the states [texts, 1 or more, width] of the texts, of which
    poolers read the first, from the last hidden states."""
    pooler = getattr(model, "pooler", None)
    if pooler is not None:
        states = firsts(output.last_hidden_state)
        output.pooler_output = (
            model.pooler_activation(pooler(states[:, 0])) if isinstance(pooler, nn.Linear) else pooler(states)
        )


def positions(model: Any, tokens: dict[str, Tensor], kept: Tensor) -> Tensor:
    """The positions [texts, longest] that the stock model gives to tokens."""
    padding = numbered_from(getattr(model, "embeddings", None))
    if padding >= 0 and "input_ids" in tokens:  # padding has none
        given = (tokens["input_ids"] != padding).long()
        return given.cumsum(1) * given + padding
    return torch.arange(kept.size(1), device=kept.device).expand(kept.shape) + padding + 1


def packed_positions(model: Any, ids: Tensor, columns: Tensor) -> Tensor:
    """The positions [T] that the stock model gives to packed tokens. columns [T]: where each is in its text."""
    padding = numbered_from(getattr(model, "embeddings", None))
    if padding < 0:
        return columns
    given = (ids != padding).long()
    ahead = given.cumsum(0) - given
    of_text = ahead[torch.arange(len(columns), device=columns.device) - columns]
    return (ahead + 1 - of_text) * given + padding


def longest(model: Any) -> int:
    """How many tokens of a text have a position."""
    embeddings: Any = getattr(model, "embeddings", None)
    if not hasattr(embeddings, "position_embeddings"):
        return sys.maxsize
    return int(embeddings.position_embeddings.num_embeddings) - numbered_from(embeddings) - 1


def words(model: Any) -> Tensor:
    """The word embeddings of a model of TEXTS."""
    weight: Tensor = getattr(getattr(model, "embeddings", model), TEXTS[_kind(model)]).weight
    return weight


def window(chain: _Chain) -> int | None:
    """Tokens at this distance or farther are not seen by the model's local layers; None if it has none."""
    sizes = (getattr(plan.attention, "sliding_window", None) for plan in chain.plans)
    return min((size for size in sizes if size is not None), default=None)


def numbered_from(embeddings: Any) -> int:
    """The padding id from which the family of RoBERTa numbers the tokens that differ from it; -1 if their positions are
    their columns."""
    return int(embeddings.padding_idx) if hasattr(embeddings, "create_position_ids_from_inputs_embeds") else -1


def takes_types(model: Any) -> bool:
    """True if the embeddings of a model of TEXTS add those of token types, which its forward takes."""
    types = getattr(model.embeddings, "token_type_embeddings", None)
    return types is not None and "token_type_ids" in names(type(model))


@of_class
def names(model: Any) -> tuple[str, ...]:
    """The names of forward's arguments, in order."""
    return tuple(signature(model.forward).parameters)[1:]
