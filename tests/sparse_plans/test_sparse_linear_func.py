"""SparseLinear under torch.func: layers stacked into an ensemble, gradients for each sample, vmap over inputs."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

import matmuls
from matmuls.sparse import ops

OUT, IN, ROWS = 5, 8, 6


def layer(device, seed=0):
    torch.manual_seed(seed)
    dense = torch.nn.Linear(IN, OUT, dtype=torch.float64, device=device)
    return matmuls.nn.SparseLinear.from_linear(dense, sparsity=0.5)


def ensemble(device, count=3):
    """Layers with the same pattern and other values."""
    layers = [layer(device)]
    for i in range(1, count):
        other = copy.deepcopy(layers[0])
        with torch.no_grad():
            other.values.mul_(i + 1).add_(0.1)
            other.bias.sub_(i)
        layers.append(other)
    return layers


def inputs(device, *leading):
    return torch.randn(*leading, ROWS, IN, dtype=torch.float64, device=device)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("each", [False, True])
def test_stacked_layers(called, each, device):
    layers = ensemble(device)
    x = inputs(device, *([3] * each))
    if called:  # so that calls of the template are prepared
        for one in layers:
            one(x[0] if each else x)
    template = layers[0]

    def call(state, x):
        return functional_call(template, state, (x,))

    for _ in range(2):
        y = vmap(call, (0, 0 if each else None))(stack_module_state(layers), x)
        expected = torch.stack([one(x[i] if each else x) for i, one in enumerate(layers)])
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(template(x), x @ template.weight.to_dense().T + template.bias)


def test_gradients_of_stacked_layers(device):
    layers, x = ensemble(device), inputs(device)
    parameters, buffers = stack_module_state(layers)

    def loss(parameters, buffers, x):
        return functional_call(layers[0], (parameters, buffers), (x,)).square().sum()

    found = vmap(grad(loss, argnums=(0, 2)), (0, 0, None))(parameters, buffers, x)
    summed = grad(lambda p: vmap(loss, (0, 0, None))(p, buffers, x).sum())(parameters)
    for i, one in enumerate(layers):
        own = x.clone().requires_grad_()
        values, bias, to_x = torch.autograd.grad(one(own).square().sum(), (one.values, one.bias, own))
        torch.testing.assert_close(found[0]["values"][i], values)
        torch.testing.assert_close(found[0]["bias"][i], bias)
        torch.testing.assert_close(found[1][i], to_x)
        torch.testing.assert_close(summed["values"][i], values)
    vmap(loss, (0, 0, None))(parameters, buffers, x).sum().backward()  # the stack's own gradients
    torch.testing.assert_close(parameters["values"].grad, summed["values"])


@pytest.mark.parametrize("known", [False, True])
def test_gradients_of_samples(known, device):
    one, x = layer(device), inputs(device)
    if known:
        one(x)
    parameters = dict(one.named_parameters())

    def loss(parameters, x):
        return functional_call(one, parameters, (x,)).square().sum()

    found = vmap(grad(loss), (None, 0))(parameters, x)
    for i in range(ROWS):
        values, bias = torch.autograd.grad(one(x[i]).square().sum(), (one.values, one.bias))
        torch.testing.assert_close(found["values"][i], values)
        torch.testing.assert_close(found["bias"][i], bias)
    torch.testing.assert_close(vmap(one)(x), one(x))
    weight = one.weight.to_dense()
    torch.testing.assert_close(jacrev(one)(x[0]), weight)
    torch.testing.assert_close(one(x), x @ weight.T + one.bias)


def test_two_levels_and_other_dimensions(device):
    layers, x = ensemble(device, 4), inputs(device)
    parameters, buffers = stack_module_state(layers)
    nested = (
        {name: t.unflatten(0, (2, 2)).movedim(1, -1) for name, t in state.items()} for state in (parameters, buffers)
    )

    def call(parameters, buffers):
        return functional_call(layers[0], (parameters, buffers), (x,))

    y = vmap(vmap(call, (-1, -1)), (0, 0))(*nested)
    torch.testing.assert_close(y.flatten(0, 1), torch.stack([one(x) for one in layers]))


def test_layers_of_other_patterns_are_refused(device):
    layers, x = [layer(device, seed) for seed in (0, 1)], inputs(device)
    assert not torch.equal(layers[0].columns, layers[1].columns)

    def call(state):
        return functional_call(layers[0], state, (x,))

    expected = "expected stacked layers of one pattern, with equal offsets and columns, got different ones"
    with pytest.raises(ValueError, match=f"SparseLinear: {expected}"):
        vmap(call)(stack_module_state(layers))
    torch.testing.assert_close(layers[0](x), x @ layers[0].weight.to_dense().T + layers[0].bias)


def test_bad_indices_of_a_stack_are_refused(device):
    layers, x = ensemble(device), inputs(device)
    for one in layers:
        one.columns[0] = IN
    with pytest.raises(ValueError, match="expected columns from 0 to 7 at nonzero 0, got 8"):
        vmap(lambda state: functional_call(layers[0], state, (x,)))(stack_module_state(layers))


def test_a_stack_is_compared_once_and_after_a_write(device, monkeypatch):
    layers, x = ensemble(device), inputs(device)
    made = []
    monkeypatch.setattr(matmuls.nn, "plan_of", lambda *args, **kwargs: made.append(1) or ops.plan_of(*args, **kwargs))
    parameters, buffers = stack_module_state(layers)

    def call(parameters, buffers):
        return functional_call(layers[0], (parameters, buffers), (x,))

    for _ in range(3):
        vmap(call)(parameters, buffers)
    assert len(made) == 1
    buffers["columns"][1] = buffers["columns"][1].flip(0)
    with pytest.raises(ValueError, match="expected stacked layers of one pattern"):
        vmap(call)(parameters, buffers)


def test_a_frozen_layer(device):
    layers, x = [one.freeze() for one in ensemble(device)], inputs(device)
    with torch.no_grad():
        y = vmap(lambda state: functional_call(layers[0], state, (x,)))(stack_module_state(layers))
        torch.testing.assert_close(y, torch.stack([one(x) for one in layers]))
