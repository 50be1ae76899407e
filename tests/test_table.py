"""One test per property, for every row of the table."""

import os

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from matmuls import matmul
from matmuls.specs import TABLE, Call, Draw, Spec

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
every_row = pytest.mark.parametrize("spec", TABLE, ids=lambda spec: spec.name)


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


LAYOUTS = [transposed, padded_rows, stepped, off_by_one_element, batch_innermost]


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_any_strides(spec, dtype, device, layout):
    if spec.contiguous:
        pytest.skip("takes contiguous rows alone")
    for call in spec.samples(Draw(dtype, device, seed=1)):
        assert_close_as_torch(spec, call, layout)


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


def leaves_of(call: Call):
    return [t for t in call.tensors if t.requires_grad]


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


@gradient_dtypes
def test_gradgradcheck(spec, dtype, device):
    for function, tensors in small_functions(spec, Draw(dtype, device)):
        assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@gradient_dtypes
def test_gradient_of_one_side_only(spec, dtype, device):
    for call in spec.samples(Draw(dtype, device)):
        function, tensors = as_function(spec, call)
        for i in range(len(tensors)):
            leaves = [t.detach().clone().requires_grad_(j == i) for j, t in enumerate(tensors)]
            y = function(*leaves)
            y.backward(torch.ones_like(y))
            assert [leaf.grad is not None for leaf in leaves] == [j == i for j in range(len(leaves))]


OWNERS = {
    spec.operators[0]: spec for spec in reversed(TABLE)
}  # rows may share an operator: the first row has its arguments


@pytest.mark.parametrize("operator", OWNERS, ids=str)
def test_opcheck(operator, device):
    spec = OWNERS[operator]
    if spec.opchecks:
        for checked, args in spec.opchecks(Draw(torch.float32, device)):
            torch.library.opcheck(checked, args)
        return
    leaves_require = spec.gradient and not spec.in_place  # a leaf that requires grad cannot be overwritten
    for n, call in enumerate(spec.samples(Draw(torch.float32, device))):
        if n % 7:
            continue
        args = operator_arguments(operator, call)
        torch.library.opcheck(operator, tuple(a.requires_grad_(leaves_require) if is_number(a) else a for a in args))
        for out_variant in [op for op in spec.operators if op._overloadname == "out"]:
            detached = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
            torch.library.opcheck(out_variant, detached, {"out": operator(*detached)})


def operator_arguments(operator, call: Call):
    """The arguments of the operator, without those that only the Python function has (inplace)."""
    names = [a.name for a in operator._schema.arguments]
    own = OWNERS[operator].arguments
    args = own(call) if own else call.args
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in call.kwargs.items() if k in names}
    return tuple(given.get(a.name, a.default_value) for a in operator._schema.arguments[: len(names)])


def is_number(x):
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


@pytest.mark.parametrize("operands", [((-1, 3, 4), (-1, 4, 5)), ((-1, 3, 4), (4, 5)), ((-1, 4), (4, 5))], ids=str)
def test_compile_with_sizes_known_at_run_time_only(operands, device):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def product(x, mask, y):
        rows = mask.nonzero().squeeze(1)
        return matmul(x[rows], y[rows] if y.dim() == x.dim() > 2 else y)

    draw = Draw(torch.float32, device)
    x, y = (draw(*(7 if n == -1 else n for n in shape)) for shape in operands)
    mask = torch.arange(7, device=device) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(product(x, mask, y), x[mask] @ (y[mask] if y.dim() == x.dim() > 2 else y))


@every_row
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(spec, device, dynamic):
    if spec.static:
        pytest.skip("how much there is to do shows in the values")
    chosen = list(spec.samples(Draw(torch.float32, device)))[2::11]
    assert chosen
    for call in chosen:
        torch._dynamo.reset()
        compiled = torch.compile(spec.on_a_copy, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        leaves = [with_gradients(spec, call) if spec.gradient else call.map(torch.clone) for _ in range(2)]
        ours, eager = compiled(*leaves[0].args, **leaves[0].kwargs), spec.on_a_copy(*leaves[1].args, **leaves[1].kwargs)
        torch.testing.assert_close(ours, eager)
        if spec.gradient:
            for y in (ours, eager):
                y.square().sum().backward()
            for x, y in zip(leaves_of(leaves[0]), leaves_of(leaves[1]), strict=True):
                torch.testing.assert_close(x.grad, y.grad)


@every_row
def test_autocast(spec, device):
    if not spec.autocast:
        pytest.skip("an in-place operation keeps its argument's dtype")
    for call in spec.samples(Draw(torch.float32, device)):
        if call.kwargs.get("inplace"):
            continue  # keeps its argument's dtype, and rejects leaves
        leaves = with_gradients(spec, call)
        with torch.autocast(device, dtype=torch.bfloat16):
            ours, theirs = spec.call(*leaves.args, **leaves.kwargs), spec.reference(*call.args, **call.kwargs)
        assert ours.dtype == theirs.dtype
        assert error(ours.double(), theirs.double()) < 2e-2
        ours.backward(torch.ones_like(ours))
        assert all(t.grad.dtype == torch.float32 for t in leaves_of(leaves))


@every_row
def test_flop_counter(spec):
    if not spec.flops:
        pytest.skip("no product inside")
    for call in spec.samples(Draw(torch.float32)):
        # torch does not count the product of two vectors, and counts matrix-vector products only in some versions
        if any(t.dim() == 1 for t in call.tensors[:2]):
            continue
        counts = []
        for function in (spec.call, spec.dense or spec.reference):
            with FlopCounterMode(display=False) as counter:
                function(*call.args, **call.kwargs)
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0


@every_dtype
def test_bad_input(spec, dtype, device):
    for bad in spec.bad(Draw(dtype, device)):
        before = [t.clone() if t.layout == torch.strided else t for t in bad.call.tensors]
        with pytest.raises(RuntimeError, match=bad.match):
            spec.call(*bad.call.args, **bad.call.kwargs)
        for x, y in zip(bad.call.tensors, before, strict=True):
            assert x.layout != torch.strided or torch.equal(x, y)


@pytest.mark.cuda
@every_dtype
def test_runs_on_cuda_without_fallback(spec, dtype):
    """All launched kernels are CUDA kernels, and nothing is copied to the host."""
    call = next(iter(spec.samples(Draw(dtype, "cuda"))))
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        result = run(spec, call)
        torch.cuda.synchronize()
    assert result.is_cuda
    names = [event.name for event in profile.events()]
    # data-dependent sizes must be copied to the host
    assert spec.static or not any("DtoH" in name for name in names)
