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


class Segments:
    """The lengths of packed texts, fastest if equal ones are adjacent. With each goes whether the text begins with a
    hidden token: none of its tokens sees it, and its own state is wanted."""

    def __init__(self, texts: Sequence[tuple[int, bool]], device: torch.device) -> None:
        self.groups = [(*text, len(list(some))) for text, some in groupby(texts)]
        self.longest = max(length for length, _ in texts)
        self.starts = torch.tensor([0, *(length for length, _ in texts)], device=device).cumsum(0, dtype=torch.int32)

    def attend(self, qkv: Tensor, scale: float) -> Tensor:
        """The context [1, T, H * D] of q, k and v [3, 1, H, T, D]."""
        if qkv.is_cuda and _has_varlen(qkv.device, qkv.dtype, qkv.size(-1)) and not any(h for _, h, _ in self.groups):
            q, k, v = qkv[:, 0].transpose(1, 2)
            y = varlen_attn(q, k, v, self.starts, self.starts, self.longest, self.longest, scale=scale)
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
