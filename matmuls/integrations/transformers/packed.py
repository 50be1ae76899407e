"""Hidden states of packed texts: an optimized encoder runs on the tokens of all texts, without padding between them."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_tracing

from . import registered
from .families import TEXTS, UNPACKED, _kind
from .plan import _Chain, _is_ours, _running
from .rotary import depends_on_length
from .segments import Segments, Text, Unpackable, _why_not_attention, has_onednn, in_blocks, packed

TOKENS = 1024  # of a step on a CPU, so that its intermediate results stay in the caches
ARGUMENTS = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "return_dict"}
RECORDED = "output_attentions", "output_hidden_states"


def can_pack(model: nn.Module) -> str | None:
    """Says why `encode_tokens` cannot run a model as it is now.

    Args:
        model: a model of transformers, or a module that contains one, such as a SentenceTransformer.

    Returns:
        The reason, or None if `encode_tokens` can run it.

    Examples:
        >>> from matmuls.integrations.transformers import can_pack, optimize
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> can_pack(model)
        'optimize has not changed BertModel as a whole'
        >>> handle = optimize(model)
        >>> can_pack(model) is None
        True
    """
    whole = _whole(model)
    if whole is None:
        for m in model.modules():
            if _kind(m) in UNPACKED:
                return f"{type(m).__name__} {UNPACKED[_kind(m)]}"
        return f"{type(model).__name__} contains no model of texts that optimize knows"
    if not _is_ours(whole):
        return f"optimize has not changed {type(whole).__name__} as a whole"
    chain: _Chain = whole.__dict__["forward"].args[1]
    if not chain.is_private():
        return f"{type(whole).__name__} has hooks or replaced modules"
    if any(m.training for m in whole.modules()):
        return f"{type(whole).__name__} is in training mode"
    if depends_on_length(whole):
        return f"the positions of {type(whole).__name__} depend on the longest text of a batch"
    return next(filter(None, (_why_not_attention(plan.attention) for plan in chain.plans)), None)


@torch.no_grad()
def encode_tokens(
    model: nn.Module, input_ids: Tensor, lengths: Sequence[int] | Tensor, *, token_type_ids: Tensor | None = None
) -> Tensor:
    """Computes the last hidden states of packed texts, with no padding anywhere.

    Each text gets the positions that it has alone, and its tokens attend to each other only. The result is that of the
    model for a padded batch, within rounding. No gradient is recorded.

    Args:
        model: a model that `optimize` changed, of any of its families for texts but CLIP and SigLIP, or a module
            that contains one.
        input_ids: [T], the token ids of all texts, one text after the other.
        lengths: the number of tokens of each text, at least 1; their sum is T.
        token_type_ids: [T], or None for zeros.

    Returns:
        [T, width], in the order of input_ids.

    Raises:
        ValueError: if the shapes do not match, if a text is longer than the model allows, or with the reason of
            `can_pack`.

    Examples:
        >>> import torch
        >>> from matmuls.integrations.transformers import encode_tokens, optimize
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_attention_heads=1, num_hidden_layers=2)
        >>> model = BertModel(config).eval()
        >>> handle = optimize(model)
        >>> encode_tokens(model, torch.tensor([2, 7, 3, 2, 9, 8, 3]), [3, 4]).shape
        torch.Size([7, 64])
    """
    why = can_pack(model)
    if why is not None:
        raise ValueError(f"encode_tokens: {why}")
    whole: Any = _whole(model)
    counts = _checked("encode_tokens", input_ids, lengths)
    given = {"input_ids": input_ids, "token_type_ids": token_type_ids}
    if token_type_ids is not None and token_type_ids.shape != input_ids.shape:
        raise ValueError(f"encode_tokens: expected token_type_ids [{len(input_ids)}], got {list(token_type_ids.shape)}")
    if token_type_ids is not None and "token_type_ids" not in _names(type(whole)):
        raise ValueError(f"encode_tokens: {type(whole).__name__} takes no token_type_ids")
    if len(input_ids) == 0:
        return input_ids.new_empty(0, whole.config.hidden_size, dtype=whole.dtype)
    of_text = torch.tensor(counts, device=input_ids.device)
    kept = torch.arange(max(counts), device=input_ids.device) < of_text[:, None]
    padding = getattr(whole.embeddings, "padding_idx", 0)  # RoBERTa numbers the other tokens
    tokens = {
        name: x.new_full(kept.shape, padding if name == "input_ids" else 0).masked_scatter_(kept, x)
        for name, x in given.items()
        if x is not None
    }
    if not _fits(whole, tokens, kept):
        raise ValueError(f"encode_tokens: {type(whole).__name__} has too few positions for {max(counts)} tokens")
    try:
        output = _run(whole, tokens, kept, [(count, False, False) for count in counts], unpad=False)
    except Unpackable as reason:
        raise ValueError(f"encode_tokens: {reason}") from None
    states: Tensor = output.last_hidden_state
    return states


def pool(
    hidden: Tensor,
    lengths: Sequence[int] | Tensor,
    mode: Literal["mean", "cls", "lasttoken", "max"] = "mean",
    normalize: bool = False,
) -> Tensor:
    """Computes one vector per text from the hidden states of packed texts.

    Args:
        hidden: [T, width] in a real floating-point dtype, such as the result of `encode_tokens`.
        lengths: the number of tokens of each text, at least 1; their sum is T.
        mode: "mean" of all tokens, summed in float32 (float64 for float64), "cls" the first token, "lasttoken", or
            "max" of each column.
        normalize: divide each vector by its length, as torch.nn.functional.normalize does.

    Returns:
        [texts, width] in hidden's dtype.

    Raises:
        ValueError: if the lengths do not match or the mode is unknown.

    Examples:
        >>> import torch
        >>> from matmuls.integrations.transformers import pool
        >>> pool(torch.tensor([[1.0], [3.0], [5.0]]), [2, 1])
        tensor([[2.],
                [5.]])
    """
    counts = _checked("pool", hidden, lengths, dims=2)
    if mode not in ("mean", "cls", "lasttoken", "max"):
        raise ValueError(f"pool: expected mode mean, cls, lasttoken or max, got {mode}")
    if not counts:
        return torch.empty_like(hidden)
    of_text = torch.tensor(counts, device=hidden.device)
    ends = of_text.cumsum(0)
    if mode == "mean":
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        result = torch.segment_reduce(wide, "mean", lengths=of_text, axis=0, unsafe=True)
    elif mode == "max":
        result = torch.segment_reduce(hidden, "max", lengths=of_text, axis=0, unsafe=True)
    else:
        result = hidden[ends - of_text if mode == "cls" else ends - 1]
    if normalize:
        result = nn.functional.normalize(result if result.dtype == torch.float64 else result.float(), dim=-1)
    return result.to(hidden.dtype)


def unpadded(model: Any, chain: _Chain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of a whole model whose attention mask hides tokens, computed on the others; None if the call needs the
    padded batch. States of hidden tokens are zero, except a text's first, which heads read."""
    if chain.unpad is False or _kind(model) not in TEXTS or depends_on_length(model):
        return None
    given = dict(zip(_names(type(model)), args, strict=False)) | kwargs
    mask, config = given.pop("attention_mask", None), model.config
    source = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
    if type(mask) is not Tensor or mask.dim() != 2 or mask.numel() == 0 or mask.is_meta or is_tracing(mask):
        return None
    if mask.is_cuda and (not chain.unpad or torch.cuda.is_current_stream_capturing()):  # it waits for the mask
        return None
    if type(source) is not Tensor or source.shape[:2] != mask.shape or source.device != mask.device:
        return None
    others = [given[name] for name in given.keys() - ARGUMENTS]
    if any(x is not None and x is not False for x in others) or registered._captured():
        return None
    if any(given.get(name, getattr(config, name, False)) for name in RECORDED):
        return None
    if model.training or any(m.training for _, _, m, _, _ in chain.links):
        return None
    kept = mask.bool()
    hidden = ~kept[:, 0]
    kept = torch.cat([kept[:, :1] | hidden[:, None], kept[:, 1:]], 1)
    columns = torch.arange(kept.size(1), device=kept.device)
    gaps = (kept * columns).amax(1) - kept.byte().argmax(1) >= kept.sum(1)
    counts, starts_hidden, gaps = torch.stack([kept.sum(1), hidden, gaps]).tolist()
    texts = [(count, bool(h), bool(g)) for count, h, g in zip(counts, starts_hidden, gaps, strict=True)]
    if any(text[:2] == (1, True) for text in texts):
        return None  # a text without a token
    if sum(counts) == kept.numel() and not any(starts_hidden) and not in_blocks(kept.size(1), _window(config)):
        return None  # nothing to leave out
    tensors = {name: x for name, x in given.items() if name in ARGUMENTS and isinstance(x, Tensor)}
    tokens = {name: x.expand(*kept.shape, *x.shape[2:]) for name, x in tensors.items()}
    if not _fits(model, tokens, kept):
        return None
    try:
        output = _run(model, tokens, kept, texts)
    except Unpackable:
        return None
    pooler = getattr(model, "pooler", None)
    if pooler is not None:
        states = output.last_hidden_state
        output.pooler_output = (
            model.pooler_activation(pooler(states[:, 0])) if isinstance(pooler, nn.Linear) else pooler(states)
        )
    return output.to_tuple() if given.get("return_dict", getattr(config, "return_dict", True)) is False else output


def _run(model: Any, tokens: dict[str, Tensor], kept: Tensor, texts: list[Text], *, unpad: bool = True) -> Any:
    """The model's output for the tokens that are kept of [texts, longest], computed in steps of whole texts. Its hidden
    states are [texts, longest, width], or [T, width] without unpad."""
    chain: _Chain = model.__dict__["forward"].args[1]
    tokens = {"position_ids": _positions(model.embeddings, tokens, kept)} | tokens
    order = sorted(range(len(texts)), key=texts.__getitem__)  # texts of one length side by side
    texts = [texts[i] for i in order]
    of_text = torch.tensor(order, device=kept.device)
    row, column = kept[of_text].nonzero().unbind(1)
    places = of_text[row] * kept.size(1) + column
    flat = {name: x.reshape(kept.numel(), *x.shape[2:]) for name, x in tokens.items()}
    into = places if unpad else (kept.flatten().cumsum(0) - 1)[places]
    rounded = has_onednn(_words(model))
    states: Any = None
    output: Any = None
    for some, part in _steps(texts, _most(chain, model, kept.device)):
        taken, columns = places[part], column[part]
        extra = -len(taken) % _multiple(len(taken)) if rounded else 0
        if extra:
            taken, some = torch.cat([taken, taken[-1:].expand(extra)]), [*some, (extra, False, False)]
        before = packed.set(Segments(some, columns)), _running.set(chain)
        try:
            given = {name: x[taken][None] for name, x in flat.items()} | dict.fromkeys(RECORDED, False)
            if _window(model.config) is not None:  # no mask of [T, T] for the layers with a window
                given["attention_mask"] = dict.fromkeys(model.config.layer_types)
            output = type(model).forward(model, **given, return_dict=True)
        finally:
            packed.reset(before[0])
            _running.reset(before[1])
        y = output.last_hidden_state[0, : len(taken) - extra]
        if states is None:
            states = y.new_zeros(kept.numel() if unpad else len(places), y.size(1))
        states[into[part]] = y
    output.last_hidden_state = states.view(*kept.shape, -1) if unpad else states
    return output


def _window(config: Any) -> int | None:
    """Tokens at this distance or farther are not seen by the model's local layers; None if it has none."""
    return config.sliding_window + 1 if getattr(config, "layer_types", None) else None


def _steps(texts: list[Text], most: float) -> Iterator[tuple[list[Text], slice]]:
    """Texts of at most that many tokens at a time, or one longer text, and where their tokens lie."""
    some: list[Text] = []
    start = tokens = 0
    for text in texts:
        if some and tokens + text[0] > most:
            yield some, slice(start, start + tokens)
            some, start, tokens = [], start + tokens, 0
        some.append(text)
        tokens += text[0]
    yield some, slice(start, start + tokens)


def _multiple(tokens: int) -> int:
    """What a step's tokens are rounded up to, by copies of one: oneDNN compiles a kernel for each number of rows, and
    keeps 1024 of them."""
    return max(4, 1 << tokens.bit_length() >> 5)


def _most(chain: _Chain, model: Any, device: torch.device) -> float:
    """Tokens of a step."""
    chunk_bytes = next(iter(chain.plans)).chunk_bytes
    if chunk_bytes is not None:
        return chunk_bytes / (3 * model.config.hidden_size * model.dtype.itemsize)
    return TOKENS if device.type == "cpu" else float("inf")


def _positions(embeddings: Any, tokens: dict[str, Tensor], kept: Tensor) -> Tensor:
    """The positions [texts, longest] that the stock model gives to tokens."""
    if _first(embeddings) and "input_ids" in tokens:  # padding has none
        given = (tokens["input_ids"] != embeddings.padding_idx).long()
        return given.cumsum(1) * given + embeddings.padding_idx
    return torch.arange(kept.size(1), device=kept.device).expand(kept.shape) + _first(embeddings)


def _first(embeddings: Any) -> int:
    """The position of a first token: 0, but not in the family of RoBERTa."""
    return embeddings.padding_idx + 1 if hasattr(embeddings, "create_position_ids_from_inputs_embeds") else 0


def _fits(model: Any, tokens: dict[str, Tensor], kept: Tensor) -> bool:
    """True if there are positions enough, or the caller gives them."""
    embeddings = model.embeddings
    if not hasattr(embeddings, "position_embeddings"):
        return True
    return (
        "position_ids" in tokens or kept.size(1) + _first(embeddings) <= embeddings.position_embeddings.num_embeddings
    )


def _whole(model: nn.Module) -> nn.Module | None:
    """The model of texts inside a module: the embeddings and all layers, without a head."""
    return next((m for m in model.modules() if _kind(m) in TEXTS), None)


def _words(model: Any) -> Tensor:
    weight: Tensor = getattr(model.embeddings, TEXTS[_kind(model)]).weight
    return weight


@lru_cache
def _names(model: Any) -> tuple[str, ...]:
    """The names of forward's arguments, in order."""
    return tuple(signature(model.forward).parameters)[1:]


def _checked(what: str, x: Tensor, lengths: Sequence[int] | Tensor, dims: int = 1) -> list[int]:
    counts = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    if x.dim() != dims or sum(counts) != len(x) or any(n < 1 for n in counts):
        of = "input_ids [T]" if dims == 1 else "hidden [T, width]"
        raise ValueError(
            f"{what}: expected {of} and lengths of at least 1 with the sum T, got {list(x.shape)} and {len(counts)} "
            f"lengths from {min(counts, default=0)} with the sum {sum(counts)}"
        )
    return counts
