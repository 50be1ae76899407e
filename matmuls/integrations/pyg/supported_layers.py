"""Which layers' messages are products: x_j, or a weight of the edge times x_j, with one of four reductions."""

from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from torch_geometric.nn import RGCNConv
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation
from torch_geometric.nn.conv import MessagePassing

REDUCTIONS = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max", MinAggregation: "min"}
HOOKS = [
    f"_{where}_forward_{when}"
    for where in ("propagate", "message", "aggregate", "message_and_aggregate")
    for when in ("pre_hooks", "hooks")
]


class Form(NamedTuple):
    """A message x_j, times the edges' `weight`, an argument of propagate, if that is a name."""

    weight: str | None = None
    optional: bool = False  # a weight of None counts as 1
    absent: str | None = None  # an argument of propagate that must be None


# The messages that are recognized, by their bytecode: the name of the weight may be another.


def _plain(self: Any, x_j: Any) -> Any:
    return x_j


def _weighted(self: Any, x_j: Any, edge_weight: Any) -> Any:
    return edge_weight.view(-1, 1) * x_j


def _weighted_after(self: Any, x_j: Any, edge_weight: Any) -> Any:
    return x_j * edge_weight.view(-1, 1)


def _maybe_weighted(self: Any, x_j: Any, edge_weight: Any) -> Any:
    return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j


def _text(code: CodeType) -> tuple[Any, ...]:
    """What a function does, without the names of its variables and its docstring."""
    constants = tuple(c for c in code.co_consts if not (c is None or isinstance(c, str)))
    return code.co_code, constants, code.co_names, code.co_argcount, code.co_flags & 0xF, len(code.co_varnames)


KNOWN = {_text(f.__code__): f for f in (_plain, _weighted, _weighted_after, _maybe_weighted)}


@lru_cache(maxsize=1024)
def form_of(message: Callable[..., Any], aggregate: Callable[..., Any], update: Callable[..., Any]) -> Form | str:
    """The form of a class's message, by the functions of the class; a reason if it is no product."""
    if aggregate is not MessagePassing.aggregate:
        return "aggregates in its own way"
    if update is not MessagePassing.update:
        return "has an update of its own"
    if message is RGCNConv.message:
        return Form(absent="edge_type_ptr")
    code = getattr(message, "__code__", None)
    known = KNOWN.get(_text(code)) if code is not None else None
    if code is None or known is None or code.co_varnames[:2] != ("self", "x_j"):
        return "has a message of its own"
    if known is _plain:
        return Form()
    weight = code.co_varnames[2]
    if weight in MessagePassing.special_args or weight[-2:] in ("_i", "_j"):
        return "has a message of its own"
    return Form(weight, optional=known is _maybe_weighted)


def recognised(layer: MessagePassing) -> tuple[Form, str] | str:
    """The form of a layer's message and its reduction; a reason if PyG must run it."""
    kind, own = type(layer), vars(layer)
    form = form_of(kind.message, kind.aggregate, kind.update)
    if isinstance(form, str):
        return form
    if "message" in own or "aggregate" in own or "update" in own or "message_and_aggregate" in own:
        return "has a method replaced"
    reduce = REDUCTIONS.get(type(layer.aggr_module))
    if reduce is None:
        return f"aggregates by {type(layer.aggr_module).__name__}"
    if layer.explain or layer.decomposed_layers > 1:
        return "is explained or decomposed"
    if not layer.fuse and kind.message_and_aggregate is not MessagePassing.message_and_aggregate:
        return "has fuse set to False"
    aggr = layer.aggr_module
    if any(getattr(layer, name) for name in HOOKS) or aggr._forward_hooks or aggr._forward_pre_hooks:
        return "has hooks"
    return form, reduce
