"""Attention of packed texts: each token sees the tokens of its own text."""

import math
from collections.abc import Callable, Sequence
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

BLOCK = 64  # half of the queries of a block, at least


class Unpackable(Exception):
    """Raised by a layer that cannot run on packed tokens in this call; the whole model is then run another way."""


Text = tuple[int, bool, bool]
Bias = Callable[[Tensor], Tensor]


class Segments:
    """The lengths of packed texts, fastest if equal ones are adjacent, and the columns of their tokens in the padded
    batch. With each length goes whether the text begins with a hidden token (none of its tokens sees it, and its own
    state is wanted), and whether its columns have gaps."""

    def __init__(self, texts: Sequence[Text], columns: Tensor) -> None:
        self.groups = [(*text, len(list(some))) for text, some in groupby(texts)]
        self.longest = max(length for length, _, _ in texts)
        lengths = [0, *(length for length, _, _ in texts)]
        self.starts = torch.tensor(lengths, device=columns.device).cumsum(0, dtype=torch.int32)
        self.columns = columns
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def attend(self, qkv: Tensor, scale: float, window: int | None = None, bias: Bias | None = None) -> Tensor:
        """The context [1, T, H * D] of q, k and v [3, 1, H, T, D]. A token sees those less than window columns away,
        or all of its text. bias is added to the scores: [texts, H, Q, K] of the columns [texts, Q, K] from queries to
        keys."""
        masked = bias or any(hidden or (gaps and window is not None) for _, hidden, gaps, _ in self.groups)
        if qkv.is_cuda and not masked and _has_varlen(qkv.device, qkv.dtype, qkv.size(-1)):
            q, k, v = qkv[:, 0].transpose(1, 2)
            sides = (-1, -1) if window is None else (window - 1, window - 1)
            of_all = self.starts, self.starts, self.longest, self.longest
            return varlen_attn(q, k, v, *of_all, scale=scale, window_size=sides).flatten(1)[None]
        pieces, start = [], 0
        for length, hidden, gaps, count in self.groups:
            tokens = slice(start, start + count * length)
            q, k, v = qkv[:, 0, :, tokens].unflatten(2, (count, length)).transpose(1, 2)
            if not hidden and not gaps and in_blocks(length, window):
                y = _local(q, k, v, scale, window)
            else:
                key = start, window
                if key not in self._masks:  # equal in all layers with that window
                    self._masks[key] = self._mask(tokens, length, hidden, gaps, window, bias)
                y = scaled_dot_product_attention(q, k, v, self._masks[key], scale=scale)
            pieces.append(y.transpose(1, 2).flatten(2).flatten(0, 1))
            start = tokens.stop
        return torch.cat(pieces)[None] if len(pieces) > 1 else pieces[0][None]

    def _mask(
        self, tokens: slice, length: int, hidden: bool, gaps: bool, window: int | None, bias: Bias | None
    ) -> Tensor | None:
        """The bias [texts or 1, H, length, length], or True where a token sees another; None if all of a text do."""
        seen, distances = None, None
        if bias or (window is not None and (gaps or length > window)):
            columns = self.columns[tokens].view(-1, length) if gaps else self._range(length)[None]
            distances = columns[:, None, :] - columns[:, :, None]
        if window is not None and distances is not None:
            seen = (distances.abs() < window)[:, None]
        if hidden:
            others = self._range(length) > 0
            seen = others[None, None, None] if seen is None else seen & others
        if bias is None or distances is None:
            return seen
        return bias(distances) if seen is None else bias(distances).masked_fill(~seen, -math.inf)

    def _range(self, length: int) -> Tensor:
        return torch.arange(length, device=self.columns.device)


def in_blocks(length: int, window: int | None) -> bool:
    """True if local attention of such a text is computed in blocks of queries."""
    return window is not None and length > 4 * max(window, BLOCK)


def _local(q: Tensor, k: Tensor, v: Tensor, scale: float, window: Any) -> Tensor:
    """The context [B, H, S, D] of tokens that see those less than window away, in blocks of queries."""
    length, step, pieces = q.size(2), 2 * max(window, BLOCK), []
    places = torch.arange(length, device=q.device)
    for start in range(0, length, step):
        some, near = slice(start, start + step), slice(max(start - window, 0), start + step + window)
        seen = (places[None, near] - places[some, None]).abs() < window
        pieces.append(scaled_dot_product_attention(q[:, :, some], k[:, :, near], v[:, :, near], seen, scale=scale))
    return torch.cat(pieces, 2)


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
    if not hasattr(attention, "config"):  # MPNet's is always ours
        return None
    name = attention.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    if getattr(attention, "is_causal", False):
        return f"{type(attention).__name__} is causal"
    if registered.gives_probabilities(function, attention, {}):
        return f'its attention "{name}" returns probabilities'
    if function is not sdpa_attention_forward and not registered.is_ours(function):
        return f'its attention is "{name}", neither "sdpa" nor a function of register'
    return None
