"""Runs a model with matmuls and as stock, and compares the outputs."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .plan import _is_ours
from .taken import attending, in_use, takes, unsupported

Batch = Mapping[str, Tensor] | Sequence[str]


class VerificationError(RuntimeError):
    """The optimized model's outputs differ from stock's by more than the tolerance."""


@dataclass(frozen=True)
class Difference:
    """Largest difference from stock, relative to stock's largest magnitude if that is above 1."""

    hidden_states: float
    attentions: float | None  # None: the model returns none
    tolerance: float


@torch.no_grad()
def verify(model: nn.Module, batch: Batch, tolerance: float | None = None) -> Difference:
    """Run a batch through the model as it is and as stock with eager attention, and compare the outputs.

    Compares hidden states of all layers, the first output of a call that returns none of them and, if the model returns
    them, attentions, each at the tokens kept by batch["attention_mask"]. Of a SentenceTransformer its transformer is
    run; its batch may also be texts. tolerance: by default 1e-10 for float64, 1e-4 for float32, 2e-2 for float16, 1e-1
    for bfloat16. Raises VerificationError, with the figures, if the difference is larger or NaN, and if the model has
    no layer changed by `optimize` and no module that calls an attention function of `register`: it would be compared
    with itself. Raises NotImplementedError if its attention needs what that function does not support.
    """
    if _of_sentence_transformers(model):
        model, batch = _transformer(model, batch)
    if not isinstance(batch, Mapping):
        raise TypeError(f"verify: expected the tensors of a batch by name, got {type(batch).__name__}")
    if not any(_is_ours(m) for m in model.modules()) and not in_use(model):
        for why in unsupported(model).values():
            raise NotImplementedError(f"verify: {why}")
        raise VerificationError(
            "verify: expected layers that optimize changed or modules whose attention function is of register, got "
            f"{type(model).__name__} without any ({takes(model)})"
        )
    if tolerance is None:
        dtype = next(model.parameters()).dtype
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2}.get(dtype, 1e-1)
    training = {m: m.training for m in model.modules()}
    wanted = {"output_hidden_states": True, "output_attentions": True}
    model.eval()
    try:
        ours = _results(model(**batch, **wanted))
        ours["hidden_states"] += (model(**batch)[0],)  # in such a call layers write over their input
        forwards = {m: m.__dict__.pop("forward") for m in model.modules() if _is_ours(m)}
        try:
            with attending(model, "eager"):
                output = model(**batch, **wanted)
            stock = _results(output)
            stock["hidden_states"] += (output[0],)
        finally:
            for module, forward in forwards.items():
                module.forward = forward
    finally:
        for module, mode in training.items():
            module.training = mode
    kept = batch.get("attention_mask")
    found = {name: _difference(ours[name], stock[name], kept) for name in stock if ours[name]}
    result = Difference(found["hidden_states"], found.get("attentions"), tolerance)
    if not all(x <= tolerance for x in found.values()):
        raise VerificationError(f"verify: expected a difference from stock of at most {tolerance:g}, got {result}")
    return result


def _of_sentence_transformers(model: nn.Module) -> bool:
    return any(kind.__module__.startswith("sentence_transformers.") for kind in type(model).__mro__)


def _transformer(model: Any, batch: Batch) -> tuple[nn.Module, dict[str, Tensor]]:
    """The transformer inside a SentenceTransformer, and those tensors of a batch that it takes."""
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None:
        raise TypeError(f"verify: expected a model of transformers inside {type(model).__name__}, got none")
    tokenize = getattr(model, "preprocess", None) or model.tokenize  # the name until sentence-transformers 6
    given = batch if isinstance(batch, Mapping) else tokenize(list(batch))
    taken = inspect.signature(type(inner).forward).parameters
    return inner, {name: x.to(inner.device) for name, x in given.items() if name in taken and isinstance(x, Tensor)}


def _results(output: Any) -> dict[str, tuple[Tensor, ...]]:
    return {name: tuple(getattr(output, name, None) or ()) for name in ("hidden_states", "attentions")}


def _difference(ours: tuple[Tensor, ...], stock: tuple[Tensor, ...], kept: Tensor | None) -> float:
    worst = 0.0
    for x, y in zip(ours, stock, strict=True):
        # mask [B, S] for x [B, S, hidden] or [B, H, S, S]; x may belong to a decoder, with other sizes
        if kept is not None and x.dim() > 2 and kept.shape == (x.size(0), x.size(-2)):
            x, y = (t.movedim(-2, 1)[kept.bool()] for t in (x, y))
        x, y = x.double(), y.double()
        difference = ((x - y).abs().max() / y.abs().max().clamp(min=1)).item()
        worst = difference if difference > worst or difference != difference else worst
    return worst
