"""Pickled plans are checked whole when they are loaded: GPU kernels trust the indices of a plan, and a file may be
damaged. What can be made again (transposed matrices, chunks, copies of A) is not taken from a pickle."""

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .csr_pattern import CsrPattern
    from .plan import SparsePlan

NAME = "SparsePlan"


def _expect(fits: object, what: str, got: object) -> None:
    if not fits:
        raise ValueError(f"{NAME}: expected {what} in a pickled plan, got {got}")


def _described(t: object) -> str:
    return f"{t.dtype} of shape {list(t.shape)} on {t.device}" if isinstance(t, torch.Tensor) else repr(t)


def _is_vector(t: object, dtypes: tuple[torch.dtype, ...]) -> bool:
    return isinstance(t, torch.Tensor) and t.layout == torch.strided and t.dim() == 1 and t.dtype in dtypes


def _is_size(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 0


def _expect_index(name: str, t: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    dtypes = (torch.int32, torch.int64) if like is None else (like.dtype,)
    where = "" if like is None else f" on {like.device}"
    fits = _is_vector(t, dtypes) and (like is None or t.device == like.device)
    _expect(fits, f"{name} of one dimension in {' or '.join(map(str, dtypes))}{where}", _described(t))
    return t.contiguous()


def load_pattern(pattern: "CsrPattern", state: dict[str, Any]) -> None:
    """Make the pattern of a pickled state. Waits for the GPU."""
    rows, columns, batch = state["rows"], state["columns"], state["batch"]
    _expect(_is_size(rows) and _is_size(columns), "rows and columns of 0 or more", (rows, columns))
    fits = batch is None or (_is_size(batch) and rows % max(batch, 1) == columns % max(batch, 1) == 0)
    _expect(fits, f"a batch that {rows} x {columns} can be cut into, or None", batch)
    crow = _expect_index("offsets", state["crow"])
    col, order = _expect_index("columns", state["col"], crow), state["order"]
    if order is not None:
        order = _expect_index("the order", order, crow)
        _expect(order.shape == col.shape, f"an order of {col.shape[0]} values", list(order.shape))
        known = (order >= 0) & (order < col.shape[0])
        named = torch.zeros_like(order, dtype=torch.bool)
        named[order[known].long()] = True
        _expect(bool(named.all()), f"an order that names each of {col.shape[0]} values once", "another one")
    pattern.__init__(NAME, crow, col, (rows, columns), order=order, batch=batch)  # type: ignore[misc]
    blocks = state.get("blocks")
    if blocks is not None:
        _expect(_are_blocks_of(pattern, blocks), "blocks of the plan's matrix", "others")
        pattern.blocks = blocks


def _are_blocks_of(pattern: "CsrPattern", blocks: Any) -> bool:
    """True if the values of the blocks, [blocks, height, width], are where the pattern has them."""
    of, height, width = blocks.pattern, blocks.height, blocks.width
    if not (isinstance(of, type(pattern)) and _is_size(height) and _is_size(width) and height and width):
        return False
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


def load_plan(plan: "SparsePlan", state: dict[str, Any]) -> None:
    """Make the plan of a pickled state."""
    from .csr_pattern import CsrPattern
    from .plan import DTYPES
    from .prepared import PreparedCalls
    from .selector import Selector

    if "_prepared" not in state:  # of an older pickle
        prepared = PreparedCalls.from_older_pickle(state)
        pattern, selector = state["_structure"], state["_choice"]
    else:
        prepared, pattern, selector = state["_prepared"], state["_pattern"], state["_selector"]
    _expect(isinstance(pattern, CsrPattern), "the pattern of a matrix", type(pattern).__name__)
    shape = torch.Size(state["shape"])
    batch = math.prod(shape[:-2]) if len(shape) > 2 else None
    rows, columns = (n * (1 if batch is None else batch) for n in shape[-2:])
    sizes = pattern.batch, pattern.rows, pattern.columns
    _expect((batch, rows, columns) == sizes, f"a shape of {sizes[1]} x {sizes[2]}, batch {sizes[0]}", list(shape))
    _expect(selector is None or isinstance(selector, Selector), "a selector", type(selector).__name__)
    if selector is not None:
        _expect(batch is None, "no selector for a batch", "one")
        products, constant = selector.products, selector.constant
        _expect(_is_size(products) and products, "a number of products of 1 or more", products)
        _expect(isinstance(constant, bool), "constant to be True or False", constant)
        if selector._pattern is not pattern:
            selector = Selector(pattern, products=products, constant=constant)
    _expect(isinstance(prepared, PreparedCalls), "values", type(prepared).__name__)
    values, source = prepared.values, prepared.source
    fits = _is_vector(values, DTYPES) and values.shape == (pattern.nonzeros,) and values.device == pattern.crow.device
    _expect(fits, f"values of shape [{pattern.nonzeros}] on {pattern.crow.device}", _described(values))
    constant = selector is not None and selector.constant
    _expect(not (constant and values.requires_grad), "constant values without a gradient", "some with one")
    if source is not None:
        fits = isinstance(source, torch.Tensor) and source.layout != torch.strided and source.shape == shape
        _expect(fits, f"the sparse tensor of the values of shape {list(shape)}", _described(source))
        prepared.distrust()
    plan.__dict__.update({"_pattern": pattern, "shape": shape, "_selector": selector, "_prepared": prepared})
