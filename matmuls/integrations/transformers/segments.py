"""Attention of packed texts: each token sees the tokens of its own text."""

from collections.abc import Sequence
from contextvars import ContextVar
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import registered


class Unpackable(Exception):
    """Raised by a layer that cannot run on packed tokens in this call; the whole model is then run another way."""


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device, from pinned memory, so that the host does not wait for the GPU."""
    return x if device.type == "cpu" else x.contiguous().pin_memory().to(device, non_blocking=True)


class Segments:
    """The lengths of packed texts. With each goes whether the text begins with a hidden token: none of its tokens sees
    it, and its own state is wanted.

    A text of n tokens with a hidden one, from row r of the packed tokens, is two segments of attention: the key r
    without queries, and the queries from r to r + n with the keys from r + 1 to r + n.
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        longest: int,
        groups: Sequence[tuple[int, bool, int]] = (),
    ) -> None:
        """queries, keys: [segments + 1] int32, where each segment begins. groups: length, hidden and number of adjacent
        equal texts, for attention without a kernel for segments."""
        self.queries, self.keys, self.longest, self.groups = queries, keys, longest, groups

    @classmethod
    def of(cls, texts: Sequence[tuple[int, bool]], device: torch.device) -> "Segments":
        """The segments of texts whose lengths the host knows; without a kernel for segments, equal adjacent ones are
        computed together."""
        queries, keys = moved(cls.starts(texts, any(hidden for _, hidden in texts)), device).unbind(0)
        groups = [(*text, len(list(some))) for text, some in groupby(texts)]
        return cls(queries, keys, max(length for length, _ in texts), groups)

    @staticmethod
    def starts(texts: Sequence[tuple[int, bool]], hidden: bool) -> Tensor:
        """[2, segments + 1] int32, queries and keys. Without hidden there is one segment for each text."""
        lengths, first = torch.tensor(texts, dtype=torch.int32).unbind(1)
        if hidden:
            return Segments._pairs(lengths, first)
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)]).expand(2, -1)

    @staticmethod
    def _pairs(lengths: Tensor, hidden: Tensor) -> Tensor:
        ends = lengths.cumsum(0)
        begins = ends - lengths
        starts = torch.stack([torch.stack([begins, begins + hidden]), ends.expand(2, -1)], -1).flatten(1)
        return torch.cat([starts.new_zeros(2, 1), starts], 1).int()

    def attend(self, qkv: Tensor, scale: float) -> Tensor:
        """The context [1, T, H * D] of q, k and v [3, 1, H, T, D]."""
        if qkv.is_cuda and _has_varlen(qkv.device, qkv.dtype, qkv.size(-1)):
            q, k, v = qkv[:, 0].transpose(1, 2)
            y = varlen_attn(q, k, v, self.queries, self.keys, self.longest, self.longest, scale=scale)
            return y.flatten(1)[None]
        pieces, start = [], 0
        for length, hidden, count in self.groups:
            tokens = slice(start, start + count * length)
            q, k, v = qkv[:, 0, :, tokens].unflatten(2, (count, length)).transpose(1, 2)
            seen = (torch.arange(length, device=qkv.device) > 0)[None, None, None] if hidden else None
            y = scaled_dot_product_attention(q, k, v, seen, scale=scale)
            pieces.append(y.transpose(1, 2).flatten(2).flatten(0, 1))
            start = tokens.stop
        return torch.cat(pieces)[None] if len(pieces) > 1 else pieces[0][None]


def has_onednn(x: Tensor) -> bool:
    """True if products of x go to oneDNN, and not to BLAS."""
    backend = torch.backends.mkldnn
    return x.dtype == torch.float32 and x.device.type == "cpu" and backend.is_available() and bool(backend.enabled)


@lru_cache
def _has_varlen(device: torch.device, dtype: torch.dtype, head: int) -> bool:
    half = dtype in (torch.float16, torch.bfloat16)
    return half and head % 8 == 0 and head <= 256 and torch.cuda.get_device_capability(device) >= (8, 0)


packed: ContextVar[Segments | None] = ContextVar("packed", default=None)  # of the hidden states [1, T, width] of a call


def _why_not_attention(attention: Any) -> str | None:
    """Why an attention module, as it is set, does not attend by segments."""
    name = attention.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    if getattr(attention, "is_causal", False):
        return f"{type(attention).__name__} is causal"
    if registered.gives_probabilities(function, attention, {}):
        return f'its attention "{name}" returns probabilities'
    if function is not sdpa_attention_forward and not registered.is_ours(function):
        return f'its attention is "{name}", neither "sdpa" nor a function of register'
    return None
