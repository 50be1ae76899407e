"""What repeats a call sees that a switch or a tensor has changed since."""

import pytest
import torch

import matmuls
from common.switch_cases import SWITCHES
from custom_mm import _C


def test_switches_as_they_were_are_equal():
    before = _C.switches()
    for change in SWITCHES.values():
        back = change()
        try:
            assert _C.switches() != before
        finally:
            back()
        assert _C.switches() == before


def product():
    """A @ b of a plan as a prepared call, and its operands."""
    torch.manual_seed(0)
    plan = matmuls.plan((torch.randn(6, 5) * (torch.rand(6, 5) < 0.5)).to_sparse_csr())
    b = torch.randn(5, 3)
    plan @ b
    plan @ b
    return plan._prepared.products, b, plan._prepared.values


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_prepared_call_holds_for_its_switches(switch):
    calls, b, values = product()
    assert calls(b, values) is not None
    back = SWITCHES[switch]()
    try:
        assert calls(b, values) is None
    finally:
        back()
    assert calls(b, values) is not None


def test_a_prepared_call_holds_for_tensors_of_its_form():
    calls, b, values = product()
    square = torch.randn(5, 5)
    assert calls(square[:, :3], values) is None  # other strides
    assert calls(b, values) is not None
    wide = torch.randn(values.numel(), 2)
    values.data = wide[:, 0]
    assert calls(b, values) is None
