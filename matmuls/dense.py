"""Dense products by cuBLAS and cuBLASLt, with gradients; torch's own BLAS for CPU tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import InplaceFunction
from torch.compiler import is_dynamo_compiling
from torch.utils.flop_counter import register_flop_formula

import custom_mm
from custom_mm.arguments import clearer
from custom_mm.literals import Activation

from .registration import Applied, signature_of_apply

_call: Callable[..., torch.Tensor] = custom_mm._C.matmul  # the operator below without what torch.ops adds
_matmul: Callable[..., torch.Tensor] = torch.ops.custom_mm.matmul.default
_matmul_out: Callable[..., None] = torch.ops.custom_mm.matmul.out
_matmul_backward: Callable[..., tuple[torch.Tensor | None, ...]] = torch.ops.custom_mm.matmul_backward.default
_lt: Callable[..., torch.Tensor] = torch.ops.custom_mm.cublaslt_matmul.default
_lt_out: Callable[..., None] = torch.ops.custom_mm.cublaslt_matmul.out


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    transa: bool = False,
    transb: bool = False,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes activation(op(a) @ op(b) + bias); op transposes the last two dimensions if transa or transb is set.

    On a GPU cuBLAS computes the product, or cuBLASLt if there is a bias or an activation; on a CPU torch's BLAS does.
    The operation is differentiable any number of times in a, b and bias. Under autocast it behaves as torch.matmul.

    Args:
        a: [..., M, K], or [..., K, M] with transa, or a vector [K]; float64, float32, float16, bfloat16, complex64 or
            complex128. Batch dimensions broadcast as in torch.matmul. A strided view is read in place if BLAS can
            describe it: one of its last two strides is 1, and the other is its leading dimension (lda). Otherwise it
            is copied.
        b: [..., K, N], or [..., N, K] with transb, or a vector [K]; dtype and device of a.
        transa: transpose the last two dimensions of a. A vector is not transposed.
        transb: transpose the last two dimensions of b.
        bias: [N], dtype and device of a.
        activation: None, "relu", "gelu" (by erf) or "gelu_tanh"; None for complex dtypes.
        out: a tensor of exactly the result's shape, with any non-overlapping strides; the result is written to it.

    Returns:
        [..., M, N], or `out`. Products are summed in float32 or wider; TF32 is used only if torch's switch allows it.

    Raises:
        RuntimeError: before anything is computed, if shapes, dtypes or devices do not match, if out overlaps an input,
            or if a gradient would be recorded through out.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, -1.0]])
        >>> matmuls.matmul(a, b, transb=True, bias=torch.tensor([0.5]), activation="relu")
        tensor([[0.],
                [0.]])
        >>> matmuls.matmul(a, b, transb=True)
        tensor([[-1.],
                [-1.]])
    """
    try:
        if bias is None and activation is None:
            if out is None:
                return _matmul(a, b, transa, transb) if is_dynamo_compiling() else _call(a, b, transa, transb)
            _matmul_out(a, b, transa, transb, out=out)
            return out
        if out is None:
            return _lt(a, b, bias, activation, transa, transb)
        _lt_out(a, b, bias, activation, transa, transb, out=out)
    except RuntimeError as error:
        raise clearer(error, "matmul", ("bias", "out"), a=a, b=b, bias=bias, out=out) from None
    return out


@contextmanager
def handles(*, batch_invariant: bool = False) -> Iterator[int]:
    """Context manager: creates this thread's library handles on entry and destroys those of all threads on exit.

    Its use is optional: a product creates a missing handle itself, which takes some milliseconds. With this context
    manager that time is spent where you choose.

    With `batch_invariant` a row's result has the same bits however many rows are computed with it: a request of a
    server then gets the same answer alone and in a batch. This holds for `matmul`, `linear_` and all other dense
    products of this library, for `masked_linear`, and for the operations on rows, in all threads until the context
    ends. It costs time: each product has one algorithm for any number of rows, without split-K.

    Args:
        batch_invariant: make results independent of the number of rows.

    Returns:
        A context manager whose value is the number of GPUs, 0 without CUDA.

    Raises:
        RuntimeError: on exit, while a CUDA graph that uses a handle is being captured.

    Examples:
        >>> import torch, matmuls
        >>> with matmuls.handles() as devices:
        ...     c = matmuls.matmul(torch.eye(2), torch.ones(2, 2))
        >>> devices == torch.cuda.device_count() or devices == 0
        True
        >>> x, w = torch.randn(100, 64), torch.randn(32, 64)
        >>> with matmuls.handles(batch_invariant=True):
        ...     alone, together = matmuls.matmul(x[:1], w, transb=True), matmuls.matmul(x, w, transb=True)
        >>> torch.equal(alone, together[:1])
        True
    """
    if batch_invariant:
        custom_mm._C.open_batch_invariant_scope()
    try:
        devices = custom_mm.init_cublas()
        custom_mm.init_cublaslt()
        custom_mm.init_cusparse()
        yield devices
    finally:
        if batch_invariant:
            custom_mm._C.close_batch_invariant_scope()
        custom_mm.destroy_cublas()
        custom_mm.destroy_cublaslt()
        custom_mm.destroy_cusparse()


# The upstream document's classes. `apply` calls the operator, which records its gradient itself: an autograd Function
# in Python would cost 5 us more per call, and 17 with backward. forward and backward are for subclasses.


def _forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, transa: bool, transb: bool) -> torch.Tensor:
    need_a, need_b = ctx.needs_input_grad
    if need_a or need_b:
        ctx.save_for_backward(a if need_b else None, b if need_a else None)
        ctx.sizes = a.shape, b.shape
    try:
        return _matmul(a, b, transa, transb)
    except RuntimeError as error:
        raise clearer(error, "matmul", a=a, b=b) from None


def _backward(ctx: Any, grad: torch.Tensor, transa: bool, transb: bool) -> tuple[torch.Tensor | None, ...]:
    a, b = ctx.saved_tensors
    return _matmul_backward(grad, a, b, *ctx.sizes, transa, transb)


def _apply(transa: bool, transb: bool) -> "staticmethod[[torch.Tensor, torch.Tensor], torch.Tensor]":
    def apply(a: torch.Tensor, b: torch.Tensor, /) -> torch.Tensor:
        """Computes the product that the class says.

        Args:
            a: as the class says.
            b: as the class says.

        Returns:
            The product, differentiable any number of times.
        """
        try:
            return _matmul(a, b, transa, transb) if is_dynamo_compiling() else _call(a, b, transa, transb)
        except RuntimeError as error:
            raise clearer(error, "matmul", a=a, b=b) from None

    return staticmethod(apply)


class _Product(Applied, InplaceFunction):
    """A product as an autograd Function: two tensors to one."""

    __signature__ = signature_of_apply("a", "b")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "apply" not in vars(cls):  # a subclass of the classes below, whose forward or backward may be another
            cls.apply = classmethod(InplaceFunction.apply.__func__)  # type: ignore[assignment,attr-defined]

    if TYPE_CHECKING:  # torch's takes and returns anything

        @staticmethod
        def apply(a: torch.Tensor, b: torch.Tensor, /) -> torch.Tensor: ...


class cublasMM(_Product):
    """`cublasMM.apply(a, b)` computes a @ b by cuBLAS, as `matmul(a, b)`.

    It takes as long to call as `matmul`, and is for interfaces that need an autograd Function. The gradient is recorded
    in C++: a subclass that overrides `forward` or `backward` records it in Python.

    Args:
        a: [..., M, K], or a vector [K]; dtypes as `matmul`.
        b: [..., K, N], or a vector [K]; dtype and device of a.

    Returns:
        [..., M, N], differentiable any number of times.

    Raises:
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> a = torch.tensor([[1.0, 2.0]], requires_grad=True)
        >>> matmuls.cublasMM.apply(a, torch.tensor([[3.0], [4.0]])).sum().backward()
        >>> a.grad
        tensor([[3., 4.]])
    """

    apply = _apply(False, False)

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _forward(ctx, a, b, False, False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, grad, False, False)


class cublasTransaMM(_Product):
    """`cublasTransaMM.apply(a, b)` computes a^T @ b by cuBLAS, as `matmul(a, b, transa=True)`.

    Args:
        a: [..., K, M]; dtypes as `matmul`.
        b: [..., K, N]; dtype and device of a.

    Returns:
        [..., M, N], differentiable any number of times.

    Raises:
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.cublasTransaMM.apply(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]))
        tensor([[11.]])
    """

    apply = _apply(True, False)

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _forward(ctx, a, b, True, False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, grad, True, False)


class cublasTransbMM(_Product):
    """`cublasTransbMM.apply(a, b)` computes a @ b^T by cuBLAS, as `matmul(a, b, transb=True)`.

    Args:
        a: [..., M, K]; dtypes as `matmul`.
        b: [..., N, K]; dtype and device of a.

    Returns:
        [..., M, N], differentiable any number of times.

    Raises:
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.cublasTransbMM.apply(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([[11.]])
    """

    apply = _apply(False, True)

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _forward(ctx, a, b, False, True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, grad, False, True)


class cublasTransabMM(_Product):
    """`cublasTransabMM.apply(a, b)` computes a^T @ b^T by cuBLAS, as `matmul(a, b, transa=True, transb=True)`.

    Args:
        a: [..., K, M]; dtypes as `matmul`.
        b: [..., N, K]; dtype and device of a.

    Returns:
        [..., M, N], differentiable any number of times.

    Raises:
        RuntimeError: if shapes, dtypes or devices do not match.
        TypeError: if an operand is no tensor.

    Examples:
        >>> import torch, matmuls
        >>> matmuls.cublasTransabMM.apply(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([[11.]])
    """

    apply = _apply(True, True)

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _forward(ctx, a, b, True, True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, grad, True, True)


# FLOPs for torch.utils.flop_counter: one multiplication and one addition per term; bias and activation are not counted.


def _product_flops(a: torch.Size, b: torch.Size, transa: bool, transb: bool) -> int:
    m, k = (1, a[0]) if len(a) == 1 else (a[-1], a[-2]) if transa else (a[-2], a[-1])
    n = 1 if len(b) == 1 else b[-2] if transb else b[-1]
    batch: torch.Size = torch.broadcast_shapes(a[:-2], b[:-2])
    return 2 * m * n * k * batch.numel()


@register_flop_formula(torch.ops.custom_mm.matmul)
def _matmul_flops(
    a: torch.Size, b: torch.Size, transa: bool = False, transb: bool = False, *args: Any, **kwargs: Any
) -> int:
    return _product_flops(a, b, transa, transb)


@register_flop_formula(torch.ops.custom_mm.cublaslt_matmul)
def _lt_flops(
    a: torch.Size,
    b: torch.Size,
    bias: torch.Size | None = None,
    activation: str | None = None,
    transa: bool = False,
    transb: bool = False,
    *args: Any,
    **kwargs: Any,
) -> int:
    return _product_flops(a, b, transa, transb)
