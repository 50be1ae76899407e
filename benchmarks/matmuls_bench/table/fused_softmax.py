"""Table rows of the scaled masked softmax."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from matmuls import dense, fused_softmax

from .drawn import SIZES
from .rowwise import BAD_X, ROWWISE, no_rows, softmax_gradient
from .spec import Bad, Call, Case, Draw, Spec

_ops = torch.ops.custom_mm
ATTENTION = [(8, 16, 1024, 1024), (2, 16, 4096, 4096), (32, 12, 512, 512), (64, 12, 128, 128)]
ATTENTION += [(8, 16, 1500, 1500), (32, 12, 577, 577)]  # Whisper and ViT: rows not a multiple of 16 bytes
ADDED = "added [B,1,Q,K]"
MASKS: dict[str, Callable[..., tuple[int, ...]]] = {
    "[B,1,1,K]": lambda b, h, q, k: (b, 1, 1, k),
    "[B,1,Q,K]": lambda b, h, q, k: (b, 1, q, k),
    "causal": lambda b, h, q, k: (),
    ADDED: lambda b, h, q, k: (b, 1, q, k),
}


def masked(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False, inplace: bool = False
) -> Tensor:
    """softmax(scale * x + mask) in torch operations; fully masked rows give 0."""
    z = x * scale
    dropped = torch.zeros((), dtype=torch.bool, device=x.device)
    if causal:
        dropped = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    if mask is not None and mask.is_floating_point():
        z = z + mask
    elif mask is not None:
        dropped = dropped | mask.bool()
    y = torch.softmax(z.masked_fill(dropped, -torch.inf), -1)
    return y.masked_fill(dropped.expand_as(y).all(-1, keepdim=True), 0)


def _eager_masked(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False) -> Tensor:
    """softmax(scale * x + mask) in torch operations; assumes that no row is fully masked."""
    if causal:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    if mask is not None and mask.is_floating_point():
        return torch.softmax(x * scale + mask, -1)
    return torch.softmax((x * scale).masked_fill(mask, torch.finfo(x.dtype).min), -1)


def _eager_masked_gradient(
    y: Tensor, grad: Tensor, dim: int, scale: float, causal: bool, mask: Tensor | None = None
) -> Tensor:
    if causal:
        mask = torch.ones(y.shape[-2:], dtype=torch.bool, device=y.device).triu(1)
    return softmax_gradient(y, grad, dim).masked_fill(mask, 0) * scale


def _masked_backward(
    y: Tensor, grad: Tensor, dim: int, scale: float, causal: bool, mask: Tensor | None = None
) -> Tensor:
    return torch.ops.custom_mm.softmax_backward.default(y, grad, dim, scale, causal)


def _masked_cases() -> Iterator[Case]:
    for shape, (label, mask_shape) in product((*ATTENTION, *SIZES["masked softmax"]), MASKS.items()):
        new = shape in SIZES["masked softmax"]
        causal, name = label == "causal", "x".join(map(str, shape))
        sizes, length = mask_shape(*shape), shape[-1]
        seen = (length + 1) / (2 * length) if causal else 1.0  # share of elements that causal rows read
        added = label == ADDED

        def forward(
            draw: Draw, shape: Any = shape, sizes: Any = sizes, causal: bool = causal, added: bool = added
        ) -> Call:
            mask = None if causal else draw(*sizes) > 1
            if added:
                mask = torch.zeros(sizes, dtype=draw.dtype, device=draw.device).masked_fill(mask, -torch.inf)
            return Call((draw(*shape), mask, 0.125), {"causal": causal})

        def backward(draw: Draw, shape: Any = shape, sizes: Any = sizes, causal: bool = causal) -> Call:
            mask = None if causal else draw(*sizes) > 1
            y = _eager_masked(draw(*shape), mask, 0.125, causal=causal)
            return Call((y, draw(*shape), -1, 0.125, causal, mask))

        yield Case(
            f"forward {name} {label}",
            forward,
            reference=_eager_masked,
            device="cuda",
            moved=(lambda call, seen=seen: int(call.args[0].nbytes * (1 + seen))) if causal else None,
            drawn=new,
            parameters=(),
        )
        if added:  # its gradient is the same as with a bool mask
            continue
        yield Case(
            f"backward {name} {label}",
            backward,
            call=_masked_backward,
            reference=_eager_masked_gradient,
            device="cuda",
            # the backward does not read the mask: y is 0 where it masks
            moved=lambda call, seen=seen: int(call.args[0].nbytes * (1 + 2 * seen)),
            drawn=new,
        )


def _attention(masked_softmax: Callable[..., Tensor], scores: Any, context: Any) -> Callable[..., Any]:
    """Forward and backward of attention with its probabilities; returns the gradients of q, k and v."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        probabilities = masked_softmax(scores(leaves[0], leaves[1]), mask, 0.125)
        y = context(probabilities, leaves[2])
        del probabilities
        return torch.autograd.grad(y, leaves, grad)

    return run


def _attention_draw(draw: Draw) -> Call:
    q, k, v, grad = (draw(32, 12, 512, 64) for _ in range(4))
    return Call((q, k, v, draw(32, 1, 1, 512) > 1, grad))


_ATTENTION_MEMORY = Case(
    "attention forward + backward 32x12x512x512, head size 64",
    _attention_draw,
    call=_attention(
        lambda x, mask, scale: fused_softmax.scaled_masked_softmax(x, mask, scale, inplace=True),
        dense.cublasTransbMM.apply,
        dense.cublasMM.apply,
    ),
    reference=_attention(_eager_masked, lambda q, k: q @ k.mT, torch.matmul),
    rival="eager",
    in_place=False,
    device="cuda",
)


def _masked_samples(draw: Draw) -> Iterator[Call]:
    for shape in [(2, 3, 4, 5), (1, 2, 7, 33), (2, 2, 3, 64), (3, 300)]:
        x, (*lead, q, k) = draw(*shape), shape
        b, h = ([*lead, 1, 1])[:2]
        yield Call((x,))
        yield Call((x, None, 0.3), {"causal": True})
        for mask in [(b, 1, 1, k), (1, 1, q, k), (b, 1, q, k), (b, h, q, k), (k,), (q, 1)]:
            mask = mask[-len(shape) :]
            yield Call((x, draw(*mask) > 0.5, -1.7))
        yield Call((x, (draw(*shape) > 0.5).to(torch.uint8) * 3, 0.5), {"causal": True})
        yield Call((x, draw(q, k), 2.0))
        yield Call((x, draw(*shape), 0.125), {"inplace": True})


def _masked_bad(draw: Draw) -> Iterator[Bad]:
    x, name = draw(2, 3, 4), "scaled_masked_softmax"
    yield Bad(Call((x.to(torch.int64),)), f"{name}: {BAD_X}")
    yield Bad(
        Call((x, draw(3, 5) > 0)), rf"{name}: expected a mask whose shape broadcasts to x's \[2, 3, 4\], got \[3, 5\]"
    )
    yield Bad(Call((x, draw(1, 2, 3, 4) > 0)), f"{name}: expected a mask whose shape broadcasts")
    yield Bad(
        Call((x, draw(3, 4).to(torch.int32))),
        rf"{name}: expected a mask in Bool, Byte(, Float)? or \w+ as x is, got Int",
    )
    yield Bad(Call((draw(4),), {"causal": True}), f"{name}: expected x of at least two dimensions where causal")
    yield Bad(Call((x, x), {"inplace": True}), f"{name}: expected out and mask not to overlap")
    yield Bad(Call((draw(3, 1).expand(3, 4),), {"inplace": True}), f"{name}: expected out to have one memory location")
    if draw.device != "cpu":
        yield Bad(Call((x, draw(4).cpu())), f"{name}: expected mask on cuda:0 as x is, got cpu")


TABLE: tuple[Spec, ...] = (
    Spec(
        name="scaled_masked_softmax",
        summary="`scaled_masked_softmax(x, mask, scale, *, causal, inplace)`: softmax(scale * x + mask) in one pass",
        call=fused_softmax.scaled_masked_softmax,
        reference=masked,
        operators=(_ops.scaled_masked_softmax.default, _ops.scaled_masked_softmax_.default),
        samples=_masked_samples,
        bad=_masked_bad,
        empty=no_rows,
        cases=tuple(_masked_cases()),
        memory_cases=(_ATTENTION_MEMORY,),
        rival="eager",
        compiled=True,
        **ROWWISE | {"autocast": True, "bench_dtypes": (torch.float16, torch.bfloat16)},
    ),
    Spec(
        name="scaled_masked_softmax_forward",
        summary="`scaled_masked_softmax_forward(x, mask, scale)`: softmax(scale * x); nonzero elements of mask hide "
        "scores",
        call=fused_softmax.scaled_masked_softmax_forward,
        reference=lambda x, mask, scale: masked(x, None if mask is None else mask.ne(0), scale),
        operators=(_ops.scaled_masked_softmax.default,),
        samples=lambda draw: (Call((draw(2, 3, 4, 5), (draw(2, 1, 1, 5) > 0).to(draw.dtype), 0.5)) for _ in range(3)),
        bad=lambda draw: iter([Bad(Call((draw(3, 4), draw(5), 1.0)), "scaled_masked_softmax: expected a mask whose")]),
        empty=lambda draw: iter([Call((draw(0, 4), None, 1.0))]),
        frozen=(1,),
        **ROWWISE,
    ),
    Spec(
        name="scaled_masked_softmax_backward",
        summary="`scaled_masked_softmax_backward(grad, y, scale, *, inplace)`: scale * y * (grad - sum(y * grad))",
        call=fused_softmax.scaled_masked_softmax_backward,
        reference=lambda grad, y, scale: softmax_gradient(y, grad) * scale,
        operators=(_ops.softmax_backward.default,),
        samples=lambda draw: (
            Call((draw(*shape), torch.softmax(draw(*shape), -1), 0.5))
            for shape in [(2, 3, 4, 33), (3, 7), (2, 1, 3, 5)]
        ),
        bad=lambda draw: iter(
            [Bad(Call((draw(3, 4), draw(4, 3), 1.0)), "softmax_backward: expected grad of y's shape")]
        ),
        empty=lambda draw: iter([Call((draw(0, 4), draw(0, 4), 1.0))]),
        **ROWWISE,
    ),
    Spec(
        name="FusedSoftmax",
        summary="`FusedSoftmax.apply(src, mask, factor)`: scaled_masked_softmax_forward and its gradient",
        call=fused_softmax.FusedSoftmax.apply,
        reference=lambda x, mask, scale: masked(x, mask.ne(0), scale),
        operators=(_ops.scaled_masked_softmax.default, _ops.softmax_backward.default),
        samples=lambda draw: (Call((draw(2, 3, 4, 5), (draw(2, 1, 4, 5) > 0).to(draw.dtype), 0.5)) for _ in range(3)),
        bad=lambda draw: iter([Bad(Call((draw(3, 4), draw(5), 1.0)), "scaled_masked_softmax: expected a mask whose")]),
        empty=lambda draw: iter([Call((draw(0, 4), draw(4), 1.0))]),
        frozen=(1,),
        **ROWWISE,
    ),
)
