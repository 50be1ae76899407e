"""Rotates q and k by their positions (RoPE), in place."""

from typing import Any

import torch
from torch import Tensor


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x <- x cos + (-second half of x, first half of x) sin, for x [..., B, H, S, D] and cos and sin [B or 1, S, D].
    In 16 bits it is computed in float32."""
    if x.dtype not in (torch.float32, torch.float64):
        return x.copy_(rotate_(x.float(), cos.float(), sin.float()))
    first, second = x.chunk(2, -1)
    (cos1, cos2), (sin1, sin2) = (t.unsqueeze(-3).chunk(2, -1) for t in (cos, sin))
    added = first * sin2
    first.mul_(cos1).addcmul_(second, sin1, value=-1)
    second.mul_(cos2).add_(added)
    return x


def depends_on_length(model: Any) -> bool:
    """True if a model's frequencies depend on the longest text of a batch."""
    kind = getattr(getattr(model, "rotary_emb", None), "rope_type", None)
    return any(name in ("dynamic", "longrope") for name in (kind.values() if isinstance(kind, dict) else [kind]))
