"""Table rows of the dense products."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import custom_mm
from matmuls import dense

from .drawn import SIZES as DRAWN
from .spec import REAL, Bad, Call, Case, Draw, Spec


def turned(x: Tensor, transposed: bool) -> Tensor:
    return x.mT if transposed and x.dim() > 1 else x


def _stored(draw: Draw, shape: tuple[int, ...], transposed: bool) -> Tensor:
    """A random tensor of `shape`, with its last two sizes swapped if `transposed`."""
    if transposed and len(shape) > 1:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return draw(*shape)


def activated(x: Tensor, activation: str | None) -> Tensor:
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
    def case(label: str, a: tuple[int, ...], b: tuple[int, ...], new: bool = False) -> Case:
        return Case(label, lambda draw: Call((_stored(draw, a, transa), _stored(draw, b, transb))), drawn=new)

    def of_heads(batch: int, heads: int, length: int, width: int, *, new: bool) -> tuple[Case, Case]:
        lead, label = (batch, heads), f"{batch}x{heads}x{length}x{width}"
        return (
            case(f"{label} scores", (*lead, length, width), (*lead, width, length), new),
            case(f"{label} context", (*lead, length, length), (*lead, length, width), new),
        )

    shapes: list[tuple[tuple[int, ...], bool]] = [((n, n, n), False) for n in sizes]
    shapes += [((65536, 1024, 1024), False)]
    shapes += [(shape, True) for shape in DRAWN["product"]]
    heads: list[tuple[tuple[int, ...], bool]] = [((16, 16, 512, 64), False), ((64, 12, 512, 64), False)]
    heads += [(shape, True) for shape in DRAWN["batched product"]]
    return (
        *(case(f"{m}x{k}x{n}", (m, k), (k, n), new) for (m, k, n), new in shapes),
        *(each for shape, new in heads for each in of_heads(*shape, new=new)),
    )


SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_MATMUL = (torch.ops.custom_mm.matmul.default,)


def _product_spec(name: str, call: Callable[..., Tensor], transa: bool, transb: bool, formula: str) -> Spec:
    return Spec(
        name=name,
        summary=formula,
        call=call,
        reference=lambda a, b: torch.matmul(turned(a, transa), turned(b, transb)),
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
        x = F.linear(turned(a, transa), b if transb else b.mT, bias)
    else:
        x = torch.matmul(turned(a, transa), turned(b, transb))
        x = x if bias is None else x + bias.to(x.dtype)
    return activated(x, activation)


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
    yield Bad(Call((a, draw(4), draw(1))), "cublaslt_matmul: expected b of at least two dimensions with a bias")
    yield Bad(Call((a, b, None, "tanh")), "cublaslt_matmul: expected activation None, 'relu', 'gelu' or 'gelu_tanh'")
    if draw.dtype.is_complex:
        yield Bad(Call((a, b, None, "relu")), "cublaslt_matmul: expected no activation")
    if draw.device != "cpu":
        yield Bad(Call((a, b, draw(5).cpu())), "cublaslt_matmul: expected bias on cuda:0 as a is, got cpu")


def _affine_empty(draw: Draw) -> Iterator[Call]:
    for a, b in EMPTY[:4]:
        yield Call((draw(*a), draw(*b), draw(b[-1]), None if draw.dtype.is_complex else "relu"))


def _linear_case(label: str, m: int, k: int, n: int, activation: str | None, new: bool = False) -> Case:
    return Case(
        f"{label} {m}x{k}x{n}",
        lambda draw: Call((draw(m, k), draw(n, k) / k**0.5, draw(n), activation, False, True)),
        drawn=new,
    )


_EPILOGUES = (
    ("bias", None),
    ("bias+relu", "relu"),
    ("bias+gelu(tanh)", "gelu_tanh"),
    ("bias+gelu(erf)", "gelu"),
    ("bias+gelu(tanh)", "gelu_tanh"),
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


TABLE: tuple[Spec, ...] = (
    Spec(
        name="matmul",
        summary="`matmul(a, b, *, transa, transb, bias, activation, out)`: op(a) @ op(b), 1-D to N-D",
        call=dense.matmul,
        reference=lambda a, b, transa=False, transb=False: torch.matmul(turned(a, transa), turned(b, transb)),
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
        summary="`custom_mm.cublaslt_matmul(a, b, bias, activation, transa, transb, c)`: a @ b, bias, activation",
        call=custom_mm.cublaslt_matmul,
        reference=_affine,
        operators=(
            torch.ops.custom_mm.cublaslt_matmul.default,
            torch.ops.custom_mm.cublaslt_matmul.out,
            torch.ops.custom_mm.gelu.default,
            torch.ops.custom_mm.gelu_backward.default,
        ),
        samples=_affine_samples,
        bad=_affine_bad,
        empty=_affine_empty,
        cases=(
            *(_linear_case(label, 16384, 1024, 4096, activation) for label, activation in _EPILOGUES[:4]),
            _linear_case("bias+gelu(tanh)", 2048, 768, 3072, "gelu_tanh"),
            *(
                _linear_case(label, m, k, n, activation, new=True)
                for (label, activation), (m, k, n) in zip(_EPILOGUES, DRAWN["linear"], strict=True)
            ),
        ),
        host_case=_linear_case("bias+gelu(tanh)", 64, 64, 64, "gelu_tanh"),
        host_reference=lambda x, w, bias, *_: F.gelu(F.linear(x, w, bias), approximate="tanh"),
        rival="F.linear, then the activation",
    ),
    Spec(
        name="bias_act_",
        summary="`custom_mm.bias_act_(x, bias, activation)`: x ← activation(x + bias), in place",
        call=custom_mm.bias_act_,
        reference=lambda x, bias=None, activation=None: activated(x if bias is None else x + bias, activation),
        operators=(torch.ops.custom_mm.bias_act_.default,),
        samples=_bias_act_samples,
        bad=_bias_act_bad,
        empty=lambda draw: iter([Call((draw(0, 4), draw(4), "relu")), Call((draw(3, 0), None, "gelu"))]),
        cases=tuple(
            Case(
                f"{name} {m}x{n}",
                lambda draw, m=m, n=n, act=act: Call((draw(m, n), draw(n), act)),
                drawn=(m, n) in DRAWN["bias and activation"],
            )
            for name, act in (("bias+gelu(erf)", "gelu"), ("bias+gelu(tanh)", "gelu_tanh"))
            for m, n in ((65536, 4096), (262144, 1000), *DRAWN["bias and activation"])
        ),
        dtypes=REAL,
        gradient=False,
        autocast=False,
        flops=False,
        rival="x + bias, then the activation",
    ),
)
