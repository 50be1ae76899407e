"""torch.func transforms: vmap with our batching rules, gradients inside and outside it, against single samples."""

import itertools
import re

import pytest
import torch
from torch.func import grad, jacrev, vmap

import matmuls
from matmuls_bench.table import TABLE, Call, Draw, operators

B = 3


@pytest.fixture(autouse=True)
def _no_fallback():
    """torch's slow fallback loop warns; here it is an error."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def numbers(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.layout == torch.strided


def batches(call: Call):
    """Which tensors of a call are batched, and along which dimension: all, only the first, only the others."""
    slots = [i for i, x in enumerate(call.args) if numbers(x)]
    for chosen in dict.fromkeys((tuple(slots), (slots[0],), tuple(slots[1:]))):
        if chosen:
            yield {i: (0, -1, call.args[i].dim() // 2)[n % 3] for n, i in enumerate(chosen)}
            yield dict.fromkeys(chosen, 0)


def batched(call: Call, where: dict[int, int]):
    """The samples' calls, the batched arguments, and vmap's in_dims."""
    drawn = {i: [call.args[i] * f for f in (1, -0.5, 0.75)] for i in where}
    samples = [[drawn[i][n] if i in where else x for i, x in enumerate(call.args)] for n in range(B)]
    together = [torch.stack(drawn[i], where[i]) if i in where else x for i, x in enumerate(call.args)]
    return samples, together, tuple(where.get(i) for i in range(len(call.args)))


def as_function(spec, call: Call, together, in_dims):
    """A function of only the batched tensors, because vmap's in_dims needs tensors."""
    slots = [i for i, d in enumerate(in_dims) if d is not None]

    def function(*tensors):
        args = list(together)
        for i, t in zip(slots, tensors, strict=True):
            args[i] = t
        return spec.on_a_copy(*args, **call.kwargs)

    return function, [together[i] for i in slots], tuple(in_dims[i] for i in slots)


# The autograd Functions of the upstream documentation have no setup_context: torch rejects them under transforms.
FUNCTIONS = {"cublasMM", "cublasTransaMM", "cublasTransbMM", "cublasTransabMM", "FusedSoftmax", "cusparseMM"}
ROWS = [s for s in TABLE if s.name not in FUNCTIONS]
# Gradients implemented by such Functions, which torch.func.grad rejects too.
DIFFERENTIABLE = [s for s in ROWS if s.gradient and torch.float64 in s.dtypes]
IN_CPP = [s for s in DIFFERENTIABLE if not s.name.lower().startswith("masked")]


def has_numbers(call: Call):
    return any(numbers(x) for x in call.args)


@pytest.mark.parametrize("spec", ROWS, ids=lambda s: s.name)
def test_vmap_equals_single_samples(spec, device):
    tried = 0
    for call in itertools.islice(filter(has_numbers, spec.samples(Draw(torch.float64, device))), 24):
        for where in batches(call):
            if (spec.in_place or call.kwargs.get("inplace")) and 0 not in where:
                continue
            samples, together, in_dims = batched(call, where)
            expected = torch.stack([spec.on_a_copy(*args, **call.kwargs) for args in samples])
            function, tensors, dims = as_function(spec, call, together, in_dims)
            torch.testing.assert_close(vmap(function, dims)(*tensors), expected, equal_nan=True)
            tried += 1
    assert tried


def small_calls(spec, device, most=120):
    """A few calls, each with all tensors batched and with only the first."""
    small = (c for c in spec.samples(Draw(torch.float64, device)) if has_numbers(c) and not c.kwargs.get("out"))
    small = (c for c in small if sum(t.numel() for t in c.tensors if numbers(t)) <= most)
    for call in itertools.islice(small, 6):
        frozen = [call.args[i] for i in spec.frozen if i < len(call.args)]
        slots = [i for i, x in enumerate(call.args) if numbers(x) and not any(x is f for f in frozen)]
        for chosen in dict.fromkeys((tuple(slots), (slots[0],))):
            yield call, dict.fromkeys(chosen, 0)


def of_samples(spec, call, samples, where):
    """For each sample a function of the batched arguments, and these arguments."""
    for args in samples:
        slots = list(where)

        def function(*tensors, args=args, slots=slots):
            given = list(args)
            for i, t in zip(slots, tensors, strict=True):
                given[i] = t
            return spec.on_a_copy(*given, **call.kwargs)

        yield function, [args[i].detach().clone().requires_grad_() for i in slots]


def stacked(rows):
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("spec", DIFFERENTIABLE, ids=lambda s: s.name)
def test_a_gradient_through_vmap(spec, device):
    for call, where in small_calls(spec, device):
        samples, together, in_dims = batched(call, where)
        function, tensors, dims = as_function(spec, call, together, in_dims)
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = vmap(function, dims)(*leaves)
        found = torch.autograd.grad(y.square().sum(), leaves)
        expected = [torch.autograd.grad(f(*t).square().sum(), t) for f, t in of_samples(spec, call, samples, where)]
        torch.testing.assert_close(list(found), stacked(expected))


@pytest.mark.parametrize("spec", IN_CPP, ids=lambda s: s.name)
def test_transforms_of_gradients(spec, device):
    """vmap of grad, grad of vmap, jacrev, and a second derivative."""
    for call, where in small_calls(spec, device, most=60):
        samples, together, in_dims = batched(call, where)
        function, tensors, dims = as_function(spec, call, together, in_dims)
        tensors = [t.detach() for t in tensors]
        every = tuple(range(len(tensors)))
        ones = list(of_samples(spec, call, samples, where))
        loss = lambda *t, f=function: f(*t).pow(3).sum()  # noqa: E731

        expected = stacked(torch.autograd.grad(f(*t).pow(3).sum(), t) for f, t in ones)
        torch.testing.assert_close(list(vmap(grad(loss, every), dims)(*tensors)), expected)
        whole = lambda *t, f=function, d=dims: vmap(f, d)(*t).pow(3).sum()  # noqa: E731
        torch.testing.assert_close(list(grad(whole, every)(*tensors)), expected)

        jacobians = [torch.autograd.functional.jacobian(f, tuple(t)) for f, t in ones]
        torch.testing.assert_close(list(vmap(jacrev(function, every), dims)(*tensors)), stacked(jacobians))

        twice = []
        for f, t in ones:
            first = torch.autograd.grad(f(*t).pow(3).sum(), t, create_graph=True)
            twice.append(torch.autograd.grad(sum(g.square().sum() for g in first), t))
        slope = grad(loss, every)
        penalty = lambda *t, g=slope: sum(x.square().sum() for x in g(*t))  # noqa: E731
        torch.testing.assert_close(list(vmap(grad(penalty, every), dims)(*tensors)), stacked(twice))


def test_unbatched_tensors_are_not_overwritten(device):
    x, weights = torch.ones(4, device=device), torch.ones(B, 4, device=device)
    match = "layer_norm_: expected x, which is written over, to be batched by vmap"
    with pytest.raises(RuntimeError, match=match):
        vmap(lambda w: matmuls.layer_norm_(x, w))(weights)
    assert (x == 1).all()


def test_bad_samples_are_refused(device):
    x = torch.ones(B, 4, device=device)
    with pytest.raises(RuntimeError, match="softmax: expected dim between -1 and 0, got 1"):
        vmap(lambda t: matmuls.softmax(t, 1))(x)
    with pytest.raises(RuntimeError, match="scaled_masked_softmax: expected x of at least two dimensions where causal"):
        vmap(lambda t: matmuls.scaled_masked_softmax(t, causal=True))(x)
    with pytest.raises(
        RuntimeError, match=r"scaled_masked_softmax: expected a mask whose shape broadcasts to x's \[4\]"
    ):
        vmap(matmuls.scaled_masked_softmax)(x, torch.ones(B, 2, 4, device=device))


def test_a_number_for_a_sample(device):
    x = torch.tensor([1.0, float("nan"), 3.0], device=device)
    for function in (matmuls.softmax, matmuls.softmax_, matmuls.scaled_masked_softmax):
        torch.testing.assert_close(vmap(function)(x.clone()), x / x, equal_nan=True)


# Operators of layouts and indices: integers, and copies of values that plans keep.
LAYOUTS = re.compile("mask_plan|csr_(check|chunks|filled|halves|packed|reads|regions|reorder|tile|transpose)|_prepare$")


@pytest.mark.parametrize("operator", operators(), ids=str)
def test_every_operator_has_a_batching_rule(operator):
    name = operator.name()
    if operator._overloadname == "default" and not LAYOUTS.search(name):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "FuncTorchBatched")
