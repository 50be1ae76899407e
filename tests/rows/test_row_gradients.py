"""Softmax and the norms in place: autograd, views, inference tensors, what is saved for the gradient."""

import gc
import weakref

import pytest
import torch

import matmuls
from common.row_cases import SCALE, draw, layer_norm, rms_norm
from matmuls.timing import peak_memory

# --------------------------------------------------------------------------------- in place: what autograd must see

IN_PLACE = {
    "softmax_": (matmuls.softmax_, lambda x: x.softmax(-1)),
    "layer_norm_": (matmuls.layer_norm_, layer_norm),
    "layer_norm_ affine": (
        lambda x: matmuls.layer_norm_(x, x.detach()[0] * 0 + 2, x.detach()[0] * 0 + 1),
        lambda x: layer_norm(x) * 2 + 1,
    ),
    "rms_norm_": (matmuls.rms_norm_, rms_norm),
    "scaled_masked_softmax": (
        lambda x: matmuls.scaled_masked_softmax(x, None, SCALE, inplace=True),
        lambda x: (x * SCALE).softmax(-1),
    ),
    "inplace_softmax": (lambda x: matmuls.inplace_softmax(x, *x.shape), lambda x: x.softmax(-1)),
    "layernorm": (lambda x: matmuls.layernorm(x, *x.shape), layer_norm),
}
in_place = pytest.mark.parametrize(("function", "reference"), IN_PLACE.values(), ids=IN_PLACE)


@in_place
def test_x_is_returned_and_its_version_increases(function, reference, device):
    x = draw(4, 9, device=device)
    expected, version = reference(x), x._version
    assert function(x) is x
    assert x._version > version
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("name", [name for name in IN_PLACE if name != "layer_norm_ affine"])
def test_overwriting_the_result_raises_in_backward(name, device):
    """Backward needs it."""
    leaf = draw(4, 9, device=device).requires_grad_()
    x = IN_PLACE[name][0](leaf * 1)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_norms_with_weight_allow_overwriting_the_result(device):
    """They save the normalized rows separately."""
    leaf, weight = draw(4, 9, device=device).requires_grad_(), draw(9, device=device)
    x = matmuls.layer_norm_(leaf * 1, weight)
    x.mul_(2).sum().backward()
    expected = leaf.detach().requires_grad_()
    layer_norm(expected, weight).mul(2).sum().backward()
    torch.testing.assert_close(leaf.grad, expected.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
@in_place
def test_overwriting_a_saved_tensor_raises_in_backward(function, reference, mode, device):
    x, saved = draw(4, 9, device=device).requires_grad_(), draw(4, 9, device=device, seed=1)
    y = x * saved
    with mode():
        function(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "write", [lambda x: matmuls.softmax(x * 1, out=x), lambda x: matmuls.softmax_backward_(x, x * 1)]
)
def test_writes_to_out_are_seen_by_autograd(write, device):
    x, saved = draw(4, 9, device=device).requires_grad_(), draw(4, 9, device=device, seed=1)
    y = x * saved
    with torch.inference_mode():
        write(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@in_place
def test_a_leaf_is_refused_before_any_write(function, reference, device):
    x = draw(4, 9, device=device).requires_grad_()
    before, version = x.detach().clone(), x._version
    for t in (x, x.view(4, 9)):
        with pytest.raises(RuntimeError, match=r"leaf Variable that requires grad .*is being used in an in-place op"):
            function(t)
    assert torch.equal(x, before)
    assert x._version == version
    with torch.no_grad():
        assert function(x) is x
    torch.testing.assert_close(x, reference(before))


def test_inference_tensors_are_refused_before_any_write(device):
    """If a gradient is recorded: autograd cannot save them."""
    with torch.inference_mode():
        x, weight = draw(4, 9, device=device), draw(9, device=device, seed=1)
    before, leaf = x.clone(), draw(9, device=device).requires_grad_()
    for write in (
        lambda: matmuls.layer_norm_(x, leaf),
        lambda: matmuls.rms_norm_(x, leaf),
        lambda: matmuls.scaled_masked_softmax(x, leaf, inplace=True),
        lambda: matmuls.matmul_(x, draw(9, 9, device=device).requires_grad_(), keep_input=True),
    ):
        with pytest.raises(
            RuntimeError, match=r"expected tensors that autograd knows, .* got one made under torch.inf"
        ):
            write()
    assert torch.equal(x, before)
    x = leaf * 1
    with pytest.raises(RuntimeError, match="layer_norm_: expected tensors that autograd knows"):
        matmuls.layer_norm_(x, weight)
    assert torch.equal(x, leaf)


VIEWS = {
    "another shape": lambda t: t.view(8, 9),
    "some rows": lambda t: t[1:3],
    "every other column": lambda t: t[:, ::2],
    "transposed": lambda t: t.mT,
}


@in_place
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_a_non_leaf(function, reference, view, device):
    """After a write through the view, the base has the new values and the correct graph."""
    leaf, weights = draw(4, 18, device=device).requires_grad_(), draw(4, 18, device=device, seed=1)
    base, expected = leaf * 1, leaf * 1
    if not view(base).is_contiguous() and function in (IN_PLACE["inplace_softmax"][0], IN_PLACE["layernorm"][0]):
        pytest.skip("rows and columns are counted by the caller, in contiguous memory")
    function(view(base))
    view(expected).copy_(reference(view(expected).clone()))
    torch.testing.assert_close(base, expected)
    grads = [torch.autograd.grad((t * weights).sum(), leaf)[0] for t in (base, expected)]
    torch.testing.assert_close(*grads)


@in_place
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_dropped_graph_is_freed(function, reference, view, device):
    """Without a backward: tensors saved for x must not keep alive the graph that produced x."""
    leaf = draw(4, 18, device=device).requires_grad_()
    base = leaf * 1
    if not view(base).is_contiguous() and function in (IN_PLACE["inplace_softmax"][0], IN_PLACE["layernorm"][0]):
        pytest.skip("rows and columns are counted by the caller, in contiguous memory")
    held = torch.nn.Module()
    base.register_hook(lambda grad, held=held: None)
    seen = weakref.ref(held)
    function(view(base))
    del base, held
    gc.collect()
    assert seen() is None


@in_place
def test_compiled_over_an_input_of_the_graph(function, reference, device):
    """Gradients flow through the in-place write."""
    torch._dynamo.reset()
    leaf, grad = draw(4, 9, device=device).requires_grad_(), draw(4, 9, device=device, seed=1)
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        (found,) = torch.autograd.grad(f(leaf * 1), leaf, grad)
        torch.testing.assert_close(found, torch.autograd.grad(reference(leaf), leaf, grad)[0])


@in_place
def test_batched_gradients(function, reference, device):
    leaf, grads = draw(4, 9, device=device).requires_grad_(), draw(3, 4, 9, device=device, seed=1)
    found, expected = (
        torch.autograd.grad(f(leaf * 1).sin(), leaf, grads, is_grads_batched=True)[0] for f in (function, reference)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("norm", [matmuls.layer_norm_, matmuls.rms_norm_], ids=lambda f: f.__name__)
def test_a_norm_of_a_view_is_differentiable_once(norm, device):
    leaf = draw(4, 18, device=device, dtype=torch.float64).requires_grad_()
    reference = layer_norm if norm is matmuls.layer_norm_ else rms_norm

    def first(function, x):
        (grad,) = torch.autograd.grad(function(x).pow(3).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    torch.testing.assert_close(first(norm, leaf * 1), first(reference, leaf * 1))
    match = f"{norm.__name__}: expected first derivatives only, x being a view of another tensor"
    with pytest.raises(RuntimeError, match=match):
        first(norm, (leaf * 1).view(8, 9))


@in_place
def test_backward_twice_through_one_graph(function, reference, device):
    """Backward does not overwrite saved tensors."""
    leaf, grad = draw(4, 9, device=device).requires_grad_(), draw(4, 9, device=device, seed=1)
    y = function(leaf * 1) * 1
    first, second = (torch.autograd.grad(y, leaf, grad, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.autograd.grad(reference(leaf), leaf, grad)[0])


SOFTMAXES = [
    matmuls.softmax,
    matmuls.softmax_,
    matmuls.scaled_masked_softmax,
    lambda x: matmuls.scaled_masked_softmax(x, inplace=True),
]
softmaxes = pytest.mark.parametrize("softmax", SOFTMAXES, ids=["softmax", "softmax_", "masked", "masked in place"])


def test_a_softmax_of_a_view_is_differentiable_twice(device):
    leaf = draw(4, 18, device=device, dtype=torch.float64).requires_grad_()

    def second(function):
        base = leaf * 1
        function(base.view(8, 9)[1:4])
        (grad,) = torch.autograd.grad(base.pow(3).sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    expected = second(lambda x: x.copy_(x.clone().softmax(-1)))
    torch.testing.assert_close(second(matmuls.softmax_), expected)
    torch.testing.assert_close(second(lambda x: matmuls.scaled_masked_softmax(x, inplace=True)), expected)


@softmaxes
def test_a_gradient_that_the_caller_holds_is_not_overwritten(softmax, device):
    leaf, grad = draw(4, 9, device=device).requires_grad_(), draw(4, 9, device=device, seed=1)
    before = grad.clone()
    torch.autograd.grad(softmax(leaf * 1), leaf, grad)
    torch.autograd.grad(softmax(leaf * 1).view(-1), leaf, grad.view(-1))
    assert torch.equal(grad, before)


@softmaxes
def test_a_shared_gradient_is_not_overwritten(softmax, device):
    """The gradient of the other summand is the same tensor or shares its memory; also gradients of hooks and retained
    ones.
    """
    leaf, other = (draw(4, 9, device=device, seed=i).requires_grad_() for i in range(2))
    weights = draw(4, 9, device=device, seed=2)
    for join in (lambda y, z: y + z, lambda y, z: z + y, lambda y, z: (y.view(-1) + z.view(-1)).view(4, 9)):
        seen = []
        y = softmax(leaf * 1)
        y.register_hook(seen.append)
        y.retain_grad()
        (join(y, other * 1) * weights).sum().backward()
        assert torch.equal(other.grad, weights)
        assert torch.equal(seen[0], weights)
        assert torch.equal(y.grad, weights)
        (expected,) = torch.autograd.grad((torch.softmax(leaf, -1) * weights).sum(), leaf)
        torch.testing.assert_close(leaf.grad, expected)
        leaf.grad = other.grad = None


def test_softmax_backward_in_place_is_refused_under_autograd(device):
    y = draw(4, 9, device=device).requires_grad_()
    for args in ((y * 1, y.detach()), (y.detach().clone(), y)):
        before = args[0].detach().clone()
        with pytest.raises(RuntimeError, match="softmax_backward_: expected no gradient to be recorded"):
            matmuls.softmax_backward_(*args)
        assert torch.equal(args[0], before)


# ------------------------------------------------------------------------------------------------------ what is kept


def kept_by(function):
    """The tensors that function saves for backward."""
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return kept


@pytest.mark.parametrize("norm", [matmuls.layer_norm_, matmuls.rms_norm_], ids=lambda f: f.__name__)
def test_a_norm_without_weight_saves_its_result_and_a_number_per_row(norm, device):
    x = draw(64, 100, device=device).requires_grad_() * 1
    kept = kept_by(lambda: norm(x))
    assert sorted(tuple(t.shape) for t in kept) == [(64,), (64, 100)]
    assert any(t.data_ptr() == x.data_ptr() for t in kept)
    y = draw(64, 100, device=device).requires_grad_() * 1
    assert 64 * 4 <= peak_memory(lambda: norm(y), device) <= 64 * 4 + 512


def test_a_norm_with_weight_saves_the_normalized_rows(device):
    x, weight = draw(64, 100, device=device).requires_grad_() * 1, draw(100, device=device).requires_grad_()
    kept = kept_by(lambda: matmuls.layer_norm_(x, weight))
    assert sorted(tuple(t.shape) for t in kept) == [(64,), (64, 100), (100,)]
    assert all(t.data_ptr() != x.data_ptr() for t in kept)


@softmaxes
def test_a_softmax_saves_only_its_result(softmax, device):
    x = draw(4, 9, device=device).requires_grad_() * 1
    results = []
    kept = kept_by(lambda: results.append(softmax(x)))
    assert [t.data_ptr() for t in kept] == [results[0].data_ptr()]


def test_a_scale_with_a_gradient_is_refused(device):
    """A missing gradient would be silent: backward saves the result only."""
    x, scale = draw(4, 9, device=device).requires_grad_(), torch.tensor(0.5, requires_grad=True)
    expected = "scaled_masked_softmax: expected a scale without a gradient"
    for function in (matmuls.scaled_masked_softmax, matmuls.scaled_masked_softmax_forward):
        with pytest.raises(RuntimeError, match=expected):
            function(x, None, scale)
        torch.testing.assert_close(function(x, None, scale.detach()), (0.5 * x).softmax(-1))
    with torch.no_grad():
        torch.testing.assert_close(matmuls.FusedSoftmax.apply(x, None, scale), (0.5 * x).softmax(-1))
    with pytest.raises(RuntimeError, match=expected):
        matmuls.FusedSoftmax.apply(x, None, scale).sum().backward()


def test_frozen_tensors_have_no_gradient(device):
    for needed in range(4):
        tensors = [
            draw(*shape, device=device).requires_grad_(i == needed)
            for i, shape in enumerate([(4, 9), (9,), (9,), (4, 9)])
        ]
        x, weight, bias, residual = tensors
        matmuls.layer_norm_(x * 1, weight, bias, residual=residual).sum().backward()
        assert [t.grad is not None for t in tensors] == [i == needed for i in range(4)]
