"""Sparse products by rows: SpMM, SDDMM, the softmax between them, and the plan that keeps a matrix ready for them."""

import math
import weakref
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import torch
from torch.autograd.function import InplaceFunction
from torch.utils.flop_counter import register_flop_formula

from custom_mm import _C
from custom_mm.indices import version_of

from .calls import Call
from .choice import Choice
from .dense import matmul
from .ours import our_call
from .registration import expect_dense, number
from .structure import Structure, for_every_stream, from_entries, is_capturing, relaxed_capture, structure_of, values_of

_ops = torch.ops.custom_mm
_spmm: Callable[..., torch.Tensor] = _ops.csr_spmm.default
_spmm_out: Callable[..., None] = _ops.csr_spmm.out
_sddmm: Callable[..., torch.Tensor] = _ops.csr_sddmm.default
_softmax: Callable[..., torch.Tensor] = _ops.csr_softmax.default


class SparsePlan:
    """A sparse matrix made ready for products: `plan @ B`. Made by `plan(A)`.

    The indices were checked once and are kept by rows, in int32 where that suffices; with the first gradient to a dense
    side the same by columns. A product looks at none of them again. Values are read at every product, where A keeps
    them; `plan(A, constant=True)` also takes products that keep a copy of them in another layout.

    `plan @ B` takes the fastest candidate: our product, cuSPARSE's, that by blocks and, of a constant matrix, the dense
    one and those on tensor cores. The first product for a dtype and a number of columns (to a power of two) chooses, by
    size in a tenth of a millisecond or, where that does not tell, by measuring them in a few, and waits for the GPU; no
    later one does, and none under CUDA-graph capture or torch.compile. The same product again, by another dense side of
    the same shape and strides and without a gradient, costs the host 2 us beside its launches.
    """

    _bound_linear: _C.BoundCalls | None = None  # as _bound, of linear layers; not in older pickles
    _values_shape: torch.Size | None = None  # A.values()', of blocks or of a batch; not in older pickles
    _origin: weakref.ref[torch.Tensor] | None = None  # the sparse tensor whose values these are
    _seen: tuple[int, int] = (0, 0)  # its _state_of, when its indices were those of the structure
    _is_apart = False  # the values' version is not the sparse tensor's

    def __init__(
        self, structure: Structure, values: torch.Tensor, shape: tuple[int, ...], choice: Choice | None = None
    ) -> None:
        self._structure, self._values, self.shape, self._choice = structure, values, torch.Size(shape), choice
        self._source: torch.Tensor | None = None  # the sparse tensor whose values are taken anew for each product
        self._bound: _C.BoundCalls | None = None  # the last products, to be made again

    @property
    def values(self) -> torch.Tensor:
        """[nonzeros], in the order of A.values() (flattened)."""
        # Taken anew each time: a graph can be walked back once.
        return self._values if self._source is None else values_of(self._source)

    @property
    def dtype(self) -> torch.dtype:
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        return self._structure.crow.device

    @property
    def nnz(self) -> int:
        return self._structure.nonzeros

    def _checked(self, values: torch.Tensor) -> torch.Tensor:
        expect_dense("SparsePlan", values=values)
        if values.dim() > 1 and values.shape == self._values_shape and values.is_contiguous():
            values = values.view(-1)
        if values.shape != (self.nnz,) or values.device != self.device:
            raise ValueError(
                f"SparsePlan: expected values of shape [{self.nnz}] on {self.device}, "
                f"got {list(values.shape)} on {values.device}"
            )
        return values

    def update(self, values: torch.Tensor) -> "SparsePlan":
        """Take other values for the same nonzeros, in the order of A.values(), whose shape they may have; nothing is
        inspected. Returns itself.

        They are read where they are at every product. Values that are written to need no update; a constant plan needs
        one after writes that torch does not count (by `.data`, through a tensor that shares their memory without their
        version, by a fused optimizer, by a replayed graph). What a constant plan keeps is then made anew, which waits
        for the GPU, and in place where a captured graph reads it: its next replay reads the other values. Raises
        ValueError where values of a constant plan require a gradient.
        """
        values = self._checked(values)
        self._expect_constant(values)
        self._values, self._source, self._origin = values, None, None
        self._unbind()
        if self._choice is not None:
            self._choice.refresh(values)
        return self

    def _expect_constant(self, values: torch.Tensor) -> None:
        if self._choice is not None and self._choice.constant and values.requires_grad:
            raise ValueError("SparsePlan: expected values without a gradient in a constant plan, got some with one")

    def with_values(self, values: torch.Tensor) -> "SparsePlan":
        """A plan with other values for the same nonzeros, not constant, sharing everything else with this one."""
        choice = None if self._choice is None else self._choice.of_other_values()
        return SparsePlan(self._structure, self._checked(values), self.shape, choice)

    def _product(self, values: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """By the fastest candidate."""
        call = None if self._choice is None else self._choice.call(values, b)
        if call is None:
            call = our_call(self._structure, values, b)
        product = call.run()
        if self._source is None and call.lasting:
            self._bound = self._bind(self._bound, call, values)
        return product

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x W^T + bias, or None where a product by columns and a sum after it are the way."""
        if self._choice is None or not self._choice.constant:
            return None
        bound, first = self._bound_linear, self._values if bias is None else bias
        if bound is not None and (product := bound(x, first)) is not None:
            return product
        self._look_again("spmm")
        values = self.values
        call = self._choice.linear(values, x, bias)
        if call is None:
            return None
        product = call.run()
        if self._source is None and call.lasting:
            self._bound_linear = self._bind(bound, call, first, values)
        return product

    def _bind(self, bound: _C.BoundCalls | None, call: Call, *made_of: torch.Tensor) -> _C.BoundCalls:
        """With this call to be made again, by whoever hands over the first of what it was made of."""
        bound = bound or _C.BoundCalls()
        name = call.operator.name()
        watched = [*made_of, *self._structure.tensors, *self._structure.block_tensors]
        bound.bind(name, call.arguments, call.dense, watched)
        return bound

    def _look_again(self, name: str) -> None:
        """After writes to the sparse tensor, whose values and indices have one version, and after its `.data` was set.
        Waits for the GPU."""
        a = None if self._origin is None else self._origin()
        if a is None or (seen := _state_of(a)) == self._seen or is_capturing(self.device):
            return
        structure, values = structure_of(name, a)
        if not structure.in_int32(a).is_like(self._structure):
            raise ValueError(f"{name}: expected the indices that the plan was made of, got others; make it anew")
        self._values, self._seen = values.detach() if values.requires_grad else values, seen

    def __copy__(self) -> "SparsePlan":
        made = object.__new__(SparsePlan)
        made.__dict__.update(self.__dict__)
        made._unbind()
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_origin": None}  # the values are a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._origin = None if self._source is None else weakref.ref(self._source)

    def _unbind(self) -> None:
        self._bound = self._bound_linear = None

    def _again(self, b: torch.Tensor) -> torch.Tensor | None:
        """The product by b as one before, where nothing has changed since."""
        bound = self._bound
        if torch.compiler.is_compiling() or bound is None or self._was_replaced():
            return None
        return bound(b, self._values)

    def _was_replaced(self) -> bool:
        """True after writes to the sparse tensor that leave the version of `_values` as it is: to values of which these
        are a copy, and by `.data` of a COO tensor."""
        a = None if self._origin is None or not self._is_apart else self._origin()
        return a is not None and _state_of(a) != self._seen

    def __matmul__(self, b: torch.Tensor) -> torch.Tensor:
        return spmm(self, b)

    @property
    def nbytes(self) -> int:
        """Bytes of the indices, the values and what the chosen products need, which the plan keeps alive."""
        chosen = [] if self._choice is None else self._choice.tensors
        return sum(t.untyped_storage().nbytes() if t.numel() == 0 else t.nbytes for t in (*self._tensors, *chosen))

    @property
    def _is_captured(self) -> bool:
        """True where a captured graph reads a copy that the plan keeps alive."""
        return self._choice is not None and self._choice.is_captured

    @property
    def _tensors(self) -> list[torch.Tensor]:
        s = self._structure
        return [*s.tensors, *s.chunk_tensors, *s.block_tensors, self._values]

    def explain(self) -> str:
        """What the plan knows, in a few lines: the matrix, and every candidate's time where they were measured."""
        s = self._structure
        mean = s.nonzeros / max(s.rows, 1)
        density = s.nonzeros / max(s.rows * s.columns, 1)
        transposed = "kept" if s._transposed is not None else "made with the first gradient to a dense side"
        blocks = f", {s.batch} blocks on the diagonal" if s.batch is not None else ""
        order = "in the order of rows" if s.order is None else "by an order of their own"
        if s.blocks is not None:
            order += f", in {s.blocks.structure.nonzeros} blocks of {s.blocks.height} x {s.blocks.width}"
        return (
            f"{' x '.join(map(str, self.shape))}: {s.nonzeros} nonzeros ({density:.2%}), {self.dtype}, {self.device}\n"
            f"nonzeros a row: mean {mean:.1f}, most {s.longest}{blocks}\n"
            f"indices: {s.crow.dtype}, values {order}\n"
            f"transposed matrix: {transposed}\n"
            f"{self.nbytes} bytes"
            + ("" if self._choice is None else "".join("\n" + line for line in self._choice.explain(self.dtype)))
        )

    def __repr__(self) -> str:
        return f"SparsePlan({list(self.shape)}, nnz={self.nnz}, {self.dtype}, {self.device})"


Sparse = torch.Tensor | SparsePlan


def _state_of(a: torch.Tensor) -> tuple[int, int]:
    """What changes when a sparse tensor's indices or values are written to or replaced, as far as torch counts it."""
    return version_of(a), a._values().data_ptr() if a.layout == torch.sparse_coo else 0


def plan(
    a: Sparse,
    *,
    tune: bool | Iterable[int] = True,
    products: int | None = None,
    constant: bool | None = None,
) -> SparsePlan:
    """Make a sparse matrix ready for many products: `plan(A) @ B`.

    a: a sparse tensor, [M, K] in CSR, CSC, COO, BSR or BSC, or a batch of CSR or CSC matrices, or a plan, which is
    returned. tune: True chooses among the candidates at the first product of each dtype and number of columns, by size
    or by measuring them; numbers of columns are looked at now, in a's dtype; False always takes our own product.
    products: about how many products of each width are to come, 50 unless given: more may pay for a longer choice. Of a
    plan that is handed in it holds for the choices from now on. Every candidate gives the same bits every time, but not
    those of another; which one is fastest may change from process to process.

    constant: True says that the values stay as they are, a pruned weight's or a graph's. Then candidates that keep a
    copy of them in another layout may be taken: the dense product, those on tensor cores, and, on a GPU, rows in
    another order, in which scattered ones read less of a large dense side (matmuls/reorder.py). Writes that torch
    counts are seen; after others call `update`. Without it every product reads the values that A has by then, however
    they were written. None, the default, is False, and leaves a plan that is handed in as it is. Raises ValueError
    where the values require a gradient.

    By blocks, of BSR and BSC with sides of 16, 32, 64 or 128: on tensor cores, of capability 8.0 on, in float16,
    bfloat16 or, where torch.set_float32_matmul_precision allows TF32, float32; differentiable, twice and more, in b.

    a's values are shared with it, its indices are not; values that do not lie side by side, and those of an uncoalesced
    COO tensor, are copied or added up for every product. After a write to a that torch counts the next product looks
    whether the indices are still those of before, which waits for the GPU, and raises ValueError where they are not;
    compiled ones do not look. Where the dense product is taken, NaN and inf in B reach every row of the result, as
    those of torch.matmul do.

    Raises ValueError on indices that do not fit. Gradients go to a's values where it requires one now, or to those of
    `update`. A product that records a gradient to the values is our own.
    """
    widths = () if isinstance(tune, bool) else tuple(tune) if isinstance(tune, Iterable) else None
    if widths is None or not all(isinstance(n, Integral) and n >= 0 for n in widths):
        raise TypeError(f"plan: expected tune to be True, False or several numbers of columns, got {tune!r}")
    if products is not None and (not isinstance(products, Integral) or isinstance(products, bool) or products < 1):
        raise TypeError(f"plan: expected products to be a whole number of 1 or more, got {products!r}")
    if constant is not None and not isinstance(constant, bool):
        raise TypeError(f"plan: expected constant to be True or False, got {constant!r}")
    made = a if isinstance(a, SparsePlan) else plan_of("plan", a, tune is not False, constant=bool(constant))
    if constant is not None and made._choice is not None and made._choice.constant != constant:
        if not constant:  # graphs may read what it keeps
            raise ValueError("plan: expected constant=True for a constant plan, got False; make another of the matrix")
        if made.values.requires_grad:
            raise ValueError("plan: expected values without a gradient for constant=True, got some that require it")
        made._choice = Choice(made._structure, products=made._choice.products, constant=True)
        made._unbind()
    if products is not None and made._choice is not None:
        made._choice.products = int(products)
    if widths and made._choice is not None:
        for n in widths:
            b = torch.randn(made.shape[-1], n, dtype=made.dtype, device=made.device)
            made._choice.measure(made.values, b, made.dtype)
        made._unbind()  # another may be the fastest now
    return made


def plan_of(name: str, a: torch.Tensor, tuned: bool = True, shared: bool = False, constant: bool = False) -> SparsePlan:
    """shared: a's indices are the caller's, who sees what is written to them; int32 ones are not copied."""
    if constant and isinstance(a, torch.Tensor) and a.requires_grad:
        raise ValueError(f"{name}: expected values without a gradient for constant=True, got a matrix that requires it")
    with relaxed_capture():  # another thread's capture forbids none of this
        structure, values = structure_of(name, a, wait=False, copied=not shared)
        structure = structure.in_int32(None if shared else a)
        choice = Choice(structure, constant=constant) if tuned and structure.batch is None else None
        needs_gradient = a.requires_grad
        made = SparsePlan(structure, values.detach() if needs_gradient else values, a.shape, choice)
        own = a.detach()._values() if a.layout == torch.sparse_coo else a.detach().values()
        is_copy = made.nnz > 0 and own.data_ptr() != values.data_ptr()
        made._source = a if needs_gradient or (is_copy and not constant) else None
        made._origin, made._seen, made._values_shape = weakref.ref(a), _state_of(a), own.shape
        made._is_apart = is_copy or a.layout == torch.sparse_coo
        structure.checked()
        if a.layout == torch.sparse_coo and not a.is_coalesced():
            for_every_stream(values)  # which were added up after the look at the indices
        return made


def _ours(
    structure: Structure, values: torch.Tensor, b: torch.Tensor, reduce: str = "sum", alpha: float = 1.0
) -> torch.Tensor:
    return our_call(structure, values, b, reduce, alpha).run()


def _ours_into(
    out: torch.Tensor,
    structure: Structure,
    values: torch.Tensor,
    b: torch.Tensor,
    reduce: str,
    alpha: float,
    beta: float,
) -> torch.Tensor:
    parts = structure.crow, structure.col, values, b, structure.columns, reduce, alpha, structure.order, beta
    _spmm_out(*parts, structure.longest, out=out)
    return out


def _parts(name: str, a: Sparse) -> tuple[Structure, torch.Tensor, torch.Size]:
    if isinstance(a, SparsePlan):
        if not torch.compiler.is_compiling():
            a._look_again(name)
        return a._structure, a.values, a.shape
    structure, values = structure_of(name, a)
    return structure, values, a.shape


def _folded(name: str, structure: Structure, leading: torch.Size, x: torch.Tensor, what: str) -> torch.Tensor:
    """The dense side of a batch [*leading, M, K] of sparse matrices as that of their block-diagonal matrix."""
    if structure.batch is None:
        return x
    if x.dim() == 2:
        x = x.expand(*leading, *x.shape)
    if x.shape[:-2] != leading:
        raise ValueError(
            f"{name}: expected {what} with leading dimensions {list(leading)}, a matrix for each sparse one, "
            f"got {list(x.shape)}"
        )
    return x.flatten(0, -2)


def spmm(
    a: Sparse,
    b: torch.Tensor,
    *,
    reduce: str = "sum",
    alpha: float = 1,
    beta: float = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """alpha * (A @ B), or into `out`: out <- alpha * (A @ B) + beta * out.

    a: [M, K], a plan or a sparse tensor in CSR, CSC, COO, BSR or BSC, or a batch [..., M, K] of CSR or CSC matrices;
    b: [..., K, N] dense, [K] too; one of float64, float32, float16, bfloat16 for both, on one device. reduce: "sum",
    "mean" (over the nonzeros of a row), "max" or "min"; a row without nonzeros gives 0. Duplicate and unsorted columns
    are fine. Rows of b are read where they lie, whatever their distance; columns that are not side by side are copied.
    Sums in float32 (float64 for float64), the same bits every time for the same matrix, width, alignment of b and
    gradients asked for. With alpha = 0 no operand is read, with beta = 0 not `out`, as in BLAS: no NaN comes through.

    On a GPU a matrix with much of its elements stored, a tenth to a half of them, is multiplied by a wide b with its
    zeros, which takes a workspace of up to 128 MiB: 4 bytes an element for float32, else 2. Results are as by rows: NaN
    and inf reach no other row. On Hopper float32 of 16 nonzeros a row on average then goes through the tensor cores,
    each number as two of float16 under a scale for each row of A and column of b: at least 22 bits of it, products but
    for one in 2^22 of them, sums in float32. Columns whose numbers lie so far apart that this would lose more the GPU
    sums again by rows.

    On a GPU rows of uneven length, or short ones, are shared out in chunks: made at the first product, which waits for
    the GPU, and kept with the matrix, about 4 bytes a nonzero and 4 a row, with int64 indices a copy in int32 too, and
    with a gradient to b the transposed matrix and its chunks, about 12 and 8.

    Differentiable, twice and more, in A's values (a sparse tensor with A's pattern: O(nonzeros) memory) and in b. The
    indices of a sparse tensor are checked once for as long as it lives, and again when they were written to, but not
    through the tensors that it was made of, which torch does not count; a plan spares the look-up. Under autocast as
    torch.matmul.

    Raises ValueError on indices that do not fit, RuntimeError, before anything is written, on shapes, dtypes or devices
    that do not fit, on overlap, and on out= where a gradient would be recorded.
    """
    if out is None and beta != 0:
        raise ValueError(f"spmm: expected out= beside beta={beta}, which multiplies it")
    if isinstance(alpha, torch.Tensor) or isinstance(beta, torch.Tensor):
        alpha, beta = number("spmm", "alpha", alpha), number("spmm", "beta", beta)
    plain = out is None and reduce == "sum" and alpha == 1 and not torch.compiler.is_compiling()
    if plain and isinstance(a, SparsePlan):
        product = a._again(b)
        if product is not None:
            return product
    structure, values, shape = _parts("spmm", a)
    expect_dense("spmm", b=b)
    if out is not None:
        expect_dense("spmm", out=out)
    if b.dim() == 0:
        raise RuntimeError(f"spmm: expected dense of shape [..., {shape[-1]}, n], got []")
    if b.dim() == 1:
        if out is not None:
            spmm(a, b.unsqueeze(-1), reduce=reduce, alpha=alpha, beta=beta, out=out.unsqueeze(-1))
            return out
        return spmm(a, b.unsqueeze(-1), reduce=reduce, alpha=alpha).squeeze(-1)
    if structure.batch is not None:
        return _spmm_of_batch(structure, values, shape, b, reduce, alpha, beta, out)
    if out is not None:
        return _ours_into(out, structure, values, b, reduce, alpha, beta)
    if plain and isinstance(a, SparsePlan):
        return a._product(values, b)
    return _ours(structure, values, b, reduce, alpha)


def linear(a: SparsePlan, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ A^T + bias, [n, M], as spmm(a, x.mT).mT + bias. x: [n, K]; bias: [M] or None. In 16 bits and without a
    gradient the bias may be added before the sum is rounded."""
    y = a._linear(x, bias)
    if y is not None:
        return y
    y = spmm(a, x.mT).mT
    return y if bias is None else y + bias.to(y.dtype)


def _spmm_of_batch(
    structure: Structure,
    values: torch.Tensor,
    shape: torch.Size,
    b: torch.Tensor,
    reduce: str,
    alpha: float,
    beta: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    expected = [*shape[:-1], b.shape[-1]]
    if b.shape[-2] != shape[-1] or (b.dim() > 2 and b.shape[:-2] != shape[:-2]):
        raise RuntimeError(f"spmm: expected dense of shape {[*shape[:-2], shape[-1]]} and n, got {list(b.shape)}")
    dense = _folded("spmm", structure, shape[:-2], b, "dense")
    if out is None:
        return _ours(structure, values, dense, reduce, alpha).view(expected)
    if list(out.shape) != expected:
        raise RuntimeError(f"spmm: expected out of shape {expected}, got {list(out.shape)}")
    if not torch.compiler.is_compiling():  # what is multiplied below may be a copy of out, which overlaps nothing
        _C.check_no_overlap("spmm", out, values, b)
    whole = out.is_contiguous()
    flat = _ours_into(out.contiguous().flatten(0, -2), structure, values, dense, reduce, alpha, beta)
    return out if whole else out.copy_(flat.view(expected))


def sddmm(a: torch.Tensor, b: torch.Tensor, pattern: Sparse, *, alpha: float = 1) -> torch.Tensor:
    """alpha * (a @ b) where `pattern` has nonzeros, and nowhere else: [..., nonzeros], in the order of its values.

    a: [..., M, D]; b: [..., D, K]; leading dimensions broadcast; pattern: [M, K], a plan or a sparse tensor, of which
    the indices alone matter. dtypes as `spmm`. b is read by columns: hand over k.mT for rows k. Nothing of M x K
    elements is ever made. Differentiable, twice and more; the same every time. `plan.with_values` takes the result.
    """
    structure, _, shape = _parts("sddmm", pattern)
    expect_dense("sddmm", a=a, b=b)
    if a.dim() < 2 or b.dim() < 2:
        raise RuntimeError(f"sddmm: expected a and b of at least two dimensions, got {list(a.shape)}, {list(b.shape)}")
    x, y = (_folded("sddmm", structure, shape[:-2], *side) for side in ((a, "a"), (b.mT, "b, transposed,")))
    gradient = (a.requires_grad or b.requires_grad) and torch.is_grad_enabled()
    if isinstance(alpha, torch.Tensor):
        alpha = number("sddmm", "alpha", alpha)
    return _sddmm(structure.crow, structure.col, x, y, structure.columns, alpha, *structure.arguments(gradient))


def sparse_softmax(values: torch.Tensor, pattern: Sparse, *, scale: float = 1.0) -> torch.Tensor:
    """softmax(scale * values) over the nonzeros of each row of `pattern`; what is not in the pattern is as if masked.

    values: [..., nonzeros], in the order of the pattern's values, such as `sddmm` gives; pattern: a plan or a sparse
    tensor, of which the indices alone matter. Statistics in float32 (float64 for float64); values as torch.softmax, NaN
    and inf included. Differentiable, twice and more. Under autocast as torch.softmax: float32 on a GPU.
    """
    structure, _, _ = _parts("sparse_softmax", pattern)
    expect_dense("sparse_softmax", values=values)
    if values.dim() < 1 or values.shape[-1] != structure.nonzeros:
        raise ValueError(
            f"sparse_softmax: expected values of shape [..., {structure.nonzeros}], one for each nonzero, "
            f"got {list(values.shape)}"
        )
    if isinstance(scale, torch.Tensor):
        scale = number("sparse_softmax", "a scale", scale)
    return _softmax(structure.crow, values, scale, structure.order)


def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Sparse, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale * q @ k^T) @ v where each query sees the keys that `pattern` has in its row.

    q: [..., M, D]; k: [..., K, D]; v: [..., K, E]; pattern: [M, K], a plan or a sparse tensor, of which the indices
    alone matter, the same for all heads and batches; scale: 1 / sqrt(D) unless given. A query that sees nothing gets 0.
    Nothing of M x K elements is ever made, forward or backward: scores and probabilities are [..., nonzeros]. dtypes as
    `spmm`. Differentiable, twice and more. Raises TypeError, ValueError and RuntimeError as `sddmm` and `spmm` do.
    """
    expect_dense("sparse_attention", q=q, k=k, v=v)
    if min(q.dim(), k.dim(), v.dim()) < 2:
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        raise RuntimeError(f"sparse_attention: expected q, k and v of at least two dimensions, got {shapes}")
    ready = pattern if isinstance(pattern, SparsePlan) else plan_of("sparse_attention", pattern, tuned=False)
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    # Float16 ends at 65504, scores of long vectors do not: a sixteenth of them is kept, which rounds as they would.
    scores = sddmm(q, k.mT, ready, alpha=scale / 16)
    structure = ready._structure
    probabilities = sparse_softmax(scores, ready, scale=16.0).to(v.dtype)
    value = _folded("sparse_attention", structure, ready.shape[:-2], v, "v")
    result = _ours(structure, probabilities, value)
    return result if structure.batch is None else result.view(*ready.shape[:-1], v.shape[-1])


def _sparsified(name: str, a: torch.Tensor) -> tuple[Structure, torch.Tensor]:
    """What of a dense matrix, or a batch of them, is not 0, and where."""
    index = a.nonzero()
    row, col, batch = index[:, -2], index[:, -1], None
    rows, columns = a.shape[-2], a.shape[-1]
    if a.dim() > 2:
        batch = math.prod(a.shape[:-2])
        which = torch.zeros_like(row)
        for d in range(a.dim() - 2):
            which = which * a.shape[d] + index[:, d]
        row, col, rows, columns = row + which * rows, col + which * columns, rows * batch, columns * batch
    return from_entries(name, row, col, (rows, columns), batch), a[tuple(index.unbind(1))]


class cusparseMM(InplaceFunction):
    """`cusparseMM.apply(a, b)`: a @ b with a sparse.

    a: [M, K] in any layout that `spmm` takes, or dense, [..., M, K]: then what is not 0 of it is taken, which waits for
    the GPU; b: [..., K, N], with a's leading dimensions where a is a dense batch. dtypes and errors as `spmm`.
    Gradients to both, twice and more; to a dense a at every element, zeros included, as that of a @ b.
    """

    @classmethod
    def apply(cls, a: Sparse, b: torch.Tensor) -> torch.Tensor:
        if not isinstance(a, torch.Tensor) or a.layout != torch.strided:
            return spmm(a, b)
        expect_dense("cusparseMM", b=b)
        if a.dim() < 2 or (a.dim() > 2 and a.shape[:-2] != b.shape[:-2]):
            raise RuntimeError(
                f"cusparseMM: expected a of shape [M, K], or [..., M, K] beside b of the same leading dimensions, "
                f"got {list(a.shape)} and {list(b.shape)}"
            )
        apply: Callable[..., torch.Tensor] = cls._apply
        if torch.compiler.is_compiling():  # a break in the graph: torch traces no super() of a Function
            apply = torch.compiler.disable(apply)  # type: ignore[no-untyped-call]
        return apply(a, b)

    @classmethod
    def _apply(cls, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().apply(a, b)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        structure, values = _sparsified("cusparseMM", a)
        ctx.structure = structure
        ctx.save_for_backward(a, b, values)
        if b.dim() < 2 or b.shape[-2] != a.shape[-1]:
            raise RuntimeError(
                f"cusparseMM: expected b of shape [..., {a.shape[-1]}, n] beside a of {a.shape[-1]} columns, "
                f"got {list(b.shape)}"
            )
        dense = _folded("cusparseMM", structure, a.shape[:-2], b, "b")
        product = _ours(structure, values, dense)
        return product if structure.batch is None else product.view(*a.shape[:-1], b.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b, values = ctx.saved_tensors
        structure: Structure = ctx.structure
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = matmul(grad, b.to(grad.dtype), transb=True).sum_to_size(a.shape)
        if ctx.needs_input_grad[1]:
            if torch.is_grad_enabled():  # a second derivative is to be had
                grad_b = cusparseMM.apply(a.to(grad.dtype).mT, grad)
            else:
                t_crow, t_col, t_order = structure.transposed()
                dense = _folded("cusparseMM", structure, a.shape[:-2], grad, "grad")
                values = values.to(grad.dtype)
                parts = t_crow, t_col, values, dense, structure.rows, "sum", 1.0, t_order
                grad_b = _spmm(*parts, longest=structure.longest_column).view(b.shape)
        return grad_a, grad_b


# What torch.utils.flop_counter counts: one multiplication and one addition for each nonzero and column.


@register_flop_formula(_ops.csr_spmm)
def _spmm_flops(
    crow: torch.Size, col: torch.Size, values: torch.Size, dense: torch.Size, *args: Any, **kwargs: Any
) -> int:
    batch: torch.Size = torch.broadcast_shapes(values[:-1], dense[:-2])  # type: ignore[no-untyped-call]
    return 2 * col[0] * dense[-1] * batch.numel()


@register_flop_formula([_ops.csr_spmm_chunks, _ops.csr_spmm_tiles, _ops.csr_spmm_halves])
def _laid_out_flops(*args: Any, **kwargs: Any) -> int:
    _, col, _, dense = args[4:8]  # after four tensors of the layout
    return int(2 * col[0] * dense[-1])


@register_flop_formula([_ops.csr_spmm_packed, _ops.csr_linear_packed])
def _packed_flops(
    packed: torch.Size,
    crow: torch.Size,
    col: torch.Size,
    values: torch.Size,
    dense: torch.Size,
    columns: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    return 2 * col[0] * math.prod(dense) // max(columns, 1)  # [columns, n], or rows of a linear layer [n, columns]


@register_flop_formula(_ops.cusparse_spmm)
def _cusparse_flops(
    offsets: torch.Size,
    indices: torch.Size,
    values: torch.Size,
    b: torch.Size,
    rows: int,
    columns: int,
    layout: str = "csr",
    algorithm: str = "default",
    transa: bool = False,
    transb: bool = False,
    *args: Any,
    **kwargs: Any,
) -> int:
    return 2 * math.prod(values) * b[0 if transb else 1]


@register_flop_formula([_ops.csr_sddmm, _ops.cusparse_sddmm])
def _sddmm_flops(crow: torch.Size, col: torch.Size, a: torch.Size, b: torch.Size, *args: Any, **kwargs: Any) -> int:
    batch: torch.Size = torch.broadcast_shapes(a[:-2], b[:-2])  # type: ignore[no-untyped-call]
    return 2 * col[0] * a[-1] * batch.numel()
