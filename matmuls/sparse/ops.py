"""Operations on sparse matrices: SpMM, SDDMM, softmax over a row's nonzeros, and attention made of the three."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import InplaceFunction
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from custom_mm.literals import Reduce

from ..dense import matmul
from ..registration import Applied, expect_dense, number, signature_of_apply
from .csr_pattern import CsrPattern
from .default_spmm import check_operands, default_op, default_product, default_product_into, folded, multiply_batch
from .foreign import native
from .plan import Sparse, SparsePlan, plan_of
from .prepared import record, repeat
from .tensor_pattern import entries_of, from_entries, pattern_alone, pattern_of

_ops = torch.ops.custom_mm
_spmm: Callable[..., torch.Tensor] = _ops.csr_spmm.default
_sddmm: Callable[..., torch.Tensor] = _ops.csr_sddmm.default
_softmax: Callable[..., torch.Tensor] = _ops.csr_softmax.default


def _parts(name: str, a: Sparse) -> tuple[CsrPattern, torch.Tensor, torch.Size]:
    if isinstance(a, SparsePlan):
        if not is_compiling():
            a._expect_same_indices(name)
        return a._pattern, a.values, a.shape
    tensor = native(name, a)
    pattern, values = pattern_of(name, tensor)
    return pattern, values, tensor.shape


def _pattern(name: str, a: Sparse) -> CsrPattern:
    return _parts(name, a)[0] if isinstance(a, SparsePlan) else pattern_alone(name, native(name, a))


def spmm(
    a: Sparse,
    b: torch.Tensor,
    *,
    reduce: Reduce = "sum",
    alpha: float = 1,
    beta: float = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes alpha * (A @ B) for a sparse A, or in place out <- alpha * (A @ B) + beta * out.

    The operation is differentiable any number of times in B and in the values of A; the gradient of A is a sparse
    tensor with A's pattern. Products are summed in float32, or float64 for float64, and the result has the same bits
    every time. Under autocast it behaves as torch.matmul. If one matrix is multiplied many times, make a `plan` of it.
    On a GPU, up to 128 MiB of temporary memory may be allocated for a dense copy of A, and in float32 up to 128 MiB for
    B; a row partition, which divides A's nonzeros evenly, may be cached with A.

    Args:
        a: [M, K] a plan, or a sparse tensor in CSR, CSC, COO, BSR or BSC, or a batch [..., M, K] of CSR or CSC
            matrices; float64, float32, float16, bfloat16, complex64 or complex128, indices int32 or int64. Columns may
            be unsorted, and duplicates are added. A matrix of scipy.sparse or CuPy is taken as by `plan`. The indices
            of a sparse tensor are checked on a GPU once, and again after a write to it; on a CPU at every product.
        b: [K, N] or [K], dense, or [..., K, N] for a batch; dtype and device of a. It is read in place if
            b.stride(-1) is 1, otherwise copied.
        reduce: "sum", "mean" over the nonzeros of a row, "max" or "min"; in complex dtypes "sum" or "mean". A row
            without nonzeros gives 0.
        alpha: a real number that multiplies the product. If 0, a and b are not read, so that NaN in them does not reach
            the result.
        beta: multiplies `out`. If 0, out is not read.
        out: [M, N], written and returned; no gradient may be recorded.

    Returns:
        [M, N], or [M] for a vector, or [..., M, N] for a batch, dense; or `out`.

    Raises:
        ValueError: if an index does not fit the shape, or beta is given without out.
        RuntimeError: before anything is written, if shapes, dtypes or devices do not match, if out overlaps an operand,
            or if a gradient would be recorded through out.
        TypeError: if a is neither a sparse tensor nor a plan, or b is not a dense tensor.

    Examples:
        >>> import torch, matmuls
        >>> a = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]).to_sparse_csr()
        >>> b = torch.tensor([[1.0], [2.0], [3.0]])
        >>> matmuls.spmm(a, b)
        tensor([[7.],
                [6.]])
        >>> matmuls.spmm(a, b, reduce="mean")
        tensor([[3.5000],
                [6.0000]])
    """
    if isinstance(alpha, torch.Tensor) or isinstance(beta, torch.Tensor):
        alpha, beta = number("spmm", "alpha", alpha), number("spmm", "beta", beta)
    plain = out is None and reduce == "sum" and alpha == 1 and beta == 0 and not is_compiling()
    if plain:
        product = a._again(b) if isinstance(a, SparsePlan) else repeat(a, b)
        if product is not None:
            return product
        if isinstance(a, SparsePlan):
            return a._multiply(b)
    if out is None and beta != 0:
        raise ValueError(f"spmm: expected out= with beta={beta}, which multiplies it")
    entries = entries_of("spmm", a) if reduce == "sum" else None
    pattern, values, shape = (*entries, a.shape) if entries else _parts("spmm", a)
    check_operands(shape, b, out)
    if b.dim() == 1:
        if out is not None:
            spmm(a, b.unsqueeze(-1), reduce=reduce, alpha=alpha, beta=beta, out=out.unsqueeze(-1))
            return out
        return spmm(a, b.unsqueeze(-1), reduce=reduce, alpha=alpha).squeeze(-1)
    if pattern.batch is not None:
        return multiply_batch(pattern, values, shape, b, reduce, alpha, beta, out)
    if out is not None:
        return default_product_into(out, pattern, values, b, reduce, alpha, beta)
    op = default_op(pattern, values, b, reduce, alpha)
    product = op.run()
    if plain:
        record(a, op, values, pattern)
    return product


def sddmm(a: torch.Tensor, b: torch.Tensor, pattern: Sparse, *, alpha: float = 1) -> torch.Tensor:
    """Computes alpha * (a @ b) at the nonzeros of `pattern` only (SDDMM).

    The dense [M, K] product is never allocated. The operation is differentiable any number of times in a and b. The
    result has the same bits every time; it can be passed to `plan.with_values`. (`blocks.bsr_sddmm` computes a @ b^T
    instead.)

    Args:
        a: [..., M, D] dense; float64, float32, float16, bfloat16, complex64 or complex128. Leading dimensions of a and
            b broadcast. Complex numbers are multiplied as they are, without conjugation.
        b: [..., D, K] dense, dtype and device of a. For q @ k^T pass k.mT: that makes no copy, and its layout is the
            one that the kernel reads.
        pattern: [M, K] a plan or a sparse matrix as `plan` takes it, whose values are ignored.
        alpha: multiplies the product.

    Returns:
        [..., nonzeros], in the order of the pattern's values.

    Raises:
        ValueError: if an index does not fit the shape.
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if a or b is not a dense tensor, or pattern neither a sparse tensor nor a plan.

    Examples:
        >>> import torch, matmuls
        >>> pattern = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).to_sparse_csr()
        >>> matmuls.sddmm(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]]), pattern)
        tensor([3., 6., 8.])
    """
    csr = _pattern("sddmm", pattern)
    expect_dense("sddmm", a=a, b=b)
    if a.dim() < 2 or b.dim() < 2:
        raise RuntimeError(f"sddmm: expected a and b of at least two dimensions, got {list(a.shape)}, {list(b.shape)}")
    x, y = (folded("sddmm", csr, pattern.shape[:-2], *side) for side in ((a, "a"), (b.mT, "b, transposed,")))
    gradient = (a.requires_grad or b.requires_grad) and torch.is_grad_enabled()
    if isinstance(alpha, torch.Tensor):
        alpha = number("sddmm", "alpha", alpha)
    return _sddmm(csr.crow, csr.col, x, y, csr.columns, alpha, *csr.arguments(gradient))


def sparse_softmax(values: torch.Tensor, pattern: Sparse, *, scale: float = 1.0) -> torch.Tensor:
    """Computes softmax(scale * values) over the nonzeros of each row of `pattern`; all other elements are masked.

    Statistics are in float32, or float64 for float64; values are those of torch.softmax, NaN and inf included. The
    operation is differentiable any number of times. Under autocast it behaves as torch.softmax: the result is float32
    on a GPU.

    Args:
        values: [..., nonzeros] dense, in the order of the pattern's values, such as the result of `sddmm`; float64,
            float32, float16 or bfloat16.
        pattern: a plan or a sparse matrix as `plan` takes it, whose values are ignored.
        scale: multiplies the values.

    Returns:
        [..., nonzeros].

    Raises:
        ValueError: if values has another number of elements than the pattern, or an index does not fit the shape.
        RuntimeError: if the dtype is not supported, or the devices differ.
        TypeError: if values is not a dense tensor, or pattern neither a sparse tensor nor a plan.

    Examples:
        >>> import torch, matmuls
        >>> pattern = torch.tensor([[1.0, 1.0], [0.0, 1.0]]).to_sparse_csr()
        >>> matmuls.sparse_softmax(torch.zeros(3), pattern)
        tensor([0.5000, 0.5000, 1.0000])
    """
    csr = _pattern("sparse_softmax", pattern)
    expect_dense("sparse_softmax", values=values)
    if values.dim() < 1 or values.shape[-1] != csr.nonzeros:
        raise ValueError(
            f"sparse_softmax: expected values of shape [..., {csr.nonzeros}], one for each nonzero, "
            f"got {list(values.shape)}"
        )
    if isinstance(scale, torch.Tensor):
        scale = number("sparse_softmax", "a scale", scale)
    return _softmax(csr.crow, values, scale, csr.order)


def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Sparse, scale: float | None = None
) -> torch.Tensor:
    """Computes softmax(scale * q @ k^T) @ v where query i sees the keys at the nonzeros of row i of `pattern`.

    The dense [M, K] scores are never allocated, forward or backward: scores and probabilities are [..., nonzeros]. The
    result of a query that sees no key is 0. The operation is differentiable any number of times in q, k and v.

    Args:
        q: [..., M, D] dense; float64, float32, float16 or bfloat16.
        k: [..., K, D], dtype and device of q.
        v: [..., K, E], dtype and device of q.
        pattern: [M, K] a plan or a sparse matrix as `plan` takes it, whose values are ignored. It applies to all heads
            and batches.
        scale: multiplies the scores; 1 / sqrt(D) if None.

    Returns:
        [..., M, E].

    Raises:
        ValueError: if an index does not fit the shape.
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if q, k or v is not a dense tensor, or pattern neither a sparse tensor nor a plan.

    Examples:
        >>> import torch, matmuls
        >>> window = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).to_sparse_csr()
        >>> q = torch.zeros(2, 1)
        >>> matmuls.sparse_attention(q, q, torch.tensor([[1.0], [3.0]]), window)
        tensor([[1.],
                [2.]])
    """
    expect_dense("sparse_attention", q=q, k=k, v=v)
    if min(q.dim(), k.dim(), v.dim()) < 2:
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        raise RuntimeError(f"sparse_attention: expected q, k and v of at least two dimensions, got {shapes}")
    if q.is_complex():
        raise RuntimeError(f"sparse_attention: expected q of a real floating-point dtype, got {q.dtype}")
    ready = pattern if isinstance(pattern, SparsePlan) else plan_of("sparse_attention", pattern, tuned=False)
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    if isinstance(scale, torch.Tensor):
        scale = number("sparse_attention", "a scale", scale)
    if not is_compiling():
        ready._expect_same_indices("sparse_attention")
    csr = ready._pattern
    x, y = (folded("sddmm", csr, ready.shape[:-2], *side) for side in ((q, "a"), (k, "b, transposed,")))
    value = folded("sparse_attention", csr, ready.shape[:-2], v, "v")
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    # float16 ends at 65504, scores of long vectors do not: they are divided by 16, which rounds alike.
    scores = _sddmm(csr.crow, csr.col, x, y, csr.columns, scale / 16, *csr.arguments(gradient))
    probabilities = _softmax(csr.crow, scores, 16.0, csr.order).to(v.dtype)
    result = default_product(csr, probabilities, value)
    return result if csr.batch is None else result.view(*ready.shape[:-1], v.shape[-1])


def _sparsified(name: str, a: torch.Tensor) -> tuple[CsrPattern, torch.Tensor]:
    """Pattern and values of the elements of a dense matrix, or a batch of them, that are not 0."""
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


class cusparseMM(Applied, InplaceFunction):
    """`cusparseMM.apply(a, b)` computes a @ b for a sparse a, or for a dense a that is mostly 0.

    It runs the kernels of `spmm`, not cuSPARSE's. For a dense a, it first extracts the nonzeros, which waits for the
    GPU.

    Args:
        a: [M, K] in any layout that `spmm` accepts, or dense, [..., M, K]; dtypes as `spmm`.
        b: [..., K, N] dense; dtype and device of a. If a is a dense batch, b has the same leading dimensions.

    Returns:
        [..., M, N], differentiable any number of times in a and b. The gradient of a sparse a has a's pattern; that of
        a dense a is dense, as for a @ b.

    Raises:
        ValueError: if an index does not fit the shape.
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if b is not a dense tensor.

    Examples:
        >>> import torch, matmuls
        >>> a = torch.tensor([[0.0, 2.0]], requires_grad=True)
        >>> product = matmuls.cusparseMM.apply(a, torch.tensor([[1.0], [3.0]]))
        >>> product.backward()
        >>> product.item(), a.grad
        (6.0, tensor([[1., 3.]]))
    """

    __signature__ = signature_of_apply("a", "b")

    @classmethod
    def apply(cls, a: Sparse, b: torch.Tensor) -> torch.Tensor:
        """Computes a @ b.

        Args:
            a: [M, K] sparse, or [..., M, K] dense.
            b: [..., K, N] dense.

        Returns:
            [..., M, N].
        """
        if not isinstance(a, torch.Tensor) or a.layout != torch.strided:
            return spmm(a, b)
        expect_dense("cusparseMM", b=b)
        if a.dim() < 2 or (a.dim() > 2 and a.shape[:-2] != b.shape[:-2]):
            raise RuntimeError(
                f"cusparseMM: expected a of shape [M, K], or [..., M, K] for b of the same leading dimensions, "
                f"got {list(a.shape)} and {list(b.shape)}"
            )
        apply: Callable[..., torch.Tensor] = cls._apply
        if is_compiling():  # a graph break: torch does not trace super() of a Function
            apply = torch.compiler.disable(apply)
        return apply(a, b)

    @classmethod
    def _apply(cls, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().apply(a, b)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        csr, values = _sparsified("cusparseMM", a)
        ctx.pattern = csr
        ctx.save_for_backward(a, b, values)
        if b.dim() < 2 or b.shape[-2] != a.shape[-1]:
            raise RuntimeError(
                f"cusparseMM: expected b of shape [..., {a.shape[-1]}, n] for a of {a.shape[-1]} columns, "
                f"got {list(b.shape)}"
            )
        dense = folded("cusparseMM", csr, a.shape[:-2], b, "b")
        product = default_product(csr, values, dense)
        return product if csr.batch is None else product.view(*a.shape[:-1], b.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b, values = ctx.saved_tensors
        csr: CsrPattern = ctx.pattern
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = matmul(grad, b.to(grad.dtype).conj(), transb=True).sum_to_size(a.shape)
        if ctx.needs_input_grad[1]:
            if torch.is_grad_enabled():  # a second derivative is needed
                grad_b = cusparseMM.apply(a.to(grad.dtype).mH, grad)
            else:
                t_crow, t_col, t_order = csr.transposed()
                dense = folded("cusparseMM", csr, a.shape[:-2], grad, "grad")
                values = values.to(grad.dtype).conj()
                parts = t_crow, t_col, values, dense, csr.rows, "sum", 1.0, t_order
                grad_b = _spmm(*parts, longest=csr.longest_column).view(b.shape)
        return grad_a, grad_b


# For torch.utils.flop_counter: one multiplication and one addition for each nonzero and column of B.


@register_flop_formula(_ops.csr_spmm)
def _spmm_flops(
    crow: torch.Size, col: torch.Size, values: torch.Size, dense: torch.Size, *args: Any, **kwargs: Any
) -> int:
    batch: torch.Size = torch.broadcast_shapes(values[:-1], dense[:-2])
    return 2 * col[0] * dense[-1] * batch.numel()


@register_flop_formula(_ops.csr_linear)
def _linear_flops(
    crow: torch.Size, col: torch.Size, values: torch.Size, x: torch.Size, *args: Any, **kwargs: Any
) -> int:
    return 2 * col[0] * math.prod(x[:-1])


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
    batch: torch.Size = torch.broadcast_shapes(a[:-2], b[:-2])
    return 2 * col[0] * a[-1] * batch.numel()
