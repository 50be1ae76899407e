"""Table rows of the masked products (two experts)."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from matmuls import masked

from .drawn import NAMED_MASKED_LINEAR, SIZES
from .spec import REAL, Bad, Call, Case, Draw, Spec

_ops = torch.ops.custom_mm


def _blend(
    x: Tensor, w1: Tensor, w2: Tensor, mask: Tensor, b1: Tensor | None = None, b2: Tensor | None = None
) -> Tensor:
    return torch.where(mask.view(*x.shape[:-1], 1), F.linear(x, w1, b1), F.linear(x, w2, b2))


def _one_linear(x: Tensor, w1: Tensor, w2: Tensor, mask: Tensor, b1: Tensor | None = None, *_: Any) -> Tensor:
    return F.linear(x, w1, b1)


def _split_linear(x: Tensor, w1: Tensor, w2: Tensor, mask: Any, *_: Any) -> Tensor:
    """Gather each expert's rows, two products, scatter; the row lists are made beforehand, untimed."""
    parts = [F.linear(x.index_select(0, rows), w) for rows, w in zip(mask.lists, (w1, w2), strict=True)]
    return torch.cat(parts).index_select(0, mask.inverse)


def _grouped(x: Tensor, stacked: Tensor, mask: Any) -> Tensor:
    y: Tensor = torch._grouped_mm(x.index_select(0, mask.order), stacked, mask.ends)  # type: ignore[attr-defined]
    return y.index_select(0, mask.inverse)


def _stacked(w1: Any, w2: Tensor) -> Tensor:
    if not hasattr(w1, "stacked"):
        w1.stacked = torch.stack([w1, w2]).mT
    stacked: Tensor = w1.stacked
    return stacked


def _grouped_linear(x: Tensor, w1: Tensor, w2: Tensor, mask: Any, *_: Any) -> Tensor:
    """torch._grouped_mm of sorted rows, gather and scatter included; the weights are stacked beforehand, untimed."""
    return _grouped(x, _stacked(w1, w2), mask)


def _grouped_training(grad: Tensor, x: Tensor, w1: Tensor, w2: Tensor, mask: Any) -> tuple[Tensor, ...]:
    """Forward and backward of `_grouped`; the gradient of the stacked weights holds both experts'."""
    x, stacked = (t.detach().requires_grad_() for t in (x, _stacked(w1, w2)))
    with torch.enable_grad():
        y = _grouped(x, stacked, mask)
    dx, d = torch.autograd.grad(y, (x, stacked), grad)
    return dx, *d.mT


def _swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def _blend_ffn(x: Tensor, *args: Any) -> Tensor:
    *weights, mask = args[:7]
    return torch.where(mask.view(*x.shape[:-1], 1), _swiglu(x, *weights[:3]), _swiglu(x, *weights[3:]))


def _split_ffn(x: Tensor, *args: Any) -> Tensor:
    """Gather each expert's rows, two SwiGLU networks, scatter; the row lists are made beforehand, untimed."""
    *weights, mask = args[:7]
    experts = zip(mask.lists, (weights[:3], weights[3:]), strict=True)
    parts = [_swiglu(x.index_select(0, rows), *expert) for rows, expert in experts]
    return torch.cat(parts).index_select(0, mask.inverse)


def _one_ffn(x: Tensor, *weights: Any) -> Tensor:
    return _swiglu(x, *weights[:3])


def _trained(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Forward and backward; returns the gradients of x and of every weight used."""

    def run(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() if _is_real(a) else a for a in args]
        with torch.enable_grad():
            y = function(*leaves)
        found = torch.autograd.grad(y, [a for a in leaves if _is_real(a)], grad, allow_unused=True)
        return tuple(g for g in found if g is not None)

    return run


def _planned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with the mask's plan instead of the mask; a model makes one plan for all of its layers."""

    def run(x: Tensor, *args: Any) -> Tensor:
        *weights, mask = args
        return function(x, *weights, mask.plan)

    return run


def _is_real(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point()


EXPERT_MASKS = ("span", "16 spans", "random 50 %", "random 5 %")


def _mask_of(draw: Draw, m: int, kind: str) -> Tensor:
    r = torch.arange(m, device=draw.device)
    noise = draw(m)
    mask = {
        "span": (r >= m // 5) & (r < m // 5 + m // 2),
        "16 spans": r * 32 // m % 2 == 1,
        "random 50 %": noise > 0,
        "random 5 %": noise > 1.645,
    }[kind]
    # Row lists that some rivals get untimed; a meta tensor has no values to count.
    lists = (r[: m // 2], r[m // 2 :]) if mask.is_meta else (mask.nonzero().squeeze(1), (~mask).nonzero().squeeze(1))
    mask.lists, mask.order = lists, torch.cat(lists)  # type: ignore[attr-defined]
    mask.inverse = torch.argsort(mask.order)  # type: ignore[attr-defined]
    mask.ends = torch.tensor([len(lists[0]), m], dtype=torch.int32, device=mask.device)  # type: ignore[attr-defined]
    mask.plan = masked.mask_plan(mask)  # type: ignore[attr-defined]
    return mask


def _masked_linear_draw(draw: Draw, m: int, k: int, n: int, kind: str) -> tuple[Any, ...]:
    return draw(m, k), draw(n, k) / k**0.5, draw(n, k) / k**0.5, _mask_of(draw, m, kind)


def _masked_ffn_draw(draw: Draw, m: int, d: int, h: int, kind: str) -> tuple[Any, ...]:
    up, down = (h, d), (d, h)
    weights = (draw(*shape) / shape[1] ** 0.5 for shape in (up, down, up, up, down, up))
    return draw(m, d), *weights, _mask_of(draw, m, kind)


def _masked_family_cases(
    draw_args: Callable[..., tuple[Any, ...]],
    sizes: tuple[tuple[int, ...], ...],
    drawn: tuple[tuple[int, ...], ...],
    ours: Callable[..., Tensor],
    blend: Callable[..., Tensor],
    dense: Callable[..., Tensor],
    others: dict[str, Callable[..., Tensor]],
    weights: tuple[int, ...],
) -> Iterator[Case]:
    def forward(draw: Draw, size: tuple[int, ...], kind: str) -> Call:
        return Call(draw_args(draw, *size, kind))

    def training(draw: Draw, size: tuple[int, ...], kind: str) -> Call:
        args = draw_args(draw, *size, kind)
        out = args[1].shape[0] if len(args) == 4 else size[1]
        return Call((draw(size[0], out), *args))

    for size, kind in product((*sizes, *drawn), EXPERT_MASKS):
        label = f"{'x'.join(map(str, size))} {kind}"
        rivals: dict[str, Any] = {"dense": dense, "others": others, "device": "cuda", "drawn": size in drawn}
        # the blend's time is the same for every mask: it is compiled for one of them
        parameters = weights if kind == EXPERT_MASKS[2] else None
        yield Case(label, partial(forward, size=size, kind=kind), call=_planned(ours), parameters=parameters, **rivals)
        if kind == EXPERT_MASKS[2]:
            yield Case(f"{label}, planning included", partial(forward, size=size, kind=kind), **rivals)
        yield Case(
            f"forward + backward {label}",
            partial(training, size=size, kind=kind),
            call=_trained(_planned(ours)),
            reference=_trained(blend),
            dense=_trained(dense),
            others={n: _grouped_training if f is _grouped_linear else _trained(f) for n, f in others.items()},
            in_place=False,
            device="cuda",
            drawn=size in drawn,
        )
    small = (1024, 512, 512)
    yield Case(
        "1024x512x512 random 50 %", partial(forward, size=small, kind=EXPERT_MASKS[2]), dense=dense, device="cpu"
    )


MASKED_LINEAR_SIZES = (
    (512, 4096, 4096),
    (8192, 1024, 1024),
    (65536, 1024, 1024),
    (16384, 4096, 4096),
    (4096, 4096, 11008),
)


def _masked_linear_samples(draw: Draw) -> Iterator[Call]:
    for lead, k, n in [((7,), 4, 5), ((2, 3), 4, 3), ((1,), 3, 2), ((33,), 16, 24), ((129,), 33, 17), ((2, 3), 1, 2)]:
        x, w1, w2 = draw(*lead, k), draw(n, k), draw(n, k)
        some = draw(*lead) > 0
        yield Call((x, w1, w2, some))
        yield Call((x, w1, w2, some, draw(n), draw(n)))
        yield Call((x, w1, w2, torch.zeros_like(some), draw(n), draw(n)))
        yield Call((x, w1, w2, ~torch.zeros_like(some)))


def _masked_linear_bad(draw: Draw) -> Iterator[Bad]:
    x, w, mask, name = draw(6, 4), draw(5, 4), draw(6) > 0, "masked_linear"
    other = torch.float32 if draw.dtype != torch.float32 else torch.float64
    yield Bad(Call((x, w, w, draw(5) > 0)), f"{name}: expected a mask or plan of 6 rows, as x of shape .* got 5")
    yield Bad(Call((x, w, w, mask.to(torch.uint8))), f"{name}: expected a mask of torch.bool, .* got torch.uint8")
    yield Bad(Call((x, draw(5, 3), w, mask)), rf"{name}: expected w1 of shape \[5, 4\], got \[5, 3\]")
    yield Bad(Call((x, w, draw(4, 4), mask)), rf"{name}: expected w2 of shape \[5, 4\], got \[4, 4\]")
    yield Bad(Call((x, w[0], w, mask)), rf"{name}: expected w1 of two dimensions, \[N, K\], got \[4\]")
    yield Bad(Call((x, w, w.to(other), mask)), f"{name}: expected w2 of dtype {draw.dtype} as x is, got {other}")
    yield Bad(Call((x, w, w, mask, draw(5))), f"{name}: expected both b1 and b2 or neither, got b1 alone")
    yield Bad(Call((x, w, w, mask, draw(5), draw(4))), rf"{name}: expected b2 of shape \[5\], got \[4\]")
    yield Bad(Call((x.to(torch.int64), w, w, mask)), f"{name}: expected x to be strided, of float64, float32, .* got")
    if draw.device != "cpu":
        yield Bad(Call((x, w, w.cpu(), mask)), f"{name}: expected w2 on cuda:0 as x is, got cpu")
        yield Bad(Call((x, w, w, mask.cpu())), f"{name}: expected the mask on cuda:0 as x is, got cpu")


def _ffn_args(draw: Draw, lead: tuple[int, ...], d: int, h: int) -> tuple[Tensor, ...]:
    weights = (draw(*shape) / max(1, shape[1]) ** 0.5 for shape in ((h, d), (d, h), (h, d)) * 2)
    return draw(*lead, d), *weights, draw(*lead) > 0


def _masked_ffn_samples(draw: Draw) -> Iterator[Call]:
    for lead, d, h in [((5,), 3, 4), ((2, 3), 4, 3), ((1,), 2, 5), ((33,), 16, 24), ((130,), 17, 33)]:
        args = _ffn_args(draw, lead, d, h)
        yield Call(args)
        yield Call((*args, True))
        yield Call((*args[:7], torch.zeros_like(args[7])))
        yield Call((*args[:7], ~torch.zeros_like(args[7])))


def _masked_ffn_bad(draw: Draw) -> Iterator[Bad]:
    x, *weights, mask = _ffn_args(draw, (6,), 4, 5)
    name = "masked_ffn"
    yield Bad(Call((x, *weights, mask[1:])), f"{name}: expected a mask or plan of 6 rows")
    yield Bad(Call((x, *weights, mask.to(draw.dtype))), f"{name}: expected a mask of torch.bool")
    for n, letter in enumerate(("w1", "w2", "w3", "u1", "u2", "u3")):
        wrong = [*weights[:n], draw(3, 3), *weights[n + 1 :]]
        yield Bad(Call((x, *wrong, mask)), rf"{name}: expected {letter} of shape")
    mixed = [*weights[:4], weights[4].to(torch.float32 if draw.dtype != torch.float32 else torch.float64), weights[5]]
    yield Bad(Call((x, *mixed, mask)), f"{name}: expected u2 of dtype {draw.dtype} as x is")


def _with_plan(call: Call, at: int) -> tuple[Any, ...]:
    """The operator's arguments, with a plan's rows and counts instead of the mask."""
    return *call.args[:at], *masked.mask_plan(call.args[at])[:2], *call.args[at + 1 :]


def _seed_linear(call: Call) -> Call:
    return Call((call.args[0], *(w.T for w in call.args[1:3]), call.args[3]))


def _seed_ffn(call: Call) -> Call:
    return Call((call.args[0], *(w.mT for w in call.args[1:7]), call.args[7]))


MASKED: dict[str, Any] = {"dtypes": REAL, "bench_dtypes": (torch.bfloat16,), "compiled": False}
TABLE: tuple[Spec, ...] = (
    Spec(
        name="masked_linear",
        summary="`masked_linear(x, w1, w2, mask, b1, b2)`: each row through one of two weights, as one product",
        call=masked.masked_linear,
        reference=_blend,
        operators=(
            _ops.masked_linear.default,
            _ops.mask_plan.default,
            _ops.masked_weights.default,
            _ops.masked_linear_forward.default,
            _ops.masked_linear_backward.default,
            _ops.masked_sums.default,
        ),
        samples=_masked_linear_samples,
        bad=_masked_linear_bad,
        empty=lambda draw: iter(
            [
                Call((draw(0, 4), draw(5, 4), draw(5, 4), draw(0) > 0)),
                Call((draw(3, 0), draw(5, 0), draw(5, 0), draw(3) > 0, draw(5), draw(5))),
                Call((draw(3, 4), draw(0, 4), draw(0, 4), draw(3) > 0)),
            ]
        ),
        cases=tuple(
            _masked_family_cases(
                _masked_linear_draw,
                MASKED_LINEAR_SIZES,
                (*NAMED_MASKED_LINEAR, *SIZES["masked_linear"]),
                masked.masked_linear,
                _blend,
                _one_linear,
                {"two products of split rows": _split_linear, "torch._grouped_mm of sorted rows": _grouped_linear},
                (1, 2),
            )
        ),
        host_case=Case("64x64x64", lambda draw: Call((draw(64, 64), draw(64, 64), draw(64, 64), draw(64) > 0))),
        rival="both products, blended",
        dense=_one_linear,
        arguments=lambda call: _with_plan(call, 3),
        **MASKED,
    ),
    Spec(
        name="masked_ffn",
        summary="`masked_ffn(x, w1, w2, w3, u1, u2, u3, mask, recompute)`: each row through one of two SwiGLU networks",
        call=masked.masked_ffn,
        reference=_blend_ffn,
        operators=(_ops.masked_ffn.default, _ops.masked_ffn_forward.default, _ops.masked_ffn_backward.default),
        samples=_masked_ffn_samples,
        bad=_masked_ffn_bad,
        empty=lambda draw: iter([Call(_ffn_args(draw, *s)) for s in (((0,), 4, 5), ((3,), 0, 5), ((3,), 4, 0))]),
        cases=tuple(
            _masked_family_cases(
                _masked_ffn_draw,
                ((8192, 1024, 2048), (16384, 4096, 11008)),
                SIZES["masked_ffn"],
                masked.masked_ffn,
                _blend_ffn,
                _one_ffn,
                {"two networks of split rows": _split_ffn},
                (1, 2, 3, 4, 5, 6),
            )
        ),
        memory_cases=tuple(
            Case(
                f"forward + backward 16384x4096x11008{', recompute' if recompute else ''}",
                lambda draw: Call((draw(16384, 4096), *_masked_ffn_draw(draw, 16384, 4096, 11008, EXPERT_MASKS[2]))),
                call=_trained(partial(masked.masked_ffn, recompute=recompute)),
                reference=_trained(_split_ffn),
                rival="two networks of split rows",
                in_place=False,
                device="cuda",
            )
            for recompute in (False, True)
        ),
        rival="both networks, blended",
        dense=_one_ffn,
        arguments=lambda call: _with_plan(call, 7),
        **MASKED,
    ),
    Spec(
        name="MaskedLinear",
        summary="`MaskedLinear.apply(x, w1, w2, mask)`: masked_linear with weights [K, N]",
        call=masked.MaskedLinear.apply,
        reference=lambda x, w1, w2, mask: _blend(x, w1.mT, w2.mT, mask),
        operators=(_ops.masked_linear.default, _ops.mask_plan.default),
        samples=lambda draw: (_seed_linear(call) for call in _masked_linear_samples(draw) if len(call.args) == 4),
        bad=lambda draw: (
            Bad(_seed_linear(bad.call), "masked_linear: expected")
            for bad in _masked_linear_bad(draw)
            if len(bad.call.args) == 4 and bad.call.args[1].dim() == 2
        ),
        empty=lambda draw: iter([Call((draw(0, 4), draw(4, 5), draw(4, 5), draw(0) > 0))]),
        dense=lambda x, w1, w2, mask: F.linear(x, w1.mT),
        **MASKED,
    ),
    Spec(
        name="MaskedFFN",
        summary="`MaskedFFN.apply(x, w1, w2, w3, u1, u2, u3, mask)`: masked_ffn with weights [K, N]",
        call=masked.MaskedFFN.apply,
        reference=lambda x, *args: _blend_ffn(x, *(w.mT for w in args[:6]), args[6]),
        operators=(_ops.masked_ffn.default, _ops.masked_ffn_forward.default, _ops.masked_ffn_backward.default),
        samples=lambda draw: (_seed_ffn(call) for call in _masked_ffn_samples(draw)),
        bad=lambda draw: (Bad(_seed_ffn(bad.call), "masked_ffn: expected") for bad in _masked_ffn_bad(draw)),
        empty=lambda draw: (_seed_ffn(Call(_ffn_args(draw, (0,), 4, 5))) for _ in range(1)),
        dense=lambda x, *args: _swiglu(x, *(w.mT for w in args[:3])),
        **MASKED,
    ),
)
