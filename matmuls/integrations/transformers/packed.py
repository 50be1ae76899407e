"""Hidden states of packed texts: an optimized encoder runs on the tokens of all texts, without padding between them."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_tracing

from . import cuda_graph_passes, packed_forward, registered
from .families import DECODERS, TEXTS, TUPLES, UNPACKED, _kind
from .packed_forward import RECORDED
from .plan import _Chain, _is_ours
from .rotary import depends_on_length
from .segments import Segments, Unpackable, _why_not_attention, has_onednn, in_blocks, moved

TOKENS = 1024  # of a step on a CPU, so that its intermediate results stay in the caches
ARGUMENTS = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "return_dict"}


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
    if chain.graphs is not None and chain.graphs.holds():  # of a model that could be packed
        return None
    if not chain.is_private():
        return f"{type(whole).__name__} has hooks or replaced modules"
    if chain.is_training(whole) or any(m.training for plan in chain.plans for _, _, m, _, _ in plan.inside):
        return f"{type(whole).__name__} is in training mode"
    if depends_on_length(whole):
        return f"the positions of {type(whole).__name__} depend on the longest text of a batch"
    return next(filter(None, (_why_not_attention(p.attention, p.family.causal) for p in chain.plans)), None)


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
    if token_type_ids is not None and "token_type_ids" not in packed_forward.names(type(whole)):
        raise ValueError(f"encode_tokens: {type(whole).__name__} takes no token_type_ids")
    if len(input_ids) == 0:
        return input_ids.new_empty(0, whole.config.hidden_size, dtype=whole.dtype)
    (columns,) = moved([columns_of(counts)], input_ids.device)
    return hidden_states(whole, {name: x for name, x in given.items() if x is not None}, counts, columns)


def packable(model: nn.Module) -> Any:
    """The model of texts inside a module, if `hidden_states` takes it as it is now; else None."""
    return _whole(model) if can_pack(model) is None else None


def columns_of(counts: Sequence[int]) -> Tensor:
    """Computes the position of each packed token in its text, [T] on the CPU."""
    lengths = torch.tensor(counts, device="cpu")
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1]), device="cpu") - (ends - lengths).repeat_interleave(lengths)


def hidden_states(model: Any, flat: dict[str, Tensor], counts: Sequence[int], columns: Tensor) -> Tensor:
    """The result of `encode_tokens` for arguments that are right. flat: input_ids [T], and token_type_ids or not;
    columns: `columns_of`, on their device."""
    if max(counts) > packed_forward.longest(model):
        raise ValueError(f"encode_tokens: {type(model).__name__} has too few positions for {max(counts)} tokens")
    replays = cuda_graph_passes.can_replay(model, model.__dict__["forward"].args[1], columns.device)
    flat = {"position_ids": packed_forward.packed_positions(model, flat["input_ids"], columns)} | flat
    texts, places = [(count, False) for count in counts], None
    order = sorted(range(len(counts)), key=counts.__getitem__)  # texts of one length side by side
    if not replays and order != [*range(len(counts))]:
        texts = [texts[i] for i in order]
        lengths = torch.tensor(counts, device="cpu")
        begins = (lengths.cumsum(0) - lengths)[order].repeat_interleave(lengths[order])
        begins, columns = moved([begins, columns_of([count for count, _ in texts])], columns.device)
        places = begins + columns
    try:
        states: Tensor = _run(model, flat, texts, columns, places, replays).last_hidden_state
    except Unpackable as reason:
        raise ValueError(f"encode_tokens: {reason}") from None
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
    """The output of a whole model for a padded batch, without the tokens that its attention mask hides, and by CUDA
    graphs where the GPU would wait for the host; None if the call needs the stock code. States of masked tokens are
    zero, except a text's first, which heads read."""
    given = _plain(model, chain, args, kwargs)
    if given is None:
        return None
    mask, short = given.pop("attention_mask", None), given.pop("return_dict")
    tokens = {name: x for name, x in given.items() if x is not None}
    source = tokens["input_ids"] if "input_ids" in tokens else tokens["inputs_embeds"]
    replays = "inputs_embeds" not in tokens and cuda_graph_passes.can_replay(model, chain, source.device)
    small = replays and source.numel() <= cuda_graph_passes.MOST and "position_ids" not in tokens
    output = None
    if small and (mask is None or source.numel() <= cuda_graph_passes.SMALL):
        call, _ = cuda_graph_passes.signature(model, args, kwargs)
        output = cuda_graph_passes.padded(model, chain, tokens, mask, call, short)
    if mask is None and in_blocks(source.size(1), packed_forward.window(chain)):
        mask = torch.ones_like(source[..., 0] if source.dim() > 2 else source)
    if output is None and mask is not None:
        output = _without_hidden(model, chain, tokens, mask, replays, small)
    elif output is None and small:
        output = _all_shown(model, tokens)
    if output is None or not short:
        return output
    return (output[0], output.pooler_output) if _kind(model) in TUPLES else output.to_tuple()


def _plain(model: Any, chain: _Chain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The call's arguments by name if they are those of a text encoder's plain inference. return_dict is True if the
    result shall be a tuple."""
    if not chain.unpad or registered._captured() or _kind(model) not in TEXTS or depends_on_length(model):
        return None
    given = dict(zip(packed_forward.names(type(model)), args, strict=False)) | kwargs
    config, mask = model.config, given.get("attention_mask")
    source = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
    if type(source) is not Tensor or source.dim() < 2 or source.numel() == 0 or source.is_meta or is_tracing(source):
        return None
    shape, device = source.shape[:2], source.device
    if mask is not None and (type(mask) is not Tensor or mask.shape != shape or mask.device != device):
        return None
    if any(given[name] is not None and given[name] is not False for name in given.keys() - ARGUMENTS):
        return None
    if _kind(model) in DECODERS:
        if _flag(given, config, "use_cache"):
            return None
        if given.get("is_causal") is not None or given.get("position_ids") is not None:
            return None
    if any(_flag(given, config, name) for name in RECORDED):
        return None
    tensors = {name: x for name, x in given.items() if name in ARGUMENTS and isinstance(x, Tensor)}
    if not _fits(model, tensors, source.size(1)):
        return None
    short = given.get("return_dict", getattr(config, "return_dict", True)) is False
    if _kind(model) in TUPLES:
        short = not _flag(given, config, "return_dict", True)
    return tensors | {"return_dict": short}


def _flag(given: dict[str, Any], config: Any, name: str, default: bool = False) -> Any:
    """An argument of forward, or the configuration's where it is None or absent. Heads pass None."""
    flag = given.get(name)
    return getattr(config, name, default) if flag is None else flag


def _without_hidden(
    model: Any, chain: _Chain, tokens: dict[str, Tensor], mask: Tensor, replays: bool, small: bool
) -> Any:
    """Waits for a GPU's mask. replays: packed texts may be replayed; small: a batch without masked tokens too."""
    if chain.is_training(model):
        return None
    seen = mask.bool()
    kept = packed_forward.kept(model, seen)
    hidden = kept[:, 0] & ~seen[:, 0]
    counts, starts_hidden = torch.stack([kept.sum(1), hidden]).tolist()
    texts = [(count, bool(h)) for count, h in zip(counts, starts_hidden, strict=True)]
    whole = sum(counts) == kept.numel() and not any(starts_hidden)
    if whole and not in_blocks(kept.size(1), packed_forward.window(chain)):  # nothing to leave out
        return cuda_graph_passes.padded(model, chain, tokens, None) or _all_shown(model, tokens) if small else None
    if (1, True) in texts or (0, False) in texts:  # a text without a token
        return None
    if replays:  # in any order, and without waiting for the GPU
        places = kept.flatten().nonzero_static(size=sum(counts)).squeeze(1)
    else:
        order = sorted(range(len(texts)), key=texts.__getitem__)  # texts of one length side by side
        texts = [texts[i] for i in order]
        of_text = torch.tensor(order, device=kept.device)
        row, column = kept[of_text].nonzero().unbind(1)
        places = of_text[row] * kept.size(1) + column
    return _padded_again(model, tokens, kept, texts, places % kept.size(1), places, replays)


def _all_shown(model: Any, tokens: dict[str, Tensor]) -> Any:
    """The output of a batch that has no padding, as packed texts. The attention of cuDNN that torch takes for a batch
    keeps host memory in each thread for every new shape (torch 2.11 to 2.13)."""
    ids = tokens["input_ids"]
    texts, length = ids.shape
    columns = torch.arange(length, device=ids.device).repeat(texts)
    shown = torch.ones_like(ids, dtype=torch.bool)
    return _padded_again(model, tokens, shown, [(length, False)] * texts, columns, None, False)


def _padded_again(
    model: Any,
    tokens: dict[str, Tensor],
    kept: Tensor,
    texts: list[tuple[int, bool]],
    columns: Tensor,
    places: Tensor | None,
    replays: bool,
) -> Any:
    """The output in its padded shape, of texts that `_run` packs; None if the model's layers refuse. tokens: arguments
    of forward [texts, longest]. kept: which tokens are computed."""
    tokens = {name: x.expand(*kept.shape, *x.shape[2:]) for name, x in tokens.items()}
    tokens = {"position_ids": packed_forward.positions(model, tokens, kept)} | tokens
    flat = {name: x.reshape(kept.numel(), *x.shape[2:]) for name, x in tokens.items()}
    try:
        output = _run(model, flat, texts, columns, places, replays)
    except Unpackable:
        return None
    output.last_hidden_state = output.last_hidden_state.view(*kept.shape, -1)
    packed_forward.pool_again(model, output)
    return output


def _run(
    model: Any,
    flat: dict[str, Tensor],
    texts: list[tuple[int, bool]],
    columns: Tensor,
    places: Tensor | None,
    replays: bool,
) -> Any:
    """The model's output for packed texts, computed in steps of whole texts; the hidden states have a row for each of
    flat, zero where there is no token.

    flat: arguments of its forward, [N, ...]. columns: where each packed token is in its text. places: its row of flat;
    None if they are all rows in order.
    """
    chain: _Chain = model.__dict__["forward"].args[1]
    states: Any = None
    output: Any = None
    for some, part in _steps(texts, _most(chain, model, columns.device)):
        taken, count = part if places is None else places[part], part.stop - part.start
        given = {name: x[taken] for name, x in flat.items()} | {"": columns[part]}
        extra = -count % _multiple(count, has_onednn(packed_forward.words(model), count), replays)
        if extra:
            given = {name: torch.cat([x, x[-1:].expand(extra, *x.shape[1:])]) for name, x in given.items()}
            longest = max(length for length, _ in some)
            some = [*some, *((min(longest, extra - i), False) for i in range(0, extra, longest))]
        given, of_step = {name: x[None] for name, x in given.items() if name}, given[""]
        can_replay = replays and count + extra <= cuda_graph_passes.MOST
        output = cuda_graph_passes.step(model, chain, given, some) if can_replay else None
        if output is None:
            output = packed_forward.run(model, chain, given, Segments.of(some, of_step))
        y = output.last_hidden_state[0, :count]
        rows = len(flat["position_ids"])
        if places is None and count == rows:
            states = y
            break
        if states is None:
            states = y.new_zeros(rows, y.size(1))
        states[taken] = y
    output.last_hidden_state = states
    return output


def _steps(texts: list[tuple[int, bool]], most: float) -> Iterator[tuple[list[tuple[int, bool]], slice]]:
    """Texts of at most that many tokens at a time, or one longer text, and where their tokens lie."""
    some: list[tuple[int, bool]] = []
    start = tokens = 0
    for text in texts:
        if some and tokens + text[0] > most:
            yield some, slice(start, start + tokens)
            some, start, tokens = [], start + tokens, 0
        some.append(text)
        tokens += text[0]
    yield some, slice(start, start + tokens)


def _multiple(tokens: int, onednn: bool, replays: bool) -> int:
    """The multiple to which a step's number of tokens is rounded up, by copies of one token. oneDNN compiles a kernel
    for each number of rows, and keeps 1024 of them. Large steps on a GPU have few sizes for torch's allocator and
    cuBLASLt's choice of kernels."""
    if not onednn:
        return 512 if replays and tokens > cuda_graph_passes.MOST else 1
    return max(4, 1 << tokens.bit_length() >> 5)


def _most(chain: _Chain, model: Any, device: torch.device) -> float:
    """Tokens of a step."""
    chunk_bytes = next(iter(chain.plans)).chunk_bytes
    if chunk_bytes is not None:
        row: int = 3 * model.config.hidden_size * model.dtype.itemsize
        return chunk_bytes / row
    return TOKENS if device.type == "cpu" else float("inf")


def _fits(model: Any, tokens: dict[str, Tensor], length: int) -> bool:
    """True if there are positions enough, or the caller gives them."""
    return "position_ids" in tokens or length <= packed_forward.longest(model)


def _whole(model: nn.Module) -> nn.Module | None:
    """The model of texts inside a module: the embeddings and all layers, without a head."""
    return next((m for m in model.modules() if _kind(m) in TEXTS), None)


def _checked(what: str, x: Tensor, lengths: Sequence[int] | Tensor, dims: int = 1) -> list[int]:
    counts = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    if x.dim() != dims or sum(counts) != len(x) or any(n < 1 for n in counts):
        of = "input_ids [T]" if dims == 1 else "hidden [T, width]"
        raise ValueError(
            f"{what}: expected {of} and lengths of at least 1 with the sum T, got {list(x.shape)} and {len(counts)} "
            f"lengths from {min(counts, default=0)} with the sum {sum(counts)}"
        )
    return counts
