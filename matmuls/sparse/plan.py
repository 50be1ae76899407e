"""SparsePlan: a sparse matrix A made ready for many products A @ B; and plan(), which makes one."""

import math
from collections.abc import Iterable
from copy import copy, deepcopy
from numbers import Integral
from typing import Any, overload

import torch
from torch.compiler import is_compiling

from ..registration import expect_dense
from .csr_pattern import CsrPattern, _unsafe_view, for_every_stream, is_capturing, relaxed_capture
from .default_spmm import check_operands, default_op, default_product, multiply_batch
from .dtensor import product_of_dtensor
from .foreign import SparseMatrix, is_foreign, native
from .prepared import PreparedCalls, PreparedOp
from .selector import Selector, described, linear_of
from .spgemm import spgemm
from .tensor_pattern import pattern_of

REAL = torch.float64, torch.float32, torch.float16, torch.bfloat16
DTYPES = *REAL, torch.complex64, torch.complex128


class SparsePlan:
    """A sparse matrix A prepared for many products: `plan @ B` and `x @ plan`. Made by `matmuls.plan`.

    The indices are checked once and kept in CSR, as int32 if they fit. The first gradient to B, and the first
    `x @ plan`, also store the indices of the transposed matrix. Values are not copied: every product reads those that A
    has at that time. A plan made with `constant=True` may keep a copy of A in another layout.

    The first product for a dtype and a number of columns of B selects a kernel by the sizes or, if the plan is constant
    or of BSR or BSC, by timing; it may wait for the GPU. Later products with the same dtype and about as many columns
    (between the same powers of two) run that kernel and do not wait. With the same shape and strides of B they cost the
    host 2 us plus the launches, and what autograd takes. CUDA-graph capture runs a kernel selected before, or the
    default; torch.compile the default.

    Attributes:
        shape: [M, K], or [..., M, K] for a batch of matrices.
        values: [nonzeros], in the order of A.values(), flattened.
        nnz: the number of nonzeros.
        dtype: the dtype of the values.
        device: the device of the values and the indices.
        nbytes: the bytes that the plan keeps alive.

    Examples:
        >>> import torch, matmuls
        >>> plan = matmuls.plan(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]).to_sparse_csr())
        >>> plan
        SparsePlan(shape=[2, 3], nnz=3, dtype=torch.float32, device=cpu, constant=False)
        >>> plan @ torch.tensor([1.0, 1.0, 1.0])
        tensor([3., 3.])
        >>> torch.tensor([[1.0, 1.0]]) @ plan
        tensor([[1., 3., 2.]])
        >>> plan.T @ torch.tensor([1.0, 1.0])
        tensor([1., 3., 2.])
    """

    __array_ufunc__ = None  # numpy leaves `array @ plan` to `__rmatmul__`, which names what it expects

    def __init__(
        self, pattern: CsrPattern, values: torch.Tensor, shape: tuple[int, ...], selector: Selector | None = None
    ) -> None:
        self._pattern, self.shape, self._selector = pattern, torch.Size(shape), selector
        self._prepared = PreparedCalls(values)

    @property
    def values(self) -> torch.Tensor:
        """The values of the matrix, [nonzeros], in the order of A.values() (flattened)."""
        return self._prepared.current_values()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._prepared.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values and the indices."""
        return self._pattern.crow.device

    @property
    def nnz(self) -> int:
        """The number of nonzeros."""
        return self._pattern.nonzeros

    def _checked(self, values: torch.Tensor) -> torch.Tensor:
        """values as [nonzeros]; ValueError if their shape or device is another."""
        expect_dense("SparsePlan", values=values)
        if values.dim() > 1 and values.shape == self._prepared.values_shape:
            values = values.reshape(-1)
        if values.shape != (self.nnz,) or values.device != self.device:
            got = f"{list(values.shape)} on {values.device}"
            raise ValueError(f"SparsePlan: expected values of shape [{self.nnz}] on {self.device}, got {got}")
        return values

    def update(self, values: torch.Tensor) -> "SparsePlan":
        """Replaces the values of the nonzeros; the indices stay.

        An ordinary plan reads its values at every product; it needs an update only if they move to another tensor. A
        constant plan also needs one after writes that do not raise the version counter of its values: through `.data`,
        by a fused optimizer, or by a replayed CUDA graph. The update converts the copies of A again and waits for the
        GPU. A copy that a captured graph reads is overwritten in place: the graph's next replay reads the new values.

        Args:
            values: [nonzeros] in the order of A.values(), or the shape of A.values(); any strides, any dtype of a plan.

        Returns:
            This plan.

        Raises:
            ValueError: if shape or device do not match, or values of a constant plan require a gradient.
            TypeError: if values is not a dense tensor.
        """
        checked, constant = self._checked(values), self._selector is not None and self._selector.constant
        if constant and values.requires_grad:
            raise ValueError("SparsePlan: expected values without a gradient in a constant plan, got some with one")
        self._prepared = self._prepared.of_other_values(checked, values, constant)
        for selector in self._selectors:
            selector.refresh(checked)
        return self

    def with_values(self, values: torch.Tensor) -> "SparsePlan":
        """Makes an ordinary (not constant) plan with other values for the same nonzeros. It shares the indices.

        Args:
            values: [nonzeros] in the order of A.values(), or the shape of A.values(); any strides. Gradients flow to
                it.

        Returns:
            A plan of the same shape.

        Raises:
            ValueError: if shape or device do not match.
            TypeError: if values is not a dense tensor.
        """
        selector = None if self._selector is None else self._selector.of_other_values()
        checked = self._checked(values)
        made = SparsePlan(self._pattern, checked, self.shape, selector)
        made._prepared = self._prepared.of_other_values(checked, values)
        return made

    def __matmul__(self, b: "Sparse") -> torch.Tensor:
        """Computes A @ b, as spmm(self, b), or for a sparse b or a plan as spgemm(self, b)."""
        if (product := self._again(b)) is not None:
            return product
        if b.layout != torch.strided if isinstance(b, torch.Tensor) else isinstance(b, SparsePlan) or is_foreign(b):
            return spgemm(self, b)
        return self._multiply(b, selected=not is_compiling())  # type: ignore[arg-type]

    def __rmatmul__(self, x: torch.Tensor) -> torch.Tensor:
        """x @ A, [..., K]; x: [M], or [..., M], or with the leading dimensions of a batch [..., n, M]."""
        # Not by __torch_function__: with it torch.compile takes A @ x for x @ A (torch 2.13).
        expect_dense("spmm", x=x)
        if x.shape[-1:] != self.shape[-2:-1]:
            expected = f"x of shape [..., {self.shape[-2]}] for x @ A with A of shape {list(self.shape)}"
            raise RuntimeError(f"spmm: expected {expected}, got {list(x.shape)}")
        t = self.mT
        if self._pattern.batch is not None and x.dim() > 1:
            return (t @ x.mT).mT
        return t @ x if x.dim() == 1 else t._linear(x, None)

    @property
    def T(self) -> "SparsePlan":
        """A^T as a plan that reads the same values: gradients flow to them, and `update` of either plan changes both.

        `plan.T.T` is `plan`. Raises RuntimeError for a batch of matrices; use `mT`. The first use of `T`, or of
        `x @ plan`, sorts the indices and waits for the GPU: do it before a CUDA graph capture, and before
        `torch.compile(fullgraph=True)`.
        """
        if len(self.shape) > 2:
            raise RuntimeError(f"SparsePlan.T: expected one matrix, got a batch of shape {list(self.shape)}; use .mT")
        return self.mT

    @property
    def mT(self) -> "SparsePlan":
        """`T`, or for a batch a plan of the transposed matrices."""
        return TransposedPlan(self)

    @overload
    def to(self, device: torch.device | str | int, dtype: torch.dtype | None = None) -> "SparsePlan": ...
    @overload
    def to(self, dtype: torch.dtype) -> "SparsePlan": ...
    @overload
    def to(
        self, *, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None
    ) -> "SparsePlan": ...

    def to(self, *args: Any, **kwargs: Any) -> "SparsePlan":
        """Makes a plan of the same matrix on another device or in another dtype.

        The new plan has a copy of the values and does not see later writes to A. Gradients flow through this copy to
        the values of this plan. For a second backward pass, pass retain_graph=True to the first, or call `to` again.

        Args:
            *args: a device, a dtype, or both, as for torch.Tensor.to.
            **kwargs: `device` and `dtype`; float64, float32, float16, bfloat16, complex64 or complex128.

        Returns:
            A plan; this one if device and dtype are the same.

        Raises:
            TypeError: if dtype is none of the six.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = self.device if device is None else device, self.dtype if dtype is None else dtype
        if dtype not in DTYPES:
            expected = "float64, float32, float16, bfloat16, complex64 or complex128"
            raise TypeError(f"SparsePlan.to: expected {expected}, got {dtype}")
        self._expect_same_indices("SparsePlan.to")
        values = self.values
        moved = values.to(device, dtype)
        if moved is values:
            return self
        pattern, selector = self._pattern.to(moved.device), self._selector
        if selector is not None:
            selector = Selector(pattern, products=selector.products, constant=selector.constant)
        made = SparsePlan(pattern, moved, self.shape, selector)
        made._prepared.values_shape = self._prepared.values_shape
        return made

    def _again(self, b: object) -> torch.Tensor | None:
        """A @ b by a call prepared before; None if there is none that still holds."""
        return None if is_compiling() else self._prepared.repeat(b)

    def _multiply(self, b: torch.Tensor, selected: bool = True) -> torch.Tensor:
        """A @ b by the fastest candidate or, unless `selected`, by the default product."""
        if selected:
            self._expect_same_indices("spmm")
        values = self.values
        check_operands(self.shape, b)
        if hasattr(b, "placements"):
            return product_of_dtensor(self, b)
        if b.dim() == 1:
            if (
                not selected
                or b.shape != self.shape[-1:]
                or not (op := linear_of(self._selector, self._pattern, values, b, None))
            ):
                return (self @ b.unsqueeze(-1)).squeeze(-1)
        elif self._pattern.batch is not None:
            return multiply_batch(self._pattern, values, self.shape, b)
        elif not selected:
            return default_product(self._pattern, values, b)
        else:
            op = self._op(values, b)
        product = op.run()
        self._prepared.record(op, values, self._pattern)
        return product

    def _op(self, values: torch.Tensor, b: torch.Tensor) -> PreparedOp:
        """A @ b by the fastest candidate."""
        return (self._selector and self._selector.call(values, b)) or default_op(self._pattern, values, b)

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None, *watched: torch.Tensor) -> torch.Tensor:
        """x A^T + bias, [..., M]. x: [..., K]; bias: [M] or None. In 16 bits and without a gradient, a constant plan
        may add the bias before the sum is rounded. watched: as PreparedCalls.record_linear takes them."""
        compiling = is_compiling()
        if not compiling and (product := self._prepared.repeat_linear(x, bias, *watched)) is not None:
            return product
        rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        if compiling or hasattr(x, "placements"):
            y = (self @ rows.mT).mT
            return (y if bias is None else y + bias.to(y.dtype)).reshape(*x.shape[:-1], self.shape[-2])
        self._expect_same_indices("spmm")
        values = self.values
        given = self._selector, self._pattern, values, rows, bias, bool(watched)
        op = linear_of(*given)
        transposed = op is None
        op = op or self._op(values, rows.mT)
        y = op.run()
        if transposed:
            y = y.mT if bias is None else y.mT + bias.to(y.dtype)
        is_default = transposed and linear_of(*given)  # as measured: next time
        if not is_default and (not transposed or bias is None or bias.dtype == y.dtype):
            rows_of = x if transposed or x.dim() != 2 else None
            self._prepared.record_linear(op, values, (bias, *watched), self._pattern, rows_of, transposed)
        # not a view, which FSDP warns about; nothing else refers to y
        return _unsafe_view(y if x.dim() == 2 else y.contiguous(), (*x.shape[:-1], self.shape[-2]))

    def _expect_same_indices(self, name: str) -> None:
        """ValueError if the sparse tensor was written to and has other indices: they share a version with its values,
        which are taken again. Waits for the GPU after a write."""
        changed = self._prepared.changed_origin()
        if changed is None or is_capturing(self.device):
            return
        a, state = changed
        pattern, values = (None, a.reshape(-1)) if a.layout == torch.strided else pattern_of(name, a)
        if pattern is not None and not pattern.in_int32(a).is_like(self._pattern):
            raise ValueError(f"{name}: expected the indices that the plan was made of, got others; make it anew")
        self._prepared.read_again(values.detach() if values.requires_grad else values, state)

    def __copy__(self) -> "SparsePlan":
        made = object.__new__(SparsePlan)
        made.__dict__.update(self.__dict__)
        made._prepared = self._prepared.copy()
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "SparsePlan":
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(deepcopy(self.__dict__, memo))
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ValueError("SparsePlan: expected a pickle of this version, got the state of another one's plan")

    @property
    def nbytes(self) -> int:
        """Bytes of the indices, the values and the copies of A that the plan keeps alive."""
        kept = [t for selector in self._selectors for t in selector.tensors]
        return sum(t.untyped_storage().nbytes() if t.numel() == 0 else t.nbytes for t in (*self._tensors, *kept))

    @property
    def _selectors(self) -> list[Selector]:
        """That of A and, once there are products with it, that of A^T."""
        own = self._selector
        return [selector for selector in (own, own and own.reverse) if selector is not None]

    @property
    def _is_captured(self) -> bool:
        """True if a captured graph reads a copy that the plan keeps alive."""
        return any(selector.is_captured for selector in self._selectors)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        s = self._pattern
        return [*s.tensors, *s.chunk_tensors, *s.block_tensors, self._prepared.values]

    def explain(self) -> str:
        """Describes the plan in a few lines: the matrix, the selected kernels, and the measured times of all kernels
        that were considered."""
        return "\n".join(described(self))

    def __repr__(self) -> str:
        facts = [f"shape={list(self.shape)}", f"nnz={self.nnz}", f"dtype={self.dtype}", f"device={self.device}"]
        if self._selector is not None:
            facts.append(f"constant={self._selector.constant}")
            facts += [f"kernels={{{', '.join(chosen)}}}"] if (chosen := self._selector.chosen()) else []
        return f"SparsePlan({', '.join(facts)})"


class TransposedPlan(SparsePlan):
    """A^T of a plan, read from the values that the plan has at every product. Made by its `T` and `mT`."""

    def __init__(self, base: SparsePlan) -> None:
        self._base = base
        self._pattern = base._pattern.reversed()
        *batch, rows, columns = base.shape
        self.shape = torch.Size((*batch, columns, rows))

    @property
    def _prepared(self) -> PreparedCalls:  # type: ignore[override]
        return self._base._prepared.transposed()

    @property
    def _selector(self) -> Selector | None:  # type: ignore[override]
        own = self._base._selector
        return None if own is None else own.reversed()

    @property
    def _selectors(self) -> list[Selector]:
        return self._base._selectors

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return self._base._tensors

    @property
    def mT(self) -> SparsePlan:
        return self._base

    def update(self, values: torch.Tensor) -> SparsePlan:
        self._base.update(values)
        return self

    def with_values(self, values: torch.Tensor) -> SparsePlan:
        return self._base.with_values(values).mT

    def to(self, *args: Any, **kwargs: Any) -> SparsePlan:
        moved = self._base.to(*args, **kwargs)
        return self if moved is self._base else moved.mT

    def _expect_same_indices(self, name: str) -> None:
        self._base._expect_same_indices(name)

    def __copy__(self) -> SparsePlan:
        return copy(self._base).mT


Sparse = torch.Tensor | SparsePlan | SparseMatrix


def plan(
    a: Sparse,
    *,
    tune: bool | Iterable[int] = True,
    products: int | None = None,
    constant: bool | None = None,
) -> SparsePlan:
    """Prepares a sparse matrix for many products: `plan(A) @ B`.

    Without `constant`, every product reads the values that A has at that time. If A was written to, the next product
    checks that the indices did not change, and waits for the GPU; compiled products do not check. Gradients flow to
    A's values if A requires a gradient when the plan is made, or to the values of a later `update`. Every kernel gives
    the same bits every time, but two kernels may round differently, and another process may select another kernel.

    Args:
        a: [M, K] a sparse tensor in CSR, CSC, COO, BSR or BSC, or a batch of CSR or CSC matrices; float64, float32,
            float16, bfloat16, complex64 or complex128, indices int32 or int64. The plan shares its values and has its
            own copy of the indices. A matrix of scipy.sparse or cupyx.scipy.sparse is taken as the sparse tensor in its
            memory if it is in CSR, CSC or BSR; other formats are converted to CSR.
            BSR and BSC blocks with sides of 16, 32, 64 or 128 are multiplied on tensor cores, on GPUs of compute
            capability 8.0 or later, in 16 bits or TF32. a may also be a plan: its settings are then changed as given,
            and it is returned.
        tune: True selects a kernel at the first product of each dtype and number of columns of B. A list of numbers of
            columns selects kernels for these now, in a's dtype. False always runs the default kernel.
        products: about how many products with each number of columns you will do; 50 if not given. With more products,
            the plan may spend more time on selecting a kernel.
        constant: True promises that the values will not change, as for a pruned weight or a graph. The plan may then
            select kernels that keep a copy of A in another layout. One such layout is the dense matrix: with it, NaN
            and inf in B also reach rows of the result where A has a zero. None means False, or for a plan no change.

    Returns:
        A `SparsePlan`.

    Raises:
        ValueError: if an index does not fit the shape, or constant values require a gradient.
        TypeError: if a is neither a sparse matrix nor a plan, its dtype is none of torch's, or tune, products or
            constant has a wrong type.

    Examples:
        >>> import torch, matmuls
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).to_sparse_csr().requires_grad_()
        >>> plan = matmuls.plan(weight)
        >>> (plan @ torch.tensor([[1.0], [3.0]])).sum().backward()
        >>> weight.grad.values()
        tensor([1., 3.])
    """
    widths = () if isinstance(tune, bool) else tuple(tune) if isinstance(tune, Iterable) else None
    if widths is None or not all(isinstance(n, Integral) and n >= 0 for n in widths):
        raise TypeError(f"plan: expected tune to be True, False or several numbers of columns, got {tune!r}")
    if products is not None and (not isinstance(products, Integral) or isinstance(products, bool) or products < 1):
        raise TypeError(f"plan: expected products to be a whole number of 1 or more, got {products!r}")
    if constant is not None and not isinstance(constant, bool):
        raise TypeError(f"plan: expected constant to be True or False, got {constant!r}")
    if isinstance(a, TransposedPlan):  # what holds for the one holds for the other
        plan(a._base, products=products, constant=constant)
    made = a if isinstance(a, SparsePlan) else plan_of("plan", a, tune is not False, constant=bool(constant))
    if constant is not None and made._selector is not None and made._selector.constant != constant:
        if not constant:  # graphs may read what it keeps
            raise ValueError("plan: expected constant=True for a constant plan, got False; make another of the matrix")
        if made.values.requires_grad:
            raise ValueError("plan: expected values without a gradient for constant=True, got some that require it")
        made._selector = Selector(made._pattern, products=made._selector.products, constant=True)
        made._prepared.forget()
    if products is not None:
        for selector in made._selectors:
            selector.products = int(products)
    if widths and made._selector is not None:
        for n in widths:
            b = torch.randn(made.shape[-1], n, dtype=made.dtype, device=made.device)
            made._selector.measure(made.values, b, made.dtype)
        made._prepared.forget()  # another candidate may be the fastest now
    return made


def plan_of(name: str, a: Any, tuned: bool = True, shared: bool = False, constant: bool = False) -> SparsePlan:
    """The plan of a sparse tensor. shared: a's indices are the caller's, who sees writes to them; int32 ones are not
    copied."""
    a = native(name, a)
    if constant and isinstance(a, torch.Tensor) and a.requires_grad:
        raise ValueError(f"{name}: expected values without a gradient for constant=True, got a matrix that requires it")
    with relaxed_capture(a):  # none of this is forbidden by another thread's capture
        pattern, values = pattern_of(name, a, wait=False, copied=not shared)
        pattern = pattern.in_int32(None if shared else a)
        selector = Selector(pattern, constant=constant) if tuned and pattern.batch is None else None
        made = SparsePlan(pattern, values.detach() if a.requires_grad else values, a.shape, selector)
        own = a.detach()._values() if a.layout == torch.sparse_coo else a.detach().values()
        is_copy = made.nnz > 0 and own.data_ptr() != values.data_ptr()
        made._prepared = PreparedCalls(
            made._prepared.values,
            source=a if a.requires_grad or (is_copy and not constant) else None,
            origin=a,
            apart=is_copy or a.layout == torch.sparse_coo,
            values_shape=own.shape,
        )
        pattern.checked()
        if a.layout == torch.sparse_coo and not a.is_coalesced():
            for_every_stream(values)  # they were added up after the check of the indices
        return made
