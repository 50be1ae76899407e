"""Repeated products without and with gradients: calls of C++ alone, which see every write and replacement."""

import copy
import gc
import itertools

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from matmuls import plan, sparse_attention, spmm
from matmuls.nn import SparseLinear
from matmuls.sparse import ops, prepared, select, selector
from matmuls.sparse.plan import SparsePlan


@pytest.fixture
def no_python(monkeypatch):
    """Calling it forbids what Python chooses products by."""

    def choose(*args, **kwargs):
        raise AssertionError("a repeated call chose in Python")

    def forbid():
        for owner, name in ((SparsePlan, "_multiply"), (SparsePlan, "_expect_same_indices"), (ops, "default_op")):
            monkeypatch.setattr(owner, name, choose)

    return forbid


def layer_of(device, dtype=torch.float32, frozen=False, rows=30, columns=40):
    torch.manual_seed(0)
    layer = SparseLinear.from_linear(nn.Linear(columns, rows, device=device, dtype=dtype), sparsity=0.7)
    return layer.freeze() if frozen else layer


def truth_of(layer, x):
    bias = None if layer.bias is None else layer.bias.detach()
    return nn.functional.linear(x.detach(), layer._as_csr().to_dense(), bias)


def check_sums(y, layer, x):
    """Each element errs by at most what a float32 sum of n terms may: n roundings of the sum of absolute values."""
    w, bias = layer._as_csr().to_dense().double(), layer.bias.detach().double()
    exact, absolute = (nn.functional.linear(f(x.double()), f(w), f(bias)) for f in (torch.clone, torch.abs))
    terms = int((w != 0).sum(1).max()) + 2
    assert ((y.detach().double() - exact).abs() <= terms * 2.0**-24 * absolute).all()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers(dtype, lead, frozen, device, no_python):
    layer = layer_of(device, dtype, frozen)
    x = torch.randn(*lead, 40, device=device).to(dtype)
    modes = [(recording, to_x) for recording in (False, True) for to_x in (False, True)]
    bound = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for go, (recording, to_x) in itertools.product((layer.plan, no_python, lambda: None), modes):
        go()
        side = x.clone().requires_grad_(to_x)
        layer.zero_grad()
        with torch.set_grad_enabled(recording):
            y = layer(side)
        torch.testing.assert_close(y.detach(), truth_of(layer, x), atol=bound, rtol=bound)
        assert y.requires_grad == (recording and (to_x or not frozen))
        if not y.requires_grad:
            continue
        grad = torch.randn_like(y)
        y.backward(grad)
        if to_x:
            expected = grad @ layer._as_csr().to_dense()
            torch.testing.assert_close(side.grad, expected, atol=bound, rtol=bound)
        if not frozen:
            weight = layer._as_csr().to_dense()
            expected = (grad.reshape(-1, 30).mT @ x.reshape(-1, 40))[weight != 0]
            torch.testing.assert_close(layer.values.grad, expected, atol=4 * bound, rtol=bound)
            torch.testing.assert_close(layer.bias.grad, grad.reshape(-1, 30).sum(0), atol=bound, rtol=bound)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(7,), (2, 5), ()], ids=str)
def test_layers_by_a_product_that_is_transposed(lead, bias, device, no_python, monkeypatch):
    """As where a copy of the weight in another layout is the fastest."""
    monkeypatch.setattr(selector, "SMALLEST", 0)
    monkeypatch.setattr(selector.Selector, "_copies", lambda *_: [select.DENSE])
    monkeypatch.setattr(selector.Selector, "_estimates", lambda *_: {select.DENSE: 1.0})
    torch.manual_seed(0)
    layer = SparseLinear.from_linear(nn.Linear(40, 30, bias, device=device), sparsity=0.5).freeze()
    for turn, to_x in itertools.product(range(3), (False, True)):
        if turn == 1:
            no_python()
        x = torch.randn(*lead, 40, device=device, requires_grad=to_x)
        y = layer(x)
        torch.testing.assert_close(y.detach(), truth_of(layer, x), atol=1e-4, rtol=1e-4)
        if to_x:
            grad = torch.randn_like(y)
            y.backward(grad)
            torch.testing.assert_close(x.grad, grad @ layer._as_csr().to_dense(), atol=1e-4, rtol=1e-4)
    assert f": {select.DENSE}, by its size alone" in layer.plan().explain()
    monkeypatch.undo()
    layer.values.mul_(2)
    torch.testing.assert_close(layer(x).detach(), truth_of(layer, x), atol=1e-4, rtol=1e-4)


def test_training_repeats_without_python(device, no_python):
    """Neither a write to the values nor another storage of them makes Python choose again."""
    layer, x = layer_of(device), torch.randn(8, 40, device=device)
    for fused in (False, True):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=fused)
        for step in range(3):
            optimizer.zero_grad()
            y = layer(x)
            check_sums(y, layer, x)
            y.square().sum().backward()
            optimizer.step()
            if step == fused == 0:
                no_python()
    layer.values.data = 2 * layer.values.data
    check_sums(layer(x), layer, x)


def test_what_a_layer_notices(device):
    """Other parameters, buffers, dtypes, and the end of a promise."""
    layer, x = layer_of(device), torch.randn(8, 40, device=device)

    def expect():
        for _ in range(2):
            torch.testing.assert_close(layer(x).detach(), truth_of(layer, x))

    expect()
    layer.values = nn.Parameter(2 * layer.values.detach())
    expect()
    layer.bias = None
    expect()
    layer.bias = nn.Parameter(torch.ones(30, device=device))
    expect()
    layer.columns.copy_(layer.columns.flip(0))
    expect()
    layer.columns, layer.offsets = layer.columns.flip(0).long(), layer.offsets.long()
    expect()
    with torch.no_grad():
        layer.columns += 100
    with pytest.raises(ValueError, match="expected columns from 0 to 39"):
        layer(x)
    layer.columns -= 100
    expect()
    twin = copy.deepcopy(layer)
    twin.values.data.zero_()
    torch.testing.assert_close(twin(x), layer.bias.expand(8, 30))
    expect()
    layer.double()
    with pytest.raises(RuntimeError, match="expected values"):
        layer(x)
    x = x.double()
    expect()
    layer.freeze()
    expect()
    layer.values.requires_grad_()
    with torch.no_grad():
        layer(x)
    assert not layer._is_frozen
    layer.values.data.mul_(3)  # as an optimizer that leaves versions as they are
    expect()


def test_second_derivatives_of_a_layer(device):
    layer = layer_of(device, torch.float64, rows=4, columns=5)
    x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)

    def function(values, bias, x):
        return torch.func.functional_call(layer, {"values": values, "bias": bias}, x)

    leaves = [t.detach().clone().requires_grad_() for t in (layer.values, layer.bias, x)]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def matrix(device, layout="csr"):
    torch.manual_seed(0)
    dense = torch.randn(30, 40) * (torch.rand(30, 40) < 0.3)
    return dense.to(device), getattr(dense.to(device), f"to_sparse_{layout}")()


@pytest.mark.parametrize("to_a", [False, True])
@pytest.mark.parametrize("kind", ["spmm", "plan", "vector", "x @ plan"])
def test_products(kind, to_a, device, no_python):
    dense, a = matrix(device)
    a.requires_grad_(to_a)
    made = plan(a)
    b = torch.randn(40, 6, device=device)
    if kind == "vector":
        b = b[:, 0].contiguous()
    product = {"spmm": lambda b: spmm(a, b), "x @ plan": lambda b: (b.mT @ made.T).mT}.get(kind, lambda b: made @ b)
    if kind == "x @ plan" and to_a:
        pytest.skip("values that are read anew are not prepared for x @ plan")
    for turn, to_b in itertools.product(range(3), (False, True)):
        if turn == 1:
            no_python()
        leaf = b.clone().requires_grad_(to_b)
        a.grad = None
        y = product(leaf)
        torch.testing.assert_close(y.detach(), dense @ b)
        if y.requires_grad:
            y.sum().backward()
        if to_b:
            torch.testing.assert_close(leaf.grad, dense.sum(0).view(-1, *([1] * (b.dim() - 1))).expand(b.shape))
        if to_a:
            torch.testing.assert_close(a.grad.to_dense()[dense != 0], b.view(40, -1).sum(1).expand(30, 40)[dense != 0])


def test_spmm_of_a_tensor_sees_its_changes(device):
    dense, a = matrix(device)
    b = torch.randn(40, 6, device=device)

    def expect(factor=1):
        for _ in range(2):
            torch.testing.assert_close(spmm(a, b).detach(), factor * dense @ b)

    expect()
    a.values().mul_(2)
    expect(2)
    a.values().data.mul_(2)
    expect(4)
    a.copy_(dense.to_sparse_csr())
    expect()
    a.col_indices().copy_((a.col_indices() + 1) % 40)
    dense = torch.sparse_csr_tensor(a.crow_indices(), a.col_indices(), a.values(), a.shape).to_dense()
    expect()
    a.requires_grad_()
    spmm(a, b).sum().backward()
    assert a.grad is not None
    with torch.no_grad():
        expect()
        a.col_indices().fill_(40)
    with pytest.raises(ValueError, match="expected columns from 0 to 39"):
        spmm(a, b)


def test_prepared_calls_die_with_their_tensor():
    _, a = matrix("cpu")
    storage = a.col_indices().untyped_storage()._weak_ref()
    spmm(a, torch.randn(40, 6))
    assert id(a) in prepared._of_tensors
    key = id(a)
    del a
    gc.collect()
    assert key not in prepared._of_tensors
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


def test_inference_mode(no_python):
    layer, x = layer_of("cpu"), torch.randn(8, 40)
    with torch.inference_mode():
        x = x.clone()
        y = layer(x)
        no_python()
        assert torch.equal(layer(x), y)
    torch.testing.assert_close(y.clone(), truth_of(layer, x.clone()))


def test_attention_of_a_plan_that_was_written_to(device):
    q = torch.randn(30, 8, device=device)
    a = matrix(device)[1]
    made = plan(a)
    expected = sparse_attention(q, q.new_ones(40, 8), torch.randn(40, 8, device=device), made)
    assert expected.shape == (30, 8)
    a.col_indices().copy_((a.col_indices() + 1) % 40)
    a.values().mul_(2)
    with pytest.raises(ValueError, match="expected the indices that the plan was made of"):
        sparse_attention(q, q.new_ones(40, 8), torch.randn(40, 8, device=device), made)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 40), (2, 3, 40), (40,)], ids=str)
@pytest.mark.parametrize("kernel", [None, "dense"])
def test_results_of_layers_are_no_views(kernel, shape, bias, device, monkeypatch):
    """FSDP warns about a module that returns one."""
    if kernel is not None:
        monkeypatch.setattr(selector, "SMALLEST", 0)
    layer = SparseLinear.from_linear(nn.Linear(40, 30, bias=bias, device=device), sparsity=0.7)
    for frozen in (False, True):
        layer = layer.freeze() if frozen else layer
        x = torch.randn(shape, device=device)
        for recording in (False, True):
            with torch.set_grad_enabled(recording):
                for _ in range(3):
                    y = layer(x)
                    assert not y._is_view()
                    torch.testing.assert_close(y.detach(), truth_of(layer, x), rtol=1e-4, atol=1e-5)


class _Counted(torch.Tensor):
    """Counts the calls of our operators that torch offers it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.calls += "custom_mm" in str(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class _Listed(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += "custom_mm" in str(function)
        return function(*args, **(kwargs or {}))


def test_repeated_calls_go_to_modes_and_subclasses_that_override_functions(device):
    a = torch.randn(30, 40, device=device)
    a = a.where(a > 0.5, 0.0).to_sparse_csr()
    b, made = torch.randn(40, 8, device=device), plan(a)
    for call in (lambda: spmm(a, b), lambda: made @ b):
        expected = call()
        for _ in range(3):
            with _Listed() as mode:
                assert torch.equal(call(), expected)
            assert mode.calls > 0
    of_subclass = made.with_values(a.values().as_subclass(_Counted))
    for _ in range(3):
        before = _Counted.calls
        assert type(of_subclass @ b) is _Counted
        assert _Counted.calls > before
    layer = SparseLinear.from_linear(nn.Linear(40, 30, device=device), sparsity=0.7)
    bias = layer.bias.detach().as_subclass(_Counted)
    del layer.bias
    layer.bias = bias
    for _ in range(3):
        assert type(layer(b.T)) is _Counted


def test_a_default_device_leaves_repeated_calls_in_cpp(device, no_python):
    a = torch.randn(30, 40, device=device)
    a = a.where(a > 0.5, 0.0).to_sparse_csr()
    b, made = torch.randn(40, 8, device=device), plan(a)
    expected = spmm(a, b), made @ b
    no_python()
    with torch.device(device):
        assert torch.equal(spmm(a, b), expected[0])
        assert torch.equal(made @ b, expected[1])
