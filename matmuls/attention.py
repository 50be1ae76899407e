"""Attention that can return its probabilities: scores, softmax and context, computed piece by piece."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from custom_mm.arguments import clearer

from .dense import matmul
from .device import has_hopper_kernels
from .fused_softmax import about_mask, scaled_masked_softmax

__all__ = ["attend", "compose"]

_attention: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = torch.ops.custom_mm.attention.default
_forward: Callable[..., torch.Tensor] = torch.ops.custom_mm.attention_forward.default

PIECE_BYTES = 32 << 20  # bytes of scores at a time: the next kernel finds them in the L2, of 50 MB on an H200


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    probabilities: bool = True,
    recompute: bool = False,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes softmax(scale * q @ k^T + mask) @ v, and returns the probabilities too.

    On Hopper GPUs one kernel computes all of it, in 16 bits, for heads of size 64, a number of keys that is a multiple
    of 8, and no mask or a mask of bool or uint8. The guide lists all conditions. With dropout, grouped-query attention,
    a mask that requires a gradient, or under torch.compile, `compose` computes it. In all other cases the scores are
    computed in pieces of 32 MiB, or of one head if that is larger.

    The operation is differentiable any number of times. The first line that fits says how many tensors of the size of
    the scores it saves for backward:

    - two, if `compose` computes it; `recompute` has no effect then;
    - none on a GPU, in float16 or bfloat16, without a mask, for heads of up to 128 elements (a multiple of 8): backward
      then calls that of torch's scaled_dot_product_attention, or computes the scores again if the probabilities have a
      gradient;
    - none with `recompute`: backward computes the scores again;
    - one otherwise.

    Probabilities that are returned occupy memory as long as the caller keeps them, in all cases.

    Args:
        q: [B, H, Q, D] float64, float32, float16 or bfloat16.
        k: [B, h, K, D], dtype and device of q. h divides H; if it is less, this is grouped-query attention.
        v: [B, h, K, E], dtype and device of q.
        mask: a tensor that broadcasts to [B, H, Q, K], or None. In a mask of bool or uint8, a nonzero element hides a
            key, the opposite of torch's scaled_dot_product_attention. A float mask is added to the scaled scores.
        scale: multiplies the scores.
        causal: query i sees keys 0 to i.
        dropout: the probability with which an attention probability is set to 0.
        probabilities: return the probabilities.
        recompute: compute the scores again in backward, instead of saving the probabilities.
        into: [B, H, Q, K], the probabilities are written to it if no gradient is recorded.

    Returns:
        The context [B, Q, H, E], and the probabilities [B, H, Q, K] before dropout, or None.

    Raises:
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch
        >>> from matmuls.attention import attend
        >>> q, v = torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]])
        >>> context, probabilities = attend(q, q, v, None, 0.5, causal=True)
        >>> context.flatten(), probabilities[0, 0]
        (tensor([1., 2.]), tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]]))
    """
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor):
        raise clearer(TypeError(), "attention", q=q, k=k, v=v)
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    mask_gradient = torch.is_grad_enabled() and mask is not None and mask.requires_grad
    if dropout or mask_gradient or q.shape[1:2] != k.shape[1:2] or torch.compiler.is_compiling():
        context, y = compose(q, k, v, mask, scale, causal=causal, dropout=dropout)
        if into is not None and not (gradient or mask_gradient):
            y = into.copy_(y)
        return context, y if probabilities else None
    try:
        if gradient:
            return _attention(q, k, v, mask, scale, causal, probabilities, recompute, PIECE_BYTES)
        kept = q.new_empty(*q.shape[:3], k.size(2)) if probabilities and into is None else into
        return _forward(q, k, v, mask, scale, causal, PIECE_BYTES, kept), kept
    except RuntimeError as error:
        raise about_mask(clearer(error, "attention", ("mask", "into"), mask=mask, into=into), mask) from None


def compose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    causal: bool = False,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes what `attend` computes, as separate operations that torch.compile can trace.

    `attend` calls it under torch.compile and for dropout, grouped-query attention and masks that require a gradient.
    Backward holds two tensors of the size of the scores.

    Args:
        q: [B, H, Q, D] float64, float32, float16 or bfloat16.
        k: [B, h, K, D], dtype and device of q. h divides H; if it is less, this is grouped-query attention.
        v: [B, h, K, E], dtype and device of q.
        mask: as in `attend`, or None.
        scale: multiplies the scores.
        causal: query i sees keys 0 to i.
        dropout: the probability with which an attention probability is set to 0.

    Returns:
        The context [B, Q, H, E], and the probabilities [B, H, Q, K] before dropout.

    Raises:
        RuntimeError: if shapes, dtypes or devices do not match.

    Examples:
        >>> import torch
        >>> from matmuls.attention import compose
        >>> q, v = torch.zeros(1, 2, 2, 4), torch.tensor([[[[1.0], [3.0]]]])  # two heads share keys and values
        >>> context, probabilities = compose(q, q[:, :1], v, None, 0.5)
        >>> context.flatten(), probabilities.shape
        (tensor([2., 2., 2., 2.]), torch.Size([1, 2, 2, 2]))
    """
    if (
        not q.dim() == k.dim() == v.dim() == 4
        or not q.size(0) == k.size(0) == v.size(0)
        or k.shape[1:3] != v.shape[1:3]
        or q.size(3) != k.size(3)
        or (q.size(1) % k.size(1) if k.size(1) else q.size(1))
    ):
        raise RuntimeError(
            "attention: expected q [B, H, Q, D], k [B, h, K, D] and v [B, h, K, E], h a divisor of H, got shapes "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.dtype == torch.float16:
        fold = score_fold(scale)
        q, scale = q * fold, scale / fold
    heads, key_heads = q.size(1), k.size(1)
    if heads != key_heads:  # the batch broadcasts; keys and values are not repeated
        q = q.unflatten(1, (key_heads, heads // key_heads))
        k, v = k.unsqueeze(2), v.unsqueeze(2)
    scores = matmul(q, k, transb=True)
    if heads != key_heads:
        scores = scores.flatten(1, 2)
    y = scaled_masked_softmax(scores, mask, scale, causal=causal, inplace=True)
    dropped = torch.nn.functional.dropout(y, dropout)
    if heads != key_heads:
        grouped = dropped.unflatten(1, (key_heads, heads // key_heads))
        context = matmul(grouped, v).flatten(1, 2)
    else:
        context = matmul(dropped, v)
    return context.transpose(1, 2).contiguous(), y


def score_fold(scale: float) -> float:
    """The power of two by which float16 queries are multiplied before the scores, which are then scaled by scale / it.

    Unscaled scores of long vectors exceed 65504 where scaled ones do not. The products hold scores / 16 at most; a
    power of two is exact. attention/attention.cpp does the same.
    """
    return 2.0 ** min(0, max(-24, math.frexp(scale)[1] - 5))


def shares(count: int, most: int) -> Iterator[slice]:
    """Slices of nearly equal length, each of at most `most` elements."""
    parts = -(-count // max(1, most))
    step = -(-count // parts) if parts else 1
    return (slice(i, i + step) for i in range(0, count, step))


def reads_strided(x: torch.Tensor, head: int) -> bool:
    """True if heads of x are read in place (given a bool mask); else each piece copies its heads."""
    return head == 64 and x.dtype in (torch.float16, torch.bfloat16) and has_hopper_kernels(x.device)


@register_flop_formula(torch.ops.custom_mm.attention_forward)
def _flops(q: torch.Size, k: torch.Size, v: torch.Size, *args: Any, **kwargs: Any) -> int:
    """FLOPs of the two products, counted once as torch does, even if a kernel computes them more often."""
    return 2 * q[:3].numel() * k[2] * (q[3] + v[3])
