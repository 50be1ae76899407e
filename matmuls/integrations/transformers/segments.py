"""Attention of packed texts: each token sees the tokens of its own text."""

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cached_property, lru_cache
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from custom_mm import _C

from . import registered

# torch 2.11 has no such argument, and takes fewer heads of k and v
GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
# The size of a head -> tokens of the longest text up to which attend_packed is faster than varlen_attn (H200): 0.33 of
# its time for 16 tokens, 0.96 for 256; for 512 1.07. With a window it is faster for all: 0.38 for 512 tokens.
LONGEST_OWN = {32: 256, 64: 256, 80: 128, 96: 128, 128: 128}
# Rows of a product from which it goes to oneDNN, with AVX-512: 45 rows take 1.12 of MKL's time. With AVX2 alone
# MKL is as fast or faster for any number: 0.80 to 0.98 of oneDNN's time for 512 rows (384 columns, AMD EPYC of 2021).
FEWEST_ROWS = 64
BLOCK = 64  # half of the queries of a block, at least
Bias = Callable[[Tensor], Tensor]


class Unpackable(Exception):
    """Raised by a layer that cannot run on packed tokens in this call; the whole model is then run another way."""


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the CPU, of one dtype, on the device: one copy, from pinned memory, so that the host does not wait for
    the GPU. torch uses the memory again when the copy has ended."""
    if device.type == "cpu":
        return list(tensors)
    sizes = [x.numel() for x in tensors]
    with _C.RelaxedCapture():  # another thread may capture a graph
        whole = torch.empty(sum(sizes), dtype=tensors[0].dtype, device="cpu", pin_memory=True)
        torch.cat([x.reshape(-1) for x in tensors], out=whole)
        parts = whole.to(device, non_blocking=True).split(sizes)
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


class Segments:
    """The lengths of packed texts. With each goes whether the text begins with a masked token: none of its tokens sees
    it, and its own state is wanted.

    A text of n tokens with a hidden one, from row r of the packed tokens, is two segments of attention: the key r
    without queries, and the queries from r to r + n with the keys from r + 1 to r + n.
    """

    def __init__(
        self,
        starts: Tensor,
        longest: int,
        groups: Sequence[tuple[int, bool, int]] = (),
        columns: Tensor | None = None,
        equal: bool = False,
    ) -> None:
        """starts: [2, segments + 1] int32, where the queries and the keys of each segment begin. groups: length, hidden
        and number of adjacent equal texts, for attention without a kernel for segments. columns: where the tokens are
        in the padded batch, for attention that depends on their distance. equal: attention over whole texts is that of
        a batch of one group, by torch's choice of a kernel."""
        self.queries, self.keys = starts.unbind(0)
        self.longest, self.groups, self.equal = longest, groups, equal
        self._columns = columns
        self._masks: dict[tuple[int, int | None, bool], Tensor | None] = {}

    @classmethod
    def of(cls, texts: Sequence[tuple[int, bool]], columns: Tensor) -> "Segments":
        """The segments of texts whose lengths the host knows; without a kernel for segments, equal adjacent ones are
        computed together."""
        (starts,) = moved([cls.starts(texts, any(hidden for _, hidden in texts))], columns.device)
        groups = [(*text, len(list(some))) for text, some in groupby(texts)]
        return cls(starts, max(length for length, _ in texts), groups, columns)

    @staticmethod
    def starts(texts: Sequence[tuple[int, bool]], hidden: bool) -> Tensor:
        """[2, segments + 1] int32, queries and keys. Without hidden there is one segment for each text."""
        lengths, first = torch.tensor(texts, dtype=torch.int32, device="cpu").unbind(1)
        ends = lengths.cumsum(0, dtype=torch.int32)
        if not hidden:
            return torch.cat([lengths.new_zeros(1), ends]).expand(2, -1)
        begins = ends - lengths
        starts = torch.stack([torch.stack([begins, begins + first]), ends.expand(2, -1)], -1).flatten(1)
        return torch.cat([starts.new_zeros(2, 1), starts], 1)

    def attend(
        self,
        qkv: Sequence[Tensor],
        scale: float,
        window: int | None = None,
        bias: Bias | None = None,
        causal: bool = False,
    ) -> Tensor:
        """The context [1, T, H * D] of q [1, H, T, D], and k and v [1, h, T, D]. A token sees those less than window
        columns away, or all of its text; if causal, none after it. bias is added to the scores: [texts, H, Q, K] of the
        columns [texts, Q, K] from queries to keys."""
        first, shared = qkv[0], qkv[0].size(1) > qkv[1].size(1)
        as_batch = self.equal and window is None
        varlen = first.is_cuda and bias is None and _has_varlen(first.device, first.dtype, first.size(-1))
        if varlen and not as_batch and (window is None or not any(self._gaps)):
            side = -1 if window is None else window - 1
            sides, (q, k, v) = (side, 0 if causal else side), (x[0].transpose(0, 1) for x in qkv)
            most = LONGEST_OWN.get(first.size(-1), 0)
            if self.longest <= most or (most and window is not None):
                return _C.attend_packed(q, k, v, self.queries, self.keys, self.longest, scale, *sides)[None]
            of_all = self.queries, self.keys, self.longest, self.longest
            options: dict[str, Any] = {"scale": scale, "window_size": sides} | (GROUPED if shared else {})
            return varlen_attn(q, k, v, *of_all, **options).flatten(1)[None]  # type: ignore[union-attr]
        pieces, start = [], 0
        for i, (length, hidden, count) in enumerate(self.groups):
            tokens = slice(start, start + count * length)
            q, k, v = (x[0, :, tokens].unflatten(1, (count, length)).transpose(0, 1) for x in qkv)
            if in_blocks(length, window) and not hidden and not self._gaps[i]:
                y = _local(q, k, v, scale, window, causal)
            else:
                key = i, window, causal
                if key not in self._masks:  # equal in all layers with that window
                    self._masks[key] = self._mask(i, tokens, window, bias, causal, first.device)
                mask = self._masks[key]
                alone = causal and mask is None
                y = scaled_dot_product_attention(q, k, v, mask, is_causal=alone, scale=scale, enable_gqa=shared)
            pieces.append(y.transpose(1, 2).flatten(2).flatten(0, 1))
            start = tokens.stop
        return torch.cat(pieces)[None] if len(pieces) > 1 else pieces[0][None]

    @cached_property
    def _gaps(self) -> list[bool]:
        """For each group, whether a text of it begins with a masked token or has columns that do not follow one
        another. Waits for a GPU."""
        if self._columns is None:
            return [True] * max(1, len(self.groups))
        counts = torch.tensor([count for _, _, count in self.groups], device="cpu")
        lengths = torch.tensor([length for length, _, _ in self.groups], device="cpu").repeat_interleave(counts)
        ends, columns = lengths.cumsum(0), self._columns.cpu()
        gaps = columns[ends - 1] - columns[ends - lengths] >= lengths
        found = [bool(some.any()) for some in gaps.split(counts.tolist())]
        return [hidden or gap for (_, hidden, _), gap in zip(self.groups, found, strict=True)]

    def _mask(
        self, i: int, tokens: slice, window: int | None, bias: Bias | None, causal: bool, device: torch.device
    ) -> Tensor | None:
        """The bias [texts or 1, H, length, length] of a group, or True where a token sees another; None if all of a
        text do, or, if causal, all before it."""
        length, hidden, _ = self.groups[i]
        seen, distances, places = None, None, torch.arange(length, device=device)
        if bias is not None or window is not None:
            columns = places[None]
            if self._gaps[i] and self._columns is not None:
                columns = self._columns[tokens].view(-1, length)
            distances = columns[:, None, :] - columns[:, :, None]
        if window is not None and distances is not None and (length > window or self._gaps[i]):
            seen = (distances.abs() < window)[:, None]
            seen = seen & (distances <= 0)[:, None] if causal else seen
        if hidden:
            others = places > 0
            seen = others[None, None, None] if seen is None else seen & others
        if bias is None or distances is None:
            return seen
        return bias(distances) if seen is None else bias(distances).masked_fill(~seen, -math.inf)


def in_blocks(length: int, window: int | None) -> bool:
    """True if local attention of such a text is computed in blocks of queries."""
    return window is not None and length > 4 * max(window, BLOCK)


def _local(q: Tensor, k: Tensor, v: Tensor, scale: float, window: Any, causal: bool) -> Tensor:
    """The context [B, H, S, D] of tokens that see those less than window away, if causal before them, in blocks of
    queries."""
    length, step, pieces = q.size(2), 2 * max(window, BLOCK), []
    places = torch.arange(length, device=q.device)
    for start in range(0, length, step):
        some, near = slice(start, start + step), slice(max(start - window, 0), start + step + (0 if causal else window))
        distances = places[None, near] - places[some, None]
        seen = (distances.abs() < window) & (distances <= 0) if causal else distances.abs() < window
        parts = q[:, :, some], k[:, :, near], v[:, :, near]
        shared = q.size(1) > k.size(1)
        pieces.append(scaled_dot_product_attention(*parts, seen, scale=scale, enable_gqa=shared))
    return torch.cat(pieces, 2)


def has_onednn(like: Tensor, rows: int) -> bool:
    """True if products of so many rows of packed tokens go to oneDNN, and not to BLAS. like: a tensor of their dtype
    and device."""
    if like.dtype != torch.float32 or like.device.type != "cpu" or rows < FEWEST_ROWS:
        return False
    backend = torch.backends.mkldnn
    return backend.is_available() and bool(backend.enabled) and torch.cpu._is_avx512_supported()


@lru_cache
def _has_varlen(device: torch.device, dtype: torch.dtype, head: int) -> bool:
    half = dtype in (torch.float16, torch.bfloat16)
    return half and head % 8 == 0 and head <= 256 and torch.cuda.get_device_capability(device) >= (8, 0)


packed: ContextVar[Segments | None] = ContextVar("packed", default=None)  # of the hidden states [1, T, width] of a call


def _why_not_attention(attention: Any, causal: bool) -> str | None:
    """Why an attention module, as it is set, does not attend by segments. causal: it may be."""
    if not hasattr(attention, "config"):  # MPNet's is always ours
        return None
    name = attention.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    bidirectional = causal and getattr(attention.config, "is_causal", None) is False
    if bidirectional and getattr(attention, "sliding_window", None) is not None:  # transformers' windows differ by one
        return f"{type(attention).__name__} has a window, and its configuration sets is_causal=False"
    if getattr(attention, "is_causal", False) and not causal:
        return f"{type(attention).__name__} is causal"
    if registered.gives_probabilities(function, attention, {}):
        return f'its attention "{name}" returns probabilities'
    if function is not sdpa_attention_forward and not registered.is_ours(function):
        return f'its attention is "{name}", neither "sdpa" nor a function of register'
    return None
