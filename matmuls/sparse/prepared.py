"""Products as operator calls that can be repeated without Python, and what decides whether they still hold."""

import weakref
from typing import Any, NamedTuple

import torch

from custom_mm import _C
from custom_mm.indices import version_of

from .csr_pattern import CsrPattern, values_of

State = tuple[int, int]


class PreparedOp(NamedTuple):
    """An operator and its arguments, ready to run."""

    operator: Any  # an OpOverload if reusable, else any callable
    arguments: tuple[Any, ...]
    b_index: int  # the place of B, the dense operand, among the arguments
    reusable: bool = True  # another B of the same shape may take B's place: no argument was made for this call alone

    def run(self) -> torch.Tensor:
        result: torch.Tensor = self.operator(*self.arguments)
        return result


def state_of(a: torch.Tensor) -> State:
    """Changes when the indices or values of a sparse tensor are written to or replaced, as far as torch counts it."""
    return version_of(a), a._values().data_ptr() if a.layout == torch.sparse_coo else 0


class PreparedCalls:
    """The values of a plan, where they come from, and its last products as calls prepared in C++ (2 us of the host).

    A prepared call checks in C++ (src/glue/prepared_calls.cpp) that B has the dtype, shape, strides and device of
    before, that modes and streams agree, and that no tensor it reads was written to or replaced. `valid_for` answers
    what C++ cannot see: a write to the sparse tensor of which `values` is a copy.

    values [nonzeros]: as last read.
    source: the sparse tensor whose values every product reads again, for gradients or because `values` is a copy; such
        products are not prepared. None if `values` themselves are read.
    origin: the sparse tensor that the plan was made of, held weakly; None after `update`.
    apart: a write to `origin` may leave the version of `values` as it is.
    values_shape: the shape of A.values() in blocks or in a batch, which `update` takes too.
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
        self._apart = apart
        self.forget()

    def forget(self) -> None:
        """Drop the prepared calls."""
        self._products: _C.PreparedCalls | None = None
        self._linear: _C.PreparedCalls | None = None
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

    def current_values(self) -> torch.Tensor:
        """The values for the next product. Those of `source` are taken each time: a graph runs backward only once."""
        return self.values if self.source is None else values_of(self.source)

    def valid_for(self, values: torch.Tensor) -> bool:
        """True while calls prepared with `values` give the plan's product, but for what they check themselves."""
        if values is not self.values:
            return False
        origin = self._origin if self._apart else None
        a = None if origin is None else origin()
        return a is None or state_of(a) == self._seen

    def repeat(self, b: torch.Tensor) -> torch.Tensor | None:
        """A @ b by a call prepared before; None if there is none that still holds."""
        calls, values = self._products, self.values
        return None if calls is None or not self.valid_for(values) else calls(b, values)

    def repeat_linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x @ A^T + bias by a call prepared before; None if there is none that still holds."""
        calls, values = self._linear, self.values
        if calls is None or not self.valid_for(values):
            return None
        return calls(x, values if bias is None else bias)

    def record(self, op: PreparedOp, values: torch.Tensor, pattern: CsrPattern) -> None:
        """Prepare `op` for the next B of the same shape."""
        if self.source is None and op.reusable:
            self._products = _bound(self._products, op, [values], pattern)

    def record_linear(
        self, op: PreparedOp, values: torch.Tensor, bias: torch.Tensor | None, pattern: CsrPattern
    ) -> None:
        """Prepare `op` for the next x of the same shape and this bias."""
        if self.source is None and op.reusable:
            read = [values, values] if bias is None else [bias, values]
            self._linear = _bound(self._linear, op, read, pattern)

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
        return self.__dict__ | {"_origin": None, "_products": None, "_linear": None, "_transposed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._transposed = None  # not in older pickles
        self._origin = None if self.source is None else weakref.ref(self.source)

    @classmethod
    def from_older_pickle(cls, state: dict[str, Any]) -> "PreparedCalls":
        """From the state of a plan before this class: its attributes _values, _source, _values_shape."""
        source: torch.Tensor | None = state.get("_source")
        made = cls(state["_values"], source=source, origin=source, values_shape=state.get("_values_shape"))
        made._seen = state.get("_seen", made._seen)
        return made


def _bound(
    calls: _C.PreparedCalls | None, op: PreparedOp, read: list[torch.Tensor], pattern: CsrPattern
) -> _C.PreparedCalls:
    """Add `op` to `calls`. read: tensors it was made of, the first of which is passed when it is repeated."""
    calls = calls or _C.PreparedCalls()
    calls.bind(op.operator.name(), op.arguments, op.b_index, [*read, *pattern.tensors, *pattern.block_tensors])
    return calls
