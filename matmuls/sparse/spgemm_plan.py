"""Products of two sparse matrices whose patterns stay: SpgemmPlan, made by plan_spgemm; and the size of a product."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .csr_pattern import is_capturing, untransformed
from .plan import Sparse, SparsePlan, plan_of
from .spgemm import Sizes, as_csr, expect_operands, listed, operand, sizes

_ops = torch.ops.custom_mm
_pattern: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = _ops.csr_spgemm_pattern.default
_product: Callable[..., torch.Tensor] = _ops.csr_spgemm.default
_transpose: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = _ops.csr_transpose.default


class SpgemmSize(NamedTuple):
    """The size of a sparse product, from `spgemm_size`.

    Attributes:
        nnz: the number of nonzeros.
        nbytes: the bytes of its indices and values.

    Examples:
        >>> import matmuls
        >>> matmuls.SpgemmSize(nnz=2, nbytes=36).nnz
        2
    """

    nnz: int
    nbytes: int


def spgemm_size(a: Sparse, b: Sparse) -> SpgemmSize:
    """Counts the nonzeros of the sparse product A @ B, without allocating it.

    On a GPU it takes memory for a column for each product of two nonzeros, up to 1 GiB, and waits for the GPU.

    Args:
        a: [M, K] a sparse tensor or a plan, as in `spgemm`.
        b: [K, N] as a.

    Returns:
        The number of nonzeros of C and the bytes of its CSR tensor.

    Raises:
        ValueError: if an index does not fit the shape, or a or b is a batch.
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if a or b is neither a sparse tensor nor a plan.

    Examples:
        >>> import torch, matmuls
        >>> a = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]).to_sparse_csr()
        >>> matmuls.spgemm_size(a, a.mT)
        SpgemmSize(nnz=2, nbytes=48)
    """
    made = sizes("spgemm_size", operand("spgemm_size", "A", a), operand("spgemm_size", "B", b), None)
    return SpgemmSize(made.nnz, made.nbytes)


class SpgemmPlan:
    """A sparse product C = A @ B whose patterns are prepared: `plan()` computes the values. Made by `plan_spgemm`.

    The pattern of C is computed once. Every product reads the values that A and B have at that time, or those that it
    is given. The results share the indices of the plan: do not write to them.

    Attributes:
        a: the plan of A.
        b: the plan of B.
        shape: [M, N].
        nnz: the number of nonzeros of C.
        nbytes: the bytes of C's indices and of the indices of A and B, with those for gradients that are kept.

    Examples:
        >>> import torch, matmuls
        >>> a = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]).to_sparse_csr()
        >>> plan = matmuls.plan_spgemm(a, a.mT)
        >>> plan().to_dense()
        tensor([[5., 0.],
                [0., 9.]])
        >>> plan.values(2 * plan.a.values)
        tensor([10., 18.])
    """

    def __init__(self, a: SparsePlan, b: SparsePlan, made: Sizes) -> None:
        self.a, self.b, self.nnz = a, b, made.nnz
        self.shape = torch.Size((a.shape[0], b.shape[1]))
        self._parts = made.a, made.b
        crow, col, _ = _pattern(made.a, made.b, made.columns, made.offsets, made.state, made.nnz)
        self._c = [crow, col, crow.new_empty(0)]
        self._with_transposed: tuple[list[torch.Tensor], ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"a": self.a, "b": self.b}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*_sized("SpgemmPlan", state["a"], state["b"], None))  # type: ignore[misc]  # C is computed again

    @property
    def nbytes(self) -> int:
        """The bytes of C's indices and of the indices of A and B, with those for gradients that are kept."""
        kept = {t.data_ptr(): t.nbytes for part in (*self._lists(False), *(self._with_transposed or ())) for t in part}
        return sum(kept.values())

    def _lists(self, gradient: bool) -> tuple[list[torch.Tensor], ...]:
        """The patterns of A, B and C; with those of the transposed matrices, made once, for gradients to B's values."""
        if not gradient or torch.compiler.is_compiling() or is_capturing(self.a.device):
            return *self._parts, self._c
        if self._with_transposed is None:
            index, patterns = self._c[0].dtype, (self.a._pattern, self.b._pattern)
            with torch.inference_mode(False), untransformed():
                a, b = ([*part, *listed(p, index, True)[3:]] for part, p in zip(self._parts, patterns, strict=True))
                self._with_transposed = a, b, [*self._c, *_transpose(self._c[0], self._c[1], self.shape[1])]
        return self._with_transposed

    def values(self, a_values: torch.Tensor | None = None, b_values: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the values of C.

        Args:
            a_values: [nonzeros of A] in the order of A.values(); None for those that A has now. Gradients flow to them.
            b_values: [nonzeros of B] in the order of B.values(), in the dtype of a_values; None for those that B has
                now.

        Returns:
            [nnz], in the order of C's columns within its rows.

        Raises:
            ValueError: if a shape does not match, or the indices of A or B were written to.
            RuntimeError: if dtypes or devices do not match.
            TypeError: if a_values or b_values is not a dense tensor.
        """
        compiling = torch.compiler.is_compiling()
        given = []
        for plan, values in ((self.a, a_values), (self.b, b_values)):
            if not compiling:
                plan._expect_same_indices("spgemm")
            given.append(plan.values if values is None else plan._checked(values))
        gradient = given[1].requires_grad and torch.is_grad_enabled()
        a, b, c = self._lists(gradient)
        return _product(*given, a, b, c, self.shape[1])

    def __call__(self, a_values: torch.Tensor | None = None, b_values: torch.Tensor | None = None) -> torch.Tensor:
        """Computes C = A @ B.

        Args:
            a_values: as in `values`.
            b_values: as in `values`.

        Returns:
            [M, N] a sparse CSR tensor.

        Raises:
            ValueError: as in `values`.
            RuntimeError: as in `values`.
            TypeError: as in `values`.
        """
        return as_csr(self._c[0], self._c[1], self.values(a_values, b_values), (self.shape[0], self.shape[1]))

    def explain(self) -> str:
        """Describes the product in a few lines: the sizes of A, B and C, and the bytes."""
        size = [" x ".join(map(str, shape)) for shape in (self.a.shape, self.b.shape, self.shape)]
        value = self.a.dtype.itemsize
        return "\n".join(
            (
                f"A {size[0]}: {self.a.nnz} nonzeros, B {size[1]}: {self.b.nnz} nonzeros",
                f"C {size[2]}: {self.nnz} nonzeros, {self._c[1].dtype} indices",
                f"{self.nbytes} bytes of indices, {self.nnz * value} bytes of values of each product",
            )
        )

    def __repr__(self) -> str:
        return f"SpgemmPlan(shape={list(self.shape)}, nnz={self.nnz}, dtype={self.a.dtype}, device={self.a.device})"


def plan_spgemm(a: Sparse, b: Sparse, *, max_nnz: int | None = None) -> SpgemmPlan:
    """Prepares the product A @ B of two sparse matrices for many values with the same patterns.

    Args:
        a: [M, K] a sparse tensor or a plan, as in `spgemm`.
        b: [K, N] as a, in its dtype and on its device.
        max_nnz: the most nonzeros that C may have; None for no limit.

    Returns:
        A `SpgemmPlan`.

    Raises:
        ValueError: before C is allocated, if C would have more than max_nnz nonzeros, or more than int32 indices reach
            and a or b is a plan; if an index does not fit the shape, or a or b is a batch.
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if a or b is neither a sparse tensor nor a plan.

    Examples:
        >>> import torch, matmuls
        >>> a = torch.tensor([[1.0, 0.0], [4.0, 2.0]]).to_sparse_csr()
        >>> plan = matmuls.plan_spgemm(a, a)
        >>> plan
        SpgemmPlan(shape=[2, 2], nnz=3, dtype=torch.float32, device=cpu)
        >>> _ = a.values().mul_(10)
        >>> plan().values()
        tensor([ 100., 1200.,  400.])
    """
    left, right = operand("plan_spgemm", "A", a), operand("plan_spgemm", "B", b)
    expect_operands("plan_spgemm", left, right)
    plans = [x if isinstance(x, SparsePlan) else plan_of("plan_spgemm", x, tuned=False) for x in (a, b)]
    return SpgemmPlan(*_sized("plan_spgemm", plans[0], plans[1], max_nnz))


def _sized(name: str, a: SparsePlan, b: SparsePlan, max_nnz: int | None) -> tuple[SparsePlan, SparsePlan, Sizes]:
    """The arguments of SpgemmPlan."""
    return a, b, sizes(name, operand(name, "A", a), operand(name, "B", b), max_nnz)
