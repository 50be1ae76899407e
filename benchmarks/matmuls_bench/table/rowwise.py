"""Table rows of softmax, layer norm, RMS norm and their gradients."""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from matmuls import rowwise

from .drawn import SIZES
from .spec import REAL, Bad, Call, Case, Draw, Spec

_ops = torch.ops.custom_mm
# Column counts of benchmarks of 2^29 elements: 1 GB in 16 bits, far beyond the L2.
COLUMNS = (128, 384, 512, 768, 1000, 1024, 2048, 4096, 8191, 8192, 16384, 65536, 262144)
UNEVEN = (77, 197, 577, 1023)  # text and image tokens of CLIP and ViT
VOCABULARIES = (30522, 50257)
HIDDEN = (1280, 1600, 3584)  # hidden sizes of GPT-2 and Qwen2, not powers of two
SOFTMAX_COLUMNS = tuple(sorted(COLUMNS + UNEVEN + VOCABULARIES))
NORM_COLUMNS = tuple(sorted(COLUMNS + UNEVEN + HIDDEN))
WITH_RESIDUAL = (384, 768, 1280, 4096)
ROW_SHAPES = [(5,), (3, 8), (1, 1), (4, 3, 33), (7, 64), (2, 300), (33, 1), (1, 2056)]
BAD_X = "expected x of a floating-point dtype, got Long"


def _row_cases(
    forward: Callable[[Draw, int, int], Call],
    backward: Callable[[Draw, int, int], Call],
    lengths: tuple[int, ...],
    functions: dict[str, Any],
    others: dict[str, Callable[..., Any]] | None = None,
) -> tuple[Case, ...]:
    """Benchmarks: forward and backward on a GPU, over 2^29 elements or drawn shapes; forward on a CPU.

    functions: fields of the backward's cases. others: more rivals of the forward on a GPU.
    """

    def case(
        direction: str, draw: Callable[[Draw, int, int], Call], shape: tuple[int, ...], device: str, new: bool
    ) -> Case:
        own = functions if direction == "backward" else {"others": others or {}} if device == "cuda" else {}
        label = f"{direction} {shape[0]}x{shape[1]}"
        return Case(label, lambda d: draw(d, shape[0], shape[1]), device=device, drawn=new, **own)

    gpu = [((2**29 // columns, columns), False) for columns in lengths] + [(shape, True) for shape in SIZES["rows"]]
    cpu = [((4096, 1024), False), ((64, 65536), False)] + [(shape, True) for shape in SIZES["rows on a CPU"]]
    return (
        *(case("forward", forward, shape, "cuda", new) for shape, new in gpu),
        *(case("backward", backward, shape, "cuda", new) for shape, new in gpu),
        *(case("forward", forward, shape, "cpu", new) for shape, new in cpu),
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


def softmax_gradient(y: Tensor, grad: Tensor, dim: int = -1) -> Tensor:
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
    "reference": softmax_gradient,
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


# no single column: its norm is 0 by cancellation
NORM_SHAPES = [(5,), (3, 8), (4, 3, 33), (7, 64), (2, 300), (1, 2056)]


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
    """Gradients of a norm from the saved xhat and rstd: torch's operator for layer norm, a formula for RMS norm."""
    if not rms:
        # with mean 0 and rstd 1 torch takes the input as xhat: dx only lacks the factor rstd
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


QUACK = "quack's norm in torch"


def _quack(norm: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    """The norm as a rival, where torch contains quack and the package that compiles its kernels is installed."""
    return {QUACK: norm} if find_spec("torch._vendor.quack") and find_spec("cutlass") else {}


def _rms_norm_of_quack(x: Tensor, weight: Tensor, *, residual: Tensor | None = None) -> Tensor:
    y: Tensor = import_module("torch._vendor.quack.rmsnorm").rmsnorm(x, weight, residual=residual, eps=1e-5)
    return y


def _layer_norm_of_quack(x: Tensor, weight: Tensor, bias: Tensor, *, residual: Tensor | None = None) -> Tensor:
    h = x if residual is None else x + residual
    norm = import_module("torch._vendor.quack.rmsnorm").layernorm_fwd
    y: Tensor = norm(h, weight.float(), bias.float(), 1e-5)  # it takes no other dtype
    return y


def _norm_call(draw: Draw, shape: tuple[int, ...], weights: int, **more: Tensor) -> Call:
    return Call((draw(*shape), *(draw(shape[-1]) for _ in range(weights))), more)


def _residual_cases(weights: int, others: dict[str, Any]) -> tuple[Case, ...]:
    """Benchmarks with x and residual of at most 2^28 elements each; torch materializes x + residual, as many more."""

    def case(shape: tuple[int, ...]) -> Case:
        return Case(
            f"residual {shape[0]}x{shape[1]}",
            lambda d: _norm_call(d, shape, weights, residual=d(*shape)),
            device="cuda",
            drawn=shape in SIZES["residual"],
            parameters=tuple(range(1, 1 + weights)),
            others=others,
        )

    return tuple(map(case, [*((2**28 // columns, columns) for columns in WITH_RESIDUAL), *SIZES["residual"]]))


_NORM_BACKWARD_CASES = {
    "call": torch.ops.custom_mm.norm_backward.default,
    "reference": _norm_gradient,
    "in_place": False,
}


def no_rows(draw: Draw) -> Iterator[Call]:
    yield Call((draw(0, 4),))
    yield Call((draw(3, 0),))


ROWWISE: dict[str, Any] = {
    "dtypes": REAL,
    "bench_dtypes": (torch.bfloat16, torch.float32),
    "cpu_bench_dtypes": (torch.float32, torch.bfloat16),
    "autocast": False,
    "flops": False,
}
TABLE: tuple[Spec, ...] = (
    Spec(
        name="softmax_",
        summary="`softmax_(x, dim)`: softmax in place",
        call=rowwise.softmax_,
        reference=lambda x, dim=-1: torch.softmax(x, dim),
        operators=(_ops.softmax_.default,),
        samples=_softmax_samples,
        bad=_softmax_bad("softmax_"),
        empty=no_rows,
        cases=(
            *_row_cases(
                lambda d, *shape: Call((d(*shape),)), _softmax_backward_draw, SOFTMAX_COLUMNS, _SOFTMAX_BACKWARD_CASES
            ),
            Case("dim 0 of 16384x4096", lambda draw: Call((draw(16384, 4096), 0)), device="cpu"),
            Case("dim 1 of 64x512x300", lambda draw: Call((draw(64, 512, 300), 1)), device="cpu"),
        ),
        host_case=Case("64x64", lambda draw: Call((draw(64, 64),))),
        rival="torch.softmax",
        compiled=True,
        **ROWWISE,
    ),
    Spec(
        name="softmax",
        summary="`softmax(x, dim, *, out)`: softmax with an `out` argument",
        call=rowwise.softmax,
        reference=lambda x, dim=-1: torch.softmax(x, dim),
        operators=(_ops.softmax.default, _ops.softmax.out),
        samples=_softmax_samples,
        bad=_softmax_bad("softmax"),
        empty=no_rows,
        rival="torch.softmax",
        **ROWWISE | {"autocast": True},
    ),
    Spec(
        name="softmax_backward",
        summary="`softmax_backward(y, grad, dim)`: y * (grad - sum(y * grad))",
        call=rowwise.softmax_backward,
        reference=softmax_gradient,
        operators=(_ops.softmax_backward.default, _ops.softmax_backward.out),
        samples=_softmax_backward_samples,
        bad=_softmax_backward_bad,
        empty=lambda draw: iter([Call((draw(0, 4), draw(0, 4))), Call((draw(3, 0), draw(3, 0)))]),
        **ROWWISE,
    ),
    Spec(
        name="softmax_backward_",
        summary="`softmax_backward_(y, grad, dim)`: the same, written over y",
        call=rowwise.softmax_backward_,
        reference=softmax_gradient,
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
        summary="`inplace_softmax_backward(output, d_ov, values, rows, cols_output, cols_values)`: computes the "
        "gradient of the attention scores from values and d_ov (the gradient of output @ values), and writes it over "
        "output (the probabilities)",
        call=rowwise.inplace_softmax_backward,
        reference=lambda y, d_ov, values, *counts: softmax_gradient(y, d_ov @ values.mT),
        operators=(_ops.scores_backward_.default,),
        arguments=lambda call: call.args[:3],
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
            lambda d, *shape: _norm_call(d, shape, 2),
            _norm_backward_draw(False),
            NORM_COLUMNS,
            _NORM_BACKWARD_CASES,
            _quack(_layer_norm_of_quack),
        )
        + _residual_cases(2, _quack(_layer_norm_of_quack)),
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
            lambda d, *shape: _norm_call(d, shape, 1),
            _norm_backward_draw(True),
            NORM_COLUMNS,
            _NORM_BACKWARD_CASES,
            _quack(_rms_norm_of_quack),
        )
        + _residual_cases(1, _quack(_rms_norm_of_quack)),
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
)
