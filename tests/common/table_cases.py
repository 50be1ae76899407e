"""What the tests of table share."""

import os

import pytest
import torch

from matmuls_bench.table import TABLE, Call, Draw, Spec

# Under compute-sanitizer: results start as NaN (see conftest.py), and only our kernels access GPU memory.
POISON = bool(os.environ.get("MATMULS_POISON"))
WIDE = {torch.complex64: torch.complex128, torch.complex128: torch.complex128}


def pairs(dtypes_of):
    return [
        pytest.param(spec, dtype, id=f"{spec.name}-{dtype}".replace("torch.", ""))
        for spec in TABLE
        for dtype in dtypes_of(spec)
    ]


every_dtype = pytest.mark.parametrize(("spec", "dtype"), pairs(lambda spec: spec.dtypes))
gradient_dtypes = pytest.mark.parametrize(
    ("spec", "dtype"),
    pairs(lambda spec: [d for d in (torch.float64, torch.complex128) if spec.gradient and d in spec.dtypes]),
)


def run(spec: Spec, call: Call, function=None):
    """One call on copies, so that an in-place operation does not change later inputs."""
    copies = call.map(lambda t: t.clone(memory_format=torch.preserve_format) if is_dense(t) else t)
    return (function or spec.call)(*copies.args, **copies.kwargs)


def is_dense(t):
    """Whether the tensor has no gaps: only then does clone() keep its strides; other tensors are used without a
    copy.
    """
    return torch.empty_like(t).stride() == t.stride()


def error(x, truth, scale=None):
    """Frobenius norm of the difference over that of the truth, or over `scale`; NaN if a value is not finite."""
    difference = torch.linalg.vector_norm(x.to(truth.dtype) - truth).item()
    scale = torch.linalg.vector_norm(truth).item() if scale is None else scale
    return difference / scale if scale > 0 else difference


def numbers(change):
    """Apply `change` only to floating-point and complex tensors; masks stay unchanged."""
    return lambda t: change(t) if t.is_floating_point() or t.is_complex() else t


def assert_close_as_torch(spec: Spec, call: Call, layout=torch.clone):
    """Against float64, at most twice torch's error in the same dtype on the same layout.

    Errors are relative to the result for |inputs|, so that no sum cancels. One rounding more, because torch may be
    exact; in float64, where torch is the reference, a few roundings for another order of summation.
    """
    home = call.map(torch.Tensor.cpu) if POISON else call
    wide = home.map(numbers(lambda t: t.to(WIDE.get(t.dtype, torch.float64))))
    truth = run(spec, wide, spec.reference)
    scale = torch.linalg.vector_norm(run(spec, wide.map(numbers(torch.abs)), spec.reference)).item()

    def on(x, function, laid_out):
        laid = x.map(numbers(laid_out))
        return function(*laid.args, **laid.kwargs)

    ours, theirs = on(call, spec.call, layout), on(home, spec.reference, layout)
    if not theirs.isfinite().all():
        # torch 2.11 to 2.13 with AMX: bfloat16 products, also those that ours call, multiply memory behind a row by 0
        theirs = on(home, spec.reference, lambda t: with_ones_beside(layout(t)))
        if ours.device.type == "cpu" and not ours.isfinite().all():
            ours = on(call, spec.call, lambda t: with_ones_beside(layout(t)))
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert ours.device == call.tensors[0].device
    ours = ours.to(theirs.device)
    roundings = 4 if ours.dtype in (torch.float64, torch.complex128) else 1
    bound = 2 * error(theirs, truth, scale) + roundings * torch.finfo(ours.dtype).eps
    assert error(ours, truth, scale) <= bound


def with_ones_beside(t):
    (t if t._base is None else t._base).nan_to_num_(nan=1.0)
    return t


@every_dtype
def test_float64_is_the_truth(spec, dtype, device):
    for call in spec.samples(Draw(dtype, device)):
        assert_close_as_torch(spec, call)


def transposed(t):
    return t.mT.contiguous().mT if t.dim() > 1 else t.clone()


def padded_rows(t):
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), float("nan"), dtype=t.dtype, device=t.device)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def stepped(t):
    wide = torch.full((*t.shape[:-1], t.shape[-1] * 2), float("nan"), dtype=t.dtype, device=t.device)
    wide[..., ::2] = t
    return wide[..., ::2]


def off_by_one_element(t):
    flat = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype, device=t.device)
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


def batch_innermost(t):
    return t.movedim(0, -1).contiguous().movedim(-1, 0) if t.dim() > 2 else t.clone()


@every_dtype
def test_empty(spec, dtype, device):
    for call in spec.empty(Draw(dtype, device)):
        ours, theirs = run(spec, call), run(spec, call, spec.reference)
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def with_gradients(spec: Spec, call: Call) -> Call:
    """The call with leaves that require grad, except masks and frozen arguments."""
    frozen = [call.args[i] for i in spec.frozen]
    return call.map(numbers(lambda t: t if any(t is f for f in frozen) else t.detach().clone().requires_grad_()))


def as_function(spec: Spec, call: Call):
    """The call as a function of only its differentiable tensors."""
    call = with_gradients(spec, call)
    slots = [i for i, x in enumerate(call.args) if isinstance(x, torch.Tensor) and x.requires_grad]

    def function(*tensors):
        args = list(call.args)
        for i, t in zip(slots, tensors, strict=True):
            args[i] = t
        return spec.on_a_copy(*args, **call.kwargs)

    return function, tuple(call.args[i] for i in slots)


def small_functions(spec, draw):
    """Those samples whose numerical derivative is fast."""
    functions = [as_function(spec, call) for call in spec.samples(draw)]
    small = [(function, tensors) for function, tensors in functions if sum(t.numel() for t in tensors) <= 200]
    assert small
    return small


@gradient_dtypes
def test_gradcheck(spec, dtype, device):
    for function, tensors in small_functions(spec, Draw(dtype, device)):
        fast = sum(t.numel() for t in tensors) > 60
        assert torch.autograd.gradcheck(function, tensors, fast_mode=fast)
