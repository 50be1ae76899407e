"""Passes of an optimized encoder by CUDA graphs: padded batches of few tokens, and steps of packed texts.

padded batch                       packed step
input_ids, mask [B, S]             input_ids, position_ids [1, T], lengths on the host
  -> shown tokens first, [1, T]      -> rounded up to few sizes [1, T]
  -> layers on [1, T, width]         -> layers on [1, T, width]
  -> back in place [B, S, width]
the host does not read the mask,   the host knows the lengths
T is B * S rounded up to few sizes
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from custom_mm import _C

from . import packed_forward, registered
from .families import BARE, BY_COLUMNS, _kind
from .graphs import Tensors, doubled, rounded
from .plan import _Chain
from .segments import LONGEST_OWN, Segments, _has_varlen, _why_not_attention, moved

SMALL = 4096  # tokens of a padded batch whose mask the host does not read, and whose padding is computed
MOST = 16384  # tokens of a captured pass, 32 x 512. With more, a GPU is slower than most hosts, and memory is held.
CALLS = 1024  # remembered, of one model
# Shapes of batches without padding, of one model, whose attention is that of a batch: cuDNN's on Hopper, which torch
# keeps in host memory for each shape and thread, without a limit of its own.
EQUAL = 8
EQUAL_FROM = 4096  # tokens of such a batch; smaller ones share graphs. 32 x 512: 6.6 ms, packed 7.1 (H200)
# Rows of the attention kernel's blocks. The longest text's length is rounded up to a multiple of it, in packed steps to
# a power of two times it.
LONGEST = 64


def can_replay(model: Any, chain: _Chain, device: torch.device) -> bool:
    """True if a captured pass computes what the layers would compute now on the device."""
    graphs = chain.graphs
    if graphs is None or device.type != "cuda" or torch.is_autocast_enabled("cuda"):
        return False
    if _kind(model) in BY_COLUMNS or _kind(model) in BARE:  # columns, causality: no captured pass knows them
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    weight = packed_forward.words(model)
    if graphs.holds():
        same: bool = weight.device == device
        return same
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


@dataclass(frozen=True, eq=False)
class _Padded:
    """The passes of padded batches [batch, length]. masked: with a mask; typed: with token types; short: the result is
    a tuple."""

    model: Any
    chain: _Chain
    device: torch.device
    batch: int
    length: int
    masked: bool
    typed: bool
    short: bool

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, texts and tokens of the longest text, rounded up."""
        return rounded(self.batch * self.length, 16), rounded(self.batch), -(-self.length // LONGEST) * LONGEST

    @cached_property
    def names(self) -> list[str]:
        """Arguments of forward [1, T]."""
        typed = self.typed or packed_forward.takes_types(self.model)  # zeros
        return ["input_ids", "position_ids", *(["token_type_ids"] if typed else [])]

    @cached_property
    def key(self) -> Hashable:
        return self.sizes, self.masked, tuple(self.names)

    @cached_property
    def padding(self) -> int:
        return packed_forward.numbered_from(self.model.embeddings)

    def make(self) -> Tensors:
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        tokens, texts, _ = self.sizes
        inputs = {name: torch.zeros(1, tokens, dtype=torch.int64, device=self.device) for name in self.names}
        starts = torch.zeros(2, (1 + self.masked) * texts + 1, **ints)
        return inputs | {"place": torch.zeros(tokens, **ints), "starts": starts}

    def fill(self, tokens: Tensors, mask: Tensor | None, inputs: Tensors) -> None:
        ids, types = tokens["input_ids"], tokens.get("token_type_ids")
        ids = ids if ids.dtype == torch.int64 else ids.long()
        if types is not None:
            types = types.long().expand(self.batch, self.length)
        packed = inputs["input_ids"], inputs["position_ids"], inputs.get("token_type_ids")
        _C.pack_padded(ids, mask, types, self.padding, *packed, inputs["place"], inputs["starts"])

    def segments(self, inputs: Tensors) -> Segments:
        return Segments(inputs["starts"], self.sizes[2])

    def body(self, inputs: Tensors) -> Any:
        given = {name: inputs[name] for name in self.names}
        output = packed_forward.run(self.model, self.chain, given, self.segments(inputs))
        begins = inputs["starts"][0, 1::2] if self.masked else inputs["starts"][0, :-1]
        if rounded(self.sizes[1] - 1) == self.sizes[1] > 1:  # there may be texts without tokens, after all others
            begins = begins.clamp(max=self.sizes[0] - 1)
        packed_forward.pool_again(self.model, output, lambda states: states[0].index_select(0, begins)[:, None])
        return output

    def read(self, x: Tensor, inputs: Tensors) -> Tensor:
        if x.dim() == 3:
            return _C.unpack_padded(x[0], inputs["place"], self.batch, self.length)
        return x[: self.batch].clone()


class _Equal(_Padded):
    """The passes of batches whose texts all have `length` tokens, without rounding up, so that torch's attention of a
    batch computes them."""

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        return self.batch * self.length, self.batch, self.length

    @cached_property
    def key(self) -> Hashable:
        return "equal", self.sizes, tuple(self.names)

    def segments(self, inputs: Tensors) -> Segments:
        return Segments(inputs["starts"], self.length, [(self.length, False, self.batch)], equal=True)


def _are_equal(chain: _Chain, batch: int, length: int) -> bool:
    """True from the second batch of such texts on, for a few shapes, if no kernel for packed texts is faster."""
    graphs, shape, head = chain.graphs, (batch, length), max(plan.head_size for plan in chain.plans)
    if graphs is None:
        return False
    if shape in graphs.equal:
        return True
    if batch * length < EQUAL_FROM or length <= LONGEST_OWN.get(head, 0) or packed_forward.window(chain) is not None:
        return False
    if len(graphs.equal) + len(graphs.refused) >= EQUAL or shape in graphs.refused:
        return False
    if shape in graphs.once:
        graphs.equal.add(shape)
        return True
    if len(graphs.once) >= CALLS:
        graphs.once.clear()
    graphs.once.add(shape)
    return False


def padded(
    model: Any, chain: _Chain, tokens: Tensors, mask: Tensor | None, signature: Hashable = None, short: bool = False
) -> Any:
    """The output for a padded batch, whose mask may hide any tokens; None if its sizes are new or there are no graphs.
    tokens: input_ids [B, S], and token_type_ids or not. signature: that of the call, which `repeated` answers from then
    on; short: with a tuple."""
    ids, graphs = tokens["input_ids"], chain.graphs
    if graphs is None:
        return None
    batch, length = ids.shape
    kind = _Equal if mask is None and _are_equal(chain, batch, length) else _Padded
    passes = kind(model, chain, ids.device, batch, length, mask is not None, "token_type_ids" in tokens, short)
    fill = partial(passes.fill, tokens, mask)
    output = graphs.run(passes.key, passes.device, passes.make, fill, passes.body, passes.read)
    if output is None and kind is _Equal and graphs.failed(passes.key):
        graphs.equal.discard((batch, length))
        graphs.refused.add((batch, length))
    if output is not None and signature is not None:
        if len(graphs.calls) >= CALLS:
            graphs.calls.clear()
        graphs.calls[signature] = passes
    return output


def signature(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, dict[str, Any]]:
    """Returns the key under which `repeated` finds a call, None if the call cannot be repeated, and the arguments by
    name."""
    given = dict(zip(packed_forward.names(type(model)), args, strict=False)) | kwargs if args else kwargs
    parts: list[Hashable] = []
    for name, x in given.items():
        if type(x) is Tensor:
            parts += [name, x.shape, x.dtype, x.device]
        elif x is None or type(x) is bool:
            parts += [name, x]
        else:
            return None, given
    return (*parts,), given


def repeated(model: Any, chain: _Chain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of a padded batch if a call with the same arguments, but for the values of tensors, was replayed, and
    nothing else has changed since. Else None: `unpadded` finds out what the call is."""
    graphs = chain.graphs
    if graphs is None or not graphs.calls:
        return None
    known, given = signature(model, args, kwargs)
    passes = graphs.calls.get(known)
    if passes is None or _is_watched() or not graphs.may_run():
        return None
    fill = partial(passes.fill, given, given.get("attention_mask"))
    output = graphs.again(passes.key, passes.device, fill, passes.read)
    if not graphs.holds():  # found out while the GPU computes: a pass writes to nothing but its own memory
        graphs.calls.clear()
        return None
    return output.to_tuple() if output is not None and passes.short else output


def _is_watched() -> bool:
    """True where a call may be another than its arguments say: under autocast, transforms and tracing, in a capture, or
    while transformers collects outputs."""
    return (
        torch.is_autocast_enabled("cuda")
        or torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or bool(registered._captured())
        or torch.cuda.is_current_stream_capturing()
    )


def step(model: Any, chain: _Chain, given: Tensors, texts: Sequence[tuple[int, bool]]) -> Any:
    """The output for packed texts: arguments of forward [1, T]; None if their sizes are new or there are no graphs.
    With each length goes whether the text begins with a masked token."""
    size, device, graphs = given["input_ids"].size(1), given["input_ids"].device, chain.graphs
    if graphs is None:
        return None
    hidden = any(hidden for _, hidden in texts)
    longest = doubled(max(length for length, _ in texts), LONGEST)
    sizes = rounded(size, LONGEST), doubled(len(texts)), longest, hidden

    def make() -> Tensors:
        starts = torch.zeros(2, (1 + hidden) * sizes[1] + 1, dtype=torch.int32, device=device)
        return {"starts": starts} | {name: x.new_zeros(1, sizes[0]) for name, x in given.items()}

    def fill(inputs: Tensors) -> None:
        for name, x in given.items():
            inputs[name][:, :size].copy_(x)
        starts = Segments.starts(texts, hidden)
        starts = torch.cat([starts, starts[:, -1:].expand(2, inputs["starts"].size(1) - starts.size(1))], 1)
        inputs["starts"].copy_(moved([starts], device)[0])  # texts without tokens at the end

    def body(inputs: Tensors) -> Any:
        segments = Segments(inputs["starts"], longest)
        return packed_forward.run(model, chain, {name: inputs[name] for name in given}, segments)

    def read(x: Tensor, _: Tensors) -> Tensor:
        return x[:, :size].clone()

    key = sizes, tuple((name, x.dtype) for name, x in given.items())
    return graphs.run(key, device, make, fill, body, read)
