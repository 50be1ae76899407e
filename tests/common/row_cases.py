"""What the tests of row lengths share."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import matmuls
from common.table_cases import error
from matmuls_bench.table import Draw

INF, NAN = float("inf"), float("nan")
SIXTEEN = [torch.bfloat16, torch.float16]
SCALE = 0.125  # exact in every dtype: torch's rounding of scale * x would widen the bound

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN, torch.float64], ids=str)


def draw(*shape, device="cpu", dtype=torch.float32, seed=0):
    return Draw(dtype, device, seed)(*shape)


def assert_as_good_as_torch(ours, theirs, truth, scale=None):
    """At most twice torch's error against float64, plus one rounding; in float64, where torch is the reference,
    sixteen.
    """
    assert ours.dtype == theirs.dtype
    roundings = 16 if ours.dtype == torch.float64 else 1
    bound = 2 * error(theirs, truth, scale) + roundings * torch.finfo(ours.dtype).eps
    assert error(ours, truth, scale) <= bound


# ---------------------------------------------------------------------------------------- operations, and torch's ways


@dataclass(frozen=True)
class Operation:
    """ours and reference map the random tensors to tuples of results; ours may overwrite its arguments."""

    draw: Callable
    ours: Callable
    reference: Callable
    least_columns: int = 1

    def check(self, tensors, layouts=(torch.clone,)):
        """As accurate as torch with one tensor after another in each of the layouts, whose gaps stay NaN."""
        laid = [layouts[i % len(layouts)](t) for i, t in enumerate(tensors)]
        bases = [(t._base, t._base.numel() - t.numel()) for t in laid if t._base is not None and t.is_floating_point()]
        theirs = self.reference(*tensors)
        truths = self.reference(*(t.double() if t.is_floating_point() else t for t in tensors))
        for triple in zip(self.ours(*laid), theirs, truths, strict=True):
            assert_as_good_as_torch(*triple)
        assert all(base.isnan().sum() == gaps for base, gaps in bases)


def with_gradients(function):
    """The result of function(x, ...), which may overwrite x, and the gradients for a given gradient of the first
    result.
    """

    def run(grad, *tensors):
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        y = function(leaves[0] * 1, *leaves[1:])
        return y.detach(), *torch.autograd.grad(y, [t for t in leaves if t.requires_grad], grad)

    return run


def layer_norm(x, weight=None, bias=None, residual=None):
    return F.layer_norm(x if residual is None else x + residual, x.shape[-1:], weight, bias)


def rms_norm(x, weight=None, residual=None):
    return F.rms_norm(x if residual is None else x + residual, x.shape[-1:], weight, 1e-5)


def masked_softmax(x, mask=None, scale=SCALE, causal=False):
    """softmax(scale * x + mask) as matmuls defines it, in torch operations: 0 in fully masked rows."""
    z, hidden = x * scale, torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if mask is not None and mask.is_floating_point():
        z, hidden = z + mask, hidden | (mask == -INF)
    elif mask is not None:
        hidden = hidden | (mask != 0)
    if causal:
        hidden = hidden | torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    dead = hidden.all(-1, keepdim=True)
    z = z.masked_fill(hidden, -INF).masked_fill(dead, 0)
    return z.softmax(-1).masked_fill(dead, 0).to(x.dtype)


def masked(**kwargs):
    def ours(grad, x, *masks):
        return with_gradients(lambda x: matmuls.scaled_masked_softmax(x, *(masks or [None]), SCALE, **kwargs))(grad, x)

    def reference(grad, x, *masks):
        causal = kwargs.get("causal", False)
        return with_gradients(lambda x: masked_softmax(x, *(masks or [None]), causal=causal))(grad, x)

    return ours, reference


def like(n, *others):
    """A function that draws n tensors of the shape, then those that `others` make of the draw and the shape."""
    return lambda d, *shape: (*(d(*shape) for _ in range(n)), *(other(d, shape) for other in others))


def a_row(d, shape):
    return d(shape[-1])


def probabilities(d, *shape):
    return d(*shape).softmax(-1), d(*shape)


def softmax_backward(y, grad):
    return (torch._softmax_backward_data(grad, y, -1, y.dtype),) * 2


def sees_few(d, shape):
    return d(*shape[:-2], 1, shape[-1]) > 0.5


def for_all_rows(d, shape):
    return d(*shape[-2:])


def everything(x, residual, weight, bias):
    return matmuls.layer_norm_(x, weight, bias, residual=residual)


OPERATIONS = {
    "softmax_": Operation(like(1), lambda x: (matmuls.softmax_(x),), lambda x: (x.softmax(-1),)),
    "softmax out": Operation(
        like(2), lambda x, out: (matmuls.softmax(x, out=out), out), lambda x, _: (x.softmax(-1),) * 2
    ),
    "softmax_backward": Operation(
        probabilities, lambda y, g: (matmuls.softmax_backward(y, g), matmuls.softmax_backward_(y, g)), softmax_backward
    ),
    "layer_norm_": Operation(
        like(2, a_row, a_row), lambda *t: (everything(*t),), lambda x, r, w, b: (layer_norm(x, w, b, r),)
    ),
    "layer_norm_ without residual": Operation(
        like(1, a_row, a_row), lambda *t: (matmuls.layer_norm_(*t),), lambda *t: (layer_norm(*t),)
    ),
    "layer_norm_ of x alone": Operation(like(1), lambda x: (matmuls.layer_norm_(x),), lambda x: (layer_norm(x),)),
    "rms_norm_": Operation(like(1, a_row), lambda x, w: (matmuls.rms_norm_(x, w),), lambda x, w: (rms_norm(x, w),)),
    "layer_norm_ gradients": Operation(
        like(3, a_row, a_row),
        with_gradients(everything),
        with_gradients(lambda x, r, w, b: layer_norm(x, w, b, r)),
        least_columns=3,
    ),
    "layer_norm_ gradient of x alone": Operation(
        like(2), with_gradients(matmuls.layer_norm_), with_gradients(layer_norm), least_columns=3
    ),
    "rms_norm_ gradients": Operation(
        like(3, a_row),
        with_gradients(lambda x, r, w: matmuls.rms_norm_(x, w, residual=r)),
        with_gradients(lambda x, r, w: rms_norm(x, w, r)),
        least_columns=3,
    ),
    "masked": Operation(like(2, sees_few), *masked()),
    "mask added, in place": Operation(like(2, for_all_rows), *masked(inplace=True)),
    "causal, in place": Operation(like(2), *masked(inplace=True, causal=True)),
}
every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
