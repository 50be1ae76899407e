"""Batching rules for torch.func.vmap: one call for the whole batch if leading dimensions can hold it, else one per
sample."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import custom_mm  # noqa: F401  registers its operators and those of the next two

from . import blocks, masked  # noqa: F401
from .registration import fail, library

_ops = torch.ops.custom_mm
_Operator = Any  # an OpOverload
_Dims = tuple[Any, ...]  # for each argument, the batch dimension or None
_Rule = Callable[..., tuple[Any, Any]]  # (batch size, _Dims, *arguments) -> results, their _Dims


def _writes(operator: _Operator) -> bool:
    """True if the operator writes its first argument."""
    return bool(operator._schema.name.endswith("_"))


def _register(operator: _Operator, rule: _Rule) -> None:
    """Registers `rule`, which receives all the arguments, defaults included."""
    defaults = [a.default_value for a in operator._schema.arguments]

    def batched(info: Any, dims: _Dims, *args: Any) -> tuple[Any, Any]:
        if _writes(operator) and dims[0] is None:
            name, first = operator._schema.name.partition("::")[2], operator._schema.arguments[0].name
            fail(name, f"{first}, which is written over, to be batched by vmap", "one that is not, with one that is")
        missing = defaults[len(args) :]
        return rule(info.batch_size, (*dims, *(None for _ in missing)), *args, *missing)

    torch.library.register_vmap(operator, batched, lib=library)


def _front(t: Tensor, dim: int | None) -> Tensor:
    """t with its batch dimension first; t itself if it is, since gradients through a view cost more."""
    return t.movedim(dim, 0) if dim else t


def _of_batch(t: Tensor, dim: int | None, size: int) -> Tensor:
    return t.expand(size, *t.shape) if dim is None else _front(t, dim)


def _padded(t: Tensor | None, dim: int | None, rank: int) -> Any:
    """t with its batch first, followed by ones, so that a sample has `rank` dimensions and broadcasts as a sample does.
    A tensor without a batch is returned unchanged."""
    if t is None or dim is None:
        return t
    front = _front(t, dim)
    ones = rank - t.dim() + 1
    return front.reshape(front.shape[0], *(1,) * ones, *front.shape[1:]) if ones else front


def _each(operator: _Operator) -> _Rule:
    """One call per sample, on a copy of what is written: a norm of a view is differentiable only once."""

    def rule(size: int, dims: _Dims, *args: Any) -> tuple[Any, Any]:
        def sample(i: int) -> list[Any]:
            return [a.select(d, i) if isinstance(d, int) else a for a, d in zip(args, dims, strict=True)]

        samples = [sample(i) for i in range(size)]
        if _writes(operator):
            for call in samples:
                call[0] = call[0].clone()
        results = [operator(*call) for call in samples]
        if _writes(operator):
            args[0].copy_(torch.stack([call[0] for call in samples], dims[0]))
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        if not results[0]:
            return None, None
        return tuple(torch.stack(r) for r in zip(*results, strict=True)), (0,) * len(results[0])

    return rule


def _unless_batched(operator: _Operator, *arguments: int) -> Callable[[_Rule], _Rule]:
    """Decorates a rule for calls in which these arguments have no batch; otherwise one call per sample."""
    each = _each(operator)

    def decorate(rule: _Rule) -> _Rule:
        def chosen(size: int, dims: _Dims, *args: Any) -> tuple[Any, Any]:
            return (each if any(dims[i] is not None for i in arguments) else rule)(size, dims, *args)

        return chosen

    return decorate


# --- dense products


def _matmul(size: int, dims: _Dims, a: Tensor, b: Tensor, transa: bool, transb: bool) -> tuple[Tensor, int]:
    return _product(dims, a, b, transa, transb, lambda *args: _ops.matmul.default(*args)), 0


def _product(
    dims: _Dims,
    a: Tensor,
    b: Tensor,
    transa: bool,
    transb: bool,
    product: Callable[[Tensor, Tensor, bool, bool], Tensor],
) -> Tensor:
    ranks = [t.dim() - (d is not None) for t, d in zip((a, b), dims, strict=False)]
    vectors = [rank == 1 for rank in ranks]
    if vectors[0]:  # a row vector
        a, transa = _front(a, dims[0]).unsqueeze(-2), False
    if vectors[1]:  # a column vector
        b, transb = _front(b, dims[1]).unsqueeze(-1), False
    rank = max(2, *ranks)
    fronts = [0 if d is not None and v else d for d, v in zip(dims, vectors, strict=False)]
    y = product(_padded(a, fronts[0], rank), _padded(b, fronts[1], rank), transa, transb)
    y = y.squeeze(-1) if vectors[1] else y
    return y.squeeze(-1 if vectors[1] else -2) if vectors[0] else y


def _affine(
    size: int,
    dims: _Dims,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    transa: bool,
    transb: bool,
) -> tuple[Tensor, int]:
    if dims[2] is None:
        call = _ops.cublaslt_matmul.default
        return _product(dims, a, b, transa, transb, lambda x, y, tx, ty: call(x, y, bias, activation, tx, ty)), 0
    return _each(_ops.cublaslt_matmul.default)(size, dims, a, b, bias, activation, transa, transb)


@_unless_batched(_ops.matmul_.default, 1, 3)
def _matmul_(size: int, dims: _Dims, a: Tensor, *others: Any) -> tuple[None, None]:
    _ops.matmul_.default(_front(a, dims[0]), *others)
    return None, None


@_unless_batched(_ops.bias_act_.default, 1)
def _bias_act_(size: int, dims: _Dims, x: Tensor, *others: Any) -> tuple[None, None]:
    _ops.bias_act_.default(_with_a_row(x, dims[0]), *others)
    return None, None


@_unless_batched(_ops.feed_forward_.default, *range(1, 7))
def _feed_forward_(size: int, dims: _Dims, x: Tensor, *others: Any) -> tuple[None, None]:
    _ops.feed_forward_.default(_front(x, dims[0]), *others)
    return None, None


def _elementwise(operator: _Operator) -> _Rule:
    def rule(size: int, dims: _Dims, *args: Any) -> tuple[Tensor, int]:
        tensors = [_of_batch(a, d, size) if isinstance(a, Tensor) else a for a, d in zip(args, dims, strict=True)]
        return operator(*tensors), 0

    return rule


# --- rows


def _with_a_row(x: Tensor, dim: int) -> Tensor:
    """x with its batch first and at least one more dimension, which a scalar sample lacks."""
    return _front(x, dim).unsqueeze(-1) if x.dim() == 1 else _front(x, dim)


def _row_dim(name: str, x: Tensor, dim: int) -> int:
    """A sample's dimension as a negative index; x has its batch first."""
    dims = max(x.dim() - 1, 1)
    if not -dims <= dim < dims:
        fail(name, f"dim between {-dims} and {dims - 1}", dim)
    return dim - dims if dim >= 0 else dim


def _softmax(size: int, dims: _Dims, x: Tensor, dim: int) -> tuple[Tensor, int]:
    dim = _row_dim("softmax", x, dim)
    return _ops.softmax.default(_with_a_row(x, dims[0]), dim).view_as(_front(x, dims[0])), 0


def _softmax_(size: int, dims: _Dims, x: Tensor, dim: int) -> tuple[None, None]:
    dim = _row_dim("softmax_", x, dim)
    _ops.softmax_.default(_with_a_row(x, dims[0]), dim)
    return None, None


def _mask_of(x: Tensor, mask: Tensor | None, dims: _Dims, causal: bool) -> Tensor | None:
    rank = x.dim() - (dims[0] is not None)
    if causal and rank < 2:
        fail("scaled_masked_softmax", "x of at least two dimensions where causal", rank)
    if mask is not None and mask.dim() - (dims[1] is not None) > rank:
        shape = [s for d, s in enumerate(x.shape) if d != dims[0]]
        fail("scaled_masked_softmax", f"a mask whose shape broadcasts to x's {shape}", list(mask.shape))
    padded: Tensor | None = _padded(mask, dims[1], max(rank, 1))
    return padded


def _masked(size: int, dims: _Dims, x: Tensor, mask: Any, scale: float, causal: bool) -> tuple[Tensor, int]:
    mask = _mask_of(x, mask, dims, causal)
    x = _of_batch(x, dims[0], size)
    return _ops.scaled_masked_softmax.default(_with_a_row(x, 0), mask, scale, causal).view_as(x), 0


def _masked_(size: int, dims: _Dims, x: Tensor, mask: Any, scale: float, causal: bool) -> tuple[None, None]:
    mask = _mask_of(x, mask, dims, causal)
    _ops.scaled_masked_softmax_.default(_with_a_row(x, dims[0]), mask, scale, causal)
    return None, None


def _softmax_backward(
    size: int, dims: _Dims, y: Tensor, grad: Tensor, dim: int, scale: float, causal: bool
) -> tuple[Tensor, int]:
    y, grad = _of_batch(y, dims[0], size), _of_batch(grad, dims[1], size)
    dim = _row_dim("softmax_backward", y, dim)
    rows = _with_a_row(y, 0), _with_a_row(grad, 0)
    return _ops.softmax_backward.default(*rows, dim, scale, causal).view_as(y), 0


def _softmax_backward_(
    size: int, dims: _Dims, y: Tensor, grad: Tensor, dim: int, scale: float, causal: bool
) -> tuple[None, None]:
    y, grad = _front(y, dims[0]), _of_batch(grad, dims[1], size)
    dim = _row_dim("softmax_backward_", y, dim)
    _ops.softmax_backward_.default(_with_a_row(y, 0), _with_a_row(grad, 0), dim, scale, causal)
    return None, None


def _scores_backward_(
    size: int, dims: _Dims, y: Tensor, grad: Tensor, values: Tensor, piece_bytes: int
) -> tuple[None, None]:
    y = _front(y, dims[0])
    rows = y.contiguous()
    others = (_of_batch(t, d, size) for t, d in zip((grad, values), dims[1:], strict=False))
    _ops.scores_backward_.default(rows, *others, piece_bytes)
    if rows is not y:
        y.copy_(rows)
    return None, None


@_unless_batched(_ops.csr_linear.default, 0, 1, 2, 4, 5, 6, 7, 8)
def _csr_linear(size: int, dims: _Dims, crow: Tensor, col: Tensor, values: Tensor, x: Tensor, *args: Any) -> Any:
    return _ops.csr_linear.default(crow, col, values, _front(x, dims[3]), *args), 0


def _residual(x: Tensor, residual: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    return None if residual is None else _of_batch(residual, dim, size)


@_unless_batched(_ops.layer_norm_.default, 1, 2)
def _layer_norm_(
    size: int, dims: _Dims, x: Tensor, weight: Any, bias: Any, eps: float, residual: Any
) -> tuple[None, None]:
    x = _front(x, dims[0])
    _ops.layer_norm_.default(x, weight, bias, eps, _residual(x, residual, dims[4], size))
    return None, None


@_unless_batched(_ops.rms_norm_.default, 1)
def _rms_norm_(size: int, dims: _Dims, x: Tensor, weight: Any, eps: float, residual: Any) -> tuple[None, None]:
    x = _front(x, dims[0])
    _ops.rms_norm_.default(x, weight, eps, _residual(x, residual, dims[3], size))
    return None, None


@_unless_batched(_ops.norm_keep_.default, 1, 2)
def _norm_keep_(
    size: int, dims: _Dims, x: Tensor, weight: Any, bias: Any, eps: float, residual: Any, rms: bool
) -> tuple[tuple[Tensor, Tensor], _Dims]:
    x = _front(x, dims[0])
    kept = _ops.norm_keep_.default(x, weight, bias, eps, _residual(x, residual, dims[4], size), rms)
    return kept, (None if weight is None and bias is None else 0, 0)


@_unless_batched(_ops.norm_backward.default, 3)
def _norm_backward(
    size: int,
    dims: _Dims,
    grad: Tensor,
    xhat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    rms: bool,
    need_dx: bool,
    need_columns: bool,
) -> tuple[tuple[Tensor, ...], _Dims]:
    grad, xhat, rstd = (_of_batch(t, d, size) for t, d in zip((grad, xhat, rstd), dims, strict=False))
    dx, none, _ = _ops.norm_backward.default(grad, xhat, rstd, weight, rms, need_dx, False)
    where = 0 if need_dx else None
    if not need_columns:
        return (dx, none, none), (where, None, None)
    rows = grad.to(rstd.dtype).reshape(size, math.prod(grad.shape[1:-1]), grad.shape[-1])
    dweight, dbias = (rows * xhat.reshape(rows.shape)).sum(1), rows.sum(1)
    return (dx, dweight.to(xhat.dtype), dbias.to(xhat.dtype)), (where, 0, 0)


# --- sparse matrices of one pattern


def _leads(dims: _Dims, tensors: tuple[Tensor | None, ...], own: tuple[int, ...]) -> list[Any]:
    """Adds ones so that tensors of `own` trailing dimensions broadcast in their leading ones as a sample's do."""
    given = [(t, d, n) for t, d, n in zip(tensors, dims, own, strict=True) if t is not None]
    rank = max(t.dim() - (d is not None) - n for t, d, n in given)
    return [_padded(t, d, rank + n) for t, d, n in zip(tensors, dims, own, strict=True)]


def _spmm(operator: _Operator, selected: int | None) -> _Rule:
    """Rule of a product of values and dense, arguments 2 and 3. `selected`: the argument with the result's shape."""

    @_unless_batched(operator, *(i for i, a in enumerate(operator._schema.arguments) if _is_pattern(a.name)))
    def rule(size: int, dims: _Dims, *args: Any) -> tuple[Any, Any]:
        all_args = list(args)
        if selected is not None and args[selected] is not None:
            all_args[selected] = _of_batch(args[selected], dims[selected], size)
        all_args[2:4] = _leads(dims[2:4], args[2:4], (1, 2))
        results = operator(*all_args)
        return results, 0 if isinstance(results, Tensor) else (0,) * len(results)

    return rule


def _is_pattern(name: str) -> bool:
    return name in ("crow", "col", "order", "t_crow", "t_col", "t_order")


@_unless_batched(_ops.csr_sddmm.default, 0, 1, 6, 7, 8, 9)
def _sddmm(size: int, dims: _Dims, *args: Any) -> tuple[Tensor, int]:
    *front, selected, by_column, summed = args
    if selected is not None:
        selected = _of_batch(selected, dims[10], size)
    front[2:4] = _leads(dims[2:4], args[2:4], (2, 2))
    y = _ops.csr_sddmm.default(*front, selected, by_column, False)
    return y.reshape(size, -1, y.shape[-1]).sum(1) if summed and y.dim() > 2 else y, 0


@_unless_batched(_ops.csr_softmax.default, 0, 3)
def _csr_softmax(size: int, dims: _Dims, crow: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, int]:
    return _ops.csr_softmax.default(crow, _front(x, dims[1]), *others), 0


@_unless_batched(_ops.csr_softmax_backward.default, 0, 4)
def _csr_softmax_backward(
    size: int, dims: _Dims, crow: Tensor, y: Tensor, grad: Tensor, *others: Any
) -> tuple[Tensor, int]:
    rows = _of_batch(y, dims[1], size), _of_batch(grad, dims[2], size)
    return _ops.csr_softmax_backward.default(crow, *rows, *others), 0


_RULES: dict[_Operator, _Rule] = {
    _ops.matmul.default: _matmul,
    _ops.cublaslt_matmul.default: _affine,
    _ops.matmul_.default: _matmul_,
    _ops.kept.default: _elementwise(_ops.kept.default),
    _ops.bias_act_.default: _bias_act_,
    _ops.gelu.default: _elementwise(_ops.gelu.default),
    _ops.gelu_backward.default: _elementwise(_ops.gelu_backward.default),
    _ops.feed_forward_.default: _feed_forward_,
    _ops.softmax.default: _softmax,
    _ops.softmax_.default: _softmax_,
    _ops.scaled_masked_softmax.default: _masked,
    _ops.scaled_masked_softmax_.default: _masked_,
    _ops.softmax_backward.default: _softmax_backward,
    _ops.softmax_backward_.default: _softmax_backward_,
    _ops.scores_backward_.default: _scores_backward_,
    _ops.layer_norm_.default: _layer_norm_,
    _ops.rms_norm_.default: _rms_norm_,
    _ops.norm_keep_.default: _norm_keep_,
    _ops.norm_backward.default: _norm_backward,
    _ops.csr_spmm.default: _spmm(_ops.csr_spmm.default, 11),
    _ops.csr_spmm_arg.default: _spmm(_ops.csr_spmm_arg.default, None),
    _ops.csr_linear.default: _csr_linear,
    _ops.csr_sddmm.default: _sddmm,
    _ops.csr_softmax.default: _csr_softmax,
    _ops.csr_softmax_backward.default: _csr_softmax_backward,
}
# One call per sample: operators that read a tensor's values, or whose kernels take only matrices.
_EACH = (
    _ops.attention_forward.default,
    _ops.bsr_sddmm.default,
    _ops.bsr_spmm.default,
    _ops.csr_linear_packed.default,
    _ops.csr_solve_state.default,
    _ops.csr_solve_triangular.default,
    _ops.csr_spgemm.default,
    _ops.csr_spgemm_pattern.default,
    _ops.csr_spgemm_sampled.default,
    _ops.csr_spgemm_size.default,
    _ops.csr_spmm_chunks.default,
    _ops.csr_spmm_halves.default,
    _ops.csr_spmm_packed.default,
    _ops.csr_spmm_tiles.default,
    _ops.cusparse_sddmm.default,
    _ops.cusparse_spmm.default,
    _ops.masked_ffn.default,
    _ops.masked_ffn_backward.default,
    _ops.masked_ffn_forward.default,
    _ops.masked_linear.default,
    _ops.masked_linear_backward.default,
    _ops.masked_linear_forward.default,
    _ops.masked_sums.default,
    _ops.masked_weights.default,
)


for _operator, _rule in _RULES.items():
    _register(_operator, _rule)
for _operator in _EACH:
    _register(_operator, _each(_operator))
