"""DTensor sharding rules of the operators: a table of the placements with which each needs no communication.

`enable_dtensor` registers them. A way says for one mesh dimension how results and arguments are placed: a number shards
that dimension, PARTIAL is a sum over the processes, and what is not named is replicated. Every operator may have all of
its tensors replicated, too. With other placements DTensor redistributes the arguments to the nearest way, except those
that are pinned: what an operator writes, and mask plans, whose indices count the rows of one process.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from .. import blocks, masked  # noqa: F401  they register their operators

_ops = torch.ops.custom_mm
_Operator = Any  # an OpOverload
PARTIAL = "partial"
_Place = int | str | None
_Call = Any  # a SimpleNamespace: the arguments by name, tensors as objects with ndim and shape, absent ones as None


@dataclass(frozen=True)
class Way:
    """One way to shard a call without communication. what: the dimension that is sharded, for the documentation."""

    what: str
    results: tuple[_Place, ...] = ()
    arguments: dict[str, _Place] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """ways: of a call; pinned: arguments that are never redistributed, besides those that the operator writes."""

    ways: Callable[[_Call], Iterator[Way]]
    pinned: tuple[str, ...] = ()


# --- dense products


def _product(c: _Call, name_bias: bool = False) -> Iterator[Way]:
    """op(a) @ op(b): rows of a, columns of b, batches, and the inner dimension where nothing follows the sum."""
    a, b = c.a.ndim, c.b.ndim
    dims = max(a, b) - (min(a, b) == 1) - (a == b == 1)  # of the result
    if a > 1:
        yield Way("rows", (dims - 1 - (b > 1),), {"a": a - 1 if c.transa else a - 2})
    if b > 1:
        yield Way("columns", (dims - 1,), {"b": b - 2 if c.transb else b - 1, "bias": 0})
    for d in range(2, max(a, b)):  # counted from the last
        sizes = {"a": c.a.shape[a - 1 - d] if a > d else 1, "b": c.b.shape[b - 1 - d] if b > d else 1}
        places = {name: t.ndim - 1 - d for name, t in (("a", c.a), ("b", c.b)) if sizes[name] > 1}
        if places:
            yield Way("batches", (max(a, b) - 1 - d,), places)
    if getattr(c, "bias", None) is None and getattr(c, "activation", None) is None:
        inner = {"a": a - 1 if a == 1 or not c.transa else a - 2, "b": b - 1 if b == 1 or c.transb else b - 2}
        yield Way("inner", (PARTIAL,), inner)


def _pointwise(c: _Call) -> Iterator[Way]:
    names = [name for name, given in vars(c).items() if hasattr(given, "ndim")]
    for d in range(vars(c)[names[0]].ndim):
        yield Way("any", (d,), dict.fromkeys(names, d))


def _bias_act_(c: _Call) -> Iterator[Way]:
    yield from _rows("x")(c)
    yield Way("columns", (), {"x": c.x.ndim - 1, "bias": 0})


# --- rows


def _rows(first: str, *alike: str, results: Callable[[_Call, int], tuple[_Place, ...]] = lambda c, d: ()) -> Any:
    """Every dimension of `first` but the last, in which the tensors `alike` have the same sizes."""

    def ways(c: _Call) -> Iterator[Way]:
        for d in range(getattr(c, first).ndim - 1):
            yield Way("rows", results(c, d), dict.fromkeys((first, *alike), d))

    return ways


def _softmax(results: int, *names: str) -> Callable[[_Call], Iterator[Way]]:
    def ways(c: _Call) -> Iterator[Way]:
        first = getattr(c, names[0])
        dim = c.dim % max(first.ndim, 1)
        for d in range(first.ndim):
            if d != dim and not (getattr(c, "causal", False) and d == first.ndim - 2):
                yield Way("rows", (d,) * results, dict.fromkeys(names, d))

    return ways


def _masked_softmax(results: int) -> Callable[[_Call], Iterator[Way]]:
    def ways(c: _Call) -> Iterator[Way]:
        for d in range(c.x.ndim - 1 - c.causal):  # causal: the rows are counted
            mask = -1 if c.mask is None else d - c.x.ndim + c.mask.ndim
            places: dict[str, _Place] = {"x": d}
            if mask >= 0 and c.mask.shape[mask] > 1:
                places["mask"] = mask
            yield Way("rows", (d,) * results, places)

    return ways


# --- two experts: y = x w^T by rows. A plan of a mask with Shard(0) has rows of Shard(0), and counts that add up.

_PLAN: dict[str, _Place] = {"rows": 0, "counts": PARTIAL}


def _mask_plan(c: _Call) -> Iterator[Way]:
    yield Way("rows", (0, PARTIAL), {"mask": 0})


def _masked_linear(c: _Call) -> Iterator[Way]:
    if c.known == -1:
        yield Way("rows", (0,), {"x": 0, **_PLAN})
    yield Way("columns", (c.x.ndim - 1,), dict.fromkeys(("w1", "w2", "b1", "b2"), 0))
    if c.b1 is None:
        yield Way("inner", (PARTIAL,), {"x": c.x.ndim - 1, "w1": 1, "w2": 1})


def _masked_linear_backward(c: _Call) -> Iterator[Way]:
    if c.ordered is None:
        last = c.x.ndim - 1
        if c.known == -1:
            yield Way("rows", (0, PARTIAL, PARTIAL), {"grad": 0, "x": 0, **_PLAN})
        yield Way("columns", (PARTIAL, 0, 0), {"grad": last, "w1": 0, "w2": 0})
        yield Way("inner", (last, 1, 1), {"x": last, "w1": 1, "w2": 1})


def _masked_weights(c: _Call) -> Iterator[Way]:
    if c.known == -1:
        yield Way("rows", (PARTIAL, PARTIAL), {"grad": 0, "x": 0, **_PLAN})
    yield Way("columns", (0, 0), {"grad": c.grad.ndim - 1})
    yield Way("inner", (1, 1), {"x": c.x.ndim - 1})


def _masked_sums(c: _Call) -> Iterator[Way]:
    yield Way("rows", (PARTIAL,), {"x": 0, **_PLAN})
    yield Way("columns", (1,), {"x": c.x.ndim - 1})


_HIDDEN: dict[str, _Place] = {"w1": 0, "w2": 1, "w3": 0, "u1": 0, "u2": 1, "u3": 0}


def _masked_ffn(c: _Call) -> Iterator[Way]:
    """keep: the products before the activation, [rows, 2 * hidden], are a result too."""
    keeps = hasattr(c, "keep")
    kept = (0, 1) if keeps and c.keep else (None, None)
    yield Way("rows", (0, kept[0])[: 1 + keeps], {"x": 0, **_PLAN})
    yield Way("hidden", (PARTIAL, kept[1])[: 1 + keeps], _HIDDEN)


def _masked_ffn_backward(c: _Call) -> Iterator[Way]:
    needs = c.needs
    beside = [needs[0], *(needs[n] or needs[n + 3 if n < 4 else n - 3] for n in range(1, 7))]  # else it is empty

    def of(*places: _Place) -> tuple[_Place, ...]:
        return tuple(place if there else None for place, there in zip(places, beside, strict=True))

    yield Way("rows", of(0, *(PARTIAL,) * 6), {"grad": 0, "x": 0, "t": 0, **_PLAN})
    yield Way("hidden", of(PARTIAL, *_HIDDEN.values()), {"t": 1, **_HIDDEN})


# --- sparse matrices whose pattern and values every process has


def _csr_spmm(c: _Call) -> Iterator[Way]:
    last = c.dense.ndim - 1
    yield Way("columns", (last,), {"dense": last, "selected": last})


def _csr_sddmm(c: _Call) -> Iterator[Way]:
    if c.selected is None:
        yield Way("inner", (PARTIAL,), {"a": c.a.ndim - 1, "b": c.b.ndim - 1})


def _like(c: _Call, d: int) -> tuple[_Place, ...]:
    return (d,)


def _kept(c: _Call, d: int) -> tuple[_Place, ...]:
    """xhat, which is empty if there are neither weight nor bias, and rstd."""
    return None if c.weight is None and c.bias is None else d, d


def _norm_gradients(c: _Call, d: int) -> tuple[_Place, ...]:
    sums = PARTIAL if c.need_columns else None
    return d if c.need_dx else None, sums, sums


_PLANNED = ("rows", "counts")
RULES: dict[_Operator, Rule] = {
    _ops.matmul.default: Rule(_product),
    _ops.matmul.out: Rule(_product),
    _ops.cublaslt_matmul.default: Rule(_product),
    _ops.cublaslt_matmul.out: Rule(_product),
    _ops.kept.default: Rule(_pointwise),
    _ops.gelu.default: Rule(_pointwise),
    _ops.gelu_backward.default: Rule(_pointwise),
    _ops.bias_act_.default: Rule(_bias_act_),
    _ops.matmul_.default: Rule(_rows("a")),
    _ops.feed_forward_.default: Rule(_rows("x")),
    _ops.softmax.default: Rule(_softmax(1, "x")),
    _ops.softmax.out: Rule(_softmax(1, "x")),
    _ops.softmax_.default: Rule(_softmax(0, "x")),
    _ops.softmax_backward.default: Rule(_softmax(1, "y", "grad")),
    _ops.softmax_backward.out: Rule(_softmax(1, "y", "grad")),
    _ops.softmax_backward_.default: Rule(_softmax(0, "y", "grad")),
    _ops.scaled_masked_softmax.default: Rule(_masked_softmax(1)),
    _ops.scaled_masked_softmax_.default: Rule(_masked_softmax(0)),
    _ops.layer_norm_.default: Rule(_rows("x", "residual")),
    _ops.rms_norm_.default: Rule(_rows("x", "residual")),
    _ops.norm_keep_.default: Rule(_rows("x", "residual", results=_kept)),
    _ops.norm_backward.default: Rule(_rows("grad", "xhat", "rstd", results=_norm_gradients)),
    _ops.mask_plan.default: Rule(_mask_plan),
    _ops.masked_linear.default: Rule(_masked_linear, _PLANNED),
    _ops.masked_linear_backward.default: Rule(_masked_linear_backward, _PLANNED),
    _ops.masked_weights.default: Rule(_masked_weights, _PLANNED),
    _ops.masked_sums.default: Rule(_masked_sums, _PLANNED),
    _ops.masked_ffn.default: Rule(_masked_ffn, _PLANNED),
    _ops.masked_ffn_forward.default: Rule(_masked_ffn, _PLANNED),
    _ops.masked_ffn_backward.default: Rule(_masked_ffn_backward, (*_PLANNED, "t")),
    _ops.csr_linear.default: Rule(_rows("x", results=_like)),
    _ops.csr_spmm.default: Rule(_csr_spmm),
    _ops.csr_sddmm.default: Rule(_csr_sddmm),
}


# --- what DTensor asks for


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


def ways(operator: _Operator, *args: Any, **kwargs: Any) -> list[Way]:
    """The ways of a call, that with everything replicated last. The tensors need a shape only."""
    schema = operator._schema
    named = {a.name: a.default_value for a in schema.arguments}
    named |= dict(zip(named, args, strict=False)) | kwargs
    found = list(RULES[operator].ways(SimpleNamespace(**named)))
    if operator._overloadname == "out":  # DTensor compares out with a result
        found = [Way(way.what, way.results, way.arguments | {"out": way.results[0]}) for way in found]
    results = 1 if operator._overloadname == "out" else len(schema.returns)
    return [*found, Way("replicated", (None,) * results)]


def placement(place: _Place) -> Placement:
    """The placement that a way means."""
    return Replicate() if place is None else Partial() if place == PARTIAL else Shard(int(place))


def _strategy(operator: _Operator, schema: OpSchema) -> OpStrategy:
    names = [a.name for a in operator._schema.arguments]
    given = dict(zip(names, schema.args_schema, strict=False)) | schema.kwargs_schema
    tensors = [name for name in names if isinstance(given.get(name), OpStrategy)]
    single: list[list[Placement | None]] = [
        [*map(placement, way.results), *(placement(way.arguments.get(name)) for name in tensors)]
        for way in ways(operator, *schema.args_schema, **schema.kwargs_schema)
    ]
    results = len(single[0]) - len(tensors)
    found = expand_to_full_mesh_op_strategy(schema.get_mesh_from_args(), schema, single, input_index=results)
    pinned = _pinned(operator)
    held = {i: given[name].strategies[0].output_spec.placements for i, name in enumerate(tensors) if name in pinned}
    left = [s for s in found.strategies if all(s.input_spec(i).placements == held[i] for i in held)]
    if not left:
        shown = ", ".join(f"{tensors[i]} {list(places)}" for i, places in held.items())
        raise RuntimeError(
            f"{operator._schema.name.partition('::')[2]}: expected placements with which these arguments need not be "
            f"moved, which DTensor does not do in place or to a mask plan, got {shown}"
        )
    return OpStrategy(left)


@cache
def _pinned(operator: _Operator) -> frozenset[str]:
    written = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return frozenset((*RULES[operator].pinned, *written))


def _call_as_it_is(operator: _Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The call of an operator that writes an argument and returns something else than that, which DTensor's own way
    to call operators does not provide for."""
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(operator, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    sharding = info.output_sharding
    if sharding.needs_redistribute:
        dispatcher.redistribute_local_args(info, sharding.redistribute_schema, False)
    found = operator(*info.local_args, **info.local_kwargs)
    return dispatcher.wrap(found, sharding.output_spec) if operator._schema.returns else None


@cache
def enable_dtensor() -> None:
    """Registers sharding rules of the operators with DTensor, for this process; further calls do nothing.

    `import matmuls.distributed` calls it, so you need not. See the guide for the placements of each operator.

    Examples:
        >>> import matmuls.distributed
        >>> matmuls.distributed.enable_dtensor()
    """
    dispatcher: Any = DTensor._op_dispatcher
    for operator in RULES:
        arguments = operator._schema.arguments
        first = next((i for i, a in enumerate(arguments) if not _is_tensor(a)), len(arguments))
        has_list = any("List" in str(a.type) for a in arguments)
        named = [a.name for a in arguments if a.kwarg_only and not _is_tensor(a)]
        info = RuntimeSchemaInfo(first, named or None, needs_pytree=has_list)
        dispatcher.sharding_propagator.register_op_strategy(operator, partial(_strategy, operator), info)
        if operator._overloadname == "out" or (operator._schema.returns and operator._schema.name.endswith("_")):
            dispatcher._custom_op_handlers[operator] = _call_as_it_is
