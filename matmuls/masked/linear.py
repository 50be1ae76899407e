"""masked_linear, with gradients: a mask selects one of two experts for each row. Triton on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.flop_counter import register_flop_formula

from custom_mm import _C
from custom_mm.arguments import clearer

from ..registration import Applied, fail, once, register, register_autocast, register_gradient, signature_of_apply
from . import checks, plain
from .checks import check_known, check_like, check_x, flat, one_expert, rows_of
from .plan import MaskPlan, planned


def _check_linear(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    known: int,
) -> None:
    name = "masked_linear"
    check_x(name, x, rows, counts)
    check_known(name, rows, known)
    if w1.dim() != 2:
        fail(name, "w1 of two dimensions, [N, K]", list(w1.shape))
    check_like(name, "w1", w1, x, (w1.shape[0], x.shape[-1]))
    check_like(name, "w2", w2, x, w1.shape)
    if (b1 is None) != (b2 is None):
        fail(name, "both b1 and b2 or neither", "b2 alone" if b1 is None else "b1 alone")
    if b1 is not None and b2 is not None:
        check_like(name, "b1", b1, x, w1.shape[:1])
        check_like(name, "b2", b2, x, w1.shape[:1])


def _check_rows(name: str, g: Tensor, x: Tensor, rows: Tensor, counts: Tensor, known: int) -> None:
    check_x(name, x, rows, counts)
    check_known(name, rows, known)
    check_like(name, "the gradient", g, x, (*x.shape[:-1], g.shape[-1] if g.dim() else 0))


def _linear_kernel(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    known: int = -1,
) -> Tensor:
    _check_linear(x, w1, w2, rows, counts, b1, b2, known)
    by_triton = checks.by_triton(x, w1.shape[0])
    # One library product, unless a row must not depend on whether there are rows of the other expert.
    if one_expert("masked_linear", rows, counts, known) and not (by_triton and _C.is_batch_invariant()):
        return plain.affine(x, *((w1, b1) if known else (w2, b2)))
    if by_triton:
        from ..triton.masked_linear import product

        y = product(flat(x), w1, w2, rows, counts, b1, b2)
    else:
        y = plain.linear(flat(x), w1, w2, rows, counts, b1, b2)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], w1.shape[0])


def _linear_meta(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    known: int = -1,
) -> Tensor:
    _check_linear(x, w1, w2, rows, counts, b1, b2, known)
    return x.new_empty(*x.shape[:-1], w1.shape[0])


def _rows_kept(x: Tensor, w1: Tensor, known: int) -> int:
    """The number of rows of x, in the plan's order, that forward saves for backward; 0 if backward does not read x that
    way, and for a DTensor, of which each process has other rows."""
    m, n = rows_of(x), w1.shape[0]
    if hasattr(x, "placements") or known in (0, m) or not checks.by_triton(x, n) or not torch.cuda.is_available():
        return 0
    from ..triton.masked_gradients import rows_kept

    return rows_kept(m, n, x.shape[-1], x)


def _linear_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    known: int,
    kept: int,
) -> tuple[Tensor, Tensor]:
    _check_linear(x, w1, w2, rows, counts, b1, b2, known)
    if kept not in (0, _rows_kept(x, w1, known)):
        fail("masked_linear_forward", f"0 or {_rows_kept(x, w1, known)} rows to be kept", kept)
    if not kept:
        return _linear_kernel(x, w1, w2, rows, counts, b1, b2, known), x.new_empty(0, x.shape[-1])
    from ..triton.few import in_order
    from ..triton.masked_linear import product, read_rows

    ordered = in_order(read_rows(flat(x)), rows, counts)
    y = product(flat(x), w1, w2, rows, counts, b1, b2, ordered=ordered)
    return y.view(*x.shape[:-1], w1.shape[0]), ordered


def _linear_forward_meta(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *operands, kept = args
    if kept and kept < rows_of(x):  # under tracing the number of padding rows on the GPU is unknown
        fail("masked_linear_forward", f"0 or at least {rows_of(x)} rows to be kept", kept)
    return _linear_meta(x, *operands), x.new_empty(kept, x.shape[-1])


def _weights_kernel(
    g: Tensor, x: Tensor, rows: Tensor, counts: Tensor, first: bool = True, second: bool = True, known: int = -1
) -> tuple[Tensor, Tensor]:
    _check_rows("masked_weights", g, x, rows, counts, known)
    g, x = flat(g), flat(x)
    if rows.shape[0] and one_expert("masked_weights", rows, counts, known):
        all_of_it, nothing = (first, second) if known else (second, first)
        d = g.T @ x if all_of_it else x.new_empty(0, x.shape[1])
        zero = x.new_zeros(g.shape[1] if nothing else 0, x.shape[1])
        return (d, zero) if known else (zero, d)
    if checks.by_triton(x, g.shape[1]):
        from ..triton.masked_weights import weight_gradients

        return weight_gradients(g, x, rows, counts, first, second)
    return plain.weights(g, x, rows, counts, first, second)


def _weights_meta(
    g: Tensor, x: Tensor, rows: Tensor, counts: Tensor, first: bool = True, second: bool = True, known: int = -1
) -> tuple[Tensor, Tensor]:
    _check_rows("masked_weights", g, x, rows, counts, known)
    n, k = g.shape[-1], x.shape[-1]
    return x.new_empty(n if first else 0, k), x.new_empty(n if second else 0, k)


def _check_linear_gradient(
    g: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    known: int,
    ordered: Tensor | None,
) -> None:
    name = "masked_linear_backward"
    _check_linear(x, w1, w2, rows, counts, None, None, known)
    check_like(name, "the gradient", g, x, (*x.shape[:-1], w1.shape[0]))
    if ordered is not None:  # under tracing the number of rows kept by the GPU is unknown
        kept = _rows_kept(x, w1, known) if not x.is_meta or ordered.dim() != 2 else ordered.shape[0]
        check_like(name, "ordered", ordered, x, (kept, x.shape[-1]))
        if not ordered.is_contiguous():
            fail(name, "ordered to be contiguous", f"strides {ordered.stride()}")


def _linear_backward(
    g: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    first: bool = True,
    second: bool = True,
    known: int = -1,
    ordered: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_linear_gradient(g, x, w1, w2, rows, counts, known, ordered)
    if ordered is not None and not ordered.shape[0]:
        ordered = None
    if known not in (0, rows.shape[0]) and checks.by_triton(x, w1.shape[0]):
        from ..triton.masked_gradients import gradients

        dx, d1, d2 = gradients(flat(g), flat(x), w1, w2, rows, counts, first, second, ordered)
        return dx.view(x.shape), d1, d2
    dx = _linear_kernel(g, w1.T, w2.T, rows, counts, None, None, known)
    return dx, *_weights_kernel(g, x, rows, counts, first, second, known)


def _linear_backward_meta(
    g: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    rows: Tensor,
    counts: Tensor,
    first: bool = True,
    second: bool = True,
    known: int = -1,
    ordered: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_linear_gradient(g, x, w1, w2, rows, counts, known, ordered)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, *_weights_meta(g, x, rows, counts, first, second)


def _sums_kernel(x: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    check_x("masked_sums", x, rows, counts)
    if checks.by_triton(x):
        from ..triton.masked_weights import sums

        return sums(flat(x), rows, counts)
    return plain.sums(flat(x), rows, counts)


def _sums_meta(x: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    check_x("masked_sums", x, rows, counts)
    return x.new_empty(2, x.shape[-1])


for _schema, _kernel, _meta in (
    (
        "masked_linear(Tensor x, Tensor w1, Tensor w2, Tensor rows, Tensor counts, Tensor? b1=None, Tensor? b2=None, "
        "SymInt known=-1) -> Tensor",
        _linear_kernel,
        _linear_meta,
    ),
    (
        "masked_linear_forward(Tensor x, Tensor w1, Tensor w2, Tensor rows, Tensor counts, Tensor? b1, Tensor? b2, "
        "SymInt known, SymInt kept) -> (Tensor, Tensor)",
        _linear_forward,
        _linear_forward_meta,
    ),
    (
        "masked_weights(Tensor grad, Tensor x, Tensor rows, Tensor counts, bool first=True, bool second=True, "
        "SymInt known=-1) -> (Tensor, Tensor)",
        _weights_kernel,
        _weights_meta,
    ),
    (
        "masked_linear_backward(Tensor grad, Tensor x, Tensor w1, Tensor w2, Tensor rows, Tensor counts, "
        "bool first=True, bool second=True, SymInt known=-1, Tensor? ordered=None) -> (Tensor, Tensor, Tensor)",
        _linear_backward,
        _linear_backward_meta,
    ),
    ("masked_sums(Tensor x, Tensor rows, Tensor counts) -> Tensor", _sums_kernel, _sums_meta),
):
    register(_schema, _kernel, _meta)

_ops = torch.ops.custom_mm
_linear: Callable[..., Tensor] = _ops.masked_linear.default
_weights: Callable[..., tuple[Tensor, Tensor]] = _ops.masked_weights.default
_linear_forward_op: Callable[..., tuple[Tensor, Tensor]] = _ops.masked_linear_forward.default
_linear_backward_op: Callable[..., tuple[Tensor, ...]] = _ops.masked_linear_backward.default
_sums: Callable[..., Tensor] = _ops.masked_sums.default


class _Linear(Function):
    """Autograd Function of masked_linear. dx is masked_linear on transposed weights, and so differentiable. If no
    second derivative is needed, one operator computes dx and the weights' gradients: it shares the work on the
    gradient's rows and reads x in the plan's order if forward saved it so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, rows: Tensor, counts: Tensor, *rest: Any) -> Tensor:
        need_x, need_1, need_2 = ctx.needs_input_grad[:3]
        kept, ordered = _rows_kept(x, w1, rest[2]) if need_x and (need_1 or need_2) else 0, None
        with torch._C._AutoDispatchBelowAutograd():
            if kept:
                y, ordered = _linear_forward_op(x, w1, w2, rows, counts, *rest, kept)
            else:
                y = _linear(x, w1, w2, rows, counts, *rest)
        ctx.save_for_backward(
            x if need_1 or need_2 else None, w1 if need_x else None, w2 if need_x else None, rows, counts, ordered
        )
        ctx.known = rest[2]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, w2, rows, counts, ordered = ctx.saved_tensors
        need_x, need_1, need_2, _, _, need_b1, need_b2, _ = ctx.needs_input_grad
        dx = d1 = d2 = e1 = e2 = None
        if need_x and (need_1 or need_2) and not torch.is_grad_enabled():
            dx, d1, d2 = _linear_backward_op(dy, x, w1, w2, rows, counts, need_1, need_2, ctx.known, ordered)
        elif need_x:
            dx = _linear(dy, w1.T, w2.T, rows, counts, None, None, ctx.known)
        if (need_1 or need_2) and d1 is None:
            d1, d2 = _weights(dy, x, rows, counts, need_1, need_2, ctx.known)
        if need_b1 or need_b2:
            e1, e2 = _sums(dy, rows, counts).unbind(0)
        return (
            dx,
            d1 if need_1 else None,
            d2 if need_2 else None,
            None,
            None,
            e1 if need_b1 else None,
            e2 if need_b2 else None,
            None,
        )


class _Weights(Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, rows: Tensor, counts: Tensor, first: bool, second: bool, known: int
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            d = _weights(g, x, rows, counts, first, second, known)
        ctx.save_for_backward(g, x, rows, counts)
        ctx.first, ctx.second, ctx.known = first, second, known
        return d

    @staticmethod
    def backward(ctx: Any, e1: Tensor, e2: Tensor) -> tuple[Tensor | None, ...]:
        g, x, rows, counts = ctx.saved_tensors
        zero = x.new_zeros(g.shape[-1], x.shape[-1])
        e1, e2 = e1 if ctx.first else zero, e2 if ctx.second else zero
        need_g, need_x, *_ = ctx.needs_input_grad
        dg = _linear(x, e1, e2, rows, counts, None, None, ctx.known) if need_g else None
        dx = _linear(g, e1.T, e2.T, rows, counts, None, None, ctx.known) if need_x else None
        return dg, dx, None, None, None, None, None


class _Sums(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            y = _sums(x, rows, counts)
        ctx.save_for_backward(rows, counts)
        ctx.lead = x.shape[:-1]
        return y

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        rows, counts = ctx.saved_tensors
        one = e.new_ones(*ctx.lead, 1)  # each row's gradient goes to its expert: a product over K = 1
        return _linear(one, e[0, :, None], e[1, :, None], rows, counts), None, None


for _name, _function in (
    ("masked_linear", _Linear),
    ("masked_weights", _Weights),
    ("masked_sums", _Sums),
    ("masked_linear_forward", once("masked_linear_forward")),
    ("masked_linear_backward", once("masked_linear_backward")),
):
    register_gradient(_name, _function)
register_autocast("masked_linear")


# FLOPs for torch.utils.flop_counter: every row goes through one expert.


@register_flop_formula([_ops.masked_linear, _ops.masked_linear_forward])
def _linear_flops(x: torch.Size, w1: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * x.numel() * w1[0]


@register_flop_formula(_ops.masked_weights)
def _weights_flops(g: torch.Size, x: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * g.numel() * x[-1]


@register_flop_formula(_ops.masked_linear_backward)
def _linear_backward_flops(g: torch.Size, x: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 4 * g.numel() * x[-1]


def masked_linear(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    mask: Tensor | MaskPlan,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
) -> Tensor:
    """Computes x[r] @ w^T + b for every row r, where w, b are w1, b1 if mask[r], else w2, b2.

    Products are summed in float32 or wider; TF32 is used only if torch's switch allows it. The operation is
    differentiable any number of times. The weight's gradient is exactly 0 for an expert without rows, and it is not
    computed for a frozen expert. Under autocast it behaves as torch.nn.functional.linear.

    On a GPU the kernel gathers rows as it loads them and scatters them as it stores them, and nothing waits for the
    mask. To train large weights on GPUs of compute capability 9.0, it also allocates copies of x and of the gradient
    that are sorted by expert. On a CPU the rows are sorted, then multiplied in two products. In float64 on a GPU both
    products are computed for all rows. `matmuls tune masked_linear` finds the fastest tile sizes for a GPU and a shape.

    Args:
        x: [..., K] float64, float32, float16 or bfloat16. Rows may be strided.
        w1: [N, K], the layout of nn.Linear, any strides; dtype and device of x. A copy is made if only one of the
            weights is transposed in memory.
        w2: [N, K], as w1.
        mask: bool, with x's leading dimensions or flat, [rows]; or a mask plan made by `mask_plan`.
        b1: [N], dtype and device of x. Give both biases or neither.
        b2: [N], dtype and device of x.

    Returns:
        [..., N].

    Raises:
        RuntimeError: before anything is computed, if shapes, dtypes or devices do not match.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> one, two = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 10.0]])
        >>> matmuls.masked_linear(x, one, two, torch.tensor([True, False]))
        tensor([[ 1.],
                [40.]])
    """
    try:
        rows, counts, known = planned("masked_linear", mask, x)
        return _linear(x, w1, w2, rows, counts, b1, b2, known)
    except (RuntimeError, AttributeError) as error:
        raise clearer(error, "masked_linear", ("b1", "b2"), x=x, w1=w1, w2=w2, b1=b1, b2=b2) from None


class MaskedLinear(Applied):
    """`MaskedLinear.apply(x, w1, w2, mask)` computes `masked_linear` with transposed weights, [K, N].

    It is not the module `matmuls.nn.MaskedLinear`, whose weights are [N, K].

    Args:
        x: [..., K]; dtypes as `masked_linear`.
        w1: [K, N], read in place; dtype and device of x.
        w2: [K, N], read in place; dtype and device of x.
        mask: bool, one element for each row, or a mask plan.

    Returns:
        [..., N], differentiable any number of times.

    Raises:
        RuntimeError: as `masked_linear`.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> x, w = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [1.0]])
        >>> matmuls.MaskedLinear.apply(x, w, -w, torch.tensor([True, False]))
        tensor([[ 3.],
                [-7.]])
    """

    __signature__ = signature_of_apply("x", "w1", "w2", "mask")
    _module = "matmuls.nn.MaskedLinear"

    @staticmethod
    def apply(x: Tensor, w1: Tensor, w2: Tensor, mask: Tensor | MaskPlan) -> Tensor:
        """Computes `masked_linear(x, w1.T, w2.T, mask)`.

        Args:
            x: [..., K].
            w1: [K, N].
            w2: [K, N].
            mask: bool, one element for each row, or a mask plan.

        Returns:
            [..., N].
        """
        return masked_linear(x, w1.T, w2.T, mask)
