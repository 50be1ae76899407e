"""One test per property, for every row of the table."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.table_cases import (
    as_function,
    assert_close_as_torch,
    batch_innermost,
    error,
    every_dtype,
    gradient_dtypes,
    off_by_one_element,
    padded_rows,
    run,
    small_functions,
    stepped,
    transposed,
    with_gradients,
)
from matmuls import matmul
from matmuls_bench.table import TABLE, Call, Draw

every_row = pytest.mark.parametrize("spec", TABLE, ids=lambda spec: spec.name)


LAYOUTS = [transposed, padded_rows, stepped, off_by_one_element, batch_innermost]


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_any_strides(spec, dtype, device, layout):
    if spec.contiguous:
        pytest.skip("takes contiguous rows alone")
    for call in spec.samples(Draw(dtype, device, seed=1)):
        assert_close_as_torch(spec, call, layout)


def leaves_of(call: Call):
    return [t for t in call.tensors if t.requires_grad]


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


@pytest.mark.exhaustive(keep=8)
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
    """All launched kernels are CUDA kernels, and nothing but sizes and errors is copied to the host."""
    call = next(iter(spec.samples(Draw(dtype, "cuda"))))
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        result = run(spec, call)
        torch.cuda.synchronize()
    assert result.is_cuda
    names = [event.name for event in profile.events()]
    assert spec.static or spec.waits or not any("DtoH" in name for name in names)
