"""matmuls.nn.SparseLinear: pruning, forward, training, saving, moving and copying."""

import copy
import io
import re
import threading

import pytest
import torch
from torch import nn

from matmuls.nn import SparseLinear
from matmuls.sparse import selector


def layer(device, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(40, 30, bias, device=device, dtype=dtype)


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_pruned_linear_layer(lead, bias, device):
    linear = layer(device, bias)
    sparse = SparseLinear.from_linear(linear, sparsity=0.7)
    assert sparse.values.numel() == 360
    pruned = sparse.weight.to_dense()
    kept = pruned != 0
    assert torch.equal(pruned[kept], linear.weight.detach()[kept])
    assert linear.weight.detach()[~kept].abs().max() <= pruned[kept].abs().min()
    x = torch.randn(*lead, 40, device=device)
    y = sparse(x)
    assert y.shape == (*lead, 30)
    torch.testing.assert_close(y, nn.functional.linear(x, pruned, linear.bias))


def test_a_transposed_weight(device):
    linear = layer(device)
    expected = SparseLinear.from_linear(linear, sparsity=0.7)
    linear.weight = nn.Parameter(linear.weight.detach().mT.contiguous().mT)
    assert torch.equal(SparseLinear.from_linear(linear, sparsity=0.7).weight.to_dense(), expected.weight.to_dense())


@pytest.mark.parametrize("lead", [(), (2,), (0, 3)], ids=str)
def test_no_input_features(lead, device):
    sparse = SparseLinear(0, 3, device=device)
    nn.init.ones_(sparse.bias)
    assert torch.equal(sparse(torch.ones(*lead, 0, device=device)), torch.ones(*lead, 3, device=device))


def test_frozen_parameters_and_nan_are_kept(device):
    linear = layer(device)
    linear.bias.requires_grad_(False)
    linear.weight.data[0, 0] = float("nan")
    sparse = SparseLinear.from_linear(linear, threshold=0.1)
    assert not sparse.bias.requires_grad
    assert sparse.weight.to_dense()[0, 0].isnan()


@pytest.mark.parametrize("absent", ["offsets", "columns", "values"])
@pytest.mark.parametrize("strict", [False, True])
def test_an_incomplete_state_dict_changes_nothing(absent, strict, device):
    sparse, x = SparseLinear.from_linear(layer(device), sparsity=0.3), torch.randn(2, 40, device=device)
    before, values = sparse(x), sparse.values
    state = SparseLinear.from_linear(layer(device), sparsity=0.7).state_dict()
    state.pop(absent)
    if strict:
        with pytest.raises(RuntimeError, match=f'Missing .*"{absent}"'):
            sparse.load_state_dict(state)
    else:
        assert sparse.load_state_dict(state, strict=False).missing_keys == [absent]
    assert sparse.values is values
    assert torch.equal(sparse(x), before)


def test_another_default_device(device):
    sparse, x = SparseLinear.from_linear(layer(device), sparsity=0.5), torch.randn(4, 40, device=device)
    expected = nn.functional.linear(x, sparse.weight.to_dense(), sparse.bias)
    sparse._plan = None
    with torch.device("meta"):
        y = sparse(x)
    torch.testing.assert_close(y, expected)


def test_threshold_and_zeros(device):
    linear = layer(device)
    for sparse, kept in (
        (SparseLinear.from_linear(linear, threshold=0.1), linear.weight.detach().abs() > 0.1),
        (SparseLinear.from_linear(linear), linear.weight.detach() != 0),
        (SparseLinear.from_linear(linear, sparsity=1.0), torch.zeros(30, 40, dtype=torch.bool, device=device)),
    ):
        assert torch.equal(sparse.weight.to_dense(), linear.weight.detach() * kept)
        sparse(torch.ones(3, 40, device=device))
    for options, message in (
        ({"sparsity": 1.5}, "sparsity from 0 to 1, got 1.5"),
        ({"sparsity": 0.5, "threshold": 0.1}, "sparsity or threshold, got both"),
    ):
        with pytest.raises(ValueError, match=f"SparseLinear: expected {message}"):
            SparseLinear.from_linear(linear, **options)
    for shape in ([3, 41], []):
        with pytest.raises(RuntimeError, match=re.escape(f"SparseLinear: expected x of shape [..., 40], got {shape}")):
            sparse(torch.ones(shape, device=device))


def test_gradients(device):
    sparse = SparseLinear.from_linear(layer(device, dtype=torch.float64), sparsity=0.5)
    x = torch.randn(4, 40, dtype=torch.float64, device=device, requires_grad=True)

    def function(values, bias, x):
        return torch.func.functional_call(sparse, {"values": values, "bias": bias}, x)

    leaves = [t.detach().clone().requires_grad_() for t in (sparse.values, sparse.bias, x)]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    sparse(x).square().sum().backward()
    pruned = sparse.weight.to_dense().requires_grad_()
    nn.functional.linear(x.detach(), pruned, sparse.bias.detach()).square().sum().backward()
    torch.testing.assert_close(sparse.values.grad, pruned.grad[pruned != 0])
    assert sparse.bias.grad is not None


@pytest.mark.parametrize("fused", [False, True])
def test_training_follows_the_values(fused, device, monkeypatch):
    monkeypatch.setattr(selector, "SMALLEST", 0)
    sparse = SparseLinear.from_linear(layer(device), sparsity=0.9)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=1.0, fused=fused)
    x, target = torch.randn(64, 40, device=device), torch.randn(64, 30, device=device)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (sparse(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            torch.testing.assert_close(sparse(x), nn.functional.linear(x, sparse.weight.to_dense(), sparse.bias))
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("gradient", [True, False])
def test_another_storage_of_the_values(gradient, device, monkeypatch):
    """At the address of the one before, or elsewhere."""
    monkeypatch.setattr(selector, "SMALLEST", 0)
    sparse = SparseLinear.from_linear(layer(device), sparsity=0.5).requires_grad_(gradient)
    x = torch.randn(64, 40, device=device)
    with torch.no_grad():
        for _ in range(20):
            sparse(x)
            for _ in range(2):
                sparse.values.data = torch.randn_like(sparse.values)
            torch.testing.assert_close(sparse(x), nn.functional.linear(x, sparse.weight.to_dense(), sparse.bias))


def test_state_dict(device):
    sparse = SparseLinear.from_linear(layer(device), sparsity=0.8)
    x = torch.randn(3, 40, device=device)
    expected = sparse(x)
    file = io.BytesIO()
    torch.save(sparse.state_dict(), file)
    file.seek(0)
    for other in (SparseLinear(40, 30, device=device), SparseLinear.from_linear(layer(device), sparsity=0.2)):
        other(x).sum().backward()  # creates a gradient of another size
        file.seek(0)
        other.load_state_dict(torch.load(file, map_location=device))
        assert torch.equal(other(x), expected)
        other(x).sum().backward()
        assert other.values.grad.shape == sparse.values.shape
        assert "sparsity=0.8" in repr(other)
    bad = sparse.state_dict()
    bad["columns"] = bad["columns"] + 40
    other.load_state_dict(bad)
    with pytest.raises(ValueError, match="plan: expected columns from 0 to 39"):
        other(x)


def test_copies_and_dtypes(device):
    sparse = SparseLinear.from_linear(layer(device), sparsity=0.5)
    x = torch.randn(3, 40, device=device)
    expected = sparse(x)
    assert torch.equal(copy.deepcopy(sparse)(x), expected)
    torch.testing.assert_close(sparse.double()(x.double()), expected.double(), atol=1e-5, rtol=1e-5)
    compiled = torch.compile(copy.deepcopy(sparse).float(), backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert SparseLinear.from_linear(layer(device), sparsity=0.5)(x).dtype == torch.bfloat16


def test_freeze_beside_a_forward_pass_that_makes_a_plan(monkeypatch):
    """The plan is made of what freeze sets step by step: neither sees half of the other."""
    sparse = SparseLinear.from_linear(layer("cpu"), sparsity=0.7)
    x = torch.randn(5, 40)
    expected = SparseLinear.from_linear(layer("cpu"), sparsity=0.7)(x)
    begun, end = threading.Event(), threading.Event()
    freezing = threading.Thread(target=sparse.freeze)
    as_csr, drop = sparse._as_csr, sparse._drop_plan

    def in_the_middle(*parts):  # of making a plan
        freezing.start()
        begun.wait(0.3)
        return as_csr(*parts)

    def dropped():
        if threading.current_thread() is freezing:
            begun.set()
            end.wait(0.3)
        drop()

    monkeypatch.setattr(sparse, "_as_csr", in_the_middle)
    monkeypatch.setattr(sparse, "_drop_plan", dropped)
    try:
        torch.testing.assert_close(sparse(x), expected)
    finally:
        end.set()
        freezing.join()
    monkeypatch.undo()
    assert sparse._is_frozen
    assert not sparse.values.requires_grad
    torch.testing.assert_close(sparse(x), expected)


def test_freeze_is_not_undone_by_a_forward_pass_beside_it(monkeypatch):
    sparse = SparseLinear.from_linear(layer("cpu"), sparsity=0.7)
    drop, passes = sparse._drop_plan, []

    def beside():  # a forward pass in another thread, in the middle of freeze
        drop()
        if not passes:
            passes.append(threading.Thread(target=sparse, args=(torch.randn(5, 40),)))
            passes[0].start()
            passes[0].join(0.3)

    monkeypatch.setattr(sparse, "_drop_plan", beside)
    sparse.freeze()
    passes[0].join()
    assert sparse._is_frozen
    assert sparse.plan()._selector.constant
