"""masked_ffn, with gradients: two SwiGLU networks, of which a mask selects one for each row. Triton on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.flop_counter import register_flop_formula

from custom_mm.arguments import clearer

from ..registration import Applied, fail, once, register, register_autocast, register_gradient, signature_of_apply
from . import checks, linear, plain  # noqa: F401  linear registers the operator that gradients are made of
from .checks import check_like, check_x, flat, rows_of
from .plan import MaskPlan, planned


def _check_ffn(x: Tensor, w: Sequence[Tensor], u: Sequence[Tensor], rows: Tensor, counts: Tensor) -> None:
    name = "masked_ffn"
    check_x(name, x, rows, counts)
    if w[0].dim() != 2:
        fail(name, "w1 of two dimensions, [H, D]", list(w[0].shape))
    up, down = (w[0].shape[0], x.shape[-1]), (x.shape[-1], w[0].shape[0])
    for letter, expert in (("w", w), ("u", u)):
        for n, (t, shape) in enumerate(zip(expert, (up, down, up), strict=True), 1):
            check_like(name, f"{letter}{n}", t, x, shape)


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
    t: Tensor | None
    if checks.by_triton(x, w1.shape[0]):
        from ..triton.masked_ffn import forward

        y, t = forward(flat(x), w, u, rows, counts, keep)
    else:
        y, t = plain.ffn(flat(x), w, u, rows, counts, keep)
    return y if x.dim() == 2 else y.view(x.shape), t if keep and t is not None else x.new_empty(0)


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
    check_like(name, "the gradient", dy, x, x.shape)
    if t is not None:
        check_like(name, "t", t, x, (rows_of(x), 2 * w[0].shape[0]))
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
    args = (flat(dy), flat(x), w, u, rows, counts, t, needs)
    if checks.by_triton(x, w1.shape[0]):
        from ..triton.masked_ffn import backward

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


_experts = "Tensor w1, Tensor w2, Tensor w3, Tensor u1, Tensor u2, Tensor u3"
for _schema, _kernel, _meta in (
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
_linear: Callable[..., Tensor] = _ops.masked_linear.default
_ffn_op: Callable[..., Tensor] = _ops.masked_ffn.default
_ffn_forward_op: Callable[..., tuple[Tensor, Tensor]] = _ops.masked_ffn_forward.default
_ffn_backward_op: Callable[..., tuple[Tensor, ...]] = _ops.masked_ffn_backward.default


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


for _name, _function in (
    ("masked_ffn", _Ffn),
    ("masked_ffn_forward", _FfnForward),
    ("masked_ffn_backward", once("masked_ffn_backward")),
):
    register_gradient(_name, _function)
register_autocast("masked_ffn")


# FLOPs for torch.utils.flop_counter: every row goes through one expert.


@register_flop_formula([_ops.masked_ffn, _ops.masked_ffn_forward])
def _ffn_flops(x: torch.Size, w1: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 6 * x.numel() * w1[0]


@register_flop_formula(_ops.masked_ffn_backward)
def _ffn_backward_flops(g: torch.Size, x: torch.Size, w1: torch.Size, *args: Any, **kwargs: Any) -> int:
    t, needs = args[7:9]
    again = 0 if t is not None else 4
    products: int = again + 2 + 4 * needs[0] + 2 * sum(a or b for a, b in zip(needs[1:4], needs[4:], strict=True))
    return products * x.numel() * w1[0]


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
    """Computes (silu(x w1^T) * (x w3^T)) w2^T for the rows where mask is True, and the same with u1, u2, u3 for the
    others.

    The operation is differentiable any number of times. x and the two products [M, H] are saved for backward. On a GPU
    one kernel computes the gate, the up projection and SwiGLU, and the hidden rows are stored sorted by expert.

    Args:
        x: [..., D] float64, float32, float16 or bfloat16.
        w1: [H, D], gate of the first expert, the layout of nn.Linear; dtype and device of x, as all weights.
        w2: [D, H], down projection of the first expert.
        w3: [H, D], up projection of the first expert.
        u1: [H, D], gate of the second expert.
        u2: [D, H], down projection of the second expert.
        u3: [H, D], up projection of the second expert.
        mask: bool, with x's leading dimensions or flat, [rows]; or a mask plan made by `mask_plan`.
        recompute: save only x for backward, which computes the products again.

    Returns:
        [..., D].

    Raises:
        RuntimeError: before anything is computed, if shapes, dtypes or devices do not match.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> x, w = torch.ones(2, 1), torch.ones(1, 1)
        >>> matmuls.masked_ffn(x, w, w, w, w, -w, w, torch.tensor([True, False]))
        tensor([[ 0.7311],
                [-0.7311]])
    """
    try:
        rows, counts, _ = planned("masked_ffn", mask, x)
        return _ffn_op(x, w1, w2, w3, u1, u2, u3, rows, counts, recompute)
    except (RuntimeError, AttributeError) as error:
        raise clearer(error, "masked_ffn", x=x, w1=w1, w2=w2, w3=w3, u1=u1, u2=u2, u3=u3) from None


class MaskedFFN(Applied):
    """`MaskedFFN.apply(x, w1, w2, w3, u1, u2, u3, mask)` computes `masked_ffn` with transposed weights.

    It is not the module `matmuls.nn.MaskedFFN`, whose weights have the layout of nn.Linear.

    Args:
        x: [..., D]; dtypes as `masked_ffn`.
        w1, w3, u1, u3: [D, H], read in place; dtype and device of x.
        w2, u2: [H, D], read in place; dtype and device of x.
        mask: bool, one element for each row, or a mask plan.

    Returns:
        [..., D], differentiable any number of times.

    Raises:
        RuntimeError: as `masked_ffn`.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> x, w = torch.ones(2, 1), torch.ones(1, 1)
        >>> matmuls.MaskedFFN.apply(x, w, w, w, w, -w, w, torch.tensor([True, False]))
        tensor([[ 0.7311],
                [-0.7311]])
    """

    __signature__ = signature_of_apply("x", "w1", "w2", "w3", "u1", "u2", "u3", "mask")
    _module = "matmuls.nn.MaskedFFN"

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
        """Computes `masked_ffn(x, w1.T, w2.T, w3.T, u1.T, u2.T, u3.T, mask)`.

        Args:
            x: [..., D].
            w1: [D, H].
            w2: [H, D].
            w3: [D, H].
            u1: [D, H].
            u2: [H, D].
            u3: [D, H].
            mask: bool, one element for each row, or a mask plan.

        Returns:
            [..., D].
        """
        return masked_ffn(x, w1.T, w2.T, w3.T, u1.T, u2.T, u3.T, mask)
