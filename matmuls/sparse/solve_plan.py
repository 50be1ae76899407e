"""Triangular systems of one matrix, solved many times: SolvePlan, made by plan_solve."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from custom_mm import _C
from custom_mm.indices import place_of, version_of

from .csr_pattern import is_transformed, relaxed_capture
from .plan import Sparse, SparsePlan, plan_of
from .prepared import PreparedCalls, state_of
from .spgemm import Operand
from .triangular import solve, square

_state: Callable[..., torch.Tensor] = torch.ops.custom_mm.csr_solve_state.default
_versions = itertools.count(1)  # of values, in the whole process


def _is_traced() -> bool:
    """True where a number given to an operator may be recorded as a constant."""
    return torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0


class SolvePlan:
    """A triangle T of a sparse matrix, prepared to solve T x = b many times: `plan(b)`. Made by `plan_solve`.

    On a GPU the first solve for a number of columns and a dtype makes cuSPARSE's analysis, and waits for it. Later ones
    do not wait: they load the values that A has at that time, or those that they are given, into what was analysed, and
    solve. If these are other values or were written to, their diagonal is checked, which waits for the GPU. If a is a
    constant plan, its values are loaded once. The gradient's solves with the transpose are prepared likewise. The last
    8 analyses are kept, and those that captured CUDA graphs use while they exist; a graph needs the plan to live.

    On a CPU the plan keeps where the diagonal lies, and checks it at every solve.

    Attributes:
        a: the plan of A.
        upper: True for the upper triangle, False for the lower one.
        transpose: solve T^T x = b.
        unit_diagonal: take 1 for each element of the diagonal.
        shape: [n, n].
        nbytes: the bytes of the indices, and of the values and buffers of the analyses that are kept.

    Examples:
        >>> import torch, matmuls
        >>> plan = matmuls.plan_solve(torch.tensor([[2.0, 0.0], [1.0, 4.0]]).to_sparse_csr(), upper=False)
        >>> plan(torch.tensor([2.0, 5.0]))
        tensor([1., 1.])
        >>> plan(torch.tensor([2.0, 5.0]), 2 * plan.a.values)
        tensor([0.5000, 0.5000])
    """

    def __init__(self, a: SparsePlan, upper: bool, transpose: bool, unit_diagonal: bool) -> None:
        self.a, self.upper, self.transpose, self.unit_diagonal = a, upper, transpose, unit_diagonal
        self._start()

    def _start(self) -> None:
        """Keep nothing yet."""
        self._ways = self.upper, self.transpose, self.unit_diagonal
        self._seen: tuple[weakref.ref[torch.Tensor], tuple[Any, ...], PreparedCalls | None, int] | None = None
        with torch.inference_mode(False):
            selector = self.a._selector
            constant = selector is not None and selector.constant
            self._state = _state(self.a._pattern.crow, self.a._pattern.col, constant)

    @property
    def shape(self) -> torch.Size:
        """[n, n]."""
        return self.a.shape

    def _version(self, values: torch.Tensor | None) -> int:
        """A number that the values alone have, given or A's; 0 if a write to them cannot be noticed."""
        own = None
        if values is None:
            own = self.a._prepared
            values = own.values if own.source is None else own.source
        if is_transformed() or _is_traced() or values.is_inference():
            return 0
        state = (version_of(values), place_of(values)) if values.layout == torch.strided else state_of(values)
        seen = self._seen
        if seen is None or seen[0]() is not values or seen[1] != state or seen[2] is not own:
            seen = self._seen = weakref.ref(values), state, own, next(_versions)
        return seen[3]

    def __call__(self, b: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
        """Computes x of T x = b, or T^T x = b. Differentiable any number of times in b and the values.

        On a GPU the diagonal is not checked again after a write that does not raise the values' version counter
        (through `.data`, by a replayed CUDA graph).

        Args:
            b: [n] or [n, k], dense; dtype and device of the values.
            values: [nonzeros of A] in the order of A.values(), in any dtype that a plan takes; None for those that A
                has now. Gradients flow to them.

        Returns:
            x, of b's shape.

        Raises:
            ValueError: if an element of the diagonal is missing or 0, a shape of values does not match, or the indices
                of A were written to.
            RuntimeError: if shapes, dtypes or devices do not match; in a CUDA graph capture, if no solve for this
                number of columns and dtype was made since the last capture.
            TypeError: if b or values is not a dense tensor.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.a._expect_same_indices("SolvePlan")
        made = self.a.values if values is None else self.a._checked(values)
        version = 0 if compiling or not made.is_cuda else self._version(values)
        return solve("SolvePlan", Operand(self.a._pattern, made, self.a.shape), b, self._ways, self._state, version)

    def to(self, *args: Any, **kwargs: Any) -> "SolvePlan":
        """Makes a plan of the same triangle on another device or in another dtype, as `SparsePlan.to` does.

        Args:
            *args: a device, a dtype, or both, as for torch.Tensor.to.
            **kwargs: `device` and `dtype`.

        Returns:
            A plan; this one if device and dtype are the same.

        Raises:
            TypeError: if dtype is none of a plan.
        """
        moved = self.a.to(*args, **kwargs)
        return self if moved is self.a else SolvePlan(moved, *self._ways)

    def __reduce__(self) -> tuple[Any, ...]:
        return solve_plan, (self.a, self.upper, self.transpose, self.unit_diagonal)

    @property
    def nbytes(self) -> int:
        """The bytes of the indices, and of the values and buffers of the analyses that are kept."""
        return sum(t.nbytes for t in self.a._pattern.tensors) + sum(kept[-1] for kept in _C.kept_solves(self._state))

    def explain(self) -> str:
        """Describes the plan in a few lines: the triangle, and the analyses that are kept."""
        triangle = f"{'upper' if self.upper else 'lower'} triangle" + ", transposed" * self.transpose
        lines = [
            f"{' x '.join(map(str, self.shape))}: {self.a.nnz} nonzeros, {self.a.dtype}, {self.a.device}",
            triangle + (", unit diagonal" if self.unit_diagonal else ""),
        ]
        for columns, dtype, transposed, captured, nbytes in _C.kept_solves(self._state):
            notes = ", transposed" * transposed + ", of a captured graph" * captured
            lines.append(
                f"analysis by {'SpSV' if columns == 1 else 'SpSM'}: {columns} columns in {dtype}{notes}, {nbytes} bytes"
            )
        return "\n".join((*lines, f"{self.nbytes} bytes"))

    def __repr__(self) -> str:
        facts = [f"shape={list(self.shape)}", f"nnz={self.a.nnz}", f"upper={self.upper}"]
        facts += [f"{name}=True" for name in ("transpose", "unit_diagonal") if getattr(self, name)]
        return f"SolvePlan({', '.join(facts)}, dtype={self.a.dtype}, device={self.a.device})"


def plan_solve(a: Sparse, *, upper: bool, transpose: bool = False, unit_diagonal: bool = False) -> SolvePlan:
    """Prepares T x = b, or T^T x = b, for the upper or lower triangle T of a sparse matrix, to be solved many times.

    It takes what `solve_triangular` takes, and its solves give the same x.

    Args:
        a: [n, n] a sparse tensor or a plan, as in `solve_triangular`.
        upper: True for the upper triangle, False for the lower one.
        transpose: solve T^T x = b.
        unit_diagonal: take 1 for each element of the diagonal, whatever A has there.

    Returns:
        A `SolvePlan`.

    Raises:
        ValueError: if A is not square or a batch, or if an index does not fit the shape.
        TypeError: if a is neither a sparse tensor nor a plan.

    Examples:
        >>> import torch, matmuls
        >>> a = torch.tensor([[2.0, 0.0], [1.0, 4.0]]).to_sparse_csr()
        >>> plan = matmuls.plan_solve(a, upper=False)
        >>> plan
        SolvePlan(shape=[2, 2], nnz=3, upper=False, dtype=torch.float32, device=cpu)
        >>> _ = a.values().mul_(2)
        >>> plan(torch.tensor([2.0, 5.0]))
        tensor([0.5000, 0.5000])
    """
    with relaxed_capture(a):
        made = a if isinstance(a, SparsePlan) else plan_of("plan_solve", a, tuned=False)
        square("plan_solve", made)
        return SolvePlan(made, bool(upper), bool(transpose), bool(unit_diagonal))


def solve_plan(a: SparsePlan, upper: bool, transpose: bool, unit_diagonal: bool) -> SolvePlan:
    """The plan of a pickle."""
    return plan_solve(a, upper=upper, transpose=transpose, unit_diagonal=unit_diagonal)
