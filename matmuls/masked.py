"""masked_linear and masked_ffn, with gradients: a mask selects one of two experts for each row. Triton on a GPU."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.utils.flop_counter import register_flop_formula

from custom_mm.arguments import clearer

from . import masked_plain as plain
from .registration import fail, library, register, register_autocast, register_gradient

REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class MaskPlan(NamedTuple):
    """The rows of a mask grouped by expert, reusable for any number of calls, layers and backward passes. Made by
    `mask_plan`."""

    rows: Tensor  # int32 [M]: rows with mask True in ascending order, then the others in ascending order
    counts: Tensor  # int32 [2]: number of rows of each expert
    known: int = -1  # counts[0] if known on the host, else -1


# -------------------------------------------------------------------------------------------------------------- checks


def _rows_of(x: Tensor) -> int:
    """The number of rows, symbolic if a size is: Size.numel() would make it concrete and recompile for each number."""
    return math.prod(x.shape[:-1])


def _check_x(name: str, x: Tensor, rows: Tensor, counts: Tensor) -> None:
    if x.layout != torch.strided or x.dtype not in REAL or x.dim() == 0:
        kind = f"{x.dtype} of shape {list(x.shape)}, {x.layout}"
        fail(name, "x to be strided, of float64, float32, float16 or bfloat16 and of at least one dimension", kind)
    m = _rows_of(x)
    if rows.dim() != 1 or rows.shape[0] != m:
        fail(name, f"a mask or plan of {m} rows, as x of shape {list(x.shape)} has", rows.numel())
    if rows.dtype != torch.int32 or counts.dtype != torch.int32 or counts.dim() != 1 or counts.shape[0] != 2:
        fail(name, "a plan made by mask_plan", f"{rows.dtype} and {counts.dtype} of shape {list(counts.shape)}")
    if not rows.is_contiguous() or not counts.is_contiguous():
        fail(name, "a contiguous plan, as mask_plan makes it", f"strides {rows.stride()} and {counts.stride()}")
    if rows.device != x.device or counts.device != x.device:
        fail(name, f"the mask on {x.device} as x is", f"{rows.device} and {counts.device}")


def _check_known(name: str, rows: Tensor, known: int) -> None:
    if known != -1 and not 0 <= known <= rows.shape[0]:
        fail(name, f"known from 0 to the mask's {rows.shape[0]} elements, or -1", known)


def _one_expert(name: str, rows: Tensor, counts: Tensor, known: int) -> bool:
    """True if all rows belong to one expert and the host knows it. On a CPU `known` is compared with the plan."""
    if known not in (0, rows.shape[0]):
        return False
    if counts.device.type == "cpu" and (n1 := int(counts[0])) != known:
        fail(name, f"known to be the plan's count, {n1}", known)
    return True


def _check_like(name: str, which: str, t: Tensor, x: Tensor, shape: Sequence[int | torch.SymInt]) -> None:
    if list(t.shape) != list(shape):
        fail(name, f"{which} of shape {list(shape)}", list(t.shape))
    if t.dtype != x.dtype:
        fail(name, f"{which} of dtype {x.dtype} as x is", t.dtype)
    if t.device != x.device:
        fail(name, f"{which} on {x.device} as x is", t.device)


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
    _check_x(name, x, rows, counts)
    _check_known(name, rows, known)
    if w1.dim() != 2:
        fail(name, "w1 of two dimensions, [N, K]", list(w1.shape))
    _check_like(name, "w1", w1, x, (w1.shape[0], x.shape[-1]))
    _check_like(name, "w2", w2, x, w1.shape)
    if (b1 is None) != (b2 is None):
        fail(name, "both b1 and b2 or neither", "b2 alone" if b1 is None else "b1 alone")
    if b1 is not None and b2 is not None:
        _check_like(name, "b1", b1, x, w1.shape[:1])
        _check_like(name, "b2", b2, x, w1.shape[:1])


def _check_rows(name: str, g: Tensor, x: Tensor, rows: Tensor, counts: Tensor, known: int) -> None:
    _check_x(name, x, rows, counts)
    _check_known(name, rows, known)
    _check_like(name, "the gradient", g, x, (*x.shape[:-1], g.shape[-1] if g.dim() else 0))


def _check_ffn(x: Tensor, w: Sequence[Tensor], u: Sequence[Tensor], rows: Tensor, counts: Tensor) -> None:
    name = "masked_ffn"
    _check_x(name, x, rows, counts)
    if w[0].dim() != 2:
        fail(name, "w1 of two dimensions, [H, D]", list(w[0].shape))
    up, down = (w[0].shape[0], x.shape[-1]), (x.shape[-1], w[0].shape[0])
    for letter, expert in (("w", w), ("u", u)):
        for n, (t, shape) in enumerate(zip(expert, (up, down, up), strict=True), 1):
            _check_like(name, f"{letter}{n}", t, x, shape)


# --------------------------------------------------------------- kernels: Triton or torch, and shapes only (Meta)


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(_rows_of(x), x.shape[-1])


def _by_triton(x: Tensor, *sizes: int) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and all(sizes) and x.numel() > 0


def _check_mask(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool or mask.layout != torch.strided:
        fail(name, "a strided mask of torch.bool", f"{mask.dtype}, {mask.layout}")


def _plan_kernel(mask: Tensor) -> tuple[Tensor, Tensor]:
    _check_mask("mask_plan", mask)
    if mask.numel() >= 2**31:  # under tracing this is a guard on every size
        fail("mask_plan", "a mask of fewer than 2^31 rows", mask.numel())
    mask = mask.reshape(-1)
    if _by_triton(mask):
        from .triton import mask_plan

        if mask.shape[0] <= mask_plan.LARGEST:
            return mask_plan.plan(mask.contiguous())
    return plain.plan(mask)


def _plan_meta(mask: Tensor) -> tuple[Tensor, Tensor]:
    _check_mask("mask_plan", mask)
    return mask.new_empty(mask.numel(), dtype=torch.int32), mask.new_empty(2, dtype=torch.int32)


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
    if _one_expert("masked_linear", rows, counts, known):  # one library product
        return torch.nn.functional.linear(x, *((w1, b1) if known else (w2, b2)))
    if _by_triton(x, w1.shape[0]):
        from .triton.masked_linear import product

        y = product(_flat(x), w1, w2, rows, counts, b1, b2)
    else:
        y = plain.linear(_flat(x), w1, w2, rows, counts, b1, b2)
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
    way."""
    m, n = _rows_of(x), w1.shape[0]
    if known in (0, m) or not _by_triton(x, n) or not torch.cuda.is_available():
        return 0
    from .triton.masked_linear import rows_kept

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
    from .triton.few import in_order
    from .triton.masked_linear import product, read_rows

    ordered = in_order(read_rows(_flat(x)), rows, counts)
    y = product(_flat(x), w1, w2, rows, counts, b1, b2, ordered=ordered)
    return y.view(*x.shape[:-1], w1.shape[0]), ordered


def _linear_forward_meta(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *operands, kept = args
    if kept and kept < _rows_of(x):  # under tracing the number of padding rows on the GPU is unknown
        fail("masked_linear_forward", f"0 or at least {_rows_of(x)} rows to be kept", kept)
    return _linear_meta(x, *operands), x.new_empty(kept, x.shape[-1])


def _weights_kernel(
    g: Tensor, x: Tensor, rows: Tensor, counts: Tensor, first: bool = True, second: bool = True, known: int = -1
) -> tuple[Tensor, Tensor]:
    _check_rows("masked_weights", g, x, rows, counts, known)
    g, x = _flat(g), _flat(x)
    if rows.shape[0] and _one_expert("masked_weights", rows, counts, known):
        all_of_it, nothing = (first, second) if known else (second, first)
        d = g.T @ x if all_of_it else x.new_empty(0, x.shape[1])
        zero = x.new_zeros(g.shape[1] if nothing else 0, x.shape[1])
        return (d, zero) if known else (zero, d)
    if _by_triton(x, g.shape[1]):
        from .triton.masked_linear import weight_gradients

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
    _check_like(name, "the gradient", g, x, (*x.shape[:-1], w1.shape[0]))
    if ordered is not None:  # under tracing the number of rows kept by the GPU is unknown
        kept = _rows_kept(x, w1, known) if not x.is_meta or ordered.dim() != 2 else ordered.shape[0]
        _check_like(name, "ordered", ordered, x, (kept, x.shape[-1]))
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
    if known not in (0, rows.shape[0]) and _by_triton(x, w1.shape[0]):
        from .triton.masked_linear import gradients

        dx, d1, d2 = gradients(_flat(g), _flat(x), w1, w2, rows, counts, first, second, ordered)
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
    _check_x("masked_sums", x, rows, counts)
    if _by_triton(x):
        from .triton.masked_linear import sums

        return sums(_flat(x), rows, counts)
    return plain.sums(_flat(x), rows, counts)


def _sums_meta(x: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    _check_x("masked_sums", x, rows, counts)
    return x.new_empty(2, x.shape[-1])


def _ffn_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    u1: Tensor,
    u2: Tensor,
    u3: Tensor,
    rows: Tensor,
    counts: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    w, u = (w1, w2, w3), (u1, u2, u3)
    _check_ffn(x, w, u, rows, counts)
    if _by_triton(x, w1.shape[0]):
        from .triton.masked_ffn import forward

        y, t = forward(_flat(x), w, u, rows, counts, keep)
    else:
        y, t = plain.ffn(_flat(x), w, u, rows, counts)
    return y.view(x.shape), t if keep else x.new_empty(0)


def _ffn_forward_meta(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    u1: Tensor,
    u2: Tensor,
    u3: Tensor,
    rows: Tensor,
    counts: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    _check_ffn(x, (w1, w2, w3), (u1, u2, u3), rows, counts)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(rows.shape[0], 2 * w1.shape[0]) if keep else x.new_empty(0)


def _ffn(x: Tensor, *args: Any) -> Tensor:
    forward: Callable[..., tuple[Tensor, Tensor]] = _ffn_forward_meta if x.is_meta else _ffn_forward
    return forward(x, *args[:8], False)[0]  # nothing is kept, so recompute has no effect


def _check_ffn_backward(
    dy: Tensor,
    x: Tensor,
    w: Sequence[Tensor],
    u: Sequence[Tensor],
    rows: Tensor,
    counts: Tensor,
    t: Tensor | None,
    needs: Sequence[bool],
) -> None:
    name = "masked_ffn_backward"
    _check_ffn(x, w, u, rows, counts)
    _check_like(name, "the gradient", dy, x, x.shape)
    if t is not None:
        _check_like(name, "t", t, x, (_rows_of(x), 2 * w[0].shape[0]))
    if len(needs) != 7:
        fail(name, "7 answers, which gradients are needed", len(needs))


def _ffn_backward(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    u1: Tensor,
    u2: Tensor,
    u3: Tensor,
    rows: Tensor,
    counts: Tensor,
    t: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    w, u = (w1, w2, w3), (u1, u2, u3)
    _check_ffn_backward(dy, x, w, u, rows, counts, t, needs)
    args = (_flat(dy), _flat(x), w, u, rows, counts, t, needs)
    if _by_triton(x, w1.shape[0]):
        from .triton.masked_ffn import backward

        grads = backward(*args)
    else:
        grads = plain.ffn_backward(*args)
    return (grads[0].view(x.shape) if needs[0] else grads[0], *grads[1:])


def _ffn_backward_meta(dy: Tensor, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *experts, rows, counts, t, needs = args
    _check_ffn_backward(dy, x, experts[:3], experts[3:], rows, counts, t, needs)
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else x.new_empty(0)]
    for n, t in enumerate(experts, 1):
        # The other expert's weight: one kernel computes the gradients of both.
        beside = needs[n + 3 if n < 4 else n - 3]
        found.append(t.new_empty(t.shape[0] if needs[n] else 0, t.shape[1]) if needs[n] or beside else t.new_empty(0))
    return tuple(found)


# ------------------------------------------------------------------------------------------------------- registration

_experts = "Tensor w1, Tensor w2, Tensor w3, Tensor u1, Tensor u2, Tensor u3"
for _schema, _kernel, _meta in (
    ("mask_plan(Tensor mask) -> (Tensor, Tensor)", _plan_kernel, _plan_meta),
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
    (f"masked_ffn(Tensor x, {_experts}, Tensor rows, Tensor counts, bool recompute=False) -> Tensor", _ffn, _ffn),
    (
        f"masked_ffn_forward(Tensor x, {_experts}, Tensor rows, Tensor counts, bool keep) -> (Tensor, Tensor)",
        _ffn_forward,
        _ffn_forward_meta,
    ),
    (
        f"masked_ffn_backward(Tensor grad, Tensor x, {_experts}, Tensor rows, Tensor counts, Tensor? t, bool[] needs) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _ffn_backward,
        _ffn_backward_meta,
    ),
):
    register(_schema, _kernel, _meta)

_ops = torch.ops.custom_mm
_plan: Callable[..., tuple[Tensor, Tensor]] = _ops.mask_plan.default
_linear: Callable[..., Tensor] = _ops.masked_linear.default
_weights: Callable[..., tuple[Tensor, Tensor]] = _ops.masked_weights.default
_linear_forward_op: Callable[..., tuple[Tensor, Tensor]] = _ops.masked_linear_forward.default
_linear_backward_op: Callable[..., tuple[Tensor, ...]] = _ops.masked_linear_backward.default
_sums: Callable[..., Tensor] = _ops.masked_sums.default
_ffn_op: Callable[..., Tensor] = _ops.masked_ffn.default
_ffn_forward_op: Callable[..., tuple[Tensor, Tensor]] = _ops.masked_ffn_forward.default
_ffn_backward_op: Callable[..., tuple[Tensor, ...]] = _ops.masked_ffn_backward.default


# ---------------------------------------------------------------------------------------------------------- gradients


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


def _ffn_by_parts(x: Tensor, w: Sequence[Tensor], u: Sequence[Tensor], rows: Tensor, counts: Tensor) -> Tensor:
    hidden = torch.nn.functional.silu(_linear(x, w[0], u[0], rows, counts)) * _linear(x, w[2], u[2], rows, counts)
    return _linear(hidden, w[1], u[1], rows, counts)


class _Ffn(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        tensors, recompute = args[:9], args[9]
        with torch._C._AutoDispatchBelowAutograd():
            y, t = _ffn_forward_op(*tensors, not recompute)
        ctx.save_for_backward(*tensors, None if recompute else t)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, t = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:7])
        if torch.is_grad_enabled():  # a second derivative is needed: use differentiable operators
            # Views, as one tensor may be passed twice or be computed from another.
            own = [t.view_as(t) for t in tensors[:7]]
            y = _ffn_by_parts(own[0], own[1:4], own[4:7], *tensors[7:])
            wanted = [t for t, need in zip(own, needs, strict=True) if need]
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
            return (*(next(found) if need else None for need in needs), None, None, None)
        grads = _ffn_backward_op(dy, *tensors, t, needs)
        return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None)


class _FfnForward(Function):
    """The forward operator alone: t has no gradient of its own; y's gradient is that of `_Ffn`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            y, t = _ffn_forward_op(*args)
        ctx.save_for_backward(*args[:9], t if args[9] else None)
        ctx.mark_non_differentiable(t)
        return y, t

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return _Ffn.backward(ctx, dy)


def _once(name: str) -> type[Function]:
    """Raises on a second derivative: `_Linear` and `_Ffn` use other operators where one is needed."""

    class Once(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
            with torch._C._AutoDispatchBelowAutograd():
                found: tuple[Tensor, ...] = getattr(_ops, name).default(*args)
            return found

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise RuntimeError(f"{name}: expected to be differentiated once, got a second time")

    return Once


for _name, _function in (
    ("masked_linear", _Linear),
    ("masked_weights", _Weights),
    ("masked_sums", _Sums),
    ("masked_ffn", _Ffn),
    ("masked_ffn_forward", _FfnForward),
    ("masked_linear_forward", _once("masked_linear_forward")),
    ("masked_linear_backward", _once("masked_linear_backward")),
    ("masked_ffn_backward", _once("masked_ffn_backward")),
):
    register_gradient(_name, _function)
library.impl("mask_plan", torch.library.fallthrough_kernel, "Autograd")


for _name in ("masked_linear", "masked_ffn"):
    register_autocast(_name)


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


@register_flop_formula([_ops.masked_ffn, _ops.masked_ffn_forward])
def _ffn_flops(x: torch.Size, w1: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 6 * x.numel() * w1[0]


@register_flop_formula(_ops.masked_ffn_backward)
def _ffn_backward_flops(g: torch.Size, x: torch.Size, w1: torch.Size, *args: Any, **kwargs: Any) -> int:
    t, needs = args[7:9]
    again = 0 if t is not None else 4
    products: int = again + 2 + 4 * needs[0] + 2 * sum(a or b for a, b in zip(needs[1:4], needs[4:], strict=True))
    return products * x.numel() * w1[0]


# -------------------------------------------------------------------------------------------------------------- public


def mask_plan(mask: Tensor, known: int | None = None) -> MaskPlan:
    """The rows of a mask grouped by expert, passed to `masked_linear` and `masked_ffn` instead of the mask to reuse it.

    mask: bool, any shape; True selects the first expert. Made on the mask's device in one launch, without
    synchronization: a CUDA graph can replay with another mask. known: the number of True elements if the host knows it;
    it must be right. If all rows belong to one expert, a GPU then runs a single library product. A plan made under
    torch.inference_mode can be used in inference only: autograd cannot save it. Raises RuntimeError on another dtype
    and on an impossible `known`.
    """
    try:
        rows, counts = _plan(mask)
    except RuntimeError as error:
        raise clearer(error, "mask_plan", mask=mask) from None
    if known is not None and not 0 <= known <= rows.shape[0]:
        fail("mask_plan", f"known from 0 to the mask's {rows.shape[0]} elements", known)
    return MaskPlan(rows, counts, -1 if known is None else known)


def _planned(name: str, mask: Tensor | MaskPlan, x: Tensor) -> tuple[Tensor, Tensor, int]:
    if isinstance(mask, MaskPlan):
        return mask
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        fail(name, "a mask of torch.bool, or a plan made by mask_plan", found)
    leading = x.shape[:-1]
    if mask.dim() > 1 and len(leading) > 1 and mask.shape not in (leading, (*leading, 1)):
        fail(name, f"a mask of shape {list(leading)} as the rows of x, or of one dimension", list(mask.shape))
    return (*_plan(mask), -1)


def masked_linear(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    mask: Tensor | MaskPlan,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
) -> Tensor:
    """x[r] @ w[r]^T + b[r] for every row r; w, b are w1, b1 if mask[r], else w2, b2. Takes the time of one product.

    x: [..., K]; w1, w2: [N, K], nn.Linear's layout, each with its own strides; mask: bool with x's leading dimensions
    or flat, or a plan; b1, b2: [N], both or neither. float64, float32, float16, bfloat16, one dtype and device for all.
    Accumulates in float32 or wider; uses TF32 only if torch's switch allows it. Differentiable any number of times. An
    expert without rows gets a gradient of exactly 0; a frozen expert's gradient is not computed. Under autocast it
    behaves as linear.

    On a GPU rows are gathered by the kernel's loads and scattered by its stores; nothing synchronizes on the mask. Only
    the gradient of large weights reads sorted copies, of x and of y's gradient. On sm_90 a second stream makes them
    while the gradient of x is computed; if that is not needed, the one with fewer columns is copied first. Few rows on
    sm_90, where tuned tiles say so (512 on an H200), are copied too: one wave of tiles for any mask. With 256 to 1024
    rows and large weights in 16 bits, the copy of x is saved for backward in addition to x.

    Rows may be strided. A copy is made if neither x nor its rows are contiguous, and if only one of the weights is
    transposed. float64 runs both products and blends them. On the CPU the rows are sorted, then multiplied in two
    products. `matmuls tune masked_linear` finds the fastest tiles for a GPU and a shape.

    Raises RuntimeError, before anything is computed, on shapes, dtypes or devices that do not match.
    """
    rows, counts, known = _planned("masked_linear", mask, x)
    try:
        return _linear(x, w1, w2, rows, counts, b1, b2, known)
    except RuntimeError as error:
        raise clearer(error, "masked_linear", x=x, w1=w1, w2=w2, b1=b1, b2=b2) from None


def masked_ffn(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    u1: Tensor,
    u2: Tensor,
    u3: Tensor,
    mask: Tensor | MaskPlan,
    recompute: bool = False,
) -> Tensor:
    """(silu(x w1^T) * (x w3^T)) w2^T for the rows where mask, the same with u1, u2, u3 for the others.

    x: [..., D]; w1, w3, u1, u3: [H, D]; w2, u2: [D, H], nn.Linear's layout; mask, dtypes, devices and errors as
    `masked_linear`. Differentiable any number of times. Saves x and the two products [M, H] for backward; with
    `recompute` only x, and backward computes the products again.

    On a GPU gate and up projections are one kernel with SwiGLU in its epilogue. The hidden rows are stored sorted by
    expert, so that only the first product gathers and only the second scatters.
    """
    rows, counts, _ = _planned("masked_ffn", mask, x)
    try:
        return _ffn_op(x, w1, w2, w3, u1, u2, u3, rows, counts, recompute)
    except RuntimeError as error:
        raise clearer(error, "masked_ffn", x=x, w1=w1, w2=w2, w3=w3, u1=u1, u2=u2, u3=u3) from None


# The upstream document's functions: weights [K, N], read in place.


class MaskedLinear:
    """`MaskedLinear.apply(x, w1, w2, mask)`: `masked_linear` with weights [K, N]; otherwise the same. The module is
    `matmuls.nn.MaskedLinear`."""

    @staticmethod
    def apply(x: Tensor, w1: Tensor, w2: Tensor, mask: Tensor | MaskPlan) -> Tensor:
        return masked_linear(x, w1.T, w2.T, mask)


class MaskedFFN:
    """`MaskedFFN.apply(x, w1, w2, w3, u1, u2, u3, mask)`: `masked_ffn` with w1, w3, u1, u3 [D, H] and w2, u2 [H, D];
    otherwise the same. The module is `matmuls.nn.MaskedFFN`."""

    @staticmethod
    def apply(
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        u1: Tensor,
        u2: Tensor,
        u3: Tensor,
        mask: Tensor | MaskPlan,
    ) -> Tensor:
        return masked_ffn(x, w1.T, w2.T, w3.T, u1.T, u2.T, u3.T, mask)
