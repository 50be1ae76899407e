"""The table: one row per operation. Tests, gradcheck, opcheck, benchmarks and README's list are drawn from it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import custom_mm

from . import dense, fused_softmax, inplace, masked, rowwise, sparse

REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALL = (*REAL, torch.complex64, torch.complex128)


class Draw:
    """Random tensors of one dtype on one device: `draw(3, 4)` is standard normal of that shape, the same for a seed."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.randn(shape, generator=self._generator, dtype=wide, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class Call:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """The same call with every tensor changed."""

        def one(x: Any) -> Any:
            return change(x) if isinstance(x, Tensor) else x

        return Call(tuple(map(one, self.args)), {k: one(v) for k, v in self.kwargs.items()})


@dataclass(frozen=True)
class Bad:
    """A call that must raise RuntimeError with `match` in its message."""

    call: Call
    match: str


@dataclass(frozen=True)
class Case:
    """One benchmark: a label and its arguments; where it is not the row's own call, what it runs instead."""

    label: str
    draw: Callable[[Draw], Call]  # from draw's tensors, dtype and device alone: it runs on "meta" too
    call: Callable[..., Any] | None = None  # such as a backward operator; may return a tuple of tensors and None
    reference: Callable[..., Any] | None = None
    rival: str | None = None
    in_place: bool | None = None
    moved: Callable[[Call], int] | None = None  # bytes that must move, where not every input and result once
    device: str | None = None  # "cpu" or "cuda" alone
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)  # more rivals
    dense: Callable[..., Any] | None = None  # a rival of as many operations on the same sizes, with another result


@dataclass(frozen=True)
class Spec:
    """One row of the table."""

    name: str
    summary: str
    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]  # torch with the same arguments: the truth in float64, the rival in a benchmark
    operators: tuple[torch._ops.OpOverload, ...]  # what it runs on; each needs a CPU and a CUDA kernel
    samples: Callable[[Draw], Iterator[Call]]
    bad: Callable[[Draw], Iterator[Bad]]
    empty: Callable[[Draw], Iterator[Call]]
    cases: tuple[Case, ...] = ()
    memory_cases: tuple[Case, ...] = ()  # their peak is measured, not their time
    host_case: Case | None = None  # small enough that the host's time is all there is
    host_reference: Callable[..., Tensor] | None = None  # what a user would type for it
    dtypes: tuple[torch.dtype, ...] = ALL
    bench_dtypes: tuple[torch.dtype, ...] | None = None  # timed unless told otherwise; None: bench.GPU_DTYPES
    cpu_bench_dtypes: tuple[torch.dtype, ...] | None = None  # None: bench.CPU_DTYPES
    gradient: bool = True
    autocast: bool = True
    flops: bool = True  # torch.utils.flop_counter counts it
    rival: str = "torch"
    compiled: bool = False  # on a GPU torch.compile(reference) is a second rival
    dense: Callable[..., Any] | None = None  # what the operations are counted on, where the reference does more
    arguments: Callable[[Call], tuple[Any, ...]] | None = None  # of operators[0], where they are not the call's

    frozen: tuple[int, ...] = ()  # arguments without a gradient
    opchecks: Callable[[Draw], Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]] | None = None  # where the
    # operators take other arguments than the row's calls
    static: bool = False  # what is made depends on values: not for torch.compile(fullgraph=True)
    contiguous: bool = False  # no other layout is taken
    writes: bool = False  # written over its first argument, under a name that does not end in "_"

    @property
    def in_place(self) -> bool:
        """The first argument is written over."""
        return self.writes or self.name.endswith("_")

    def on_a_copy(self, *args: Any, **kwargs: Any) -> Tensor:
        """The call with its first argument left as it is; a leaf that requires grad is no leaf then."""
        writes = self.in_place or kwargs.get("inplace")
        return self.call(args[0].clone(), *args[1:], **kwargs) if writes else self.call(*args, **kwargs)


# ------------------------------------------------------------------------------------------------------- dense products


def _t(x: Tensor, transposed: bool) -> Tensor:
    return x.mT if transposed and x.dim() > 1 else x


def _stored(draw: Draw, shape: tuple[int, ...], transposed: bool) -> Tensor:
    """A tensor whose transpose, where asked for, has `shape`."""
    if transposed and len(shape) > 1:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return draw(*shape)


def _activated(x: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return x
    return {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}[activation](x)


SHAPES_2D = [((3, 4), (4, 5)), ((1, 1), (1, 1)), ((17, 33), (33, 9)), ((1, 64), (64, 3)), ((64, 1), (1, 64))]
SHAPES_ND = [
    ((4,), (4,)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (5, 4, 3)),
    ((2, 3, 4, 5), (2, 3, 5, 4)),
    ((5, 1, 3, 8), (1, 6, 8, 2)),
]
EMPTY = [
    ((0, 4), (4, 5)),
    ((3, 0), (0, 5)),
    ((3, 4), (4, 0)),
    ((0, 2, 3), (3, 4)),
    ((0,), (0,)),
    ((2, 3, 0), (2, 0, 4)),
]


def _calls(shapes: list[Any], transa: bool, transb: bool, **kwargs: Any) -> Callable[[Draw], Iterator[Call]]:
    def draw_calls(draw: Draw) -> Iterator[Call]:
        for a, b in shapes:
            yield Call((_stored(draw, a, transa), _stored(draw, b, transb)), dict(kwargs))

    return draw_calls


def _bad_operands(transa: bool = False, transb: bool = False) -> Callable[[Draw], Iterator[Bad]]:
    def draw_bad(draw: Draw) -> Iterator[Bad]:
        a, b = _stored(draw, (3, 4), transa), _stored(draw, (4, 5), transb)
        yield Bad(
            Call((a, _stored(draw, (6, 5), transb))), "matmul: expected a and b with equal inner sizes, got 4 and 6"
        )
        other = torch.float32 if draw.dtype != torch.float32 else torch.float64
        yield Bad(Call((a, b.real.to(other))), "matmul: expected b of dtype")
        yield Bad(
            Call((a.real.to(torch.int64), b.real.to(torch.int64))),
            "expected a floating-point or complex dtype, got Long",
        )
        yield Bad(Call((a.real.to_sparse().to(draw.dtype), b)), "Sparse|expected a to be a strided")
        if draw.device != "cpu":
            yield Bad(Call((a, b.cpu())), "matmul: expected b on cuda:0 as a is, got cpu")

    return draw_bad


def _bad_nd(transa: bool, transb: bool) -> Callable[[Draw], Iterator[Bad]]:
    def draw_bad(draw: Draw) -> Iterator[Bad]:
        yield from _bad_operands(transa, transb)(draw)
        yield Bad(Call((draw(), draw(4, 4))), "matmul: expected a and b of at least one dimension")
        yield Bad(Call((draw(2, 4, 4), draw(3, 4, 4))), "matmul: expected batch dimensions that broadcast, got 2 and 3")

    return draw_bad


def _product_cases(transa: bool, transb: bool, sizes: tuple[int, ...]) -> tuple[Case, ...]:
    def case(label: str, a: tuple[int, ...], b: tuple[int, ...]) -> Case:
        return Case(label, lambda draw: Call((_stored(draw, a, transa), _stored(draw, b, transb))))

    square = [case(f"{n}x{n}x{n}", (n, n), (n, n)) for n in sizes]
    batched = []
    for batch, heads, length, width in ((16, 16, 512, 64), (64, 12, 512, 64)):
        lead = (batch, heads)
        batched.append(case(f"{batch}x{heads}x{length}x{width} scores", (*lead, length, width), (*lead, width, length)))
        batched.append(
            case(f"{batch}x{heads}x{length}x{width} context", (*lead, length, length), (*lead, length, width))
        )
    return (*square, case("65536x1024x1024", (65536, 1024), (1024, 1024)), *batched)


SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_MATMUL = (torch.ops.custom_mm.matmul.default,)


def _product_spec(name: str, call: Callable[..., Tensor], transa: bool, transb: bool, formula: str) -> Spec:
    return Spec(
        name=name,
        summary=formula,
        call=call,
        reference=lambda a, b: torch.matmul(_t(a, transa), _t(b, transb)),
        operators=_MATMUL,
        samples=_calls(SHAPES_2D + SHAPES_ND, transa, transb),
        bad=_bad_nd(transa, transb),
        empty=_calls(EMPTY, transa, transb),
        cases=_product_cases(transa, transb, SIZES),
        host_case=Case("64x64x64", lambda draw: Call((draw(64, 64), draw(64, 64)))),
        host_reference=torch.matmul,
        rival="torch.matmul",
    )


def _matmul_samples(draw: Draw) -> Iterator[Call]:
    for (a, b), transa, transb in product(SHAPES_2D + SHAPES_ND, (False, True), (False, True)):
        yield Call((_stored(draw, a, transa), _stored(draw, b, transb)), {"transa": transa, "transb": transb})


def _affine(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    transa: bool = False,
    transb: bool = False,
) -> Tensor:
    if b.dim() == 2 and bias is not None:
        x = F.linear(_t(a, transa), b if transb else b.mT, bias)
    else:
        x = torch.matmul(_t(a, transa), _t(b, transb))
        x = x if bias is None else x + bias.to(x.dtype)
    return _activated(x, activation)


AFFINE = [
    ((3, 4), (4, 8)),
    ((17, 64), (64, 24)),
    ((2, 3, 4), (4, 8)),
    ((4,), (4, 8)),
    ((2, 3, 4), (2, 4, 8)),
    ((9, 7), (7, 5)),
]


def _affine_samples(draw: Draw) -> Iterator[Call]:
    activations = (None,) if draw.dtype.is_complex else (None, "relu", "gelu", "gelu_tanh")
    for (a, b), activation, transb, with_bias in product(AFFINE, activations, (False, True), (True, False)):
        bias = draw(b[-1]) if with_bias else None
        args = (draw(*a), _stored(draw, b, transb), bias, activation, False, transb)
        yield Call(args)
    yield Call((draw(6, 4), draw(5, 6), draw(5), None, True, True))
    for activation in activations:
        yield Call((draw(4), draw(4), None, activation))
        yield Call((draw(2, 3, 4), draw(4), None, activation))


def _affine_bad(draw: Draw) -> Iterator[Bad]:
    a, b = draw(3, 4), draw(4, 5)
    yield Bad(Call((a, draw(6, 5), draw(5))), "cublaslt_matmul: expected a and b with equal inner sizes, got 4 and 6")
    yield Bad(Call((a, b, draw(4))), r"cublaslt_matmul: expected bias of shape \[5\]")
    yield Bad(Call((a, draw(4), draw(1))), "cublaslt_matmul: expected b of at least two dimensions beside a bias")
    yield Bad(Call((a, b, None, "tanh")), "cublaslt_matmul: expected activation None, 'relu', 'gelu' or 'gelu_tanh'")
    if draw.dtype.is_complex:
        yield Bad(Call((a, b, None, "relu")), "cublaslt_matmul: expected no activation")
    if draw.device != "cpu":
        yield Bad(Call((a, b, draw(5).cpu())), "cublaslt_matmul: expected bias on cuda:0 as a is, got cpu")


def _affine_empty(draw: Draw) -> Iterator[Call]:
    for a, b in EMPTY[:4]:
        yield Call((draw(*a), draw(*b), draw(b[-1]), None if draw.dtype.is_complex else "relu"))


def _linear_case(label: str, m: int, k: int, n: int, activation: str | None) -> Case:
    return Case(
        f"{label} {m}x{k}x{n}", lambda draw: Call((draw(m, k), draw(n, k) / k**0.5, draw(n), activation, False, True))
    )


def _bias_act_samples(draw: Draw) -> Iterator[Call]:
    for shape, activation in product(
        [(5,), (3, 8), (2, 3, 16), (7, 33), (64, 1), (33, 2056)], (None, "relu", "gelu", "gelu_tanh")
    ):
        yield Call((draw(*shape), draw(shape[-1]), activation))
        yield Call((draw(*shape), None, activation))


def _bias_act_bad(draw: Draw) -> Iterator[Bad]:
    x = draw(3, 4)
    yield Bad(Call((x, draw(3))), r"bias_act_: expected bias of shape \[4\], got \[3\]")
    yield Bad(Call((x, None, "tanh")), "bias_act_: expected activation None, 'relu', 'gelu' or 'gelu_tanh', got 'tanh'")
    yield Bad(
        Call((draw(3, 1).expand(3, 4), None, "relu")), "bias_act_: expected out to have one memory location per element"
    )
    yield Bad(Call((x, x[0])), "bias_act_: expected out and bias not to overlap in memory")
    yield Bad(Call((x.to(torch.int64), None)), "bias_act_: expected a floating-point dtype, got Long")


# ---------------------------------------------------------------------------------------------------- in-place products


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
    yield Bad(Call((a, b), {"workspace": 0}), "matmul_: expected a workspace of at least one row of a")
    if draw.device != "cpu":
        yield Bad(Call((a, b.cpu())), "matmul_: expected b on cuda:0 as a is, got cpu")


def _inplace_empty(draw: Draw) -> Iterator[Call]:
    yield Call((draw(0, 4), draw(4, 4)))
    yield Call((draw(3, 4), draw(4, 0)))


class _IntoOneBuffer:
    """torch.mm(a, b, out=c), c being there already."""

    out: Tensor | None = None

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        if self.out is None or (self.out.shape, self.out.dtype, self.out.device) != (a.shape, a.dtype, a.device):
            self.out = torch.empty_like(a)
        return torch.mm(a, b, out=self.out)


def _inplace_cases(bias: bool) -> Iterator[Case]:
    def drawn(draw: Draw, m: int, k: int) -> Call:
        # a matrix that keeps lengths: a may go through it many times
        return Call((draw(m, k), draw(k, k) / k**0.5, draw(k)) if bias else (draw(m, k), draw(k, k) / k**0.5))

    for m, k in [
        (40000, 1024),
        (16384, 768),
        (65536, 768),
        (16384, 1024),
        (16384, 2048),
        (16384, 4096),
        (8192, 8192),
        (512, 1024),
        (2048, 4096),
    ]:
        yield Case(
            f"{m}x{k}",
            lambda draw, m=m, k=k: drawn(draw, m, k),
            reference=None if bias else _IntoOneBuffer(),
            device="cuda",
        )
    yield Case(
        "4096x1024",
        lambda draw: drawn(draw, 4096, 1024),
        reference=None if bias else _IntoOneBuffer(),
        device="cpu",
    )


INPLACE: dict[str, Any] = {"dtypes": REAL, "autocast": False, "flops": False}


# ------------------------------------------------------------------------------------------------------------- rows

# 2^29 elements: 1 GB in 16 bits, so that the L2 holds none of it.
COLUMNS = (128, 384, 512, 768, 1000, 1024, 2048, 4096, 8191, 8192, 16384, 65536, 262144)
ROW_SHAPES = [(5,), (3, 8), (1, 1), (4, 3, 33), (7, 64), (2, 300), (33, 1), (1, 2056)]
BAD_X = "expected x of a floating-point dtype, got Long"


def _row_cases(
    forward: Callable[[Draw, int, int], Call], backward: Callable[[Draw, int, int], Call], **functions: Any
) -> tuple[Case, ...]:
    """Forward and backward over 2^29 elements on a GPU; forward on a CPU."""

    def case(direction: str, draw: Callable[[Draw, int, int], Call], rows: int, columns: int, device: str) -> Case:
        own = functions if direction == "backward" else {}
        return Case(f"{direction} {rows}x{columns}", lambda d: draw(d, rows, columns), device=device, **own)

    gpu = [(2**29 // columns, columns) for columns in COLUMNS]
    return (
        *(case("forward", forward, *shape, "cuda") for shape in gpu),
        *(case("backward", backward, *shape, "cuda") for shape in gpu),
        *(case("forward", forward, *shape, "cpu") for shape in ((4096, 1024), (64, 65536))),
    )


def _softmax_samples(draw: Draw) -> Iterator[Call]:
    for shape in ROW_SHAPES:
        yield Call((draw(*shape),))
    for dim in (0, 1, -2):
        yield Call((draw(4, 3, 5), dim))


def _softmax_bad(name: str) -> Callable[[Draw], Iterator[Bad]]:
    def draw_bad(draw: Draw) -> Iterator[Bad]:
        yield Bad(Call((draw(3, 4).to(torch.int64),)), f"{name}: {BAD_X}")
        yield Bad(Call((draw(3, 4), 2)), f"{name}: expected dim between -2 and 1, got 2")
        if name.endswith("_"):
            yield Bad(Call((draw(3, 1).expand(3, 4),)), f"{name}: expected out to have one memory location per element")

    return draw_bad


def _softmax_gradient(y: Tensor, grad: Tensor, dim: int = -1) -> Tensor:
    return torch.ops.aten._softmax_backward_data(grad, y, dim, y.dtype)


def _softmax_backward_draw(draw: Draw, rows: int, columns: int) -> Call:
    return Call((torch.softmax(draw(rows, columns), -1), draw(rows, columns)))


def _softmax_backward_samples(draw: Draw) -> Iterator[Call]:
    for call in _softmax_samples(draw):
        dim = call.args[1] if len(call.args) > 1 else -1
        yield Call((torch.softmax(call.args[0], dim), draw(*call.args[0].shape), dim))


def _softmax_backward_bad(draw: Draw) -> Iterator[Bad]:
    y = draw(3, 4)
    yield Bad(Call((y, draw(4, 3))), r"softmax_backward: expected grad of y's shape \[3, 4\], got \[4, 3\]")
    yield Bad(Call((y, draw(3, 4).to(torch.int64))), "softmax_backward: expected grad to be a strided tensor in")
    yield Bad(Call((y, draw(3, 4), -3)), "softmax_backward: expected dim between -2 and 1, got -3")


_SOFTMAX_BACKWARD_CASES = {
    "call": torch.ops.custom_mm.softmax_backward.default,
    "reference": _softmax_gradient,
    "in_place": False,
}


def _norm(
    rms: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None
) -> Tensor:
    h = x if residual is None else x + residual
    size = x.shape[-1:]
    return F.rms_norm(h, size, weight, eps) if rms else F.layer_norm(h, size, weight, bias, eps)


def _layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor:
    return _norm(False, x, weight, bias, eps, residual)


def _rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5, residual: Tensor | None = None) -> Tensor:
    return _norm(True, x, weight, None, eps, residual)


NORM_SHAPES = [(5,), (3, 8), (4, 3, 33), (7, 64), (2, 300), (1, 2056)]  # not 1 column: it is 0 by cancellation


def _layer_norm_samples(draw: Draw) -> Iterator[Call]:
    for shape in NORM_SHAPES:
        n = shape[-1]
        yield Call((draw(*shape),))
        yield Call((draw(*shape), draw(n), draw(n), 1e-5, draw(*shape)))
    yield Call((draw(3, 8), draw(8), None, 1e-3))
    yield Call((draw(3, 8), None, draw(8)))
    yield Call((draw(3, 8), None, None, 1e-5, draw(3, 8)))


def _rms_norm_samples(draw: Draw) -> Iterator[Call]:
    for shape in NORM_SHAPES:
        yield Call((draw(*shape),))
        yield Call((draw(*shape), draw(shape[-1]), 1e-5, draw(*shape)))
    yield Call((draw(3, 8), draw(8), 1e-3))


def _norm_bad(name: str) -> Callable[[Draw], Iterator[Bad]]:
    def draw_bad(draw: Draw) -> Iterator[Bad]:
        x = draw(3, 4)
        yield Bad(Call((x.to(torch.int64),)), f"{name}: {BAD_X}")
        yield Bad(Call((x, draw(3))), rf"{name}: expected weight of shape \[4\], got \[3\]")
        yield Bad(Call((x, draw(4).to(torch.int64))), f"{name}: expected weight to be a strided tensor in")
        yield Bad(Call((x, x[0])), f"{name}: expected out and weight not to overlap")
        yield Bad(Call((draw(3, 1).expand(3, 4),)), f"{name}: expected out to have one memory location per element")
        yield Bad(
            Call((x, None), {"residual": draw(4)}), rf"{name}: expected residual of x's shape \[3, 4\], got \[4\]"
        )
        yield Bad(Call((x, None), {"residual": x}), f"{name}: expected out and residual not to overlap")
        yield Bad(Call((x,), {"eps": -1.0}), f"{name}: expected eps of 0 or more, got -1")
        if draw.device != "cpu":
            yield Bad(Call((x, draw(4).cpu())), f"{name}: expected weight to be a strided tensor in .* on cuda:0")

    return draw_bad


def _norm_backward_draw(rms: bool) -> Callable[[Draw, int, int], Call]:
    def draw_call(draw: Draw, rows: int, columns: int) -> Call:
        rstd = draw(rows).float().abs()
        return Call((draw(rows, columns), draw(rows, columns), rstd, draw(columns), rms))

    return draw_call


def _norm_gradient(grad: Tensor, xhat: Tensor, rstd: Tensor, weight: Tensor, rms: bool) -> tuple[Tensor, ...]:
    """torch's own, where it has one that starts from what was kept."""
    if not rms:
        # with mean 0 and rstd 1 torch's xhat is its input: dx lacks the factor rstd alone
        zeros, ones = torch.zeros_like(rstd), torch.ones_like(rstd)
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            grad, xhat, grad.shape[-1:], zeros.unsqueeze(-1), ones.unsqueeze(-1), weight, weight, [True, True, True]
        )
        return (dx.to(rstd.dtype) * rstd.unsqueeze(-1)).to(grad.dtype), dweight, dbias
    wide = torch.promote_types(grad.dtype, rstd.dtype)
    g, h = grad.to(wide), xhat.to(wide)
    d = g * weight
    dx = rstd.unsqueeze(-1) * (d - h * (d * h).mean(-1, keepdim=True))
    return dx.to(grad.dtype), (g * h).sum(0).to(grad.dtype), g.sum(0).to(grad.dtype)


_NORM_BACKWARD_CASES = {
    "call": torch.ops.custom_mm.norm_backward.default,
    "reference": _norm_gradient,
    "in_place": False,
}

ATTENTION = [(8, 16, 1024, 1024), (2, 16, 4096, 4096), (32, 12, 512, 512), (64, 12, 128, 128)]
MASKS: dict[str, Callable[[int, int, int, int], tuple[int, ...]]] = {
    "[B,1,1,K]": lambda b, h, q, k: (b, 1, 1, k),
    "[B,1,Q,K]": lambda b, h, q, k: (b, 1, q, k),
    "causal": lambda b, h, q, k: (),
}


def _masked(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False, inplace: bool = False
) -> Tensor:
    """As a user would write it, and rows with nothing to attend to are 0."""
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
    """As a user would write it where no row is masked throughout."""
    if causal:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return torch.softmax((x * scale).masked_fill(mask, torch.finfo(x.dtype).min), -1)


def _eager_masked_gradient(
    y: Tensor, grad: Tensor, dim: int, scale: float, causal: bool, mask: Tensor | None = None
) -> Tensor:
    if causal:
        mask = torch.ones(y.shape[-2:], dtype=torch.bool, device=y.device).triu(1)
    return _softmax_gradient(y, grad, dim).masked_fill(mask, 0) * scale


def _masked_backward(
    y: Tensor, grad: Tensor, dim: int, scale: float, causal: bool, mask: Tensor | None = None
) -> Tensor:
    return torch.ops.custom_mm.softmax_backward.default(y, grad, dim, scale, causal)


def _masked_cases() -> Iterator[Case]:
    for shape, (label, mask_shape) in product(ATTENTION, MASKS.items()):
        causal, name = label == "causal", "x".join(map(str, shape))
        sizes, length = mask_shape(*shape), shape[-1]
        seen = (length + 1) / (2 * length) if causal else 1.0  # of the columns, by the rows together

        def forward(draw: Draw, shape: Any = shape, sizes: Any = sizes, causal: bool = causal) -> Call:
            mask = None if causal else draw(*sizes) > 1
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
        )
        yield Case(
            f"backward {name} {label}",
            backward,
            call=_masked_backward,
            reference=_eager_masked_gradient,
            device="cuda",
            # the mask is not read: y is 0 there
            moved=lambda call, seen=seen: int(call.args[0].nbytes * (1 + 2 * seen)),
        )


def _attention(masked_softmax: Callable[..., Tensor], scores: Any, context: Any) -> Callable[..., Any]:
    """Forward and backward of attention's core with its probabilities kept; returns the three gradients."""

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
    yield Bad(Call((x, draw(3, 4).to(torch.int32))), f"{name}: expected a mask in Bool, Byte, .* got Int")
    yield Bad(Call((draw(4),), {"causal": True}), f"{name}: expected x of at least two dimensions where causal")
    yield Bad(Call((x, x), {"inplace": True}), f"{name}: expected out and mask not to overlap")
    yield Bad(Call((draw(3, 1).expand(3, 4),), {"inplace": True}), f"{name}: expected out to have one memory location")
    if draw.device != "cpu":
        yield Bad(Call((x, draw(4).cpu())), f"{name}: expected mask on cuda:0 as x is, got cpu")


def _no_rows(draw: Draw) -> Iterator[Call]:
    yield Call((draw(0, 4),))
    yield Call((draw(3, 0),))


# ------------------------------------------------------------------------------------------------------------- masked


def _blend(
    x: Tensor, w1: Tensor, w2: Tensor, mask: Tensor, b1: Tensor | None = None, b2: Tensor | None = None
) -> Tensor:
    return torch.where(mask.view(*x.shape[:-1], 1), F.linear(x, w1, b1), F.linear(x, w2, b2))


def _one_linear(x: Tensor, w1: Tensor, w2: Tensor, mask: Tensor, b1: Tensor | None = None, *_: Any) -> Tensor:
    return F.linear(x, w1, b1)


def _split_linear(x: Tensor, w1: Tensor, w2: Tensor, mask: Any, *_: Any) -> Tensor:
    """Two products of the rows picked out; the lists are made beforehand, untimed."""
    i1, i2 = mask.lists
    y = x.new_empty(x.shape[0], w1.shape[0])
    y[i1] = F.linear(x[i1], w1)
    y[i2] = F.linear(x[i2], w2)
    return y


def _grouped_linear(x: Tensor, w1: Tensor, w2: Tensor, mask: Any, *_: Any) -> Tensor:
    """torch's grouped product of sorted rows, on weights stacked beforehand, with what sorting and back costs."""
    order, ends = torch.cat(mask.lists), mask.ends
    if not hasattr(w1, "stacked"):
        w1.stacked = torch.stack([w1, w2]).mT  # type: ignore[attr-defined]
    y = x.new_empty(x.shape[0], w1.shape[0])
    y[order] = torch._grouped_mm(x[order], w1.stacked, ends)  # type: ignore[attr-defined]
    return y


def _swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def _blend_ffn(x: Tensor, *args: Any) -> Tensor:
    *weights, mask = args[:7]
    return torch.where(mask.view(*x.shape[:-1], 1), _swiglu(x, *weights[:3]), _swiglu(x, *weights[3:]))


def _one_ffn(x: Tensor, *weights: Any) -> Tensor:
    return _swiglu(x, *weights[:3])


def _trained(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Forward and backward: the gradients of x and of every weight that took part."""

    def run(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() if _is_real(a) else a for a in args]
        y = function(*leaves)
        found = torch.autograd.grad(y, [a for a in leaves if _is_real(a)], grad, allow_unused=True)
        return tuple(g for g in found if g is not None)

    return run


def _planned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """With the mask's plan, made beforehand: a model makes one for all of its layers."""

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
    if not mask.is_meta:  # what some rivals are given beforehand
        mask.lists = (mask.nonzero().squeeze(1), (~mask).nonzero().squeeze(1))  # type: ignore[attr-defined]
        mask.ends = torch.tensor([int(mask.sum()), m], dtype=torch.int32, device=mask.device)  # type: ignore[attr-defined]
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
    sizes: tuple[tuple[int, int, int], ...],
    ours: Callable[..., Tensor],
    blend: Callable[..., Tensor],
    dense: Callable[..., Tensor],
    others: dict[str, Callable[..., Tensor]],
) -> Iterator[Case]:
    def forward(draw: Draw, size: tuple[int, int, int], kind: str) -> Call:
        return Call(draw_args(draw, *size, kind))

    def training(draw: Draw, size: tuple[int, int, int], kind: str) -> Call:
        args = draw_args(draw, *size, kind)
        out = args[1].shape[0] if len(args) == 4 else size[1]
        return Call((draw(size[0], out), *args))

    for size, kind in product(sizes, EXPERT_MASKS):
        label = f"{'x'.join(map(str, size))} {kind}"
        rivals: dict[str, Any] = {"dense": dense, "others": others, "device": "cuda"}
        yield Case(label, partial(forward, size=size, kind=kind), call=_planned(ours), **rivals)
        if kind == EXPERT_MASKS[2]:
            yield Case(f"{label}, planning included", partial(forward, size=size, kind=kind), **rivals)
        yield Case(
            f"forward + backward {label}",
            partial(training, size=size, kind=kind),
            call=_trained(_planned(ours)),
            reference=_trained(blend),
            dense=_trained(dense),
            others={name: _trained(f) for name, f in others.items() if f is not _grouped_linear},
            in_place=False,
            device="cuda",
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
    """The operator's arguments: a plan's rows and counts instead of the mask."""
    return *call.args[:at], *masked.mask_plan(call.args[at])[:2], *call.args[at + 1 :]


def _seed_linear(call: Call) -> Call:
    return Call((call.args[0], *(w.T for w in call.args[1:3]), call.args[3]))


def _seed_ffn(call: Call) -> Call:
    return Call((call.args[0], *(w.mT for w in call.args[1:7]), call.args[7]))


ROWWISE: dict[str, Any] = {
    "dtypes": REAL,
    "bench_dtypes": (torch.bfloat16, torch.float32),
    "cpu_bench_dtypes": (torch.float32, torch.bfloat16),
    "autocast": False,
    "flops": False,
}
MASKED: dict[str, Any] = {"dtypes": REAL, "bench_dtypes": (torch.bfloat16,), "compiled": False}
_ops = torch.ops.custom_mm


# ------------------------------------------------------------------------------------------------------ sparse products


def _sparse_plan(draw: Draw, rows: int, columns: int, layout: str = "csr") -> Any:
    """A plan of a random matrix, about a quarter full, with an empty row where there are some."""
    dense = torch.zeros(rows, columns, device=draw.device, dtype=draw.dtype)
    if rows * columns:
        chosen = Draw(torch.float64, "cpu", rows * 1000 + columns)(rows, columns) > 0.7
        chosen[rows // 2] &= rows < 3
        dense[chosen.to(draw.device)] = 1
    return sparse.plan(getattr(dense, f"to_sparse_{layout}")())


def _stored_dense(plan: Any, values: Tensor) -> Tensor:
    """The matrix of a plan with other values, dense; differentiable."""
    s = plan._structure
    rows = torch.repeat_interleave(torch.arange(s.rows, device=values.device), s.crow.diff().long())
    if s.order is not None:
        values = values[..., s.order.long()]
    index = (rows * s.columns + s.col.long()).expand(values.shape)
    flat = values.new_zeros(*values.shape[:-1], s.rows * s.columns).scatter(-1, index, values)
    return flat.view(*values.shape[:-1], s.rows, s.columns)


def _in_order(plan: Any, dense: Tensor) -> Tensor:
    """What a dense matrix, or a batch, has where a plan has nonzeros, in the order of the plan's values."""
    s = plan._structure
    rows = torch.repeat_interleave(torch.arange(s.rows, device=dense.device), s.crow.diff().long())
    found = dense[..., rows, s.col.long()]
    return found if s.order is None else found[..., torch.argsort(s.order)]


def _spmm_reference(values: Tensor, b: Tensor, plan: Any, reduce: str = "sum", alpha: float = 1) -> Tensor:
    dense = _stored_dense(plan, values)
    if reduce == "sum":
        return alpha * (dense @ b)
    stored = _stored_dense(plan, torch.ones_like(values)) != 0
    lengths = stored.sum(-1, keepdim=True)
    if reduce == "mean":
        total = dense @ b
        return alpha * (total / lengths.clamp_min(1).to(total.dtype))
    end = -torch.inf if reduce == "max" else torch.inf
    terms = torch.where(stored.unsqueeze(-1), dense.unsqueeze(-1) * b.unsqueeze(-3), end)
    best = terms.amax(-2) if reduce == "max" else terms.amin(-2)
    return alpha * torch.where(lengths > 0, best, 0)


def _spmm_call(values: Tensor, b: Tensor, plan: Any, **kwargs: Any) -> Tensor:
    return sparse.spmm(plan.with_values(values), b, **kwargs)


SPARSE_SHAPES = [(6, 5, 3), (1, 1, 1), (9, 17, 8), (33, 20, 64), (4, 300, 5)]


def _spmm_samples(draw: Draw) -> Iterator[Call]:
    for (rows, columns, n), layout, reduce in product(SPARSE_SHAPES, ("csr", "csc"), ("sum", "mean", "max", "min")):
        plan = _sparse_plan(draw, rows, columns, layout)
        yield Call((draw(plan.nnz), draw(columns, n), plan), {"reduce": reduce, "alpha": 0.5})
    plan = _sparse_plan(draw, 7, 5)
    yield Call((draw(plan.nnz), draw(2, 3, 5, 4), plan))


def _spmm_bad(draw: Draw) -> Iterator[Bad]:
    plan = _sparse_plan(draw, 6, 5)
    yield Bad(Call((draw(plan.nnz), draw(6, 3), plan)), r"spmm: expected dense of shape \[..., 5, n\]")
    yield Bad(Call((draw(plan.nnz), draw(5, 3).long(), plan)), "spmm: expected dense of a floating-point dtype")
    other = torch.float32 if draw.dtype != torch.float32 else torch.float64
    yield Bad(Call((draw(plan.nnz).to(other), draw(5, 3), plan)), "spmm: expected values to be a strided tensor in")
    if draw.device != "cpu":
        yield Bad(Call((draw(plan.nnz), draw(5, 3).cpu(), plan)), "spmm: expected values to be a strided tensor in")


def _spmm_opchecks(draw: Draw) -> Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    s = _sparse_plan(draw, 6, 5)._structure
    transposed = _ops.csr_transpose(s.crow, s.col, 5)
    for reduce in ("sum", "mean", "max"):
        values, dense = draw(s.nonzeros).requires_grad_(), draw(2, 5, 3).requires_grad_()
        yield _ops.csr_spmm.default, (s.crow, s.col, values, dense, 5, reduce, 0.5)
        yield _ops.csr_spmm.default, (s.crow, s.col, values, dense, 5, reduce, 1.0, None, *transposed)
    yield _ops.csr_spmm_arg.default, (s.crow, s.col, values, dense, 5, "min")
    chosen = _ops.csr_spmm_arg(s.crow, s.col, values.detach(), dense.detach(), 5, "max")[1]
    yield _ops.csr_spmm.default, (s.crow, s.col, values, dense, 5, "sum", 1.0, None, *transposed, chosen)
    yield _ops.csr_check.default, (s.crow, s.col, 5)
    yield _ops.csr_transpose.default, (s.crow, s.col, 5)


def _sddmm_samples(draw: Draw) -> Iterator[Call]:
    for rows, columns, n in SPARSE_SHAPES:
        for layout in ("csr", "csc"):
            yield Call((draw(rows, n), draw(n, columns), _sparse_plan(draw, rows, columns, layout)))
    yield Call((draw(2, 1, 7, 8), draw(3, 8, 5), _sparse_plan(draw, 7, 5)), {"alpha": 0.5})


def _sddmm_bad(draw: Draw) -> Iterator[Bad]:
    plan = _sparse_plan(draw, 6, 5)
    yield Bad(Call((draw(5, 3), draw(3, 5), plan)), r"sddmm: expected a of shape \[..., 6, n\]")
    yield Bad(Call((draw(6, 3), draw(4, 5), plan)), r"sddmm: expected b, transposed, of shape \[..., 5, 3\]")


def _sddmm_opchecks(draw: Draw) -> Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    s = _sparse_plan(draw, 6, 5)._structure
    a, b = draw(2, 6, 3).requires_grad_(), draw(5, 3).requires_grad_()
    yield _ops.csr_sddmm.default, (s.crow, s.col, a, b, 5)
    yield _ops.csr_sddmm.default, (s.crow, s.col, a, b, 5, 0.5, *[None] * 5, False, True)


def _sparse_softmax_reference(values: Tensor, plan: Any, scale: float = 1.0) -> Tensor:
    stored = _stored_dense(plan, torch.ones_like(values)) != 0
    scores = torch.where(stored, _stored_dense(plan, values) * scale, -torch.inf)
    return _in_order(plan, torch.softmax(scores, -1))


def _sparse_softmax_samples(draw: Draw) -> Iterator[Call]:
    for rows, columns, _ in SPARSE_SHAPES:
        for layout in ("csr", "csc"):
            plan = _sparse_plan(draw, rows, columns, layout)
            yield Call((draw(plan.nnz), plan), {"scale": 0.5})
    plan = _sparse_plan(draw, 7, 5)
    yield Call((draw(2, 3, plan.nnz), plan))


def _sparse_softmax_opchecks(draw: Draw) -> Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    s = _sparse_plan(draw, 6, 5)._structure
    x, grad = draw(2, s.nonzeros).requires_grad_(), draw(2, s.nonzeros).requires_grad_()
    yield _ops.csr_softmax.default, (s.crow, x, 0.5)
    yield _ops.csr_softmax_backward.default, (s.crow, x, grad, 0.5)


def _sparse_attention_reference(q: Tensor, k: Tensor, v: Tensor, plan: Any, scale: float | None = None) -> Tensor:
    stored = _stored_dense(plan, torch.ones(plan.nnz, dtype=q.dtype, device=q.device)) != 0
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    probabilities = torch.softmax(torch.where(stored, scores, -torch.inf), -1)
    return torch.where(stored.any(-1, keepdim=True), probabilities, 0).to(v.dtype) @ v


def _sparse_attention_samples(draw: Draw) -> Iterator[Call]:
    for rows, columns, n in SPARSE_SHAPES:
        plan = _sparse_plan(draw, rows, columns)
        yield Call((draw(rows, n), draw(columns, n), draw(columns, 3), plan))
    plan = _sparse_plan(draw, 7, 5, "csc")
    yield Call((draw(2, 7, 4), draw(2, 5, 4), draw(2, 5, 6), plan), {"scale": 0.3})


def _half_empty(draw: Draw, *shape: int) -> Tensor:
    x = draw(*shape)
    return torch.where(x.abs() > 0.5, x, 0)


SPARSE: dict[str, Any] = {"dtypes": REAL, "flops": False}


TABLE: tuple[Spec, ...] = (
    Spec(
        name="matmul",
        summary="`matmul(a, b, *, transa, transb, bias, activation, out)`: op(a) @ op(b), 1-D to N-D",
        call=dense.matmul,
        reference=lambda a, b, transa=False, transb=False: torch.matmul(_t(a, transa), _t(b, transb)),
        operators=(*_MATMUL, torch.ops.custom_mm.matmul.out),
        samples=_matmul_samples,
        bad=_bad_nd(False, False),
        empty=_calls(EMPTY, False, False),
        cases=_product_cases(False, False, SIZES),
        host_case=Case("64x64x64", lambda draw: Call((draw(64, 64), draw(64, 64)))),
        host_reference=torch.matmul,
        rival="torch.matmul",
    ),
    _product_spec("cublasMM", dense.cublasMM.apply, False, False, "`cublasMM.apply(a, b)`: a @ b"),
    _product_spec("cublasTransaMM", dense.cublasTransaMM.apply, True, False, "`cublasTransaMM.apply(a, b)`: aᵀ @ b"),
    _product_spec("cublasTransbMM", dense.cublasTransbMM.apply, False, True, "`cublasTransbMM.apply(a, b)`: a @ bᵀ"),
    _product_spec("cublasTransabMM", dense.cublasTransabMM.apply, True, True, "`cublasTransabMM.apply(a, b)`: aᵀ @ bᵀ"),
    Spec(
        name="cublas_mmul",
        summary="`custom_mm.cublas_mmul(a, b, c, transa, transb)`: two matrices by cublasGemmEx",
        call=custom_mm.cublas_mmul,
        reference=torch.matmul,
        operators=_MATMUL,
        samples=_calls(SHAPES_2D, False, False),
        bad=_bad_operands(),
        empty=_calls(EMPTY[:3], False, False),
    ),
    Spec(
        name="cublas_bmm",
        summary="`custom_mm.cublas_bmm(a, b, c, dim, transa, transb)`: batches by cublasGemmStridedBatchedEx",
        call=custom_mm.cublas_bmm,
        reference=torch.matmul,
        operators=_MATMUL,
        samples=_calls([s for s in SHAPES_ND if len(s[0]) == len(s[1]) > 2], False, False),
        bad=lambda draw: iter([Bad(Call((draw(2, 3), draw(3, 2))), "cublas_bmm: expected at least 3 dimensions each")]),
        empty=_calls(EMPTY[5:], False, False),
    ),
    Spec(
        name="cublaslt_matmul",
        summary="`custom_mm.cublaslt_matmul(a, b, bias, activation)`: bias and activation in cuBLASLt's epilogue",
        call=custom_mm.cublaslt_matmul,
        reference=_affine,
        operators=(torch.ops.custom_mm.cublaslt_matmul.default, torch.ops.custom_mm.cublaslt_matmul.out),
        samples=_affine_samples,
        bad=_affine_bad,
        empty=_affine_empty,
        cases=(
            _linear_case("bias", 16384, 1024, 4096, None),
            _linear_case("bias+relu", 16384, 1024, 4096, "relu"),
            _linear_case("bias+gelu(tanh)", 16384, 1024, 4096, "gelu_tanh"),
            _linear_case("bias+gelu(erf)", 16384, 1024, 4096, "gelu"),
            _linear_case("bias+gelu(tanh)", 2048, 768, 3072, "gelu_tanh"),
        ),
        host_case=_linear_case("bias+gelu(tanh)", 64, 64, 64, "gelu_tanh"),
        host_reference=lambda x, w, bias, *_: F.gelu(F.linear(x, w, bias), approximate="tanh"),
        rival="F.linear, then the activation",
    ),
    Spec(
        name="bias_act_",
        summary="`custom_mm.bias_act_(x, bias, activation)`: x ← activation(x + bias), in place",
        call=custom_mm.bias_act_,
        reference=lambda x, bias=None, activation=None: _activated(x if bias is None else x + bias, activation),
        operators=(torch.ops.custom_mm.bias_act_.default,),
        samples=_bias_act_samples,
        bad=_bias_act_bad,
        empty=lambda draw: iter([Call((draw(0, 4), draw(4), "relu")), Call((draw(3, 0), None, "gelu"))]),
        cases=tuple(
            Case(f"{name} {m}x{n}", lambda draw, m=m, n=n, act=act: Call((draw(m, n), draw(n), act)))
            for name, act in (("bias+gelu(erf)", "gelu"), ("bias+gelu(tanh)", "gelu_tanh"))
            for m, n in ((65536, 4096), (262144, 1000))
        ),
        dtypes=REAL,
        gradient=False,
        autocast=False,
        flops=False,
        rival="x + bias, then the activation",
    ),
    Spec(
        name="matmul_",
        summary="`matmul_(a, b, *, transb, bias, keep_input, workspace)`: a ← a @ b, in place",
        call=inplace.matmul_,
        reference=_affine_in_place,
        operators=(_ops.matmul_.default,),
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
        summary="`linear_(x, weight, bias)`: x ← F.linear(x, weight, bias), in place",
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
    *(
        Spec(
            name=name,
            summary=f"`{name}(a, b, n_rows, n_cols)`: a ← {formula}, in place",
            call=call,
            reference=lambda a, b, rows, columns, t=transposed: a @ _t(b, t),
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
    Spec(
        name="softmax_",
        summary="`softmax_(x, dim)`: softmax in place",
        call=rowwise.softmax_,
        reference=lambda x, dim=-1: torch.softmax(x, dim),
        operators=(_ops.softmax_.default,),
        samples=_softmax_samples,
        bad=_softmax_bad("softmax_"),
        empty=_no_rows,
        cases=_row_cases(lambda d, *shape: Call((d(*shape),)), _softmax_backward_draw, **_SOFTMAX_BACKWARD_CASES),
        host_case=Case("64x64", lambda draw: Call((draw(64, 64),))),
        rival="torch.softmax",
        compiled=True,
        **ROWWISE,
    ),
    Spec(
        name="softmax",
        summary="`softmax(x, dim, *, out)`: softmax, with an out that torch's lacks",
        call=rowwise.softmax,
        reference=lambda x, dim=-1: torch.softmax(x, dim),
        operators=(_ops.softmax.default, _ops.softmax.out),
        samples=_softmax_samples,
        bad=_softmax_bad("softmax"),
        empty=_no_rows,
        rival="torch.softmax",
        **ROWWISE | {"autocast": True},
    ),
    Spec(
        name="softmax_backward",
        summary="`softmax_backward(y, grad, dim)`: y * (grad - sum(y * grad))",
        call=rowwise.softmax_backward,
        reference=_softmax_gradient,
        operators=(_ops.softmax_backward.default, _ops.softmax_backward.out),
        samples=_softmax_backward_samples,
        bad=_softmax_backward_bad,
        empty=lambda draw: iter([Call((draw(0, 4), draw(0, 4))), Call((draw(3, 0), draw(3, 0)))]),
        **ROWWISE,
    ),
    Spec(
        name="softmax_backward_",
        summary="`softmax_backward_(y, grad, dim)`: the same, over y",
        call=rowwise.softmax_backward_,
        reference=_softmax_gradient,
        operators=(_ops.softmax_backward_.default,),
        samples=_softmax_backward_samples,
        bad=_softmax_backward_bad,
        empty=lambda draw: iter([Call((draw(0, 4), draw(0, 4))), Call((draw(3, 0), draw(3, 0)))]),
        gradient=False,
        **ROWWISE,
    ),
    Spec(
        name="inplace_softmax",
        summary="`inplace_softmax(x, n_rows, n_cols)`: softmax in place over contiguous rows",
        call=rowwise.inplace_softmax,
        reference=lambda x, rows, columns: torch.softmax(x, -1),
        operators=(_ops.softmax_.default,),
        samples=lambda draw: (Call((draw(*s), prod(s[:-1]), s[-1])) for s in ROW_SHAPES),
        bad=lambda draw: iter(
            [
                Bad(Call((draw(3, 4), 4, 4)), "inplace_softmax: expected a contiguous tensor of 4 x 4 elements"),
                Bad(Call((draw(3, 4).mT, 4, 3)), "inplace_softmax: expected a contiguous tensor of 4 x 3 elements"),
            ]
        ),
        empty=lambda draw: iter([Call((draw(0, 4), 0, 4))]),
        writes=True,
        contiguous=True,
        **ROWWISE,
    ),
    Spec(
        name="inplace_softmax_backward",
        summary="`inplace_softmax_backward(output, d_ov, values, rows, cols_output, cols_values)`: the gradient of "
        "attention's scores over its probabilities, in pieces of 8 MiB",
        call=rowwise.inplace_softmax_backward,
        reference=lambda y, d_ov, values, *counts: _softmax_gradient(y, d_ov @ values.mT),
        operators=(_ops.softmax_backward_.default,),
        samples=lambda draw: (
            Call((torch.softmax(draw(*lead, q, k), -1), draw(*lead, q, c), draw(*lead, k, c), prod(lead) * q, k, c))
            for lead, q, k, c in [((), 3, 5, 4), ((2, 3), 7, 33, 8), ((1,), 64, 64, 16)]
        ),
        bad=lambda draw: iter(
            [
                Bad(Call((draw(3, 5), draw(3, 4), draw(5, 4), 3, 4, 4)), "inplace_softmax_backward: expected a contig"),
                Bad(
                    Call((draw(3, 5), draw(3, 4), draw(4, 4), 3, 5, 4)),
                    r"inplace_softmax_backward: expected d_ov of shape \[3, 4\] and values of shape \[5, 4\]",
                ),
            ]
        ),
        empty=lambda draw: iter([Call((draw(0, 5), draw(0, 4), draw(5, 4), 0, 5, 4))]),
        gradient=False,
        writes=True,
        contiguous=True,
        **ROWWISE,
    ),
    Spec(
        name="layer_norm_",
        summary="`layer_norm_(x, weight, bias, eps, residual)`: layer norm of x + residual in place",
        call=rowwise.layer_norm_,
        reference=_layer_norm,
        operators=(_ops.layer_norm_.default, _ops.norm_keep_.default, _ops.norm_backward.default),
        samples=_layer_norm_samples,
        bad=_norm_bad("layer_norm_"),
        empty=lambda draw: iter([Call((draw(0, 4), draw(4), draw(4))), Call((draw(0, 4),))]),
        cases=_row_cases(
            lambda d, rows, n: Call((d(rows, n), d(n), d(n))), _norm_backward_draw(False), **_NORM_BACKWARD_CASES
        ),
        host_case=Case("64x64", lambda draw: Call((draw(64, 64), draw(64), draw(64)))),
        rival="F.layer_norm",
        compiled=True,
        **ROWWISE,
    ),
    Spec(
        name="rms_norm_",
        summary="`rms_norm_(x, weight, eps, residual)`: root mean square norm of x + residual in place",
        call=rowwise.rms_norm_,
        reference=_rms_norm,
        operators=(_ops.rms_norm_.default,),
        samples=_rms_norm_samples,
        bad=_norm_bad("rms_norm_"),
        empty=lambda draw: iter([Call((draw(0, 4), draw(4))), Call((draw(0, 4),))]),
        cases=_row_cases(
            lambda d, rows, n: Call((d(rows, n), d(n))), _norm_backward_draw(True), **_NORM_BACKWARD_CASES
        ),
        rival="F.rms_norm",
        compiled=True,
        **ROWWISE,
    ),
    Spec(
        name="layernorm",
        summary="`layernorm(x, n_rows, n_cols)`: layer norm without weights in place over contiguous rows",
        call=rowwise.layernorm,
        reference=lambda x, rows, columns: F.layer_norm(x, x.shape[-1:]),
        operators=(_ops.layer_norm_.default,),
        samples=lambda draw: (Call((draw(*s), prod(s[:-1]), s[-1])) for s in NORM_SHAPES),
        bad=lambda draw: iter(
            [Bad(Call((draw(3, 4), 4, 4)), "layernorm: expected a contiguous tensor of 4 x 4 elements")]
        ),
        empty=lambda draw: iter([Call((draw(0, 4), 0, 4))]),
        writes=True,
        contiguous=True,
        **ROWWISE,
    ),
    Spec(
        name="scaled_masked_softmax",
        summary="`scaled_masked_softmax(x, mask, scale, *, causal, inplace)`: softmax(scale * x + mask) in one pass",
        call=fused_softmax.scaled_masked_softmax,
        reference=_masked,
        operators=(_ops.scaled_masked_softmax.default, _ops.scaled_masked_softmax_.default),
        samples=_masked_samples,
        bad=_masked_bad,
        empty=_no_rows,
        cases=tuple(_masked_cases()),
        memory_cases=(_ATTENTION_MEMORY,),
        rival="eager",
        compiled=True,
        **ROWWISE | {"autocast": True, "bench_dtypes": (torch.float16, torch.bfloat16)},
    ),
    Spec(
        name="scaled_masked_softmax_forward",
        summary="`scaled_masked_softmax_forward(x, mask, scale)`: anything but 0 in the mask masks",
        call=fused_softmax.scaled_masked_softmax_forward,
        reference=lambda x, mask, scale: _masked(x, None if mask is None else mask.ne(0), scale),
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
        reference=lambda grad, y, scale: _softmax_gradient(y, grad) * scale,
        operators=(_ops.softmax_backward.default,),
        samples=lambda draw: (Call((draw(2, 3, 4, n), torch.softmax(draw(2, 3, 4, n), -1), 0.5)) for n in (5, 33)),
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
        reference=lambda x, mask, scale: _masked(x, mask.ne(0), scale),
        operators=(_ops.scaled_masked_softmax.default, _ops.softmax_backward.default),
        samples=lambda draw: (Call((draw(2, 3, 4, 5), (draw(2, 1, 4, 5) > 0).to(draw.dtype), 0.5)) for _ in range(3)),
        bad=lambda draw: iter([Bad(Call((draw(3, 4), draw(5), 1.0)), "scaled_masked_softmax: expected a mask whose")]),
        empty=lambda draw: iter([Call((draw(0, 4), draw(4), 1.0))]),
        frozen=(1,),
        **ROWWISE,
    ),
    Spec(
        name="masked_linear",
        summary="`masked_linear(x, w1, w2, mask, b1, b2)`: each row through one of two weights, as one product",
        call=masked.masked_linear,
        reference=_blend,
        operators=(
            _ops.masked_linear.default,
            _ops.mask_plan.default,
            _ops.masked_weights.default,
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
                masked.masked_linear,
                _blend,
                _one_linear,
                {"two products of split rows": _split_linear, "torch._grouped_mm of sorted rows": _grouped_linear},
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
                masked.masked_ffn,
                _blend_ffn,
                _one_ffn,
                {},
            )
        ),
        memory_cases=tuple(
            Case(
                f"forward + backward 16384x4096x11008{', recompute' if recompute else ''}",
                lambda draw: Call((draw(16384, 4096), *_masked_ffn_draw(draw, 16384, 4096, 11008, EXPERT_MASKS[2]))),
                call=_trained(partial(masked.masked_ffn, recompute=recompute)),
                reference=_trained(_blend_ffn),
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
    Spec(
        name="spmm",
        summary="`spmm(A, B, *, reduce, alpha, beta, out)`: A @ B, A sparse; sum, mean, max or min over each row",
        call=_spmm_call,
        reference=_spmm_reference,
        operators=(
            _ops.csr_spmm.default,
            _ops.csr_spmm.out,
            _ops.csr_spmm_arg.default,
            _ops.csr_check.default,
            _ops.csr_transpose.default,
        ),
        samples=_spmm_samples,
        bad=_spmm_bad,
        empty=lambda draw: (
            Call((draw(0), draw(columns, n), _sparse_plan(draw, 0, columns)))
            for columns, n in ((0, 0), (3, 0), (0, 4), (3, 4))
        ),
        opchecks=_spmm_opchecks,
        **SPARSE,
    ),
    Spec(
        name="sddmm",
        summary="`sddmm(a, b, pattern)`: a @ b where the pattern has nonzeros",
        call=sparse.sddmm,
        reference=lambda a, b, plan, alpha=1: alpha * _in_order(plan, a @ b),
        operators=(_ops.csr_sddmm.default,),
        samples=_sddmm_samples,
        bad=_sddmm_bad,
        empty=lambda draw: iter([Call((draw(0, 4), draw(4, 3), _sparse_plan(draw, 0, 3)))]),
        opchecks=_sddmm_opchecks,
        **SPARSE,
    ),
    Spec(
        name="sparse_softmax",
        summary="`sparse_softmax(values, pattern, *, scale)`: softmax over the nonzeros of each row",
        call=sparse.sparse_softmax,
        reference=_sparse_softmax_reference,
        operators=(_ops.csr_softmax.default, _ops.csr_softmax_backward.default),
        samples=_sparse_softmax_samples,
        bad=lambda draw: iter(
            [
                Bad(
                    Call((draw(_sparse_plan(draw, 6, 5).nnz).long(), _sparse_plan(draw, 6, 5))),
                    f"sparse_softmax: {BAD_X}",
                )
            ]
        ),
        empty=lambda draw: iter([Call((draw(0), _sparse_plan(draw, 0, 3)))]),
        opchecks=_sparse_softmax_opchecks,
        **SPARSE,
    ),
    Spec(
        name="sparse_attention",
        summary="`sparse_attention(q, k, v, pattern, scale)`: attention to the keys in each query's row of the pattern",
        call=sparse.sparse_attention,
        reference=_sparse_attention_reference,
        operators=(_ops.csr_sddmm.default, _ops.csr_softmax.default, _ops.csr_spmm.default),
        samples=_sparse_attention_samples,
        bad=lambda draw: iter(
            [Bad(Call((draw(5, 3), draw(5, 3), draw(5, 2), _sparse_plan(draw, 6, 5))), "sddmm: expected a of shape")]
        ),
        empty=lambda draw: iter([Call((draw(0, 4), draw(3, 4), draw(3, 2), _sparse_plan(draw, 0, 3)))]),
        opchecks=_sddmm_opchecks,
        **SPARSE,
    ),
    Spec(
        name="cusparseMM",
        summary="`cusparseMM.apply(a, b)`: a @ b, a sparse, or dense and mostly 0",
        call=sparse.cusparseMM.apply,
        reference=torch.matmul,
        operators=(_ops.csr_spmm.default,),
        samples=lambda draw: (
            Call((_half_empty(draw, *lead, m, k), draw(*lead, k, n)))
            for lead, m, k, n in [((), 3, 4, 5), ((), 17, 33, 9), ((), 1, 64, 3), ((2,), 3, 4, 5), ((2, 3), 4, 5, 8)]
        ),
        bad=lambda draw: iter(
            [
                Bad(
                    Call((draw(3, 4), draw(5, 2))),
                    r"cusparseMM: expected b of shape \[..., 4, n\] beside a of 4 columns",
                )
            ]
        ),
        empty=lambda draw: iter([Call((draw(0, 4), draw(4, 5))), Call((draw(3, 0), draw(0, 5)))]),
        opchecks=_spmm_opchecks,
        static=True,
        **SPARSE,
    ),
)


def operators() -> list[torch._ops.OpOverload]:
    """Every operator of the table, once."""
    return list(dict.fromkeys(op for spec in TABLE for op in spec.operators))
