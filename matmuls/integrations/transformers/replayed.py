"""Passes of an optimized encoder by CUDA graphs: padded batches of few tokens, and steps of packed texts.

padded batch                       packed step
input_ids, mask [B, S]             input_ids, position_ids [1, T], lengths on the host
  -> rounded up to few sizes         -> rounded up to few sizes
  -> tokens first, [1, B * S]        -> layers on [1, T, width]
  -> layers on [1, B * S, width]     -> [T, width]
  -> back in place [B, S, width]
the host does not read the mask    the host knows the lengths
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import one_pass
from .families import BARE, BY_COLUMNS, _kind
from .graphs import Tensors, rounded
from .plan import _Chain
from .segments import Segments, _has_varlen, _why_not_attention, moved

SMALL = 4096  # tokens of a padded batch whose mask the host does not read, and whose padding is computed
MOST = 12288  # tokens of a captured pass. With more, a GPU is slower than the host, and memory would be held.
LONGEST = 64  # texts' lengths are rounded up to a multiple of it, rows of the attention kernel's blocks


def can_replay(model: Any, chain: _Chain, device: torch.device) -> bool:
    """True if a captured pass computes what the layers would compute now on the device."""
    graphs = chain.graphs
    if graphs is None or device.type != "cuda" or torch.is_autocast_enabled("cuda"):
        return False
    if _kind(model) in BY_COLUMNS or _kind(model) in BARE:  # columns, causality: no captured pass knows them
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    if graphs.holds():
        return True
    weight = one_pass.words(model)
    usual = (
        weight.device == device
        and not chain.is_training(model)
        and all(
            _has_varlen(device, weight.dtype, plan.head_size)
            and plan.applies(layer, weight)
            and _why_not_attention(plan.attention, plan.family.causal) is None
            for layer, plan in chain.layers
        )
    )
    if usual:
        graphs.renew(model)
    return usual


def padded(model: Any, chain: _Chain, tokens: Tensors, mask: Tensor | None) -> Any:
    """The output for a padded batch, whose mask may hide any tokens; None if its sizes are new. tokens: input_ids
    [B, S], and token_type_ids or not."""
    ids = tokens["input_ids"]
    batch, length = ids.shape
    sizes = rounded(batch), max(length, min(rounded(length, 16), one_pass.longest(model)))
    if mask is None and sizes != (batch, length):
        mask = torch.ones_like(ids)
    given = tokens if mask is None else {**tokens, "attention_mask": mask}

    def make() -> Tensors:
        inputs = {name: x.new_zeros(sizes) for name, x in given.items()}
        if mask is None:  # constant: where texts begin
            inputs["starts"] = torch.arange(batch + 1, device=ids.device, dtype=torch.int32) * length
        return inputs

    def fill(inputs: Tensors) -> None:
        if sizes != (batch, length):
            inputs["attention_mask"].zero_()
        for name, x in given.items():
            inputs[name][:batch, :length].copy_(x)

    def read(x: Tensor) -> Tensor:
        return (x[:batch, :length] if x.dim() == 3 else x[:batch]).clone(memory_format=torch.contiguous_format)

    key = sizes, tuple((name, x.dtype) for name, x in given.items())
    body = partial(_whole if mask is None else _padded, model, chain)
    return chain.graphs.run(key, ids.device, make, fill, body, read)


def _whole(model: Any, chain: _Chain, inputs: Tensors) -> Any:
    """For a batch without a mask."""
    tokens = dict(inputs)
    starts = tokens.pop("starts")
    batch, length = tokens["input_ids"].shape
    tokens["position_ids"] = one_pass.positions(model, tokens, tokens["input_ids"])
    segments = Segments(starts, starts, length)
    output = one_pass.run(model, chain, {name: x.reshape(1, -1) for name, x in tokens.items()}, segments)
    output.last_hidden_state = output.last_hidden_state.view(batch, length, -1)
    one_pass.pool_again(model, output)
    return output


def _padded(model: Any, chain: _Chain, inputs: Tensors) -> Any:
    """For a batch with a mask. No statement may assign a number to an element: that copies it from the CPU, which fails
    in a capture."""
    tokens = dict(inputs)
    seen = tokens.pop("attention_mask").bool()
    batch, length = seen.shape
    kept = one_pass.kept(model, seen)
    tokens["position_ids"] = one_pass.positions(model, tokens, kept).masked_fill(~kept, 0)
    flat, each = kept.flatten(), torch.arange(seen.numel(), device=seen.device)
    rank = flat.cumsum(0)  # of tokens, from 1
    place = torch.where(flat, rank - 1, len(flat) - 1 - each + rank)  # hidden ones last
    index = torch.empty_like(each).scatter_(0, place, each)
    segments = Segments.on_device(kept.sum(1), ~seen[:, 0], length)
    output = one_pass.run(model, chain, {name: x.flatten()[index][None] for name, x in tokens.items()}, segments)
    states = output.last_hidden_state[0, place].masked_fill(~flat[:, None], 0)
    output.last_hidden_state = states.view(batch, length, -1)
    one_pass.pool_again(model, output)
    return output


def step(model: Any, chain: _Chain, given: Tensors, texts: Sequence[tuple[int, bool]]) -> Any:
    """The output for packed texts: arguments of forward [1, T]; None if their sizes are new. With each length goes
    whether the text begins with a hidden token."""
    size, device = given["input_ids"].size(1), given["input_ids"].device
    hidden = any(hidden for _, hidden in texts)
    longest = -(-max(length for length, _ in texts) // LONGEST) * LONGEST
    sizes = rounded(size, LONGEST), rounded(len(texts)), longest, hidden

    def make() -> Tensors:
        starts = torch.zeros(2, (1 + hidden) * sizes[1] + 1, dtype=torch.int32, device=device)
        return {"starts": starts} | {name: x.new_zeros(1, sizes[0]) for name, x in given.items()}

    def fill(inputs: Tensors) -> None:
        for name, x in given.items():
            inputs[name][:, :size].copy_(x)
        starts = Segments.starts(texts, hidden)
        starts = torch.cat([starts, starts[:, -1:].expand(2, inputs["starts"].size(1) - starts.size(1))], 1)
        inputs["starts"].copy_(moved(starts, device))  # texts without tokens at the end

    def body(inputs: Tensors) -> Any:
        segments = Segments(*inputs["starts"].unbind(0), longest)
        return one_pass.run(model, chain, {name: inputs[name] for name in given}, segments)

    def read(x: Tensor) -> Tensor:
        return x[:, :size].clone()

    key = sizes, tuple((name, x.dtype) for name, x in given.items())
    return chain.graphs.run(key, device, make, fill, body, read)
