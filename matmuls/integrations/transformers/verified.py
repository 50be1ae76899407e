"""Runs a model with matmuls and as stock, and compares the outputs."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention_in_use import attending, in_use, takes, unsupported
from .plan import _is_ours

Batch = Mapping[str, Tensor] | Sequence[str] | Sequence[Sequence[str]]


class VerificationError(RuntimeError):
    """Raised by `verify` if the outputs differ from the stock model's by more than the tolerance, or if nothing in the
    model was changed, so that there is nothing to compare.

    Examples:
        >>> from matmuls.integrations.transformers import VerificationError
        >>> issubclass(VerificationError, RuntimeError)
        True
    """


@dataclass(frozen=True)
class Difference:
    """The largest differences between a model's outputs and the stock model's, as `verify` returns them.

    A difference is divided by the largest magnitude in the stock output if that is above 1.

    Attributes:
        hidden_states: the largest difference of a hidden state.
        attentions: the largest difference of an attention probability, or None if the model returns none.
        tolerance: the largest difference that was allowed.

    Examples:
        >>> from matmuls.integrations.transformers import Difference
        >>> Difference(hidden_states=1e-7, attentions=None, tolerance=1e-4)
        Difference(hidden_states=1e-07, attentions=None, tolerance=0.0001)
    """

    hidden_states: float
    attentions: float | None  # None: the model returns none
    tolerance: float


@torch.no_grad()
def verify(model: nn.Module, batch: Batch, tolerance: float | None = None) -> Difference:
    """Runs a batch through the model as it is, and through its stock code with eager attention; compares the outputs.

    In a first call, which returns everything, the hidden states of all layers are compared, and the attention
    probabilities if the model returns them. In a second call, which returns neither, the first output is compared. Only
    tokens that batch["attention_mask"] keeps are compared.

    Args:
        model: a model that `optimize` changed, or that uses an attention function of `register`.
        batch: arguments of a forward pass. For a SentenceTransformer, a list of texts works too, and for a CrossEncoder
            a list of pairs of texts; its transformer is run.
        tolerance: the largest difference allowed; by default 1e-10 for float64, 1e-4 for float32, 2e-2 for float16 and
            1e-1 for bfloat16.

    Returns:
        A `Difference`.

    Raises:
        VerificationError: if a difference is larger than the tolerance or NaN; the message has the figures. Also if the
            model has no layer that `optimize` changed and no module that calls an attention function of `register`,
            because it would be compared with itself.
        NotImplementedError: if the model's attention needs a feature that the attention function does not support.
        TypeError: if the batch is not a mapping of names to tensors.

    Examples:
        >>> import torch
        >>> from matmuls.integrations.transformers import register, verify
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> registered = register()
        >>> model.set_attn_implementation("custom_mm")
        >>> verify(model, {"input_ids": torch.tensor([[1, 2, 3]])}).attentions < 1e-4
        True
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
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        batch = {"use_cache": False, **batch}  # type: ignore[dict-item]  # with a cache, the stock code would run
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
    """The transformer inside a SentenceTransformer or CrossEncoder, and those tensors of a batch that it takes."""
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
