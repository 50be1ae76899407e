"""Table rows of the in-place products."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from matmuls import inplace

from .dense import activated, turned
from .drawn import NAMED_INPLACE, SIZES
from .spec import REAL, Bad, Call, Case, Draw, Spec

_ops = torch.ops.custom_mm


def _affine_in_place(a: Tensor, b: Tensor, transb: bool = False, bias: Tensor | None = None, **_: Any) -> Tensor:
    return F.linear(a, b if transb else b.mT, bias)


INPLACE_SHAPES = [
    ((3, 4), (4, 4)),
    ((17, 33), (33, 33)),
    ((1, 64), (64, 64)),
    ((129, 64), (64, 64)),
    ((5,), (5, 5)),
    ((2, 3, 16), (16, 16)),
    ((7, 8), (8, 3)),
    ((2, 1, 3, 6), (6, 2)),
]


def _inplace_samples(draw: Draw) -> Iterator[Call]:
    for a, b in INPLACE_SHAPES:
        yield Call((draw(*a), draw(*b)))
        yield Call((draw(*a), draw(*b[::-1])), {"transb": True, "bias": draw(b[1])})


def _inplace_bad(draw: Draw) -> Iterator[Bad]:
    a, b = draw(3, 4), draw(4, 4)
    yield Bad(Call((a, draw(5, 4))), "matmul_: expected a and b with equal inner sizes, got 4 and 5")
    yield Bad(Call((a, draw(4, 5))), "matmul_: expected a product no wider than a, 4 columns, got 5")
    yield Bad(Call((a, draw(2, 4, 4))), "matmul_: expected b of two dimensions")
    yield Bad(Call((a, b), {"bias": draw(3)}), r"matmul_: expected bias of shape \[4\]")
    yield Bad(Call((a.to(torch.int64), b)), "matmul_: expected a floating-point or complex dtype, got Long")
    yield Bad(Call((draw(1, 4).expand(3, 4), b)), "matmul_: expected out to have one memory location per element")
    whole = draw(7, 4)
    yield Bad(Call((whole[:4], whole[3:])), "matmul_: expected out and b not to overlap in memory")
    yield Bad(Call((a, b), {"bias": a[0]}), "matmul_: expected out and bias not to overlap in memory")
    yield Bad(Call((a, b), {"workspace": 0}), "matmul_: expected a workspace of at least one row of a")
    if draw.device != "cpu":
        yield Bad(Call((a, b.cpu())), "matmul_: expected b on cuda:0 as a is, got cpu")


def _inplace_empty(draw: Draw) -> Iterator[Call]:
    yield Call((draw(0, 4), draw(4, 4)))
    yield Call((draw(3, 4), draw(4, 0)))


class _IntoOneBuffer:
    """torch.mm(a, b, out=c) with c allocated at the first call."""

    out: Tensor | None = None

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        if self.out is None or (self.out.shape, self.out.dtype, self.out.device) != (a.shape, a.dtype, a.device):
            self.out = torch.empty_like(a)
        return torch.mm(a, b, out=self.out)


INPLACE_SIZES = (
    (40000, 1024),
    (16384, 768),
    (65536, 768),
    (16384, 1024),
    (16384, 2048),
    (16384, 4096),
    (8192, 8192),
    (512, 1024),
    (2048, 4096),
)


def _inplace_cases(bias: bool) -> Iterator[Case]:
    def drawn(draw: Draw, m: int, k: int) -> Call:
        # b / sqrt(K) keeps the norm of rows, so that repeated products do not overflow
        return Call((draw(m, k), draw(k, k) / k**0.5, draw(k)) if bias else (draw(m, k), draw(k, k) / k**0.5))

    sizes = [(m, k, False) for m, k in INPLACE_SIZES] + [(m, k, True) for m, k in (*NAMED_INPLACE, *SIZES["in place"])]
    for m, k, new in sizes:
        for tf32 in (False,) if new else (False, True):
            yield Case(
                f"{m}x{k}",
                lambda draw, m=m, k=k: drawn(draw, m, k),
                reference=None if bias else _IntoOneBuffer(),
                device="cuda",
                tf32=tf32,
                drawn=new,
            )
    for m, k in ((4096, 1024), *SIZES["in place on a CPU"]):
        yield Case(
            f"{m}x{k}",
            lambda draw, m=m, k=k: drawn(draw, m, k),
            reference=None if bias else _IntoOneBuffer(),
            device="cpu",
            drawn=(m, k) in SIZES["in place on a CPU"],
        )


def _feed_forward(
    x: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    chunk_bytes: int = 0,
) -> Tensor:
    inner = activated(F.linear(x, up, up_bias), activation)
    return F.layer_norm(x + F.linear(inner, down, down_bias), x.shape[-1:], weight, bias, eps)


def _layer_of(draw: Draw, x: tuple[int, ...], inner: int, **kwargs: Any) -> Call:
    h = x[-1]
    up, down = draw(inner, h) / h**0.5, draw(h, inner) / inner**0.5
    return Call((draw(*x), up, draw(inner), down, draw(h), draw(h), draw(h)), kwargs)


def _feed_forward_samples(draw: Draw) -> Iterator[Call]:
    for activation in ("gelu", "relu", "gelu_tanh", None):
        for x, inner, chunk_bytes in [
            ((5, 8), 16, 1),
            ((2, 3, 24), 40, 1 << 20),
            ((33, 16), 64, 1 << 10),
            ((8,), 8, 1),
        ]:
            yield _layer_of(draw, x, inner, activation=activation, chunk_bytes=chunk_bytes)
    call = _layer_of(draw, (6, 8), 16)
    yield Call((*call.args[:2], None, call.args[3], None), {"activation": "gelu"})


def _feed_forward_bad(draw: Draw) -> Iterator[Bad]:
    call, name = _layer_of(draw, (3, 8), 16), "feed_forward_"
    x, up, up_bias, down, down_bias = call.args[:5]
    yield Bad(Call((x, down, up_bias, down, down_bias)), rf"{name}: expected x \[..., H\], up \[I, H\] and down")
    yield Bad(Call((x, up, up_bias, up, down_bias)), rf"{name}: expected x \[..., H\], up \[I, H\] and down")
    yield Bad(Call((x, up, down_bias, down, down_bias)), rf"{name}: expected up_bias of shape \[16\], got \[8\]")
    yield Bad(Call((x, up, up_bias, down, down_bias, up_bias)), rf"{name}: expected weight of shape \[8\], got \[16\]")
    yield Bad(Call(call.args, {"activation": "sine"}), f"{name}: expected activation None, 'relu', 'gelu'")
    yield Bad(Call(call.args, {"chunk_bytes": 0}), f"{name}: expected chunk_bytes above 0")
    yield Bad(
        Call((x.to(torch.int64), *call.args[1:])), f"{name}: expected a floating-point or complex dtype, got Long"
    )
    yield Bad(Call((draw(1, 8).expand(3, 8), *call.args[1:])), f"{name}: expected out to have one memory location")
    yield Bad(Call((up[:3], *call.args[1:])), f"{name}: expected out and up not to overlap in memory")
    trained = up.clone().requires_grad_()
    yield Bad(Call((x, trained, *call.args[2:])), f"{name}: expected no gradient to be recorded")


def _feed_forward_cases() -> Iterator[Case]:
    for m, h in ((16384, 768), (8192, 1024), *SIZES["feed-forward"]):
        yield Case(
            f"{m}x{h}x{4 * h}",
            lambda draw, m=m, h=h: _layer_of(draw, (m, h), 4 * h, activation="gelu", chunk_bytes=3 * m * h * 2),
            device="cuda",
            drawn=(m, h) in SIZES["feed-forward"],
            parameters=(1, 2, 3, 4, 5, 6),
        )


INPLACE: dict[str, Any] = {"dtypes": REAL, "autocast": False}
TABLE: tuple[Spec, ...] = (
    Spec(
        name="matmul_",
        summary="`matmul_(a, b, *, transb, bias, keep_input, workspace)`: a ← a @ b, in place",
        call=inplace.matmul_,
        reference=_affine_in_place,
        operators=(_ops.matmul_.default, _ops.kept.default),
        samples=_inplace_samples,
        bad=_inplace_bad,
        empty=_inplace_empty,
        cases=tuple(_inplace_cases(bias=False)),
        memory_cases=tuple(_inplace_cases(bias=False)),
        frozen=(1,),
        rival="torch.mm(out=)",
        **INPLACE,
    ),
    Spec(
        name="linear_",
        summary="`linear_(x, weight, bias, *, keep_input, workspace)`: x ← F.linear(x, weight, bias), in place",
        call=inplace.linear_,
        reference=F.linear,
        operators=(_ops.matmul_.default,),
        samples=lambda draw: (Call((draw(*a), draw(*b[::-1]), draw(b[1]))) for a, b in INPLACE_SHAPES),
        bad=lambda draw: iter([Bad(Call((draw(3, 4), draw(5, 4))), "matmul_: expected a product no wider than a")]),
        empty=lambda draw: iter([Call((draw(0, 4), draw(4, 4), draw(4)))]),
        cases=tuple(_inplace_cases(bias=True)),
        frozen=(1,),
        rival="F.linear",
        **INPLACE,
    ),
    Spec(
        name="feed_forward_",
        summary="`feed_forward_(x, up, up_bias, down, down_bias, weight, bias, eps, *, activation, chunk_bytes)`: "
        "x ← layer_norm(x + its feed-forward network), in place, over chunks of rows",
        call=inplace.feed_forward_,
        reference=_feed_forward,
        operators=(_ops.feed_forward_.default,),
        samples=_feed_forward_samples,
        bad=_feed_forward_bad,
        empty=lambda draw: iter([_layer_of(draw, (0, 8), 16)]),
        cases=tuple(_feed_forward_cases()),
        memory_cases=tuple(_feed_forward_cases()),
        gradient=False,
        bench_dtypes=(torch.bfloat16, torch.float16),
        dtypes=REAL,
        autocast=False,
        compiled=True,
    ),
    *(
        Spec(
            name=name,
            summary=f"`{name}(a, b, n_rows, n_cols)`: a ← {formula}, in place",
            call=call,
            reference=lambda a, b, rows, columns, t=transposed: a @ turned(b, t),
            operators=(_ops.matmul_.default,),
            samples=lambda draw: (
                Call((draw(*shape), draw(shape[-1], shape[-1]), prod(shape[:-1]), shape[-1]))
                for shape in [(3, 4), (2, 3, 5), (129, 64)]
            ),
            bad=lambda draw, name=name: iter(
                [Bad(Call((draw(3, 4), draw(4, 5), 3, 4)), f"{name}: expected a contiguous tensor of 3 x 4 elements")]
            ),
            empty=lambda draw: iter([Call((draw(0, 4), draw(4, 4), 0, 4))]),
            writes=True,
            contiguous=True,
            **INPLACE,
        )
        for name, call, formula, transposed in (
            ("square_matmul", inplace.square_matmul, "a @ b", False),
            ("square_matmul_T", inplace.square_matmul_T, "a @ bᵀ", True),
        )
    ),
)
