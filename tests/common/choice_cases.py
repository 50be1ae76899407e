"""What the tests of choice share."""

import torch

from matmuls.sparse import select


def draw(device, rows=96, columns=80, dtype=torch.float32):
    dense = torch.randn(rows, columns, dtype=torch.float64) * (torch.rand(rows, columns) < 0.5)
    return dense.to(dtype).to(device), torch.randn(columns, 128, dtype=dtype, device=device)


def assert_as_exact_as_float32(result, dense, b):
    """Each element within 8 roundings of the sum of the magnitudes of its terms; torch has 4.5."""
    truth, size = dense.double() @ b.double(), dense.double().abs() @ b.double().abs()
    assert ((result.double() - truth).abs() <= 2**-21 * size).all()


def assert_densified(plan):
    """A kernel of a densified matrix runs. In float32 on Hopper the nonzeros drawn decide which one."""
    assert any(name in plan.explain() for name in (select.DENSE, select.FP16X2))
