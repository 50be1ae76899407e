"""Sparse products by rows: SpMM, SDDMM, the softmax between them, and the plan that keeps a matrix ready for them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import InplaceFunction
from torch.utils.flop_counter import register_flop_formula
from torch.utils.weak import WeakIdKeyDictionary

from .dense import matmul

_ops = torch.ops.custom_mm
_spmm: Callable[..., torch.Tensor] = _ops.csr_spmm.default
_spmm_out: Callable[..., None] = _ops.csr_spmm.out
_sddmm: Callable[..., torch.Tensor] = _ops.csr_sddmm.default
_softmax: Callable[..., torch.Tensor] = _ops.csr_softmax.default
_csr_check: Callable[..., torch.Tensor] = _ops.csr_check.default
_csr_transpose: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = _ops.csr_transpose.default

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
INT32_MAX = 2**31 - 1


def _version(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


class _Structure:
    """A matrix without its values, checked: offsets and columns by rows, and nonzero p's value index order[p].

    A batch of matrices with one pattern each is one matrix with the blocks on its diagonal.
    """

    def __init__(
        self,
        name: str,
        crow: torch.Tensor,
        col: torch.Tensor,
        shape: tuple[int, int],
        *,
        order: torch.Tensor | None = None,
        transposed: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None,
        batch: int | None = None,
    ) -> None:
        self.crow, self.col, self.order, self.batch = crow, col, order, batch
        self.rows, self.columns = shape
        self._transposed = transposed
        if crow.dim() != 1 or crow.shape[0] != self.rows + 1:
            raise ValueError(
                f"{name}: expected {self.rows + 1} offsets of rows, got offsets of shape {list(crow.shape)}"
            )
        self.longest = _check(name, crow, col, self.columns)
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [_version(t) for t in self.tensors]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.crow, self.col, self.order, *(self._transposed or ())) if t is not None]

    @property
    def nonzeros(self) -> int:
        return self.col.shape[0]

    def check_unchanged(self, name: str) -> None:
        """Indices were checked once; written over since, they are not what was checked."""
        if self._versions != self._versions_now():
            raise ValueError(f"{name}: expected indices as they were when they were checked, got indices written over")

    def transposed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The same by columns, made once."""
        if self._transposed is None:
            t_crow, t_col, t_order = _csr_transpose(self.crow, self.col, self.columns)
            self._transposed = t_crow, t_col, t_order if self.order is None else self.order[t_order.long()]
            self._versions = self._versions_now()
        return self._transposed

    def arguments(self, dense_gradient: bool) -> tuple[torch.Tensor | None, ...]:
        """order, t_crow, t_col, t_order: the transposed matrix where a gradient will ask for it."""
        if self._transposed is None and (not dense_gradient or torch.compiler.is_compiling()):
            return self.order, None, None, None
        return self.order, *(self.transposed() if dense_gradient else (None, None, None))

    def in_int32(self) -> "_Structure":
        """Indices of 4 bytes, where they suffice: half of what a product reads of them."""
        if self.crow.dtype == torch.int32 or max(self.rows, self.columns, self.nonzeros) >= INT32_MAX:
            return self
        narrow = object.__new__(_Structure)
        narrow.__dict__.update(self.__dict__)
        narrow.crow, narrow.col = self.crow.int(), self.col.int()
        narrow.order = None if self.order is None else self.order.int()
        if self._transposed is not None:
            t_crow, t_col, t_order = self._transposed
            narrow._transposed = t_crow.int(), t_col.int(), None if t_order is None else t_order.int()
        narrow._versions = narrow._versions_now()
        return narrow


def _check(name: str, crow: torch.Tensor, col: torch.Tensor, columns: int) -> int:
    """The longest row's nonzeros; ValueError where an index is not what it must be."""
    problem, where, found, longest = _csr_check(crow, col, columns).tolist()
    if problem:
        nonzeros = col.shape[0]
        expected = {
            1: "the first offset to be 0",
            2: f"the last offset to be {nonzeros}, as many as there are columns",
            3: f"offsets that do not decrease after row {where}",
            4: f"columns from 0 to {columns - 1} at nonzero {where}",
        }
        raise ValueError(f"{name}: expected {expected[problem]}, got {found}")
    return int(longest)


def _from_entries(
    name: str, row: torch.Tensor, col: torch.Tensor, shape: tuple[int, int], batch: int | None = None
) -> _Structure:
    """From the row and column of each value, in any order."""
    if row.numel():
        low, high = torch.stack([row.min(), row.max()]).tolist()
        if low < 0 or high >= shape[0]:
            raise ValueError(f"{name}: expected rows from 0 to {shape[0] - 1}, got {low if low < 0 else high}")
    order = None
    if not bool((row[1:] >= row[:-1]).all()):
        row, order = torch.sort(row, stable=True)
        col, order = col[order], order.to(col.dtype)
    crow = torch.searchsorted(row.contiguous(), torch.arange(shape[0] + 1, device=row.device, dtype=row.dtype))
    return _Structure(name, crow.to(row.dtype), col.contiguous(), shape, order=order, batch=batch)


def _expect_plain(name: str, a: torch.Tensor) -> None:
    dense = a.dense_dim()
    if dense or (a.layout == torch.sparse_coo and a.dim() != 2):
        raise ValueError(f"{name}: expected a sparse matrix, got shape {list(a.shape)} with {dense} dense dimensions")


def _compressed_parts(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if a.layout in (torch.sparse_csr, torch.sparse_bsr):
        return a.crow_indices(), a.col_indices()
    return a.ccol_indices(), a.row_indices()


def _structure_of_compressed(name: str, a: torch.Tensor, offsets: torch.Tensor, inner: torch.Tensor) -> _Structure:
    values = a.detach().values()
    rows, columns = a.shape[-2], a.shape[-1]
    if inner.shape != values.shape[: inner.dim()]:
        raise ValueError(
            f"{name}: expected as many indices as values, got {list(inner.shape)} and {list(values.shape)}"
        )
    by_rows = a.layout in (torch.sparse_csr, torch.sparse_bsr)
    outer_size, inner_size = (rows, columns) if by_rows else (columns, rows)
    if a.layout in (torch.sparse_bsr, torch.sparse_bsc):
        if a.dim() != 2:
            raise ValueError(f"{name}: expected one matrix in blocks, got a batch of shape {list(a.shape)}")
        height, width = values.shape[1:]
        outer_block, inner_block = (height, width) if by_rows else (width, height)
        blocks = _Structure(name, offsets, inner, (outer_size // outer_block, inner_size // inner_block))
        outer = torch.repeat_interleave(torch.arange(blocks.rows, device=inner.device), blocks.crow.diff().long())
        block_row, block_col = (outer, inner.long()) if by_rows else (inner.long(), outer)
        down, across = (torch.arange(n, device=inner.device) for n in (height, width))
        index = inner.dtype if values.numel() < INT32_MAX else torch.int64
        row = (block_row[:, None, None] * height + down[None, :, None]).expand(-1, -1, width)
        col = (block_col[:, None, None] * width + across[None, None, :]).expand(-1, height, -1)
        return _from_entries(name, row.reshape(-1).to(index), col.reshape(-1).to(index), (rows, columns))
    if a.dim() == 2:
        structure = _Structure(name, offsets.contiguous(), inner.contiguous(), (outer_size, inner_size))
    else:
        # Blocks on a diagonal: offsets and columns go on where the matrix before ended.
        offsets, inner = offsets.reshape(-1, offsets.shape[-1]), inner.reshape(-1, inner.shape[-1])
        count, nonzeros = inner.shape
        each = torch.arange(count, device=inner.device, dtype=inner.dtype)[:, None]
        for one_offsets, one_inner in zip(offsets, inner, strict=True):
            _Structure(name, one_offsets.contiguous(), one_inner.contiguous(), (outer_size, inner_size))
        if max(count * nonzeros, count * max(rows, columns)) >= INT32_MAX:
            offsets, inner, each = offsets.long(), inner.long(), each.long()
        joined = (offsets[:, :-1] + each * nonzeros).reshape(-1)
        joined = torch.cat([joined, joined.new_full((1,), count * nonzeros)])
        structure = _Structure(
            name, joined, (inner + each * inner_size).reshape(-1), (count * outer_size, count * inner_size), batch=count
        )
    if by_rows:
        return structure
    crow, col, order = _csr_transpose(structure.crow, structure.col, structure.columns)
    return _Structure(
        name,
        crow,
        col,
        (structure.columns, structure.rows),
        order=order,
        transposed=(structure.crow, structure.col, None),
        batch=structure.batch,
    )


# What was checked and converted of a sparse tensor, for as long as the tensor lives and its indices are not written to.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _structure_of(name: str, a: torch.Tensor) -> tuple[_Structure, torch.Tensor]:
    """A sparse tensor's structure and its values, [nonzeros], which gradients go through."""
    if a.layout == torch.sparse_coo:
        offsets, inner = a._indices(), a._indices()
    elif a.layout in COMPRESSED:
        offsets, inner = _compressed_parts(a)
    else:
        raise ValueError(f"{name}: expected a sparse tensor or a plan, got a tensor of layout {a.layout}")
    key = offsets.data_ptr(), inner.data_ptr(), _version(offsets), _version(inner), a._nnz()
    entry = _known.get(a)  # type: ignore[no-untyped-call]
    if entry is not None and entry[0] == key:
        structure = entry[1]
    else:
        _expect_plain(name, a)
        if a.layout == torch.sparse_coo:
            structure = _structure_of_coo(name, a)
        else:
            structure = _structure_of_compressed(name, a, offsets, inner)
        _known[a] = key, structure
    return structure, _values_of(a)


def _values_of(a: torch.Tensor) -> torch.Tensor:
    values = a.values() if a.layout != torch.sparse_coo or a.is_coalesced() else a.coalesce().values()
    return values if values.dim() == 1 else values.reshape(-1)


def _structure_of_coo(name: str, a: torch.Tensor) -> _Structure:
    indices, nonzeros = a._indices(), a._values().shape[0]
    if list(indices.shape) != [2, nonzeros]:
        raise ValueError(f"{name}: expected indices of shape [2, {nonzeros}], got {list(indices.shape)}")
    shape = a.shape[0], a.shape[1]
    if nonzeros:
        lows, highs = indices.amin(1).tolist(), indices.amax(1).tolist()
        for what, low, high, size in zip(("rows", "columns"), lows, highs, shape, strict=True):
            if low < 0 or high >= size:
                raise ValueError(f"{name}: expected {what} from 0 to {size - 1}, got {low if low < 0 else high}")
    if not a.is_coalesced():
        indices = a.detach().coalesce().indices()
    return _from_entries(name, indices[0].contiguous(), indices[1].contiguous(), shape)


class SparsePlan:
    """A sparse matrix made ready for products: `plan @ B`. Made by `plan(A)`.

    The indices were checked once and are kept by rows, in int32 where that suffices; with the first gradient to a dense
    side the same by columns. A product looks at none of them again and does not wait for the GPU.
    """

    def __init__(self, structure: _Structure, values: torch.Tensor, shape: tuple[int, ...]) -> None:
        self._structure, self._values, self.shape = structure, values, torch.Size(shape)
        self._source: torch.Tensor | None = None  # the sparse tensor that takes the gradient

    @property
    def values(self) -> torch.Tensor:
        """[nonzeros], in the order of A.values() (flattened)."""
        # Taken anew each time: a graph can be walked back once.
        return self._values if self._source is None else _values_of(self._source)

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
        if values.shape != (self.nnz,) or values.device != self.device:
            raise ValueError(
                f"SparsePlan: expected values of shape [{self.nnz}] on {self.device}, "
                f"got {list(values.shape)} on {values.device}"
            )
        return values

    def update(self, values: torch.Tensor) -> "SparsePlan":
        """Take other values for the same nonzeros, in the order of A.values(); nothing is inspected. Returns itself."""
        self._values, self._source = self._checked(values), None
        return self

    def with_values(self, values: torch.Tensor) -> "SparsePlan":
        """A plan with other values for the same nonzeros, sharing everything else with this one."""
        return SparsePlan(self._structure, self._checked(values), self.shape)

    def __matmul__(self, b: torch.Tensor) -> torch.Tensor:
        return spmm(self, b)

    @property
    def nbytes(self) -> int:
        """Bytes of the indices and values that the plan keeps alive."""
        return sum(t.nbytes for t in (*self._structure.tensors, self._values))

    def explain(self) -> str:
        """What the plan knows, in a few lines."""
        s = self._structure
        mean = s.nonzeros / max(s.rows, 1)
        density = s.nonzeros / max(s.rows * s.columns, 1)
        transposed = "kept" if s._transposed is not None else "made with the first gradient to a dense side"
        blocks = f", {s.batch} blocks on the diagonal" if s.batch is not None else ""
        order = "in the order of rows" if s.order is None else "by an order of their own"
        return (
            f"{' x '.join(map(str, self.shape))}: {s.nonzeros} nonzeros ({density:.2%}), {self.dtype}, {self.device}\n"
            f"nonzeros a row: mean {mean:.1f}, most {s.longest}{blocks}\n"
            f"indices: {s.crow.dtype}, values {order}\n"
            f"transposed matrix: {transposed}\n"
            f"{self.nbytes} bytes"
        )

    def __repr__(self) -> str:
        return f"SparsePlan({list(self.shape)}, nnz={self.nnz}, {self.dtype}, {self.device})"


Sparse = torch.Tensor | SparsePlan


def plan(a: Sparse) -> SparsePlan:
    """Make a sparse matrix ready for many products: `plan(A) @ B`.

    a: a sparse tensor, [M, K] in CSR, CSC, COO, BSR or BSC, or a batch of CSR or CSC matrices, or a plan, which is
    returned. Raises ValueError on indices that do not fit. Gradients go to a's values, or to those of `update`.
    """
    if isinstance(a, SparsePlan):
        return a
    structure, values = _structure_of("plan", a)
    made = SparsePlan(structure.in_int32(), values.detach(), tuple(a.shape))
    made._source = a if a.requires_grad else None
    return made


def _parts(name: str, a: Sparse) -> tuple[_Structure, torch.Tensor, torch.Size]:
    if isinstance(a, SparsePlan):
        if not torch.compiler.is_compiling():
            a._structure.check_unchanged(name)
        return a._structure, a.values, a.shape
    if not isinstance(a, torch.Tensor):
        raise TypeError(f"{name}: expected a sparse tensor or a plan, got {type(a).__name__}")
    structure, values = _structure_of(name, a)
    return structure, values, a.shape


def _folded(name: str, structure: _Structure, x: torch.Tensor, what: str) -> torch.Tensor:
    """The dense side of a batch of sparse matrices as that of their block-diagonal matrix."""
    if structure.batch is None:
        return x
    if x.dim() == 2:
        x = x.expand(structure.batch, *x.shape)
    if x.dim() < 3 or math.prod(x.shape[:-2]) != structure.batch:
        raise ValueError(
            f"{name}: expected {what} of shape [..., n, n] with {structure.batch} matrices, one for each sparse one, "
            f"got {list(x.shape)}"
        )
    return x.reshape(-1, x.shape[-1])


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
    Sums in float32 (float64 for float64), in an order that depends on the matrix alone: the same every time.

    Differentiable, twice and more, in A's values (a sparse tensor with A's pattern: O(nonzeros) memory) and in b. The
    indices of a sparse tensor are checked once for as long as it lives; a plan spares the look-up. Under autocast as
    torch.matmul.

    Raises ValueError on indices that do not fit, RuntimeError, before anything is written, on shapes, dtypes or devices
    that do not fit, on overlap, and on out= where a gradient would be recorded.
    """
    if out is None and beta != 0:
        raise ValueError(f"spmm: expected out= beside beta={beta}, which multiplies it")
    structure, values, shape = _parts("spmm", a)
    if b.dim() == 1:
        if out is not None:
            spmm(a, b.unsqueeze(-1), reduce=reduce, alpha=alpha, beta=beta, out=out.unsqueeze(-1))
            return out
        return spmm(a, b.unsqueeze(-1), reduce=reduce, alpha=alpha).squeeze(-1)
    if structure.batch is not None:
        return _spmm_of_batch(structure, values, shape, b, reduce, alpha, beta, out)
    if out is not None:
        _spmm_out(
            structure.crow, structure.col, values, b, structure.columns, reduce, alpha, structure.order, beta, out=out
        )
        return out
    dense_gradient = b.requires_grad and torch.is_grad_enabled()
    return _spmm(
        structure.crow,
        structure.col,
        values,
        b,
        structure.columns,
        reduce,
        alpha,
        *structure.arguments(dense_gradient),
    )


def _spmm_of_batch(
    structure: _Structure,
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
    dense = _folded("spmm", structure, b, "dense")
    arguments = structure.crow, structure.col, values, dense, structure.columns, reduce, alpha
    if out is None:
        needed = b.requires_grad and torch.is_grad_enabled()
        return _spmm(*arguments, *structure.arguments(needed)).view(expected)
    if list(out.shape) != expected:
        raise RuntimeError(f"spmm: expected out of shape {expected}, got {list(out.shape)}")
    flat = out.contiguous().view(-1, out.shape[-1])
    _spmm_out(*arguments, structure.order, beta, out=flat)
    return out if flat.data_ptr() == out.data_ptr() else out.copy_(flat.view(expected))


def sddmm(a: torch.Tensor, b: torch.Tensor, pattern: Sparse, *, alpha: float = 1) -> torch.Tensor:
    """alpha * (a @ b) where `pattern` has nonzeros, and nowhere else: [..., nonzeros], in the order of its values.

    a: [..., M, D]; b: [..., D, K]; leading dimensions broadcast; pattern: [M, K], a plan or a sparse tensor, of which
    the indices alone matter. dtypes as `spmm`. b is read by columns: hand over k.mT for rows k. Nothing of M x K
    elements is ever made. Differentiable, twice and more; the same every time. `plan.with_values` takes the result.
    """
    structure, _, _ = _parts("sddmm", pattern)
    if a.dim() < 2 or b.dim() < 2:
        raise RuntimeError(f"sddmm: expected a and b of at least two dimensions, got {list(a.shape)}, {list(b.shape)}")
    x, y = _folded("sddmm", structure, a, "a"), _folded("sddmm", structure, b.mT, "b, transposed,")
    gradient = (a.requires_grad or b.requires_grad) and torch.is_grad_enabled()
    return _sddmm(structure.crow, structure.col, x, y, structure.columns, alpha, *structure.arguments(gradient))


def sparse_softmax(values: torch.Tensor, pattern: Sparse, *, scale: float = 1.0) -> torch.Tensor:
    """softmax(scale * values) over the nonzeros of each row of `pattern`; what is not in the pattern is as if masked.

    values: [..., nonzeros], in the order of the pattern's values, such as `sddmm` gives; pattern: a plan or a sparse
    tensor, of which the indices alone matter. Statistics in float32 (float64 for float64); values as torch.softmax, NaN
    and inf included. Differentiable, twice and more. Under autocast float32.
    """
    structure, _, _ = _parts("sparse_softmax", pattern)
    if values.dim() < 1 or values.shape[-1] != structure.nonzeros:
        raise ValueError(
            f"sparse_softmax: expected values of shape [..., {structure.nonzeros}], one for each nonzero, "
            f"got {list(values.shape)}"
        )
    return _softmax(structure.crow, values, scale, structure.order)


def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Sparse, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale * q @ k^T) @ v where each query sees the keys that `pattern` has in its row.

    q: [..., M, D]; k: [..., K, D]; v: [..., K, E]; pattern: [M, K], a plan or a sparse tensor, of which the indices
    alone matter, the same for all heads and batches; scale: 1 / sqrt(D) unless given. A query that sees nothing gets 0.
    Nothing of M x K elements is ever made, forward or backward: scores and probabilities are [..., nonzeros].
    Differentiable, twice and more.
    """
    ready = plan(pattern)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = sddmm(q, k.mT, ready)
    structure = ready._structure
    probabilities = sparse_softmax(scores, ready, scale=scale).to(v.dtype)
    value = _folded("sparse_attention", structure, v, "v")
    arguments = structure.arguments(torch.is_grad_enabled())
    result = _spmm(structure.crow, structure.col, probabilities, value, structure.columns, "sum", 1.0, *arguments)
    return result if structure.batch is None else result.view(*q.shape[:-1], v.shape[-1])


def _sparsified(name: str, a: torch.Tensor) -> tuple[_Structure, torch.Tensor]:
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
    return _from_entries(name, row, col, (rows, columns), batch), a[tuple(index.unbind(1))]


class cusparseMM(InplaceFunction):
    """`cusparseMM.apply(a, b)`: a @ b with a sparse.

    a: [M, K] in any layout that `spmm` takes, or dense, [..., M, K]: then what is not 0 of it is taken, which waits for
    the GPU; b: [..., K, N], with a's leading dimensions where a is a dense batch. dtypes and errors as `spmm`.
    Gradients to both, twice and more; to a dense a at every element, zeros included, as that of a @ b.
    """

    @classmethod
    def apply(cls, a: Sparse, b: torch.Tensor) -> torch.Tensor:
        if isinstance(a, SparsePlan) or a.layout != torch.strided:
            return spmm(a, b)
        if a.dim() < 2 or (a.dim() > 2 and a.shape[:-2] != b.shape[:-2]):
            raise RuntimeError(
                f"cusparseMM: expected a of shape [M, K], or [..., M, K] beside b of the same leading dimensions, "
                f"got {list(a.shape)} and {list(b.shape)}"
            )
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
        dense = _folded("cusparseMM", structure, b, "b")
        product = _spmm(structure.crow, structure.col, values, dense, structure.columns, "sum", 1.0, structure.order)
        return product if structure.batch is None else product.view(*a.shape[:-1], b.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b, values = ctx.saved_tensors
        structure: _Structure = ctx.structure
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = matmul(grad, b.to(grad.dtype), transb=True).sum_to_size(a.shape)
        if ctx.needs_input_grad[1]:
            if torch.is_grad_enabled():  # a second derivative is to be had
                grad_b = cusparseMM.apply(a.to(grad.dtype).mT, grad)
            else:
                t_crow, t_col, t_order = structure.transposed()
                dense = _folded("cusparseMM", structure, grad, "grad")
                values = values.to(grad.dtype)
                grad_b = _spmm(t_crow, t_col, values, dense, structure.rows, "sum", 1.0, t_order).view(b.shape)
        return grad_a, grad_b


# What torch.utils.flop_counter counts: one multiplication and one addition for each nonzero and column.


@register_flop_formula(_ops.csr_spmm)
def _spmm_flops(
    crow: torch.Size, col: torch.Size, values: torch.Size, dense: torch.Size, *args: Any, **kwargs: Any
) -> int:
    batch: torch.Size = torch.broadcast_shapes(values[:-1], dense[:-2])  # type: ignore[no-untyped-call]
    return 2 * col[0] * dense[-1] * batch.numel()


@register_flop_formula(_ops.csr_sddmm)
def _sddmm_flops(crow: torch.Size, col: torch.Size, a: torch.Size, b: torch.Size, *args: Any, **kwargs: Any) -> int:
    batch: torch.Size = torch.broadcast_shapes(a[:-2], b[:-2])  # type: ignore[no-untyped-call]
    return 2 * col[0] * a[-1] * batch.numel()
