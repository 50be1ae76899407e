"""Products as operator calls that can be repeated without Python, and what decides whether they still hold."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from custom_mm import _C
from custom_mm.indices import version_of

from .csr_pattern import CsrPattern
from .tensor_pattern import values_of

State = tuple[int, int]


class PreparedOp(NamedTuple):
    """An operator and its arguments, ready to run."""

    operator: Any  # an OpOverload if reusable, else any callable
    arguments: tuple[Any, ...]
    b_index: int  # the place of B, the dense operand, among the arguments
    reusable: bool = True  # another B of the same shape may take B's place: no argument was made for this call alone
    reads_values: bool = False  # of the plan, which are among the arguments, and no copy of them

    def run(self) -> torch.Tensor:
        result: torch.Tensor = self.operator(*self.arguments)
        return result

    @property
    def call(self) -> tuple[str, tuple[Any, ...], int]:
        """The first arguments of PreparedCalls.bind: the operator, its arguments, and the index of b."""
        return self.operator.name(), self.arguments, self.b_index

    def place_of(self, t: torch.Tensor) -> int:
        """The place of t among the arguments."""
        return next(i for i, argument in enumerate(self.arguments) if argument is t)


def state_of(a: torch.Tensor) -> State:
    """Changes when the indices or values of a sparse tensor are written to or replaced, as far as torch counts it."""
    return version_of(a), a._values().data_ptr() if a.layout == torch.sparse_coo else 0


class PreparedCalls:
    """The values of a plan, where they come from, and its last products as calls prepared in C++ (2 us of the host).

    A prepared call checks in C++ (src/glue/prepared_calls.cpp) that B has the dtype, shape, strides and device of
    before, that modes, streams and gradients agree, and that no copy that it reads is out of date. `repeat` checks what
    C++ does not see: a write to the sparse tensor of which `values` is a copy.

    values [nonzeros]: as last read.
    source: the sparse tensor whose values every product reads again, for gradients or because `values` is a copy. None
        if `values` themselves are read.
    origin: the sparse tensor that the plan was made of, held weakly; None after `update`. source and origin are dense
        if `update` got values whose strides leave no view of shape [nonzeros].
    apart: a write to `origin` may leave the version of `values` as it is.
    values_shape: the shape of A.values() in blocks or in a batch, which `update` takes too.
    products, linear: the calls, for A @ b with `source` or `values`, and for x A^T + bias with `values` and bias.
    """

    def __init__(
        self,
        values: torch.Tensor,
        *,
        source: torch.Tensor | None = None,
        origin: torch.Tensor | None = None,
        apart: bool = False,
        values_shape: torch.Size | None = None,
    ) -> None:
        self.values, self.source, self.values_shape = values, source, values_shape
        self._origin = None if origin is None else weakref.ref(origin)
        self._seen = (0, 0) if origin is None else state_of(origin)  # when its indices were those of the pattern
        self._apart = apart or source is not None
        self.forget()

    def forget(self) -> None:
        """Drop the prepared calls."""
        self.products: _C.PreparedCalls | None = None
        self.linear: _C.PreparedCalls | None = None
        self._transposed: PreparedCalls | None = None

    def transposed(self) -> "PreparedCalls":
        """The same values, for calls of the transposed matrix."""
        if self._transposed is None:
            self._transposed = self.copy()
        return self._transposed

    def copy(self) -> "PreparedCalls":
        """The same values without the prepared calls."""
        made = object.__new__(PreparedCalls)
        made.__dict__.update(self.__dict__)
        made.forget()
        return made

    def of_other_values(self, values: torch.Tensor, given: torch.Tensor, constant: bool = False) -> "PreparedCalls":
        """Those of `given`, which is `values` [nonzeros] or has the shape of A.values()."""
        if given.dim() == 1 or given.is_contiguous():
            return PreparedCalls(values, values_shape=self.values_shape)
        source = None if constant else given
        values = values.detach()
        return PreparedCalls(values, source=source, origin=given, apart=True, values_shape=self.values_shape)

    def current_values(self) -> torch.Tensor:
        """The values for the next product. Those of `source` are taken each time: a graph runs backward only once."""
        if self.source is None:
            return self.values
        return self.source.reshape(-1) if self.source.layout == torch.strided else values_of(self.source)

    def repeat(self, b: object) -> torch.Tensor | None:
        """A @ b by a call prepared before; None if there is none that still holds."""
        if self.products is None or (self._apart and self.changed_origin() is not None):
            return None
        return self.products(b, self.values if self.source is None else self.source)

    def repeat_linear(self, x: torch.Tensor, *passed: torch.Tensor | None) -> torch.Tensor | None:
        """x @ A^T + bias by a call prepared before; None if there is none that still holds. passed: as `record_linear`
        takes it."""
        if self.linear is None or (self._apart and self.changed_origin() is not None):
            return None
        return self.linear(x, self.values, *passed)

    def record(self, op: PreparedOp, values: torch.Tensor, pattern: CsrPattern) -> None:
        """Prepare `op`, made of `values`, for the next B of the same shape."""
        source = self.source
        if not op.reusable or (source is not None and (not op.reads_values or source.layout == torch.strided)):
            return
        calls = self.products = self.products or _C.PreparedCalls()
        if self.source is None:
            self._bind(calls, op, [values], [], pattern)
        else:
            calls.bind(*op.call, [self.source], watched_of(pattern), op.place_of(values))

    def record_linear(
        self,
        op: PreparedOp,
        values: torch.Tensor,
        passed: Sequence[torch.Tensor | None],
        pattern: CsrPattern,
        rows_of: torch.Tensor | None,
        transposed: bool,
    ) -> None:
        """Prepare `op`, made of `values`, for the next x of the same shape. passed: what is given again with each call:
        the bias, and tensors that must not be written to. rows_of: x, if op takes its rows, or those transposed; the
        bias is added to a transposed result."""
        if op.reusable and self.source is None:
            self.linear = self.linear or _C.PreparedCalls()
            beside = [t for t in passed[1:] if t is not None]
            self._bind(self.linear, op, [values, *passed], beside, pattern, rows_of, transposed)

    def _bind(
        self,
        calls: _C.PreparedCalls,
        op: PreparedOp,
        passed: list[torch.Tensor | None],
        watched: list[torch.Tensor],
        pattern: CsrPattern,
        rows_of: torch.Tensor | None = None,
        transposed: bool = False,
    ) -> None:
        if not op.reads_values or self._origin is not None:  # a write to `origin` calls for a look at its indices
            fixed = (t for i, t in enumerate(op.arguments) if i != op.b_index and isinstance(t, torch.Tensor))
            watched = [*watched, *fixed, self.values]
        calls.bind(*op.call, passed, [*watched, *watched_of(pattern)], None, rows_of, transposed)

    def changed_origin(self) -> tuple[torch.Tensor, State] | None:
        """The sparse tensor and its state, if it changed since its indices were last compared with the pattern."""
        a = None if self._origin is None else self._origin()
        if a is None or (state := state_of(a)) == self._seen:
            return None
        return a, state

    def read_again(self, values: torch.Tensor, state: State) -> None:
        """Take the values of the changed sparse tensor, whose indices were compared."""
        self.values, self._seen = values, state
        self._transposed = None

    def __getstate__(self) -> dict[str, Any]:
        # The values are a copy.
        return self.__dict__ | {"_origin": None, "products": None, "linear": None, "_transposed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()
        self._origin = None if self.source is None else weakref.ref(self.source)


def watched_of(pattern: CsrPattern) -> list[torch.Tensor]:
    """The indices that a prepared call reads."""
    return [*pattern.tensors, *pattern.block_tensors]


# By id: sparse tensors, held weakly, and their products as prepared calls, which live as long.
_of_tensors: dict[int, tuple[weakref.ref[torch.Tensor], _C.PreparedCalls]] = {}


def repeat(a: object, b: torch.Tensor) -> torch.Tensor | None:
    """A @ b for a sparse tensor by a call that `record` prepared; None if there is none that still holds."""
    known = _of_tensors.get(id(a))
    return None if known is None or known[0]() is not a else known[1](b, a)


def record(a: object, op: PreparedOp, values: torch.Tensor, pattern: CsrPattern) -> None:
    """Prepare `op`, made of the values of a sparse CSR tensor, for the next b of the same shape. It reads the values
    anew, and holds until the indices are written to or replaced."""
    if not isinstance(a, torch.Tensor) or a.layout != torch.sparse_csr or not op.reusable:
        return
    known = _of_tensors.get(id(a))
    if known is None or known[0]() is not a:
        forget = partial(_of_tensors.pop, id(a))
        known = _of_tensors[id(a)] = weakref.ref(a, lambda _: forget(None)), _C.PreparedCalls()
    known[1].bind(*op.call, [a], watched_of(pattern), op.place_of(values))
