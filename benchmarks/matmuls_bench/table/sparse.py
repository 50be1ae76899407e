"""Table rows of the sparse products."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from matmuls import sparse
from matmuls.sparse.chunks import chunks_of

from .rowwise import BAD_X
from .spec import ALL, REAL, Bad, Call, Draw, Spec

_ops = torch.ops.custom_mm


def _sparse_plan(draw: Draw, rows: int, columns: int, layout: str = "csr") -> Any:
    """A plan of a random matrix, about a quarter full; from three rows on one of them is empty."""
    dense = torch.zeros(rows, columns, device=draw.device, dtype=draw.dtype)
    if rows * columns:
        chosen = Draw(torch.float64, "cpu", rows * 1000 + columns)(rows, columns) > 0.7
        chosen[rows // 2] &= rows < 3
        dense[chosen.to(draw.device)] = 1
    return sparse.plan(getattr(dense, f"to_sparse_{layout}")())


def _places(plan: Any, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and value's index of each nonzero, where a reference computes: not always where the plan lies."""
    s = plan._pattern
    rows = torch.repeat_interleave(torch.arange(s.rows), s.crow.diff().long().cpu())
    order = torch.arange(s.nonzeros) if s.order is None else s.order.long()
    return rows.to(device), s.col.long().to(device), order.to(device)


def _stored_dense(plan: Any, values: Tensor) -> Tensor:
    """The matrix of a plan with other values, dense; differentiable."""
    s = plan._pattern
    rows, columns, order = _places(plan, values.device)
    values = values[..., order]
    index = (rows * s.columns + columns).expand(values.shape)
    flat = values.new_zeros(*values.shape[:-1], s.rows * s.columns).scatter(-1, index, values)
    return flat.view(*values.shape[:-1], s.rows, s.columns)


def _in_order(plan: Any, dense: Tensor) -> Tensor:
    """The elements of a dense matrix, or batch, at the plan's nonzeros, in the order of the plan's values."""
    rows, columns, order = _places(plan, dense.device)
    return dense[..., rows, columns][..., torch.argsort(order)]


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
    ways = ("sum", "mean") if draw.dtype.is_complex else ("sum", "mean", "max", "min")
    for (rows, columns, n), layout, reduce in product(SPARSE_SHAPES, ("csr", "csc"), ways):
        plan = _sparse_plan(draw, rows, columns, layout)
        yield Call((draw(plan.nnz), draw(columns, n), plan), {"reduce": reduce, "alpha": 0.5})
    plan = _sparse_plan(draw, 7, 5)
    yield Call((draw(plan.nnz), draw(2, 3, 5, 4), plan))


def _spmm_bad(draw: Draw) -> Iterator[Bad]:
    plan = _sparse_plan(draw, 6, 5)
    yield Bad(Call((draw(plan.nnz), draw(6, 3), plan)), r"spmm: expected dense of shape \[..., 5, n\]")
    whole = torch.ones(5, 3, device=draw.device, dtype=torch.long)
    yield Bad(Call((draw(plan.nnz), whole, plan)), "spmm: expected dense of a floating-point or complex dtype, got")
    if draw.dtype.is_complex:
        call = Call((draw(plan.nnz), draw(5, 3), plan), {"reduce": "max"})
        yield Bad(call, "spmm: expected reduce to be sum or mean in Complex(Float|Double), got max")
    other = torch.float32 if draw.dtype != torch.float32 else torch.float64
    values = torch.ones(plan.nnz, device=draw.device, dtype=other)
    yield Bad(Call((values, draw(5, 3), plan)), "spmm: expected values to be a strided tensor in")
    if draw.device != "cpu":
        yield Bad(Call((draw(plan.nnz), draw(5, 3).cpu(), plan)), "spmm: expected values to be a strided tensor in")


def _spmm_opchecks(draw: Draw) -> Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    s = _sparse_plan(draw, 6, 5)._pattern
    transposed = _ops.csr_transpose(s.crow, s.col, 5)
    for reduce in ("sum", "mean", "max"):
        values, dense = draw(s.nonzeros).requires_grad_(), draw(2, 5, 3).requires_grad_()
        yield _ops.csr_spmm.default, (s.crow, s.col, values, dense, 5, reduce, 0.5)
        yield _ops.csr_spmm.default, (s.crow, s.col, values, dense, 5, reduce, 1.0, None, *transposed)
    x, bias = draw(2, 3, 5).requires_grad_(), draw(6).requires_grad_()
    yield _ops.csr_linear.default, (s.crow, s.col, draw(s.nonzeros).requires_grad_(), x, bias)
    yield _ops.csr_linear.default, (s.crow, s.col, draw(s.nonzeros), x, None, None, *transposed)
    yield _ops.csr_spmm_arg.default, (s.crow, s.col, values, dense, 5, "min")
    chosen = _ops.csr_spmm_arg(s.crow, s.col, values.detach(), dense.detach(), 5, "max")[1]
    yield _ops.csr_spmm.default, (s.crow, s.col, values, dense, 5, "sum", 1.0, None, *transposed, chosen)
    yield _ops.csr_check.default, (s.crow, s.col, 5)
    yield _ops.csr_check_copied.default, (s.crow, s.col, 5)
    yield _ops.csr_transpose.default, (s.crow, s.col, 5)
    if s.crow.is_cuda:
        yield from _layout_opchecks(draw)
    blocks, wide = draw(s.nonzeros, 16, 32).requires_grad_(), draw(5 * 32, 3).requires_grad_()
    yield _ops.bsr_spmm.default, (s.crow, s.col, blocks, wide, 5 * 32)
    yield _ops.bsr_spmm.default, (s.crow, s.col, blocks, wide, 5 * 32, None, False, *transposed)
    tall = draw(6 * 16, 3).requires_grad_()
    yield _ops.bsr_spmm.default, (*transposed[:2], blocks, tall, 6 * 16, transposed[2], True)
    yield _ops.bsr_sddmm.default, (s.crow, s.col, tall, wide, 5 * 32, 16, 32)


def _layout_opchecks(draw: Draw) -> Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    """Calls of operators that have no CPU kernel."""
    s = _sparse_plan(draw, 6, 5)._pattern
    single, right = draw(s.nonzeros).float(), draw(5, 8).float()
    yield _ops.csr_filled.default, (s.crow, s.col, single.half(), 5)
    yield _ops.csr_halves.default, (s.crow, s.col, single, 5)
    halves = _ops.csr_halves(s.crow, s.col, single, 5)
    yield _ops.csr_spmm_halves.default, (*halves, s.crow, s.col, single, right, 5)
    narrow = s.in_int32()
    made = chunks_of(narrow.crow, narrow.col, 4, 2)
    parts = narrow.crow, narrow.col, single, right.clone().requires_grad_(), 5, made.slots
    yield _ops.csr_chunks.default, (narrow.crow, narrow.col, 4, 2)
    yield _ops.csr_spmm_chunks.default, (made.begins, made.ends, made.cut, made.empty, *parts)
    yield _ops.csr_spmm_chunks.default, (made.begins, made.ends, made.cut, made.empty, *parts, None, 4, *parts[1:3])
    square = _sparse_plan(draw, 6, 6)._pattern.in_int32()
    yield _ops.csr_regions.default, (square.crow, square.col, 6, 2, 3)
    order = torch.randperm(6, device=square.crow.device, dtype=torch.int32)
    yield _ops.csr_reads.default, (square.crow, square.col, 6, 2, 2, order)
    yield _ops.csr_reorder.default, (square.crow, square.col, order)
    yield _ops.csr_chunks.default, (square.crow, square.col, 4, 2, order)
    laid_out = _ops.csr_tiles(narrow.crow, narrow.col, 5, 1, 2, 16)
    yield _ops.csr_tiles.default, (narrow.crow, narrow.col, 5, 1, 2, 16)
    first, _, until, _ = laid_out[0].view(-1, 4)[-1].tolist()
    entries = (*laid_out, narrow.crow, narrow.col, single, 5, 16, first + (until >> 16))
    yield _ops.csr_tile_entries.default, entries
    yield _ops.csr_spmm_tiles.default, (*laid_out, *_ops.csr_tile_entries(*entries), *parts[:-1], 16)
    short = single.half()
    yield _ops.csr_packed_units.default, (s.crow, s.col, 5)
    units = int(_ops.csr_packed_units(s.crow, s.col, 5).item())
    yield _ops.csr_packed.default, (s.crow, s.col, short, 5, units)
    packed = _ops.csr_packed(s.crow, s.col, short, 5, units)
    narrow_right = right.half().requires_grad_()
    yield _ops.csr_spmm_packed.default, (packed, s.crow, s.col, short, narrow_right, 5)
    units = int(_ops.csr_packed_units(s.crow, s.col, 5, True).item())
    in_order = _ops.csr_packed(s.crow, s.col, short, 5, units, None, True)
    x, bias = draw(8, 5).half().requires_grad_(), draw(s.rows).half().requires_grad_()
    yield _ops.csr_linear_packed.default, (in_order, s.crow, s.col, short, x, 5)
    yield _ops.csr_linear_packed.default, (in_order, s.crow, s.col, short, x, 5, None, -1, bias)


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
    s = _sparse_plan(draw, 6, 5)._pattern
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
    s = _sparse_plan(draw, 6, 5)._pattern
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


def _spgemm_plan(draw: Draw, rows: int, middle: int, columns: int, layout: str = "csr") -> Any:
    return sparse.plan_spgemm(_sparse_plan(draw, rows, middle, layout), _sparse_plan(draw, middle, columns, layout))


def _spgemm_call(a_values: Tensor, b_values: Tensor, plan: Any) -> Tensor:
    result: Tensor = plan.values(a_values, b_values)
    return result


def _spgemm_reference(a_values: Tensor, b_values: Tensor, plan: Any) -> Tensor:
    product = _stored_dense(plan.a, a_values) @ _stored_dense(plan.b, b_values)
    crow, columns = (t.to(a_values.device).long() for t in plan._c[:2])
    rows = torch.repeat_interleave(torch.arange(plan.shape[0], device=crow.device), crow.diff())
    return product[..., rows, columns]


def _spgemm_samples(draw: Draw) -> Iterator[Call]:
    for (rows, middle, columns), layout in product([(6, 5, 7), (1, 1, 1), (9, 17, 8), (33, 20, 64)], ("csr", "csc")):
        plan = _spgemm_plan(draw, rows, middle, columns, layout)
        yield Call((draw(plan.a.nnz), draw(plan.b.nnz), plan))


def _spgemm_bad(draw: Draw) -> Iterator[Bad]:
    plan = _spgemm_plan(draw, 6, 5, 7)
    other = torch.float32 if draw.dtype != torch.float32 else torch.float64
    values = draw(plan.a.nnz), draw(plan.b.nnz)
    yield Bad(Call((values[0], values[1].to(other), plan)), "csr_spgemm: expected b_values to be a strided tensor in")
    yield Bad(Call((values[0].long(), values[1], plan)), "csr_spgemm: expected a_values of a floating-point dtype")


def _spgemm_opchecks(draw: Draw) -> Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    plan = _spgemm_plan(draw, 6, 5, 7)
    (a, b), c, values = plan._parts, plan._c, (draw(plan.a.nnz), draw(plan.b.nnz))
    yield _ops.csr_spgemm_size.default, (a, b, 7)
    sizes = *_ops.csr_spgemm_size(a, b, 7), plan.nnz
    yield _ops.csr_spgemm_pattern.default, (a, b, 7, *sizes)
    yield _ops.csr_spgemm_pattern.default, (a, b, 7, *sizes, *values)
    leaves = [v.requires_grad_() for v in values]
    yield _ops.csr_spgemm.default, (*leaves, a, b, c, 7)
    yield _ops.csr_spgemm.default, (*leaves, *plan._lists(True), 7)
    yield _ops.csr_spgemm_sampled.default, (draw(plan.nnz).requires_grad_(), leaves[1], a, c, b, 7)


def _triangle_plan(draw: Draw, n: int, layout: str = "csr") -> Any:
    """A plan of both triangles, with a whole diagonal."""
    dense = _stored_dense(_sparse_plan(draw, n, n), torch.ones(_sparse_plan(draw, n, n).nnz)).to(draw.device)
    dense = (dense + torch.eye(n, device=draw.device) > 0).to(draw.dtype)
    return sparse.plan(getattr(dense, f"to_sparse_{layout}")())


def _scaled(values: Tensor, plan: Any) -> Tensor:
    """Values of well-conditioned triangles: the diagonal is about 2, the rest small."""
    rows, columns, order = _places(plan, values.device)
    on_diagonal = (rows == columns)[torch.argsort(order)]
    return torch.where(on_diagonal, 2 + values.tanh() / 2, values.tanh() / 8)


def _solve_call(values: Tensor, b: Tensor, plan: Any, **kwargs: Any) -> Tensor:
    return sparse.solve_triangular(plan.with_values(_scaled(values, plan)), b, **kwargs)


def _solve_reference(
    values: Tensor, b: Tensor, plan: Any, upper: bool, transpose: bool = False, unit_diagonal: bool = False
) -> Tensor:
    wide = torch.promote_types(values.dtype, torch.float32)
    dense = _stored_dense(plan, _scaled(values, plan)).to(wide)
    dense = dense.triu() if upper else dense.tril()
    upper, dense = (not upper, dense.mT) if transpose else (upper, dense)
    return torch.linalg.solve_triangular(dense, b.to(wide), upper=upper, unitriangular=unit_diagonal).to(b.dtype)


def _solve_samples(draw: Draw) -> Iterator[Call]:
    for (n, k), layout, upper in product([(6, 3), (1, 1), (17, 20)], ("csr", "csc"), (False, True)):
        plan = _triangle_plan(draw, n, layout)
        for transpose, unit in ((False, False), (True, True)):
            options = {"upper": upper, "transpose": transpose, "unit_diagonal": unit}
            yield Call((draw(plan.nnz), draw(n, k), plan), options)


def _solve_bad(draw: Draw) -> Iterator[Bad]:
    plan, other = _triangle_plan(draw, 6), torch.float32 if draw.dtype != torch.float32 else torch.float64
    upper = {"upper": True}
    yield Bad(
        Call((draw(plan.nnz), draw(5, 3), plan), upper), r"solve_triangular: expected b of shape \[6\] or \[6, k\]"
    )
    yield Bad(Call((draw(plan.nnz).to(other), draw(6, 3), plan), upper), "expected values to be a strided tensor in")


def _solve_opchecks(draw: Draw) -> Iterator[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    plan = _triangle_plan(draw, 6)
    s = plan._pattern
    values, b = _scaled(draw(plan.nnz), plan).requires_grad_(), draw(6, 3).requires_grad_()
    yield _ops.csr_solve_triangular.default, (s.crow, s.col, values, b, True)
    yield _ops.csr_solve_triangular.default, (s.crow, s.col, values, b, False, True, True, None, *s.transposed()[:3])
    yield _ops.csr_solve_state.default, (s.crow, s.col)
    state = _ops.csr_solve_state(s.crow, s.col)
    yield _ops.csr_solve_triangular.default, (s.crow, s.col, values, b, True, False, False, *[None] * 4, state)


def _half_empty(draw: Draw, *shape: int) -> Tensor:
    x = draw(*shape)
    return torch.where(x.abs() > 0.5, x, 0)


SPARSE: dict[str, Any] = {"dtypes": REAL, "flops": False}
WITH_COMPLEX = SPARSE | {"dtypes": ALL}
TABLE: tuple[Spec, ...] = (
    Spec(
        name="spmm",
        summary="`spmm(A, B, *, reduce, alpha, beta, out)`: A @ B, A sparse; sum, mean, max or min over each row",
        call=_spmm_call,
        reference=_spmm_reference,
        operators=(
            _ops.csr_spmm.default,
            _ops.csr_spmm.out,
            _ops.csr_spmm_arg.default,
            _ops.csr_linear.default,
            _ops.csr_check.default,
            _ops.csr_check_copied.default,
            _ops.csr_transpose.default,
            _ops.csr_filled.default,
            _ops.csr_halves.default,
            _ops.csr_spmm_halves.default,
            _ops.csr_chunks.default,
            _ops.csr_spmm_chunks.default,
            _ops.csr_regions.default,
            _ops.csr_reads.default,
            _ops.csr_reorder.default,
            _ops.csr_tiles.default,
            _ops.csr_tile_entries.default,
            _ops.csr_spmm_tiles.default,
            _ops.csr_packed_units.default,
            _ops.csr_packed.default,
            _ops.csr_spmm_packed.default,
            _ops.csr_linear_packed.default,
            _ops.bsr_spmm.default,
            _ops.bsr_sddmm.default,
        ),
        samples=_spmm_samples,
        bad=_spmm_bad,
        empty=lambda draw: (
            Call((draw(0), draw(columns, n), _sparse_plan(draw, 0, columns)))
            for columns, n in ((0, 0), (3, 0), (0, 4), (3, 4))
        ),
        opchecks=_spmm_opchecks,
        **WITH_COMPLEX,
    ),
    Spec(
        name="sddmm",
        summary="`sddmm(a, b, pattern, *, alpha)`: a @ b where the pattern has nonzeros",
        call=sparse.sddmm,
        reference=lambda a, b, plan, alpha=1: alpha * _in_order(plan, a @ b),
        operators=(_ops.csr_sddmm.default,),
        samples=_sddmm_samples,
        bad=_sddmm_bad,
        empty=lambda draw: iter([Call((draw(0, 4), draw(4, 3), _sparse_plan(draw, 0, 3)))]),
        opchecks=_sddmm_opchecks,
        **WITH_COMPLEX,
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
        name="spgemm",
        summary="`spgemm(A, B, *, max_nnz)`, `plan_spgemm(A, B, *, max_nnz)`: A @ B, all three sparse",
        call=_spgemm_call,
        reference=_spgemm_reference,
        operators=(
            _ops.csr_spgemm.default,
            _ops.csr_spgemm_size.default,
            _ops.csr_spgemm_pattern.default,
            _ops.csr_spgemm_sampled.default,
        ),
        samples=_spgemm_samples,
        bad=_spgemm_bad,
        empty=lambda draw: (Call((draw(0), draw(p.b.nnz), p)) for p in [_spgemm_plan(draw, 0, 5, 7)]),
        opchecks=_spgemm_opchecks,
        **SPARSE,
    ),
    Spec(
        name="solve_triangular",
        summary="`solve_triangular(A, b, *, upper, transpose, unit_diagonal)`, "
        "`plan_solve(A, *, upper, transpose, unit_diagonal)`: T x = b, T a triangle of a sparse A",
        call=_solve_call,
        reference=_solve_reference,
        operators=(_ops.csr_solve_triangular.default, _ops.csr_solve_state.default),
        samples=_solve_samples,
        bad=_solve_bad,
        empty=lambda draw: (
            Call((draw(p.nnz), draw(n, k), p), {"upper": True})
            for n, k in ((0, 3), (4, 0))
            for p in [_triangle_plan(draw, n)]
        ),
        opchecks=_solve_opchecks,
        autocast=False,
        waits=True,
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
                    r"cusparseMM: expected b of shape \[..., 4, n\] for a of 4 columns",
                )
            ]
        ),
        empty=lambda draw: iter([Call((draw(0, 4), draw(4, 5))), Call((draw(3, 0), draw(0, 5)))]),
        opchecks=_spmm_opchecks,
        static=True,
        **WITH_COMPLEX,
    ),
)
