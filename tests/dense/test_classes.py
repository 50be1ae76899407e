"""The classes whose `apply` is a product, and the short way from Python to the operator."""

import inspect

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import custom_mm
import matmuls
from common.row_cases import draw

FOUR = [matmuls.cublasMM, matmuls.cublasTransaMM, matmuls.cublasTransbMM, matmuls.cublasTransabMM]


@pytest.mark.parametrize("function", FOUR, ids=lambda f: f.__name__)
def test_the_classes_are_autograd_functions(function):
    assert issubclass(function, torch.autograd.function.InplaceFunction)

    calls = []

    class Counted(function):
        @staticmethod
        def forward(ctx, a, b):
            calls.append("forward")
            return function.forward(ctx, a, b)

        @staticmethod
        def backward(ctx, grad):
            calls.append("backward")
            return function.backward(ctx, grad)

    class Renamed(function):
        pass

    a, b = draw(4, 4, device="cpu").requires_grad_(), draw(4, 4, device="cpu", seed=1).requires_grad_()
    results = []
    for one in (function, Counted, Renamed):
        y = one.apply(a, b)
        results.append((y.detach(), *torch.autograd.grad(y.sum(), (a, b))))
        if one is not function:
            assert type(y.grad_fn).__name__ == f"{one.__name__}Backward"
    assert calls == ["forward", "backward"]
    for others in results[1:]:
        assert all(map(torch.equal, others, results[0]))


CALLS = {
    **dict.fromkeys(("cublasMM", "cublasTransaMM", "cublasTransbMM", "cublasTransabMM", "cusparseMM"), "a, b"),
    "FusedSoftmax": "src, mask, factor",
    "MaskedLinear": "x, w1, w2, mask",
    "MaskedFFN": "x, w1, w2, w3, u1, u2, u3, mask",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_class_names_its_apply(name):
    function = getattr(matmuls, name)
    expected = f"{name}: expected {name}.apply({CALLS[name]}), got a call of the class"
    if name.startswith("Masked"):
        expected += f"; the nn.Module of this name is matmuls.nn.{name}"
        assert hasattr(matmuls.nn, name)
    for args in ((), (torch.eye(2), torch.eye(2)), (5, 7)):
        with pytest.raises(TypeError) as caught:
            function(*args)
        assert str(caught.value) == expected
    assert str(inspect.signature(function)) == f"({CALLS[name]}, /) -> torch.Tensor"


def test_every_class_with_apply_is_listed():
    assert {name for name in matmuls.__all__ if hasattr(getattr(matmuls, name), "apply")} == set(CALLS)


def test_the_classes_are_not_in_custom_mm():
    for name in custom_mm._IN_MATMULS:
        assert hasattr(matmuls, name)
        with pytest.raises(
            AttributeError, match=f"module 'custom_mm' has no attribute '{name}'; its place is matmuls.{name}"
        ):
            getattr(custom_mm, name)
    assert set(custom_mm._IN_MATMULS) == {name for name in CALLS if name.endswith("MM")}
    with pytest.raises(AttributeError, match=r"^module 'custom_mm' has no attribute 'absent'$"):
        _ = custom_mm.absent


def test_a_call_may_be_traced_overridden_and_counted():
    """What does not reach the operator by the short way."""
    a, b = draw(4, 4, device="cpu"), draw(4, 4, device="cpu", seed=1)

    seen = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append("mode")
            return function(*args, **(kwargs or {}))

    for product in (matmuls.matmul, matmuls.cublasMM.apply):
        seen.clear()
        y = product(a.as_subclass(Logged), b)
        assert isinstance(y, Logged)
        assert seen == ["custom_mm.matmul.default"]
        with Mode():
            product(a, b)
        assert seen[1:] == ["mode"]
        assert torch.equal(torch.jit.trace(product, (a, b))(b, a), b @ a)
        with FlopCounterMode(display=False) as counter:
            product(a, b)
        assert counter.get_total_flops() == 2 * 4**3
        with pytest.raises(TypeError, match=r"matmul: expected a torch.Tensor for b, got list"):
            product(a, [1.0])

    seen.clear()
    softmax = matmuls.scaled_masked_softmax
    assert isinstance(softmax(a.as_subclass(Logged)), Logged)
    assert seen == ["custom_mm.scaled_masked_softmax.default"]
    mask = b > 0
    with Mode():
        softmax(a, mask, 0.5)
    assert seen[1:] == ["mode"]
    expected = torch.softmax(a * 2, -1)
    torch.testing.assert_close(torch.jit.trace(softmax, (b,))(a * 2), expected)
    for scale in (2, 2.0, torch.tensor(2.0)):
        torch.testing.assert_close(softmax(a, None, scale), expected)
    with pytest.raises(TypeError, match=r"scaled_masked_softmax: expected a torch.Tensor for mask, got list"):
        softmax(a, [1.0])
