"""What a pickle of a plan holds, and the plan that is made of it: everything is checked, since a file may be damaged.

`torch.load` with its default, weights_only=True, calls the functions of SAFE and none else.
"""

import copyreg
import math
from typing import Any

import torch

from .csr_pattern import Blocks, CsrPattern
from .plan import SparsePlan, TransposedPlan, plan_of
from .prepared import PreparedCalls
from .selector import Selector

NAME = "SparsePlan"
Indices = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # crow, col, order


def _expect(holds: bool, what: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{NAME}: expected a pickle with {what}, got {got}")


def reduced(plan: SparsePlan) -> tuple[Any, ...]:
    """A function and its arguments, as `__reduce__` returns them. Copies in other layouts, measurements and the
    transposed indices are left out."""
    if isinstance(plan, TransposedPlan):
        return transposed_plan, (plan._base,)
    s, prepared, selector = plan._pattern, plan._prepared, plan._selector
    settings = None if selector is None else (selector.products, selector.constant)
    if prepared.source is not None and prepared.source.layout != torch.strided:
        return plan_of_source, (prepared.source, prepared.source.requires_grad, settings)
    blocks = None if s.blocks is None else (_indices(s.blocks.pattern), s.blocks.height, s.blocks.width)
    shape = None if prepared.values_shape is None else tuple(prepared.values_shape)
    values = prepared.values if prepared.source is None else prepared.source
    return plan_of_indices, (_indices(s), tuple(plan.shape), values, shape, blocks, settings)


def _indices(s: CsrPattern) -> Indices:
    return s.crow, s.col, s.order


def _names_all(order: torch.Tensor) -> bool:
    """True if the order [n] names each number from 0 to n - 1."""
    known = (order >= 0) & (order < order.shape[0])
    named = torch.zeros_like(order, dtype=torch.bool)
    named[order[known].long()] = True
    return bool(named.all())


def _pattern(parts: Indices, shape: tuple[int, int], batch: int | None = None) -> CsrPattern:
    """The pattern of checked indices."""
    crow, col, order = parts
    given = (crow, col) if order is None else (crow, col, order)
    _expect(all(type(t) is torch.Tensor and t.layout == torch.strided for t in given), "tensors of indices", parts)
    _expect(
        all(t.dtype == col.dtype and t.device == col.device and t.is_contiguous() for t in given)
        and col.dtype in (torch.int32, torch.int64),
        "contiguous int32 or int64 indices of one dtype on one device",
        [(t.dtype, t.device) for t in given],
    )
    _expect(col.dim() == 1, "columns of one dimension", list(col.shape))
    made = CsrPattern(NAME, crow, col, shape, order=order, batch=batch)
    if order is not None:
        _expect(order.shape == col.shape, f"an order of {made.nonzeros} values", list(order.shape))
        in_range = not made.nonzeros or (int(order.min()) >= 0 and int(order.max()) < made.nonzeros)
        _expect(in_range, f"an order from 0 to {made.nonzeros - 1}", "another number")
        _expect(_names_all(order), "an order with each value once", "one with a value twice")
    return made


def _settings(settings: tuple[int, bool] | None) -> tuple[int, bool] | None:
    valid = settings is None or (
        isinstance(settings, tuple) and tuple(map(type, settings)) == (int, bool) and settings[0] >= 1
    )
    _expect(valid, "a number of products and True or False for constant", settings)
    return settings


def plan_of_source(source: torch.Tensor, requires_grad: bool, settings: tuple[int, bool] | None) -> SparsePlan:
    """The plan of a sparse tensor whose values every product reads. torch's pickles of sparse tensors do not hold
    whether they require a gradient."""
    given = _settings(settings)
    _expect(isinstance(source, torch.Tensor) and type(requires_grad) is bool, "a sparse tensor", type(source).__name__)
    source.requires_grad_(requires_grad)
    made = plan_of(NAME, source, given is not None, constant=given is not None and given[1])
    if given is not None and made._selector is not None:
        made._selector.products = given[0]
    return made


def plan_of_indices(
    indices: Indices,
    shape: tuple[int, ...],
    values: torch.Tensor,
    values_shape: tuple[int, ...] | None,
    blocks: tuple[Indices, int, int] | None,
    settings: tuple[int, bool] | None,
) -> SparsePlan:
    """The plan of indices and values."""
    given, sizes = _settings(settings), (*shape, *(values_shape or ()))
    _expect(len(shape) >= 2 and all(type(n) is int and n >= 0 for n in sizes), "sizes of two dimensions or more", sizes)
    batch = math.prod(shape[:-2]) if len(shape) > 2 else None
    rows, columns = (n if batch is None else n * batch for n in shape[-2:])
    pattern = _pattern(indices, (rows, columns), batch)
    if blocks is not None:
        parts, height, width = blocks
        valid = type(height) is int and type(width) is int and min(height, width) > 0
        _expect(valid and rows % height == columns % width == 0, "blocks that divide the matrix", (height, width))
        inner = _pattern(parts, (rows // height, columns // width))
        held = inner.nonzeros * height * width
        _expect(held == pattern.nonzeros, f"blocks of {pattern.nonzeros} values", held)
        of = Blocks(inner, height, width)
        _expect(_are_blocks_of(pattern, of), "blocks of the plan's matrix", "others")
        pattern.blocks = of
    selector = None if given is None or batch is not None else Selector(pattern, products=given[0], constant=given[1])
    made = SparsePlan(pattern, values, shape, selector)
    made._prepared = PreparedCalls(values, values_shape=None if values_shape is None else torch.Size(values_shape))
    return made.update(values)  # which checks them


def transposed_plan(base: SparsePlan) -> SparsePlan:
    """The transposed plan."""
    _expect(isinstance(base, SparsePlan), "a plan", type(base).__name__)
    return base.mT


def _are_blocks_of(pattern: CsrPattern, blocks: Blocks) -> bool:
    """True if the values of the blocks, [blocks, height, width], are where the pattern has them."""
    of, height, width = blocks.pattern, blocks.height, blocks.width
    sizes = of.rows * height, of.columns * width, of.nonzeros * height * width
    if sizes != (pattern.rows, pattern.columns, pattern.nonzeros) or of.crow.device != pattern.crow.device:
        return False
    place = (
        torch.arange(pattern.nonzeros, device=pattern.crow.device) if pattern.order is None else pattern.order.long()
    )
    block, inside = place // (height * width), place % (height * width)
    row, col = torch.empty_like(of.col, dtype=torch.int64), torch.empty_like(of.col, dtype=torch.int64)
    order = slice(None) if of.order is None else of.order.long()
    row[order], col[order] = of.row.long(), of.col.long()
    here = row[block] * height + inside // width, col[block] * width + inside % width
    return torch.equal(here[0], pattern.row.long()) and torch.equal(here[1], pattern.col.long())


for _kind in (SparsePlan, TransposedPlan):
    copyreg.pickle(_kind, reduced)
SAFE = plan_of_source, plan_of_indices, transposed_plan
