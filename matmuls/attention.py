"""Attention whose probabilities can be had: scores, softmax over them, context, a piece at a time."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import Function
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import register_flop_formula

from .dense import cublasMM, cublasTransbMM, matmul
from .fused_softmax import scaled_masked_softmax

_attention: Callable[..., torch.Tensor] = torch.ops.custom_mm.attention_forward.default
_at_once: Callable[..., bool] = torch.ops.custom_mm.attention_at_once.default
_attention_pieces: Callable[..., list[int]] = torch.ops.custom_mm.attention_pieces.default
_softmax_gradient = torch.ops.custom_mm.softmax_backward.out
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

PIECE_BYTES = 32 << 20  # of scores at a time: the next kernel finds them in the L2, of 50 MB on an H200
FLASH_HEAD = 128  # the largest head that torch's fused attentions have on every GPU, there and back
Piece = tuple[slice, slice]  # of the batch, of the heads


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
    """softmax(scale * q @ k^T + mask) @ v. Returns the context [B, Q, H, E] and the probabilities [B, H, Q, K] or None.

    q: [B, H, Q, D]; k: [B, h, K, D]; v: [B, h, K, E], h a divisor of H. mask, causal, dtypes: as
    `scaled_masked_softmax`. into: a tensor for the probabilities where no gradient is to be recorded.

    On Hopper, 16-bit heads of 64 numbers, bool masks and rows of whole 16 bytes pass through one kernel, which writes
    the probabilities once. Elsewhere the scores are made in pieces of PIECE_BYTES, or one head's.

    One score-sized tensor at most is kept for backward, none with `recompute` unless `probabilities` are returned; the
    gradients pass in pieces too. None is kept either on a GPU at 16 bits without a mask: where the probabilities get no
    gradient, backward is that of torch's scaled_dot_product_attention, from the rows' sums that the one kernel left or,
    elsewhere, after another forward of torch's. With dropout, fewer key heads, a mask that wants a gradient or under
    torch.compile it is one operation after the other, and backward holds two score-sized tensors. Differentiable, twice
    and more. Raises RuntimeError on shapes, dtypes or devices that do not fit.
    """
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    mask_gradient = torch.is_grad_enabled() and mask is not None and mask.requires_grad
    if dropout or mask_gradient or q.size(1) != k.size(1) or torch.compiler.is_compiling():
        context, y = compose(q, k, v, mask, scale, causal=causal, dropout=dropout)
        if into is not None and not (gradient or mask_gradient):
            y = into.copy_(y)
        return context, y if probabilities else None
    if gradient:
        context, y = _Attention.apply(q, k, v, mask, scale, causal, probabilities, recompute)
        return context, y
    return _forward(q, k, v, mask, scale, causal, probabilities, into)


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
    """`attend` as one operation after the other: for torch.compile, second derivatives, dropout, grouped heads."""
    heads, key_heads = q.size(1), k.size(1)
    if heads != key_heads:  # the batch broadcasts, keys and values are not repeated
        q, k, v = q.unflatten(1, (key_heads, heads // key_heads)), k.unsqueeze(2), v.unsqueeze(2)
    scores = cublasTransbMM.apply(q, k)
    if heads != key_heads:
        scores = scores.flatten(1, 2)
    y = scaled_masked_softmax(scores, mask, scale, causal=causal, inplace=True)
    dropped = torch.nn.functional.dropout(y, dropout)
    if heads != key_heads:
        context = cublasMM.apply(dropped.unflatten(1, (key_heads, heads // key_heads)), v).flatten(1, 2)
    else:
        context = cublasMM.apply(dropped, v)
    return context.transpose(1, 2).contiguous(), y


def _pieces(q: torch.Tensor, k: torch.Tensor) -> Iterator[Piece]:
    """Those in which the operator makes the scores."""
    numbers = iter(_attention_pieces(q, k, PIECE_BYTES))
    for b, batches, h, heads in zip(numbers, numbers, numbers, numbers, strict=True):
        yield slice(b, b + batches), slice(h, h + heads)


def shares(count: int, most: int) -> Iterator[slice]:
    """Slices of nearly equal length, `most` at most."""
    parts = -(-count // max(1, most))
    step = -(-count // parts) if parts else 1
    return (slice(i, i + step) for i in range(0, count, step))


def _part(mask: torch.Tensor | None, piece: Piece) -> torch.Tensor | None:
    """The mask of a piece of the scores, a view."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    b, h = (part if size > 1 else slice(None) for part, size in zip(piece, mask.shape, strict=False))
    return mask[b, h]


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    keep: bool,
    into: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    y = q.new_empty(*q.shape[:3], k.size(2)) if keep and into is None else into
    return _attention(q, k, v, mask, scale, causal, PIECE_BYTES, y, sums), y


def reads_strided(x: torch.Tensor, head: int) -> bool:
    """Whether heads of x's kind are read where they lie, bool masks granted; else each piece's are copied."""
    return x.is_cuda and head == 64 and x.dtype in (torch.float16, torch.bfloat16) and _capability(x.device) == (9, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """torch asks the driver each time: 3 us of every layer."""
    return torch.cuda.get_device_capability(device)


def _has_flash(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether torch has a fused attention for these, whose backward needs no probabilities."""
    sizes = q.size(3), v.size(3)
    return (
        q.is_cuda
        and mask is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and sizes[0] == sizes[1] <= FLASH_HEAD
        and sizes[0] % 8 == 0
    )


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b^T in a's dtype, autocast or not."""
    return matmul(a, b, transb=True, out=a.new_empty(*a.shape[:3], b.size(2)))


class _Attention(Function):
    """The whole of attention: what one operation after the other cannot do is to pass the gradients in pieces."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        causal: bool,
        probabilities: bool,
        recompute: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.flash = _has_flash(q, v, mask)
        recompute = recompute or ctx.flash
        sums = None
        if ctx.flash and probabilities and _at_once(q, k, v, mask, scale):
            sums = q.new_empty(q.shape[:3], dtype=torch.float32)
        context, y = _forward(q, k, v, mask, scale, causal, probabilities or not recompute, sums=sums)
        kept = (None, None) if sums is None else (context, sums)
        ctx.save_for_backward(q, k, v, mask, None if recompute else y, *kept)
        ctx.scale, ctx.causal = scale, causal
        return context, y if probabilities else None

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, grad_y: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, mask, y, *kept = ctx.saved_tensors
        given = (grad is not None, grad_y is not None)
        if not any(given):
            return (None,) * 8
        if torch.is_grad_enabled():  # a second derivative is to be had
            q, k, v = (t.view_as(t) for t in (q, k, v))  # one may be given twice, or be made of another
            outputs = [x for x, there in zip(compose(q, k, v, mask, ctx.scale, causal=ctx.causal), given) if there]  # noqa: B905
            needed = [t for t, need in zip((q, k, v), ctx.needs_input_grad, strict=False) if need]
            grads = [g for g in (grad, grad_y) if g is not None]
            found = iter(torch.autograd.grad(outputs, needed, grads, create_graph=True, allow_unused=True))
            return (*(next(found) if need else None for need in ctx.needs_input_grad[:3]), *(None,) * 5)
        if ctx.flash and grad_y is None:
            return (*_flash_gradients(q, k, v, grad, *kept, ctx), *(None,) * 5)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # once: cuBLAS would copy what has two batch strides
        results = [
            torch.empty_like(t) if need else None for t, need in zip((q, k, v), ctx.needs_input_grad, strict=False)
        ]
        if grad is None:
            results[2] = None
        else:
            grad = grad.transpose(1, 2).contiguous()
        for piece in _pieces(q, k):
            _gradients_of_piece(ctx, piece, q, k, v, mask, y, grad, grad_y, *results)
        return (*results, *(None,) * 5)


def _flash_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor | None,
    context: torch.Tensor | None,
    sums: torch.Tensor | None,
    ctx: Any,
) -> Iterator[torch.Tensor | None]:
    """By torch's fused attention, from each row's sum rather than the row; without the sums it is made again first."""
    assert grad is not None
    grad, causal, scale = grad.transpose(1, 2), ctx.causal, ctx.scale
    fused = torch._fused_sdp_choice(q, k, v, is_causal=causal, scale=scale)
    kept: Any = None
    if context is not None and sums is not None:
        seed = q.new_empty((), dtype=torch.int64)  # for dropout, of which there is none
        kept = context.transpose(1, 2), sums, None, None, q.size(2), k.size(2), seed, seed
    if fused == SDPBackend.CUDNN_ATTENTION.value:  # called by name: a graph of autograd's own costs 120 us of the host
        out, sums, *lengths, seed, offset = kept or _cudnn(q, k, v, None, True, is_causal=causal, scale=scale)[:8]
        sums = sums.view(*q.shape[:3], 1)
        found = _cudnn_backward(grad, q, k, v, out, sums, seed, offset, None, *lengths, 0.0, causal, scale=scale)
    elif fused == SDPBackend.FLASH_ATTENTION.value:
        out, sums, *lengths, seed, offset = kept or _flash(q, k, v, is_causal=causal, scale=scale)[:8]
        found = _flash_backward(grad, q, k, v, out, sums, *lengths, 0.0, causal, seed, offset, scale=scale)
    else:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale)
        found = torch.autograd.grad(out, leaves, grad)
    return (x if need else None for x, need in zip(found, ctx.needs_input_grad, strict=False))


def _gradients_of_piece(
    ctx: Any,
    piece: Piece,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    y: torch.Tensor | None,
    grad: torch.Tensor | None,
    grad_y: torch.Tensor | None,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
) -> None:
    """Written into dq, dk, dv. The gradient of the probabilities becomes that of the scores where it lies."""
    if y is None:
        scores, seen = _product(q[piece], k[piece]), _part(mask, piece)
        y = scaled_masked_softmax(scores, seen, ctx.scale, causal=ctx.causal, inplace=True)
    else:
        y = y[piece]
    if grad is None:
        assert grad_y is not None
        ds = grad_y[piece].clone(memory_format=torch.contiguous_format)
    else:
        if dv is not None:
            matmul(y, grad[piece], transa=True, out=dv[piece])
        ds = _product(grad[piece], v[piece])
        if grad_y is not None:
            ds += grad_y[piece]
    _softmax_gradient(y, ds, -1, ctx.scale, ctx.causal, out=ds)
    if dq is not None:
        matmul(ds, k[piece], out=dq[piece])
    if dk is not None:
        matmul(ds, q[piece], transa=True, out=dk[piece])


@register_flop_formula(torch.ops.custom_mm.attention_forward)
def _flops(q: torch.Size, k: torch.Size, v: torch.Size, *args: Any, **kwargs: Any) -> int:
    """Of the two products, as torch counts them, however often a kernel makes them."""
    return 2 * q[:3].numel() * k[2] * (q[3] + v[3])
