"""Table row of attention with probabilities. tests/models/test_attention.py tests its gradient, a separate operator."""

from collections.abc import Iterator

import torch
from torch import Tensor

from matmuls import attention

from .drawn import SIZES as DRAWN
from .fused_softmax import masked
from .spec import REAL, Bad, Call, Case, Draw, Spec

_operator = torch.ops.custom_mm.attention_forward.default
SIZES = [(32, 12, 512, 64), (16, 16, 512, 64), (8, 12, 2048, 64), (64, 12, 128, 64)]  # B, H, Q = K, D


def _context(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False
) -> Tensor:
    context: Tensor = _operator(q, k, v, mask, scale, causal, attention.PIECE_BYTES, None)
    return context


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False
) -> Tensor:
    return (masked(q @ k.mT, mask, scale, causal=causal) @ v).transpose(1, 2)


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: None, scale: float) -> tuple[Tensor, Tensor]:
    y = torch.softmax(q @ k.mT * scale, -1)
    return (y @ v).transpose(1, 2).contiguous(), y


def _heads(draw: Draw, batch: int, heads: int, length: int, size: int) -> Call:
    """q, k and v as models have them: [B, H, L, D] views of [B, L, H, D] tensors."""
    return Call((*(draw(batch, length, heads, size).transpose(1, 2) for _ in range(3)), None, size**-0.5))


def _case(size: tuple[int, ...]) -> Case:
    return Case(
        "x".join(map(str, size)),
        lambda draw: _heads(draw, *size),
        call=attention.attend,
        reference=_eager,
        device="cuda",
        drawn=size in DRAWN["attention"],
        parameters=(),
    )


def _samples(draw: Draw) -> Iterator[Call]:
    for b, h, q, k, d, e in [(2, 3, 4, 5, 8, 6), (1, 2, 7, 33, 64, 64), (2, 2, 1, 16, 64, 64)]:
        operands = draw(b, h, q, d), draw(b, h, k, d), draw(b, h, k, e)
        yield Call(operands)
        yield Call((*operands, None, 0.3), {"causal": True})
        for mask in [(b, 1, 1, k), (1, 1, q, k), (b, h, q, k), (k,)]:
            yield Call((*operands, draw(*mask) > 0.5, -0.2))
        yield Call((*operands, draw(q, k), 0.125))


def _filled(call: Call) -> tuple[object, ...]:
    """The operator's arguments up to `causal`, with defaults filled in."""
    defaults = (None, 1.0)
    return (*call.args, *defaults[len(call.args) - 3 :], call.kwargs.get("causal", False))


def _bad(draw: Draw) -> Iterator[Bad]:
    q, name = draw(2, 3, 4, 8), "attention_forward"
    yield Bad(Call((q[0], q, q)), f"{name}: expected q, k and v of four dimensions")
    yield Bad(Call((q, draw(2, 3, 5, 8), q)), rf"{name}: expected q \[B, H, Q, D\], k \[B, H, K, D\] and v")
    yield Bad(Call((q, q, q, draw(5) > 0)), rf"{name}: expected a mask on .* whose shape broadcasts to the scores'")


TABLE: tuple[Spec, ...] = (
    Spec(
        name="attention_forward",
        summary="`torch.ops.custom_mm.attention_forward`: the forward pass of `matmuls.attention.attend(q, k, v, mask, "
        "scale, *, causal)`, without a gradient; call `attend`",
        call=_context,
        reference=_plain,
        operators=(_operator,),
        arguments=lambda call: (*_filled(call), attention.PIECE_BYTES, None),
        samples=_samples,
        bad=_bad,
        empty=lambda draw: iter([Call((draw(0, 2, 3, 8), draw(0, 2, 5, 8), draw(0, 2, 5, 8)))]),
        cases=tuple(map(_case, (*SIZES, *DRAWN["attention"]))),
        dtypes=REAL,
        bench_dtypes=(torch.bfloat16, torch.float16),
        gradient=False,
        autocast=False,
        rival="eager",
        compiled=True,
    ),
)
