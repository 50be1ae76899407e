"""Passes of an optimized encoder by CUDA graphs: padded batches of few tokens, and steps of packed texts.

padded batch                       packed step
input_ids, mask [B, S]             input_ids, position_ids [1, T], lengths on the host
  -> shown tokens first, [1, T]      -> rounded up to few sizes [1, T]
  -> layers on [1, T, width]         -> layers on [1, T, width]
  -> back in place [B, S, width]
the host does not read the mask,   the host knows the lengths
T is B * S rounded up to few sizes
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from custom_mm import _C

from . import one_pass
from .families import BARE, BY_COLUMNS, _kind
from .graphs import Tensors, rounded
from .plan import _Chain
from .segments import Segments, _has_varlen, _why_not_attention, moved

SMALL = 4096  # tokens of a padded batch whose mask the host does not read, and whose padding is computed
MOST = 16384  # tokens of a captured pass, 32 x 512. With more, a GPU is slower than most hosts, and memory is held.
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
    ids, types = tokens["input_ids"].long(), tokens.get("token_type_ids")
    batch, length = ids.shape
    longest = -(-length // LONGEST) * LONGEST
    sizes = rounded(ids.numel(), 16), rounded(batch), longest, mask is not None
    names = [*tokens, "position_ids"]
    if types is None and one_pass.takes_types(model):
        names.append("token_type_ids")  # zeros

    def make() -> Tensors:
        inputs = {name: ids.new_zeros(1, sizes[0]) for name in names}
        options = {"dtype": torch.int32, "device": ids.device}
        starts = torch.zeros(2, (1 if mask is None else 2) * sizes[1] + 1, **options)
        return inputs | {"place": torch.zeros(sizes[0], **options), "starts": starts}

    def fill(inputs: Tensors) -> None:
        packed = inputs["input_ids"], inputs["position_ids"], inputs.get("token_type_ids")
        of_all = None if types is None else types.long().expand(batch, length)
        given = ids, mask, of_all, one_pass.numbered_from(model.embeddings)
        _C.pack_padded(*given, *packed, inputs["place"], inputs["starts"])

    def body(inputs: Tensors) -> Any:
        segments = Segments(*inputs["starts"].unbind(0), longest)
        output = one_pass.run(model, chain, {name: inputs[name] for name in names}, segments)
        begins = inputs["starts"][0, :-1] if mask is None else inputs["starts"][0, 1::2]
        one_pass.pool_again(model, output, lambda states: states[0, begins.clamp(max=sizes[0] - 1), None])
        return output

    def read(x: Tensor, inputs: Tensors) -> Tensor:
        return _C.unpack_padded(x[0], inputs["place"], batch, length) if x.dim() == 3 else x[:batch].clone()

    return chain.graphs.run((sizes, tuple(names)), ids.device, make, fill, body, read)


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

    def read(x: Tensor, _: Tensors) -> Tensor:
        return x[:, :size].clone()

    key = sizes, tuple((name, x.dtype) for name, x in given.items())
    return chain.graphs.run(key, device, make, fill, body, read)
